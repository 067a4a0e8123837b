"""A language model of signal/noise attention, in the stack of nanoGPT, and its checkpoints."""

# No postponed annotations: huggingface_hub checks settings by the types themselves.
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, no_type_check

import numpy as np
import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from prismlm.errors import InputError, check_number
from prismlm.layers.mlp import (
    MLP,
    Experts,
    ExpertsOutput,
    OutputLinear,
    SparseCoding,
    SparseCodingOutput,
)
from prismlm.layers.signal_noise_attention import SignalNoiseAttention
from prismlm.models.decoders.caches import ProjectionCache
from prismlm.models.decoders.own_decoder import (
    OwnConfig,
    OwnDecoder,
    OwnForCausalLM,
    OwnModel,
    OwnOutput,
    count,
    number,
    positive,
    share,
)
from prismlm.ops.experts import load_balancing_loss

IGNORED = -100
"""The label of what is not to be predicted."""


# Its __init__ takes keywords that its signature does not name, which jaxtyping would refuse.
@no_type_check
@strict
class SignalNoiseConfig(OwnConfig):
    """Configuration of :class:`SignalNoiseForCausalLM`.

    Source: Prism, §2 and §3; the stack is nanoGPT's, the source's base. Beside :class:`OwnConfig`,
    whose ``intermediate_size`` is that of the MLP or of each expert, or the atoms of an
    overcomplete dictionary, 4 d unless it is given:

    Attributes:
        head_size: p.
        expansion: R; a layer has R·d/p heads, half of them signal heads.
        tied_output: whether the output matrix of attention is Uᵀ.
        frequency_base: of the rotations.
        frequency_ratio: ρ.
        frequency_scaling: ``base``, or ``angle`` as the source's Fig. 1 prints it.
        scale_by_width: divide scores by √d, as Eq. 6 prints it, in place of √p.
        noise_weight: λ of a model that is not trained yet; a checkpoint holds its own.
        bias: of norms and of MLPs, those of experts too.
        mlp: ``gelu``, ``sparse_coding`` or ``experts``; see :mod:`prismlm.layers`.
        sparse_coding_form: ``overcomplete``, which adds to the stream, or ``complete``, which
            replaces it.
        sparse_coding_steps: S; None for 2 overcomplete and 1 complete, as in the sources.
        sparse_coding_step_size: η of those steps.
        sparse_coding_threshold: θ, the weight of the sum of a code.
        num_local_experts: E.
        num_experts_per_tok: k.
        output_router_logits: whether outputs hold ``router_logits`` and ``aux_loss`` and the loss
            counts it; None for yes with experts, which without it may fall out of use.
        router_aux_loss_coef: what ``aux_loss`` counts in the loss.
        layer_norm_eps: added to the variance.
    """

    model_type = "prismlm_signal_noise"
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        "past_key_values",
        "router_logits",
        "aux_loss",
    ]

    vocab_size: int = count(default=50304)
    hidden_size: int = count(default=512)
    num_hidden_layers: int = count(default=8)
    head_size: int = count(default=64)
    expansion: int = count(default=2)
    tied_output: bool = True
    frequency_base: float | int = positive(default=10_000.0)
    frequency_ratio: float | int = positive(default=math.pi)
    frequency_scaling: Literal["base", "angle"] = "base"
    scale_by_width: bool = False
    noise_weight: float | int = number("from 0 to 1", lambda value: 0 <= value <= 1)(default=0.01)
    dropout: float | int = share(default=0.0)
    bias: bool = False
    mlp: Literal["gelu", "sparse_coding", "experts"] = "gelu"
    sparse_coding_form: Literal["overcomplete", "complete"] = "overcomplete"
    sparse_coding_steps: int | None = None
    sparse_coding_step_size: float | int = positive(default=0.1)
    sparse_coding_threshold: float | int = 0.1
    num_local_experts: int = count(default=8)
    num_experts_per_tok: int = count(default=2)
    output_router_logits: bool | None = None
    router_aux_loss_coef: float | int = number(
        "0 or a positive, finite number", lambda value: 0 <= value < math.inf
    )(default=0.01)
    layer_norm_eps: float | int = positive(default=1e-5)

    def __post_init__(self, **kwargs: Any) -> None:
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if self.sparse_coding_steps is None:
            self.sparse_coding_steps = 1 if self.sparse_coding_form == "complete" else 2
        if self.output_router_logits is None:
            self.output_router_logits = self.mlp == "experts"
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Refuse more experts for a token than there are, and routers asked for without."""
        if self.mlp == "experts" and self.num_experts_per_tok > self.num_local_experts:
            raise InputError(
                f"num_experts_per_tok is {self.num_experts_per_tok}, of num_local_experts "
                f"{self.num_local_experts}: expected at most as many."
            )
        self.check_router(self.output_router_logits)

    def check_router(self, asked: bool | None) -> None:
        """Raise InputError if router logits are asked for and there is no router."""
        if asked and self.mlp != "experts":
            raise InputError(
                f"output_router_logits is on, and mlp={self.mlp!r} has no router: leave it out, or "
                "build the model with mlp='experts'."
            )


class SignalNoiseBlock(GradientCheckpointingLayer):
    """Attention and an MLP, each behind a LayerNorm and beside a skip connection.

    Sparse coding of the complete form alone has no skip connection beside it, and no dropout.
    """

    def __init__(self, config: SignalNoiseConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        norm: dict[str, Any] = {"eps": config.layer_norm_eps, "bias": config.bias}
        self.attention_norm = nn.LayerNorm(config.hidden_size, **norm)
        self.attention = SignalNoiseAttention(
            config.hidden_size,
            config.head_size,
            config.expansion,
            tied=config.tied_output,
            base=config.frequency_base,
            ratio=config.frequency_ratio,
            scaling=config.frequency_scaling,
            scale_by_width=config.scale_by_width,
        )
        self.mlp_norm = nn.LayerNorm(config.hidden_size, **norm)
        self.mlp = _mlp_of(config)
        self.dropout = config.dropout

    def forward(
        self,
        hidden_states: Tensor,
        noise_weight: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        past_key_values: ProjectionCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the next hidden states, and router logits [B·T, E] if the MLP has a router.

        ``positions`` are those of the tokens at hand.
        """
        past, seen = None, positions
        held = None if past_key_values is None else past_key_values.layers[self.layer]
        if held is not None and held.get_seq_length():
            past = held.keys
            seen = torch.cat([held.values[:, 0, :, 0], positions], 1)
        attended = self.attention(
            self.attention_norm(hidden_states), noise_weight, past=past, positions=seen, mask=mask
        )
        if held is not None:
            held.update(attended.projections, positions[:, None, :, None])
        hidden_states = hidden_states + F.dropout(attended.output, self.dropout, self.training)
        found = self.mlp(self.mlp_norm(hidden_states))
        if isinstance(found, SparseCodingOutput) and self.mlp.complete:
            return found.output, None
        added = found if isinstance(found, Tensor) else found.output
        router_logits = found.router_logits if isinstance(found, ExpertsOutput) else None
        return hidden_states + F.dropout(added, self.dropout, self.training), router_logits


def _mlp_of(config: Any) -> Any:
    width, inner = config.hidden_size, config.intermediate_size
    if config.mlp == "sparse_coding":
        return SparseCoding(
            width,
            None if config.sparse_coding_form == "complete" else inner,
            steps=config.sparse_coding_steps,
            step_size=config.sparse_coding_step_size,
            threshold=config.sparse_coding_threshold,
        )
    if config.mlp == "experts":
        experts, chosen = config.num_local_experts, config.num_experts_per_tok
        return Experts(width, inner, experts, chosen, bias=config.bias)
    return MLP(width, inner, bias=config.bias)


class SignalNoisePreTrainedModel(OwnDecoder):
    """Initialisation, checkpoints and what Hugging Face's library has to know."""

    config_class = SignalNoiseConfig
    _supports_sdpa = True
    _no_split_modules = ["SignalNoiseBlock"]  # noqa: RUF012 (the library's own declaration)
    # λ, also of a checkpoint that is opened in half precision.
    _keep_in_fp32_modules_strict = ["noise_weight"]  # noqa: RUF012
    cache_class = ProjectionCache

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, SignalNoiseAttention):
            signal, noise = module.initial_frequencies()
            init.copy_(module.signal_frequencies, signal)
            init.copy_(module.noise_frequencies, noise)
            if module.output_projection is not None:
                self._init_smaller(module.output_projection)
        elif isinstance(module, OutputLinear):
            # At the matrix itself: a module without tensors of its own never gets here.
            self._init_smaller(module)
        elif isinstance(module, SparseCoding):
            init.normal_(module.dictionary, std=module.initial_deviation)
        elif isinstance(module, SignalNoiseModel):
            init.constant_(module.noise_weight, self.config.noise_weight)

    def _init_smaller(self, module: nn.Linear) -> None:
        """Draw what adds to the stream as GPT-2 does, by the number of such additions."""
        depth = 2 * self.config.num_hidden_layers
        init.normal_(module.weight, std=self.config.initializer_range * depth**-0.5)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint, as Hugging Face's models do, with λ in the configuration too."""
        model: Any = self.base_model
        if not model.noise_weight.is_meta:
            # As it is written shortest: 0.1 and not the float32 nearest to it.
            self.config.noise_weight = float(str(np.float32(model.noise_weight.item())))
        super().save_pretrained(*args, **kwargs)


class SignalNoiseModel(SignalNoisePreTrainedModel, OwnModel):
    """Embeddings, blocks and the last norm.

    Attributes:
        noise_weight: λ, a buffer of every checkpoint; training raises it step by step.
    """

    options = ("output_router_logits", "output_attentions")
    evidence = "router_logits"
    noise_weight: Tensor

    def __init__(self, config: SignalNoiseConfig) -> None:
        norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=config.bias)
        super().__init__(config, lambda layer: SignalNoiseBlock(config, layer), norm)
        # Whatever the default dtype is: it rises in steps that half precision would round away.
        noise_weight = torch.tensor(config.noise_weight, dtype=torch.float32)
        self.register_buffer("noise_weight", noise_weight)
        self.post_init()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move or cast the model; λ stays float32 at least."""
        before = self.noise_weight
        super()._apply(fn, recurse)
        if self.noise_weight.dtype.itemsize < before.dtype.itemsize:
            self.noise_weight = before.to(self.noise_weight.device)
        return self

    def set_noise_weight(self, value: float | Tensor) -> None:
        """Set λ, a number from 0 to 1 or a tensor of one."""
        check_number("λ", value, "one number from 0 to 1", lambda weight: 0 <= weight <= 1)
        self.noise_weight.fill_(value)

    def _of_blocks(
        self,
        embedded: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: ProjectionCache | None,
        options: dict[str, Any],
    ) -> tuple[bool, dict[str, Any]]:
        if options.get("output_attentions"):
            raise InputError(
                "output_attentions is on, and this model's attention never holds its weights: read "
                "them with prismlm.models.attention.reading_attention."
            )
        asked = options.get("output_router_logits")
        asked = self.config.output_router_logits if asked is None else asked
        self.config.check_router(asked)
        # Positions of our own have no second sequence, and looking for one reads their values.
        mask = self._mask(attention_mask, embedded, cache, position_ids)
        if position_ids is None:
            position_ids = _positions(attention_mask, embedded, cache)
        positions = position_ids.expand(embedded.shape[0], -1)
        return asked, {"noise_weight": self.noise_weight, "positions": positions, "mask": mask}

    def _mask(
        self,
        given: Tensor | None,
        embedded: Tensor,
        cache: ProjectionCache | None,
        positions: Tensor | None,
    ) -> Tensor | None:
        """Return which position sees which, bool [B, 1, T, S]; None for all up to itself."""
        # Beside a cache positions are not looked at for where sequences start; an empty one, which
        # a call has by default, would let packed sequences see each other.
        held = cache if cache is not None and cache.get_seq_length() else None
        found: Any = create_causal_mask(
            config=self.config,
            inputs_embeds=embedded,
            attention_mask=given,
            past_key_values=held,
            position_ids=positions,
        )
        if found is not None and found is not given and found.is_floating_point():
            # With attn_implementation="eager" masks are added to scores: 0 where a position sees.
            return found == 0
        return found


class SignalNoiseForCausalLM(SignalNoisePreTrainedModel, OwnForCausalLM):
    """A language model of signal/noise attention, LayerNorm and an MLP.

        Z ← Z + attention(LayerNorm(Z)),   Z ← Z + MLP(LayerNorm(Z))

    In place of GELU's two matrices the MLP can be sparse coding or a mixture of experts.

    A cache holds one unrotated tensor per head, half of what keys and values take.

    Source: Prism, §2 and §3.
    """

    decoder_class = SignalNoiseModel

    def set_noise_weight(self, value: float | Tensor) -> None:
        """Set λ; see :meth:`SignalNoiseModel.set_noise_weight`."""
        self.model.set_noise_weight(value)

    def _completed(
        self,
        output: OwnOutput,
        attention_mask: Tensor | None,
        labels: Tensor | None,
        num_items: Tensor | int | None,
    ) -> OwnOutput:
        """Add the loss of the routers, if there are any, weighted in the loss if there is one."""
        routers, logits, loss = output.router_logits, output.logits, output.loss
        if routers is None:
            return output
        assert logits is not None
        mask = None
        if attention_mask is not None and attention_mask.ndim == 2:
            # Over the positions at hand, [B·T].
            mask = attention_mask[:, -(len(routers[0]) // len(logits)) :].bool().flatten()
        aux_loss = load_balancing_loss(routers, self.config.num_experts_per_tok, mask)
        if loss is not None and labels is not None:
            weight = self.config.router_aux_loss_coef
            if num_items is not None:
                # Of the predictions of a step, so that its parts add up to a mean.
                weight = weight * ((labels[:, 1:] != IGNORED).sum() / num_items)
            loss = loss + weight * aux_loss.to(loss.device)
        return OwnOutput(**dict(output) | {"loss": loss, "aux_loss": aux_loss})


def _positions(
    attention_mask: Tensor | None, embedded: Tensor, cache: ProjectionCache | None
) -> Tensor:
    """Return positions that count tokens, not padding."""
    length = embedded.shape[1]
    if attention_mask is not None and attention_mask.ndim == 2:
        return (attention_mask.long().cumsum(1) - 1).clamp_min(0)[:, -length:]
    seen = 0 if cache is None else cache.get_seq_length()
    return torch.arange(seen, seen + length, device=embedded.device)[None]
