"""The write and read gates of the prototype mixer: which channels each position uses."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from prismlm.ops.precision import at_least_float32


class MixerEvidence(NamedTuple):
    """The gates of a mixer; a group's weights sum to 1, except on padding or masked channels."""

    write: Float[Tensor, "B T R"]
    read: Float[Tensor, "B T R"]


class GateInputs(NamedTuple):
    """The inputs of a mixer's gates.

    Attributes:
        x: the mixer's input; the write gate scores x, the read gate W x.
        read_map: W, or None with shared gates.
        prototypes: p.
        log_write_temperature: log τ_w.
        log_read_temperature: log τ_r, or None with shared gates.
        write_excluded, read_excluded: channels that interventions exclude from a softmax.
    """

    x: Float[Tensor, "B T d"]
    read_map: Float[Tensor, "d d"] | None
    prototypes: Float[Tensor, "R d"]
    log_write_temperature: Float[Tensor, " G"]
    log_read_temperature: Float[Tensor, " G"] | None
    write_excluded: Bool[Tensor, " R"] | None = None
    read_excluded: Bool[Tensor, " R"] | None = None


class ChannelGates(nn.Module):
    """Compute both gates of a mixer; each softmax runs over the R / G channels of one group.

        write = softmax_k(x·p_k / τ_w),   read = softmax_k((W x)·p_k / τ_r), or write without W

    It has no parameters and is a module only so that interventions can hook it: the hooks of
    ``interventions/channels.py`` replace its :class:`GateInputs` and the gates that it returns.
    """

    def __init__(self, temperature_mode: Literal["divide", "multiply"], groups: int = 1) -> None:
        super().__init__()
        self.temperature_mode: Literal["divide", "multiply"] = temperature_mode
        self.groups = groups

    def forward(self, inputs: GateInputs) -> MixerEvidence:
        """Return both gates; with shared gates they are one tensor unless exclusions differ."""
        channels = len(inputs.prototypes)
        products = at_least_float32(_products(inputs))
        write_scores = self._scaled(products[..., :channels], inputs.log_write_temperature)
        write = self._softmax(write_scores, inputs.write_excluded)
        if inputs.log_read_temperature is not None:
            read_scores = self._scaled(products[..., channels:], inputs.log_read_temperature)
        elif inputs.write_excluded is inputs.read_excluded:
            return MixerEvidence(write, write)
        else:
            read_scores = write_scores
        return MixerEvidence(write, self._softmax(read_scores, inputs.read_excluded))

    def _scaled(self, scores: Tensor, log_temperature: Tensor) -> Tensor:
        temperature = at_least_float32(log_temperature).exp()
        if self.groups > 1:
            temperature = temperature.repeat_interleave(scores.shape[-1] // self.groups)
        return scores / temperature if self.temperature_mode == "divide" else scores * temperature

    def _softmax(self, scores: Tensor, excluded: Tensor | None) -> Tensor:
        if excluded is not None:
            scores = scores.masked_fill(excluded, -torch.inf)
        parts = scores.reshape(*scores.shape[:-1], self.groups, -1)
        return parts.softmax(-1).reshape(scores.shape)


def _products(inputs: GateInputs) -> Tensor:
    """Return x·p, followed by (W x)·p unless gates are shared: [B, T, R or 2R]."""
    x, prototypes, read_map = inputs.x, inputs.prototypes, inputs.read_map
    if read_map is None:
        return x @ prototypes.T
    if x.shape[-2] == 1:
        # In generation, W x costs d² for each row; Wᵀp would cost R·d² for every token.
        return torch.cat([x @ prototypes.T, x @ read_map.T @ prototypes.T], dim=-1)
    # (W x)·p = x·(Wᵀp), so that one product with x gives both.
    return x @ torch.cat([prototypes, prototypes @ read_map]).T
