"""The prototype mixer: all communication along the sequence goes through R prototype channels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from prismlm.errors import InputError, check_choice, check_number
from prismlm.layers.causal_convolution import CausalConvolution, check_rows
from prismlm.layers.linear import weight_of
from prismlm.ops.channel_parts import ChannelFlow
from prismlm.ops.prototype_mixer import PrefixState, prefix_mean
from prismlm.ops.tensors import at_least_float32

# Decays keep this distance from 0 and 1, which a sigmoid reaches in float32.
DECAY_MARGIN = 1e-6


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


class MixerState(NamedTuple):
    """The recurrent state: of channels, and the convolution's history [B, n − 1, D], if any."""

    prefix: PrefixState
    history: Tensor | None


class MixerOutput(NamedTuple):
    """The output (zero on padding), the state, and the gates if requested."""

    output: Float[Tensor, "B T d"]
    state: MixerState
    evidence: MixerEvidence | None


class PrototypeMixer(nn.Module):
    """Write into R channels, average each over the past, read from them.

        write_j = softmax_k(x_j·p_k / τ_w),   read_i = softmax_k((W x_i)·p_k / τ_r)
        v_j = conv(V x_j)
        y_i = α U Σ_k read_ik (Σ_{j<i} β_k^(i−j) write_jk v_j) / (Σ_{j<i} β_k^(i−j) write_jk)

    log τ, γ with β = σ(γ), α and the prototypes p are learned. With shared gates read = write,
    without W and τ_r.

    The source has one group of channels. With G groups, channels and values are split into G equal
    parts: each softmax runs over the R / G channels of a group, which has separate temperatures and
    carries its D / G of the values, like an attention head.

    The source has one decay per channel. With ``decay_mode="token"``, β_k^(i−j) becomes
    β_jk ⋯ β_(i−1)k with β_jk = σ(γ_k + δ_k·x_j): position j determines how much each channel keeps
    afterwards, including what j writes. δ starts at 0, which is the other mode.

    The source does not specify initial values. Here p is normal with standard deviation 1/√d, so
    that inputs of unit mean square have scores of unit variance. V, U and W have nn.Linear's
    initialisation, which our models replace with normals of ``initializer_range``.

    Source: ProtoT, §3 and A.7.

    Args:
        width: d.
        channels: R.
        value_width: D, or None for half of d.
        shared_gates: read with the write gate, as in the source's layer 0.
        temperature: initial τ; in the source 1, and 3 with shared gates.
        temperature_mode: ``divide`` scores by τ, as in Eq. 1, where a larger τ makes gates
            flatter; or ``multiply``, which makes them sharper, as in the source's text.
        convolution_width: of the convolution on the values, 5 in the source's layers 0 and 1; 0 for
            none.
        normalise: whether to divide by the mass.
        decay: initial β; 0.95 is a half-life of 13.5 tokens.
        decay_half_lives: (a, b) instead of ``decay``: in each group of n channels, the half-life
            of channel k starts at a·(b/a)^(k/(n−1)) positions; at √(ab) in a group of one.
        alpha: initial α.
        groups: G, a divisor of R and D.
        decay_mode: one decay per ``channel``, or also depending on the ``token``.
        keep_unused: also have, frozen, the unused parameters (W and τ_r, a convolution of width 5)
            that the source counts in its sizes.
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
        if groups < 1 or channels % groups or value_width % groups:
            raise InputError(
                f"{groups} groups of {channels} channels and values of width {value_width}: "
                "expected a number of groups that divides both."
            )
        check_choice("temperature_mode", temperature_mode, ("divide", "multiply"))
        check_choice("decay_mode", decay_mode, ("channel", "token"))
        check_number("the temperature τ", temperature, "a positive number", lambda tau: tau > 0)
        self.groups = groups
        self.value_width = value_width
        self.normalise = normalise
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
        """Initialise everything but the projections and the convolution."""
        with torch.no_grad():
            for name, value in self.initial_values().items():
                getattr(self, name).copy_(value)

    def initial_values(self) -> dict[str, Tensor]:
        """Return initial values of all but the projections and the convolution."""
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
        """σ(γ), clamped, in float32 or wider: β unless it depends on the token."""
        return _decay_from(at_least_float32(self.decay_logits))

    def decay_of(self, x: Float[Tensor, "B T d"]) -> Float[Tensor, " R"] | Float[Tensor, "B T R"]:
        """Return β of each channel, or of each position and channel, in float32 or wider."""
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
        """Mix one or more positions.

        Args:
            x: normalised inputs.
            state: of the previous call; None at the start.
            mask: False on padding, which is ignored wherever it stands.
            starts: True where a new sequence begins, which sees nothing before it.
            return_evidence: whether to return the gates.
        """
        prefix, history = (None, None) if state is None else state
        check_rows(x, self.prototypes.shape[1], prefix and prefix.sums)
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
        """α U, the linear map from the channels' readings to the output."""
        like = self.alpha.new_empty(self.value_width)
        return self.alpha * weight_of(self.output_projection, like)

    def flow(self, x: Float[Tensor, "1 T d"], evidence: MixerEvidence) -> ChannelFlow:
        """Return what determines each position's reading, for one whole sequence.

        ``x`` are the mixer's inputs, and ``evidence`` its gates, with any interventions.
        """
        inputs = self.value_projection(x)
        values = self.convolution(inputs)[0] if self.convolves else inputs
        kernel = self.convolution.weight if self.convolves else torch.ones_like(inputs[0, :1])
        log_decay = self.decay_of(x).double().log().expand(*x.shape[:2], -1)[0]
        return ChannelFlow(
            evidence.write[0],
            evidence.read[0],
            # A decay acts after its position.
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
    """Return initial prototypes, normal with standard deviation 1/√d, on the CPU."""
    return torch.randn(channels, width, generator=generator) * width**-0.5


def _initial_decay_logits(
    channels: int, groups: int, decay: float, half_lives: Sequence[float] | None
) -> list[float]:
    if half_lives is None:
        if not DECAY_MARGIN <= decay <= 1 - DECAY_MARGIN:
            raise InputError(f"the decay β must start between 0 and 1, both excluded; got {decay}.")
        return [math.log(decay / (1 - decay))] * channels
    low, high = (-math.log(2) / math.log(beta) for beta in (DECAY_MARGIN, 1 - DECAY_MARGIN))
    if len(half_lives) != 2 or not all(low <= life <= high for life in half_lives):
        raise InputError(
            f"decay_half_lives are {list(half_lives)}: expected two half-lives in positions, the "
            f"first and the last of a group, from {low:.3g} to {high:.3g}."
        )
    first, last = map(math.log, half_lives)
    count = channels // groups
    fractions = [k / (count - 1) for k in range(count)] if count > 1 else [0.5]
    lives = [math.exp(first + fraction * (last - first)) for fraction in fractions]
    # β = 2^(−1/h), so β / (1 − β) = 1 / (2^(1/h) − 1).
    return [-math.log(math.expm1(math.log(2) / life)) for life in lives] * groups
