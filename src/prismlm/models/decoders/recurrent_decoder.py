"""Decoders whose mixers carry a recurrent state, and DeltaNet, the baseline for ProtoT.

    h ← h + dropout(mixer(RMSNorm(h))),   h ← h + dropout(SwiGLU(RMSNorm(h)))

Padding is ignored wherever it stands in a row. Without mask and cache, a new sequence starts
wherever position ids do not increase by one, as in Hugging Face's decoders: documents packed into
one training row do not see each other.
"""

# No postponed annotations: huggingface_hub checks settings by their types.
from collections.abc import Callable
from typing import Any, ClassVar, no_type_check

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from prismlm.errors import InputError
from prismlm.layers import PrototypeMixer
from prismlm.layers.causal_convolution import CausalConvolution
from prismlm.layers.delta_mixer import DeltaMixer
from prismlm.models.decoders.own_decoder import (
    OwnConfig,
    OwnDecoder,
    OwnForCausalLM,
    OwnModel,
    RecurrentCache,
    count,
    positive,
)

INNER_MULTIPLE = 16


@no_type_check
@strict
class RecurrentConfig(OwnConfig):
    """Settings of recurrent decoders, in addition to :class:`OwnConfig`.

    ``dropout`` also acts inside SwiGLU. ``intermediate_size`` defaults to 8/3 d, rounded up to a
    multiple of 16. ``rms_norm_eps`` is added to the mean square.
    """

    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "gates"]

    rms_norm_eps: float | int = positive(default=1e-6)

    def __post_init__(self, **kwargs: Any) -> None:
        if self.intermediate_size is None:
            multiples = -(-8 * self.hidden_size // (3 * INNER_MULTIPLE))
            self.intermediate_size = multiples * INNER_MULTIPLE
        super().__post_init__(**kwargs)


class SwiGLU(nn.Module):
    """W_down dropout(silu(W_gate x) ⊙ W_up x)."""

    def __init__(self, width: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network."""
        inner = F.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(F.dropout(inner, self.dropout, self.training))


class RecurrentBlock(GradientCheckpointingLayer):
    """A mixer and a SwiGLU, each with RMSNorm and skip connection."""

    def __init__(self, config: Any, mixer: nn.Module, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.mixer_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mixer = mixer
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, config.dropout)
        self.dropout = config.dropout

    def forward(
        self, hidden_states: Tensor, past_key_values: RecurrentCache | None = None, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """Return the next hidden states, and the mixer's evidence if requested."""
        cached = None if past_key_values is None else past_key_values.layers[self.layer]
        state = None if cached is None else cached.state
        mixed = self.mixer(self.mixer_norm(hidden_states), state=state, **kwargs)
        if cached is not None:
            cached.advance(mixed.state, hidden_states.shape[1])
        hidden_states = hidden_states + F.dropout(mixed.output, self.dropout, self.training)
        added = self.mlp(self.mlp_norm(hidden_states))
        return hidden_states + F.dropout(added, self.dropout, self.training), mixed.evidence


class RecurrentPreTrainedModel(OwnDecoder):
    """Initialisation, and declarations for transformers."""

    config_class = RecurrentConfig
    _no_split_modules = ["RecurrentBlock"]  # noqa: RUF012
    cache_class = RecurrentCache
    # A state cannot be rolled back, as assisted generation requires.
    _is_stateful = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, CausalConvolution):
            bound = module.width**-0.5
            init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, PrototypeMixer):
            for name, value in module.initial_values().items():
                init.copy_(getattr(module, name), value)


class RecurrentModel(RecurrentPreTrainedModel, OwnModel):
    """Embeddings, blocks and the last norm.

    ``mixer_of(config, layer)`` returns the mixer of a layer, which is called with ``(x, state,
    mask, starts, return_evidence)``.
    """

    options = ("output_gates",)
    mixer_of: Callable[[Any, int], nn.Module]

    def __init__(self, config: Any) -> None:
        def block(layer: int) -> RecurrentBlock:
            return RecurrentBlock(config, self.mixer_of(config, layer), layer)

        super().__init__(config, block, nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps))
        self.post_init()

    def _block_arguments(
        self,
        embedded: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: RecurrentCache | None,
        options: dict[str, Any],
    ) -> tuple[bool, dict[str, Any]]:
        cached = 0 if cache is None else cache.get_seq_length()
        mask, starts = _mask(attention_mask, embedded, cached), None
        if attention_mask is None and not cached:
            starts = _starts(position_ids, embedded)
        evidence = bool(options.get("output_gates"))
        return evidence, {"mask": mask, "starts": starts, "return_evidence": evidence}


class RecurrentForCausalLM(RecurrentPreTrainedModel, OwnForCausalLM):
    """A recurrent decoder with an output embedding."""


@no_type_check
@strict
class DeltaNetConfig(RecurrentConfig):
    """Configuration of :class:`DeltaNetForCausalLM`, in addition to RecurrentConfig.

    Attributes:
        num_heads: H, a divisor of the hidden size.
        convolution_width: width of the convolutions on queries, keys and values.
    """

    model_type = "prismlm_deltanet"

    num_heads: int = count(default=4)
    convolution_width: int = 4


class DeltaNetModel(RecurrentModel):
    """DeltaNet without its output embedding."""

    config_class = DeltaNetConfig

    @staticmethod
    def mixer_of(config: Any, layer: int) -> DeltaMixer:  # noqa: D102
        width = config.convolution_width
        return DeltaMixer(config.hidden_size, config.num_heads, convolution_width=width)


class DeltaNetForCausalLM(RecurrentForCausalLM):
    """A language model of delta rules, RMSNorm and SwiGLU.

    Source: Yang et al., Parallelizing Linear Transformers with the Delta Rule (2024), with the
    settings of ProtoT, §4.
    """

    config_class = DeltaNetConfig
    decoder_class = DeltaNetModel


def _mask(attention_mask: Tensor | None, embedded: Tensor, cached: int) -> Tensor | None:
    """Return which of the new positions are tokens, or None if all are.

    ``attention_mask`` covers the new positions, or the ``cached`` ones too.
    """
    if attention_mask is None:
        return None
    batch, length = embedded.shape[:2]
    if attention_mask.shape not in ((batch, length), (batch, cached + length)):
        raise InputError(
            f"attention_mask is {list(attention_mask.shape)}: expected [{batch}, {length}], or "
            f"[{batch}, {cached + length}] including the cache. A recurrent model takes no mask "
            "over pairs."
        )
    mask = attention_mask[:, -length:].bool()
    return None if _is_true(mask.all()) else mask


def _starts(position_ids: Tensor | None, embedded: Tensor) -> Tensor | None:
    """Return where sequences start within the rows, or None if nowhere."""
    if position_ids is None:
        return None
    batch, length = embedded.shape[:2]
    if position_ids.shape not in ((batch, length), (1, length)):
        raise InputError(
            f"position_ids are {list(position_ids.shape)}: expected [{batch}, {length}], or "
            f"[1, {length}] for all rows alike."
        )
    starts = torch.diff(position_ids, dim=-1, prepend=position_ids[:, :1] - 1) != 1
    return None if _is_true(~starts.any()) else starts.expand(batch, -1)


def _is_true(flag: Tensor) -> bool:
    """Return the value of a flag; False during export, which must not depend on values."""
    return not torch.compiler.is_exporting() and bool(flag)
