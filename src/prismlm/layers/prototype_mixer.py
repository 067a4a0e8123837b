"""The prototype mixer: all communication along the sequence goes through R prototype channels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from prismlm.errors import InputError, check_choice
from prismlm.layers.causal_convolution import CausalConvolution, check_rows
from prismlm.layers.linear import weight_of
from prismlm.layers.mixer_gates import ChannelGates, GateInputs, MixerEvidence
from prismlm.ops.channel_parts import ChannelFlow
from prismlm.ops.precision import at_least_float32
from prismlm.ops.prototype_mixer import PrefixState, prefix_mean
from prismlm.ops.sequences import check_groups

TEMPERATURE_MODES = ("divide", "multiply")
DECAY_MODES = ("channel", "token")
DECAY_MARGIN = 1e-6
"""How near to 0 and 1 a decay can come; the sigmoid alone reaches both in float32."""


class MixerState(NamedTuple):
    """What a sequence leaves for its next position.

    Attributes:
        prefix: what was written into each channel.
        history: the values that the convolution still needs, [B, n − 1, D], or None without one.
    """

    prefix: PrefixState
    history: Tensor | None


class MixerOutput(NamedTuple):
    """What the mixer gives.

    Attributes:
        output: to be added to the residual stream; zero on padding.
        state: for the next positions.
        evidence: the gates, if they were asked for.
    """

    output: Float[Tensor, "B T d"]
    state: MixerState
    evidence: MixerEvidence | None


class PrototypeMixer(nn.Module):
    """Write into R channels, average each over the past, read from them.

        write_j = softmax_k(x_j·p_k / τ_w),   read_i = softmax_k((W x_i)·p_k / τ_r)
        v_j = conv(V x_j)
        y_i = α U Σ_k read_ik (Σ_{j<i} β_k^(i−j) write_jk v_j) / (Σ_{j<i} β_k^(i−j) write_jk)

    log τ, γ with β = σ(γ), α and the prototypes p are learned. With shared gates there is no W
    and no τ_r: read = write.

    The source has one group of channels. With G of them, channels and the values v_j are cut into
    G equal parts: each softmax runs over the R / G channels of one group, which has temperatures
    of its own and passes on its D / G of the values, as a head of attention does.

    The source has a decay for each channel. With ``decay_mode="token"``, β_k^(i−j) becomes
    β_jk ⋯ β_(i−1)k with β_jk = σ(γ_k + δ_k·x_j): position j says how much each channel keeps of
    what it holds and of what j writes, once j is past. δ starts at 0, where this is the other form.

    The source leaves open how parameters start. Here p is normal with standard deviation 1/√d, so
    that inputs of unit mean square give scores of unit variance; V, U and W are as nn.Linear
    draws them, and models of this package draw them anew, normal with ``initializer_range``; every
    β starts at ``decay``, 0.95 being a half-life of 13.5 tokens, or they spread over
    ``decay_half_lives``.

    Source: ProtoT, §3 and A.7.

    Args:
        width: d.
        channels: R.
        value_width: D, or None for half of d.
        shared_gates: whether positions read by their write gate, as the source's layer 0 does.
        temperature: τ at the start; the source has 1, and 3 with shared gates.
        temperature_mode: ``divide`` scores by τ, as in Eq. 1, where a larger τ makes gates
            flatter; or ``multiply``, which makes them sharper, as the source's text says of 3.
        convolution_width: positions that the convolution on the values mixes, 5 in the source's
            layers 0 and 1; 0 for no convolution.
        normalise: False leaves out the division by the mass.
        decay: β at the start.
        decay_half_lives: (a, b) in place of ``decay``: in each group of n channels, the half-life
            of channel k starts at a·(b/a)^(k/(n−1)) positions; at √(ab) in a group of one.
        alpha: α at the start.
        groups: G, which divides R and D.
        decay_mode: whether a decay is a ``channel``'s, or depends on the ``token`` too.
        keep_unused: also hold, frozen, the parameters that the switches leave without use (W and
            τ_r, a convolution of width 5), so that sizes are those that the source reports.

    Raises:
        InputError: no channel, groups that do not fit, a start value out of range, or a mode that
            there is not.
    """

    def __init__(
        self,
        width: int,
        channels: int = 32,
        *,
        value_width: int | None = None,
        shared_gates: bool = False,
        temperature: float = 1.0,
        temperature_mode: Literal["divide", "multiply"] = "divide",
        convolution_width: int = 0,
        normalise: bool = True,
        decay: float = 0.95,
        decay_half_lives: Sequence[float] | None = None,
        alpha: float = 1.0,
        groups: int = 1,
        decay_mode: Literal["channel", "token"] = "channel",
        keep_unused: bool = False,
    ) -> None:
        super().__init__()
        value_width = width // 2 if value_width is None else value_width
        _check_settings(width, channels, value_width, temperature, alpha)
        check_choice("temperature_mode", temperature_mode, TEMPERATURE_MODES)
        check_choice("decay_mode", decay_mode, DECAY_MODES)
        check_groups(groups, channels, value_width)
        self.groups = groups
        self.value_width = value_width
        self.normalise = normalise
        self.temperature_mode: Literal["divide", "multiply"] = temperature_mode
        self.gates = ChannelGates(temperature_mode, groups)
        self.initial_temperature = temperature
        self.initial_decay_logits = _initial_decay_logits(channels, groups, decay, decay_half_lives)
        self.initial_alpha = alpha
        self.prototypes = nn.Parameter(torch.empty(channels, width))
        # Scalars have one dimension: FSDP2 shards no others.
        self.log_write_temperature = nn.Parameter(torch.empty(groups))
        self.decay_logits = nn.Parameter(torch.empty(channels))
        by_token = decay_mode == "token"
        self.decay_map = nn.Parameter(torch.empty(channels, width)) if by_token else None
        self.alpha = nn.Parameter(torch.empty(1))
        self.value_projection = nn.Linear(width, value_width, bias=False)
        self.output_projection = nn.Linear(value_width, width, bias=False)
        self.shared_gates = shared_gates
        self.read_projection = nn.Linear(width, width, bias=False)
        self.log_read_temperature = nn.Parameter(torch.empty(groups))
        self.convolution = CausalConvolution(value_width, convolution_width or 5)
        self.convolves = convolution_width > 0
        if not self.convolves:
            self._drop("convolution", keep_unused)
        if shared_gates:
            self._drop("read_projection", keep_unused)
            self._drop("log_read_temperature", keep_unused)
        self.reset_parameters()

    def _drop(self, name: str, keep: bool) -> None:
        if keep:
            getattr(self, name).requires_grad_(False)
        else:
            setattr(self, name, None)

    def reset_parameters(self) -> None:
        """Set everything but the projections and the convolution to where it starts."""
        with torch.no_grad():
            for name, value in self.initial_values().items():
                getattr(self, name).copy_(value)

    def initial_values(self) -> dict[str, Tensor]:
        """Return what the parameters of the mixer's own start at; the prototypes are drawn."""
        channels, width = self.prototypes.shape
        log_temperature = torch.full((self.groups,), math.log(self.initial_temperature))
        values = {
            "prototypes": initial_prototypes(channels, width),
            "log_write_temperature": log_temperature,
            "log_read_temperature": log_temperature,
            "decay_logits": torch.tensor(self.initial_decay_logits),
            "decay_map": torch.zeros(channels, width),
            "alpha": torch.tensor([self.initial_alpha]),
        }
        return {name: value for name, value in values.items() if getattr(self, name) is not None}

    @property
    def channels(self) -> int:
        """R."""
        return self.prototypes.shape[0]

    @property
    def decay(self) -> Float[Tensor, " R"]:
        """σ(γ), at least 1e-6 away from 0 and 1, in float32 at least: β unless it is by token."""
        return _decay_from(at_least_float32(self.decay_logits))

    def decay_of(self, x: Float[Tensor, "B T d"]) -> Float[Tensor, " R"] | Float[Tensor, "B T R"]:
        """Return β, which is :attr:`decay` unless it depends on the token; in float32 at least."""
        if self.decay_map is None:
            return self.decay
        logits = at_least_float32(self.decay_logits) + at_least_float32(x @ self.decay_map.T)
        return _decay_from(logits)

    def forward(
        self,
        x: Float[Tensor, "B T d"],
        *,
        state: MixerState | None = None,
        mask: Bool[Tensor, "B T"] | None = None,
        starts: Bool[Tensor, "B T"] | None = None,
        return_evidence: bool = False,
    ) -> MixerOutput:
        """Mix a stretch of positions, or one.

        Args:
            x: inputs, normalised.
            state: what earlier positions left, or None for a start.
            mask: False on padding, which takes no part wherever it stands; bool.
            starts: True where a sequence starts that sees nothing of what is before it.
            return_evidence: whether to return the gates.

        Raises:
            InputError: a state of another batch, no row or position, a width other than d, or
                flags that are not bool [B, T].
        """
        check_rows(x, self.prototypes.shape[1], mask, starts)
        write, read = self.gates(
            GateInputs(
                x,
                None if self.shared_gates else weight_of(self.read_projection, x),
                self.prototypes,
                self.log_write_temperature,
                None if self.shared_gates else self.log_read_temperature,
            )
        )
        values = self.value_projection(x)
        prefix, history = (None, None) if state is None else state
        if self.convolves:
            values, history = self.convolution(values, history=history, mask=mask, starts=starts)
        mixed, prefix = prefix_mean(
            write,
            read,
            values,
            self.decay_of(x),
            prefix,
            mask=mask,
            starts=starts,
            normalise=self.normalise,
            groups=self.groups,
        )
        output = self.alpha * self.output_projection(mixed)
        evidence = None
        if return_evidence:
            if mask is not None:
                write, read = (gate.masked_fill(~mask[..., None], 0) for gate in (write, read))
            evidence = MixerEvidence(write, read)
        return MixerOutput(output, MixerState(prefix, history), evidence)

    @property
    def output_map(self) -> Float[Tensor, "d D"]:
        """α U: what is read from the channels becomes the output by it, and by nothing else."""
        like = self.alpha.new_empty(self.value_width)
        return self.alpha * weight_of(self.output_projection, like)

    def flow(self, x: Float[Tensor, "1 T d"], evidence: MixerEvidence) -> ChannelFlow:
        """Return what decides each position's reading, for one whole sequence from its start.

        Args:
            x: the inputs that the mixer was given.
            evidence: the gates that it computed from them, interventions among them.
        """
        inputs = self.value_projection(x)
        values = self.convolution(inputs)[0] if self.convolves else inputs
        kernel = self.convolution.weight if self.convolves else torch.ones_like(inputs[0, :1])
        log_decay = self.decay_of(x).double().log().expand(*x.shape[:2], -1)[0]
        return ChannelFlow(
            evidence.write[0],
            evidence.read[0],
            # A decay acts behind its position.
            log_decay.cumsum(0) - log_decay,
            values[0],
            inputs[0],
            kernel,
            self.normalise,
            self.groups,
        )


def _decay_from(logits: Tensor) -> Tensor:
    return logits.sigmoid().clamp(DECAY_MARGIN, 1 - DECAY_MARGIN)


def initial_prototypes(
    channels: int, width: int, generator: torch.Generator | None = None
) -> Float[Tensor, "R d"]:
    """Return prototypes as they start: normal with standard deviation 1/√d, on the CPU."""
    return torch.randn(channels, width, generator=generator) * width**-0.5


def _initial_decay_logits(
    channels: int, groups: int, decay: float, half_lives: Sequence[float] | None
) -> list[float]:
    if half_lives is None:
        if not DECAY_MARGIN <= decay <= 1 - DECAY_MARGIN:
            raise InputError(f"the decay β must start between 0 and 1, both excluded; got {decay}.")
        return [math.log(decay / (1 - decay))] * channels
    least, most = (-math.log(2) / math.log(beta) for beta in (DECAY_MARGIN, 1 - DECAY_MARGIN))
    if len(half_lives) != 2 or not all(least <= life <= most for life in half_lives):
        raise InputError(
            f"decay_half_lives are {list(half_lives)}: expected two half-lives in positions, the "
            f"first and the last of a group, from {least:.3g} to {most:.3g}."
        )
    first, last = map(math.log, half_lives)
    count = channels // groups
    places = [k / (count - 1) for k in range(count)] if count > 1 else [0.5]
    lives = [math.exp(first + place * (last - first)) for place in places]
    # β = 2^(−1/h), so β / (1 − β) = 1 / (2^(1/h) − 1).
    return [-math.log(math.expm1(math.log(2) / life)) for life in lives] * groups


def _check_settings(
    width: int, channels: int, value_width: int, temperature: float, alpha: float
) -> None:
    if min(width, channels, value_width) < 1:
        raise InputError(
            f"a mixer of width {width} with {channels} channels and values of width "
            f"{value_width}: each must be at least 1."
        )
    if not (math.isfinite(temperature) and temperature > 0):
        raise InputError(f"the temperature τ must be a positive number, got {temperature}.")
    if not math.isfinite(alpha):
        raise InputError(f"α must start at a finite number, got {alpha}.")
