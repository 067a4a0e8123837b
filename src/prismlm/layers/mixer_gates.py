"""The write and read gates of the prototype mixer: which channels each position uses."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from prismlm.ops.precision import at_least_float32


class MixerEvidence(NamedTuple):
    """Which channels each position uses; zero on padding.

    Attributes:
        write: the write gate, a share for each channel; the channels of a group sum to 1.
        read: the read gate, likewise.
    """

    write: Float[Tensor, "B T R"]
    read: Float[Tensor, "B T R"]


class GateInputs(NamedTuple):
    """What both gates of a mixer are computed from.

    Attributes:
        x: what positions write by.
        read_map: W; positions read by W x. None with shared gates.
        prototypes: p.
        log_write_temperature: log τ_w.
        log_read_temperature: log τ_r, or None with shared gates.
        write_excluded: channels whose write scores are −∞, so that the others of their group
            share its gate.
        read_excluded: likewise of the read gate.
    """

    x: Float[Tensor, "B T d"]
    read_map: Float[Tensor, "d d"] | None
    prototypes: Float[Tensor, "R d"]
    log_write_temperature: Float[Tensor, " G"]
    log_read_temperature: Float[Tensor, " G"] | None
    write_excluded: Bool[Tensor, " R"] | None = None
    read_excluded: Bool[Tensor, " R"] | None = None


class ChannelGates(nn.Module):
    """Both gates of a mixer, without parameters of their own.

        write = softmax_k(x·p_k / τ_w),   read = softmax_k(x·(Wᵀp_k) / τ_r), or write without W

    Along a sequence both are one product of x with R or 2R columns, since (W x)·p = x·(Wᵀp). They
    are a module so that a forward hook can stand on them: interventions on channels are hooks.

    Args:
        temperature_mode: ``divide`` scores by τ, or ``multiply``.
        groups: G; each softmax runs over the R / G channels of one group.
    """

    def __init__(self, temperature_mode: Literal["divide", "multiply"], groups: int = 1) -> None:
        super().__init__()
        self.temperature_mode: Literal["divide", "multiply"] = temperature_mode
        self.groups = groups

    def forward(self, inputs: GateInputs) -> MixerEvidence:
        """Return both gates; with shared gates they are one tensor unless exclusions differ."""
        count = len(inputs.prototypes)
        scores = at_least_float32(_products(inputs))
        gate = self._scaled(scores[..., :count], inputs.log_write_temperature)
        write = self._softmax(gate, inputs.write_excluded)
        if inputs.log_read_temperature is not None:
            gate = self._scaled(scores[..., count:], inputs.log_read_temperature)
        elif inputs.write_excluded is inputs.read_excluded:
            return MixerEvidence(write, write)
        return MixerEvidence(write, self._softmax(gate, inputs.read_excluded))

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
    """Return x·p, with W followed by (W x)·p: [B, T, R or 2R]."""
    x, own, read_map = inputs.x, inputs.prototypes, inputs.read_map
    if read_map is None:
        return x @ own.T
    if x.shape[-2] == 1:
        # Wᵀp costs R·d², whatever the length: for one position W x, at d², is far cheaper.
        return torch.cat([x @ own.T, x @ read_map.T @ own.T], dim=-1)
    return x @ torch.cat([own, own @ read_map]).T
