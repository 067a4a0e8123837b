"""A language model of signal/noise attention, in the architecture of nanoGPT."""

# No postponed annotations: huggingface_hub checks settings by their types.
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

from prismlm.errors import check_number
from prismlm.layers.signal_noise_attention import OutputLinear, SignalNoiseAttention
from prismlm.models.decoders.own_decoder import (
    OwnConfig,
    OwnDecoder,
    OwnForCausalLM,
    OwnModel,
    ProjectionCache,
    count,
    number,
    positive,
    share,
)


@no_type_check
@strict
class SignalNoiseConfig(OwnConfig):
    """Configuration of :class:`SignalNoiseForCausalLM` (Prism, §2 and §3).

    In addition to :class:`OwnConfig`, whose ``intermediate_size``, the width of the MLP, is 4 d by
    default:

    Attributes:
        head_size: p.
        expansion: R; a layer has R·d/p heads, half of them signal heads.
        tied_output: whether the output matrix of attention is Uᵀ.
        frequency_base, frequency_ratio: base of the rotations, and ρ.
        frequency_scaling: ``base``, or ``angle`` as in the source's Fig. 1.
        scale_by_width: divide scores by √d, as in Eq. 6, instead of √p.
        noise_weight: initial λ; checkpoints store theirs.
        bias: whether norms and MLPs have biases.
        layer_norm_eps: added to the variance.
    """

    model_type = "prismlm_signal_noise"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

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
    layer_norm_eps: float | int = positive(default=1e-5)

    def __post_init__(self, **kwargs: Any) -> None:
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        super().__post_init__(**kwargs)


class MLP(nn.Module):
    """GPT-2's: W_down gelu(W_up x)."""

    def __init__(self, width: int, inner: int, *, bias: bool) -> None:
        super().__init__()
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = OutputLinear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP."""
        return self.down_proj(F.gelu(self.up_proj(x)))


class SignalNoiseBlock(GradientCheckpointingLayer):
    """Attention and an MLP, each with LayerNorm and skip connection."""

    def __init__(self, config: Any, layer: int) -> None:
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
        self.mlp = MLP(config.hidden_size, config.intermediate_size, bias=config.bias)
        self.dropout = config.dropout

    def forward(
        self,
        hidden_states: Tensor,
        noise_weight: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        past_key_values: ProjectionCache | None = None,
    ) -> tuple[Tensor, None]:
        """Return the next hidden states; ``positions`` are those of the new tokens."""
        past, all_positions = None, positions
        cache = None if past_key_values is None else past_key_values.layers[self.layer]
        if cache is not None and cache.get_seq_length():
            past = cache.keys
            all_positions = torch.cat([cache.values[:, 0, :, 0], positions], 1)
        z, places = self.attention_norm(hidden_states), {"past": past, "positions": all_positions}
        attended = self.attention(z, noise_weight, mask=mask, **places)
        if cache is not None:
            cache.update(attended.projections, positions[:, None, :, None])
        hidden_states = hidden_states + F.dropout(attended.output, self.dropout, self.training)
        added = self.mlp(self.mlp_norm(hidden_states))
        return hidden_states + F.dropout(added, self.dropout, self.training), None


class SignalNoisePreTrainedModel(OwnDecoder):
    """Initialisation, checkpoints, and declarations for transformers."""

    config_class = SignalNoiseConfig
    _supports_sdpa = True
    _no_split_modules = ["SignalNoiseBlock"]  # noqa: RUF012
    # λ, even in half precision.
    _keep_in_fp32_modules_strict = ["noise_weight"]  # noqa: RUF012
    cache_class = ProjectionCache

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, OutputLinear):
            # As in GPT-2, scaled by depth.
            depth = 2 * self.config.num_hidden_layers
            init.normal_(module.weight, std=self.config.initializer_range * depth**-0.5)

    def set_noise_weight(self, value: float | Tensor) -> None:
        """Set λ to a number from 0 to 1."""
        check_number("λ", value, "one number from 0 to 1", lambda weight: 0 <= weight <= 1)
        model: Any = self.base_model
        model.noise_weight.fill_(value)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint, with λ in the configuration too."""
        model: Any = self.base_model
        if not model.noise_weight.is_meta:
            # In the shortest form: 0.1, not the float32 nearest to it.
            self.config.noise_weight = float(str(np.float32(model.noise_weight.item())))
        super().save_pretrained(*args, **kwargs)


class SignalNoiseModel(SignalNoisePreTrainedModel, OwnModel):
    """Embeddings, blocks, the last norm, and the buffer λ, which training increases by steps."""

    noise_weight: Tensor

    def __init__(self, config: SignalNoiseConfig) -> None:
        norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=config.bias)
        super().__init__(config, lambda layer: SignalNoiseBlock(config, layer), norm)
        self.register_buffer("noise_weight", self.initial_values()["noise_weight"])
        self.post_init()

    def initial_values(self) -> dict[str, Tensor]:
        """Return λ; its steps would be lost in half precision, whatever the default dtype."""
        return {"noise_weight": torch.tensor(self.config.noise_weight, dtype=torch.float32)}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move or cast the model, but keep λ at least float32."""
        before = self.noise_weight
        super()._apply(fn, recurse)
        if self.noise_weight.dtype.itemsize < before.dtype.itemsize:
            self.noise_weight = before.to(self.noise_weight.device)
        return self

    def _block_arguments(
        self,
        embedded: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: ProjectionCache | None,
    ) -> dict[str, Any]:
        # With a cache, transformers does not look for starts of sequences in positions: an empty
        # one would let packed sequences see each other.
        cached = 0 if cache is None else cache.get_seq_length()
        filled = cache if cached else None
        mask: Any = create_causal_mask(
            config=self.config,
            inputs_embeds=embedded,
            attention_mask=attention_mask,
            past_key_values=filled,
            position_ids=position_ids,
        )
        if mask is not None and mask is not attention_mask and mask.is_floating_point():
            # With attn_implementation="eager" masks are added to scores.
            mask = mask == 0
        batch, length, _ = embedded.shape
        if position_ids is None and attention_mask is not None and attention_mask.ndim == 2:
            # Padding does not count.
            position_ids = (attention_mask.long().cumsum(1) - 1).clamp_min(0)[:, -length:]
        elif position_ids is None:
            position_ids = torch.arange(cached, cached + length, device=embedded.device)[None]
        positions = position_ids.expand(batch, -1)
        return {"noise_weight": self.noise_weight, "positions": positions, "mask": mask}


class SignalNoiseForCausalLM(SignalNoisePreTrainedModel, OwnForCausalLM):
    """A language model of signal/noise attention, LayerNorm and an MLP (Prism, §2 and §3).

        Z ← Z + attention(LayerNorm(Z)),   Z ← Z + MLP(LayerNorm(Z))

    A cache has one unrotated tensor per head, half the size of keys and values.
    """

    decoder_class = SignalNoiseModel
