"""A block of a decoder of signal/noise attention, and the MLPs that it can have."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_layers import GradientCheckpointingLayer

from prismlm.layers.mlp import MLP, Experts, ExpertsOutput, SparseCoding, SparseCodingOutput
from prismlm.layers.signal_noise_attention import SignalNoiseAttention
from prismlm.models.decoders.caches import ProjectionCache
from prismlm.models.decoders.signal_noise_config import SignalNoiseConfig


class SignalNoiseBlock(GradientCheckpointingLayer):
    """Attention and an MLP, each behind a LayerNorm and beside a skip connection.

    Sparse coding of the complete form alone has no skip connection beside it, and no dropout.

    Raises:
        InputError: sizes that do not fit, an odd number of heads, or settings of sparse coding that
            get nowhere.
    """

    def __init__(self, config: SignalNoiseConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        norm = {"eps": config.layer_norm_eps, "bias": config.bias}
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
        self.mlp = self._mlp_of(config)
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
            assert held.keys is not None
            assert held.values is not None
            past = held.keys
            seen = torch.cat([held.values[:, 0, :, 0], positions], 1)
        attended = self.attention(
            self.attention_norm(hidden_states), noise_weight, past=past, positions=seen, mask=mask
        )
        if held is not None:
            held.update(attended.projections, positions[:, None, :, None])
        hidden_states = hidden_states + self._dropped(attended.output)
        found = self.mlp(self.mlp_norm(hidden_states))
        if isinstance(found, SparseCodingOutput) and cast(SparseCoding, self.mlp).complete:
            return found.output, None
        added = found if isinstance(found, Tensor) else found.output
        router_logits = found.router_logits if isinstance(found, ExpertsOutput) else None
        return hidden_states + self._dropped(added), router_logits

    @staticmethod
    def _mlp_of(config: SignalNoiseConfig) -> MLP | SparseCoding | Experts:
        width, inner = config.hidden_size, cast(int, config.intermediate_size)
        if config.mlp == "sparse_coding":
            return SparseCoding(
                width,
                None if config.sparse_coding_form == "complete" else inner,
                steps=cast(int, config.sparse_coding_steps),
                step_size=config.sparse_coding_step_size,
                threshold=config.sparse_coding_threshold,
            )
        if config.mlp == "experts":
            experts, chosen = config.num_local_experts, config.num_experts_per_tok
            return Experts(width, inner, experts, chosen, bias=config.bias)
        return MLP(width, inner, bias=config.bias)

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)
