"""Decoders whose mixers carry a state: everything but the mixer, for Hugging Face's library.

    h ← h + dropout(mixer(RMSNorm(h))),   h ← h + dropout(SwiGLU(RMSNorm(h)))

Padding takes no part wherever it stands in a row. Without a mask and a cache, a sequence starts
wherever position ids do not go up by one, as in Hugging Face's own decoders, and sees nothing of
what is before it: documents packed into one training row stay apart.
"""

# No postponed annotations: huggingface_hub checks settings by the types themselves.
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
from prismlm.models.decoders.caches import RecurrentCache
from prismlm.models.decoders.own_decoder import (
    OwnConfig,
    OwnDecoder,
    OwnForCausalLM,
    OwnModel,
    positive,
)

INNER_MULTIPLE = 16


# Its __init__ takes keywords that its signature does not name, which jaxtyping would refuse.
@no_type_check
@strict
class RecurrentConfig(OwnConfig):
    """What recurrent decoders have in common, beside :class:`OwnConfig`.

    ``dropout`` acts inside SwiGLU too, whose ``intermediate_size`` is 8/3 of d, rounded up to a
    multiple of 16, unless it is given.

    Attributes:
        rms_norm_eps: added to the mean square.
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
        """Return the transformed positions."""
        inner = F.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(F.dropout(inner, self.dropout, self.training))


class RecurrentBlock(GradientCheckpointingLayer):
    """A mixer and a SwiGLU, each behind an RMSNorm and beside a skip connection."""

    def __init__(self, config: Any, mixer: nn.Module, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.mixer_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mixer = mixer
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, config.dropout)
        self.dropout = config.dropout

    def forward(
        self, hidden_states: Tensor, past_key_values: RecurrentCache | None = None, **given: Any
    ) -> tuple[Tensor, Any]:
        """Return the next hidden states, and the mixer's evidence if it was asked for."""
        cached = None if past_key_values is None else past_key_values.layers[self.layer]
        state = None if cached is None else cached.state
        mixed = self.mixer(self.mixer_norm(hidden_states), state=state, **given)
        if cached is not None:
            cached.advance(mixed.state, hidden_states.shape[1])
        hidden_states = hidden_states + F.dropout(mixed.output, self.dropout, self.training)
        added = self.mlp(self.mlp_norm(hidden_states))
        return hidden_states + F.dropout(added, self.dropout, self.training), mixed.evidence


class RecurrentPreTrainedModel(OwnDecoder):
    """Initialisation, checkpoints and what Hugging Face's library has to know."""

    config_class = RecurrentConfig
    _no_split_modules = ["RecurrentBlock"]  # noqa: RUF012 (the library's own declaration)
    cache_class = RecurrentCache
    # A state cannot be rolled back, which assisted generation would need.
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

    Attributes:
        mixer_of: ``mixer_of(config, layer)``, the family's; what it returns is called with
            ``(x, state, mask, starts, return_evidence)``.
    """

    options = ("output_gates",)
    evidence = "gates"
    mixer_of: Callable[[Any, int], nn.Module]

    def __init__(self, config: Any) -> None:
        def block(layer: int) -> RecurrentBlock:
            return RecurrentBlock(config, self.mixer_of(config, layer), layer)

        super().__init__(config, block, nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps))
        self.post_init()

    def _of_blocks(
        self,
        embedded: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: RecurrentCache | None,
        options: dict[str, Any],
    ) -> tuple[bool, dict[str, Any]]:
        held = 0 if cache is None else cache.get_seq_length()
        mask = _mask(attention_mask, embedded, held)
        starts = None
        if attention_mask is None and not held:
            starts = _starts(position_ids, embedded)
        asked = bool(options.get("output_gates"))
        return asked, {"mask": mask, "starts": starts, "return_evidence": asked}


class RecurrentForCausalLM(RecurrentPreTrainedModel, OwnForCausalLM):
    """A recurrent decoder with an output embedding."""


def _mask(attention_mask: Tensor | None, embedded: Tensor, held: int) -> Tensor | None:
    """Return which of the positions at hand are tokens, or None if all are.

    ``attention_mask`` is over them, or over the ``held`` positions in the cache and them.
    """
    if attention_mask is None:
        return None
    batch, length = embedded.shape[:2]
    if attention_mask.shape not in ((batch, length), (batch, held + length)):
        raise InputError(
            f"attention_mask is {list(attention_mask.shape)}: expected [{batch}, {length}], or "
            f"[{batch}, {held + length}] with what is in the cache. A recurrent model takes no "
            "mask over pairs."
        )
    mask = attention_mask[:, -length:].bool()
    return None if _known(mask.all()) else mask


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
    return None if _known(~starts.any()) else starts.expand(batch, -1)


def _known(flag: Tensor) -> bool:
    """Say whether something holds; no where programs are exported, which may not look at values."""
    return not torch.compiler.is_exporting() and bool(flag)
