"""Coding rates of what attention reads, and whether its step raises their difference."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from prismlm.errors import check_finite
from prismlm.instruments.heads.states import AttentionStates
from prismlm.ops.dictionaries import coding_rate, incoherence, subspace_rate

DISTORTION = 0.5
RANDOM_DICTIONARIES = 8


@dataclass(frozen=True)
class Rates:
    """Coding rates of N states, in nats, by Eq. 3 and 4.

    Attributes:
        whole: R(Z).
        signal: R(Z | U_s) = Σ_h R(Z U_s,h).
        noise: R(Z | U_n).
        difference: ΔR = R(Z | U_s) − λ R(Z | U_n).
    """

    whole: float
    signal: float
    noise: float
    difference: float


@dataclass(frozen=True)
class Incoherence:
    """‖U_sᵀU_n‖_F / (‖U_s‖_F ‖U_n‖_F), beside the same of random dictionaries of that shape.

    Attributes:
        own: of the layer's dictionaries.
        random: mean over pairs of dictionaries with independent normal entries.
        random_deviation: standard deviation over these pairs.
    """

    own: float
    random: float
    random_deviation: float


@dataclass(frozen=True)
class LayerRates:
    """Rates of one layer, before and after the step Z ← Z + η (S − λN), beside two controls.

    A step that only makes states longer raises every rate. ``scaled`` is Z stretched to the size
    of what the step gives; ``shuffled`` adds to each state the step of another. And a longer step
    gains more: two models are compared at steps of one length, which ``resized`` has.

    Attributes:
        layer: from 0.
        positions: N.
        distortion: ε.
        noise_weight: λ.
        step_size: ‖η (S − λN)‖_F / ‖Z‖_F.
        gradient_cosine: cosine of the step with ∂ΔR/∂Z, over all N states together.
        before: of Z.
        after: of Z + η (S − λN).
        scaled: of c Z, with the c > 0 that gives it the Frobenius norm of Z + η (S − λN).
        shuffled: of Z with the steps permuted over positions.
        incoherence: of the dictionaries.
        resized_length: the ‖step‖_F / ‖Z‖_F that the step was also scaled to, or None.
        resized: of Z plus that step, or None.
    """

    layer: int
    positions: int
    distortion: float
    noise_weight: float
    step_size: float
    gradient_cosine: float
    before: Rates
    after: Rates
    scaled: Rates
    shuffled: Rates
    incoherence: Incoherence
    resized_length: float | None = None
    resized: Rates | None = None

    @property
    def gain(self) -> float:
        """What the step adds to ΔR, in nats."""
        return self.after.difference - self.before.difference

    @property
    def gain_over_scaled(self) -> float:
        """What it adds beyond what stretching Z to that size does, in nats."""
        return self.after.difference - self.scaled.difference

    @property
    def gain_over_shuffled(self) -> float:
        """What it adds beyond what the steps of other positions do, in nats."""
        return self.after.difference - self.shuffled.difference

    @property
    def gain_resized(self) -> float | None:
        """What the step of the length asked for adds to ΔR, in nats."""
        return None if self.resized is None else self.resized.difference - self.before.difference

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, the gains among them."""
        gains = ("gain", "gain_over_scaled", "gain_over_shuffled", "gain_resized")
        return {**asdict(self), **{name: getattr(self, name) for name in gains}}


def layer_rates(
    states: Sequence[AttentionStates],
    *,
    distortion: float = DISTORTION,
    seed: int = 0,
    lengths: Sequence[float] | None = None,
) -> tuple[LayerRates, ...]:
    """Return the rates of each layer, from :func:`read_states`.

    The step is what the layer adds to its stream, but here it is added to the normalised stream
    that it reads: the source's update has no norm, and its ΔR is of what the dictionaries see.

    Source: Prism, Eq. 2 to 7. Controls and the random dictionaries are ours; so is ε, which the
    source leaves open.

    Args:
        states: what the layers read and add.
        distortion: ε.
        seed: of the permutation and of the random dictionaries.
        lengths: ‖step‖_F / ‖Z‖_F of each layer, such as another model's, for ``resized``.

    Raises:
        InputError: a distortion that is not positive, or states or weights that are not finite.
    """
    wanted = lengths if lengths is not None else [None] * len(states)
    pairs = zip(states, wanted, strict=True)
    return tuple(_rates(one, distortion, seed, length) for one, length in pairs)


def rates_of(
    points: Float[Tensor, "N d"],
    dictionary: Float[Tensor, "G d p"],
    noise_weight: float,
    *,
    distortion: float = DISTORTION,
) -> Rates:
    """Return the rates of states under a dictionary whose first half is signal heads.

    Raises:
        InputError: as :func:`prismlm.ops.dictionaries.subspace_rate`.
    """
    heads = len(dictionary) // 2
    signal = subspace_rate(points, dictionary[:heads], distortion=distortion).item()
    noise = subspace_rate(points, dictionary[heads:], distortion=distortion).item()
    whole = coding_rate(points, distortion=distortion).item()
    return Rates(whole, signal, noise, signal - noise_weight * noise)


def _rates(one: AttentionStates, distortion: float, seed: int, length: float | None) -> LayerRates:
    dictionary = one.dictionary.double()
    check_finite(f"the dictionaries of layer {one.layer}", dictionary)
    inputs, steps = one.inputs.double(), one.steps.double()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(steps), generator=generator)
    after = inputs + steps
    size, moved = float(inputs.norm()), float(steps.norm())

    def rates(points: Tensor) -> Rates:
        return rates_of(points, dictionary, one.noise_weight, distortion=distortion)

    return LayerRates(
        layer=one.layer,
        positions=len(inputs),
        distortion=distortion,
        noise_weight=one.noise_weight,
        step_size=moved / size if size else math.nan,
        gradient_cosine=_gradient_cosine(inputs, steps, dictionary, one.noise_weight, distortion),
        before=rates(inputs),
        after=rates(after),
        scaled=rates(inputs * (float(after.norm()) / size if size else 1.0)),
        shuffled=rates(inputs + steps[order]),
        incoherence=_incoherence(dictionary, generator),
        resized_length=length,
        resized=None if length is None else rates(inputs + steps * _factor(length, size, moved)),
    )


def _factor(length: float, size: float, moved: float) -> float:
    """Return what a step is to be multiplied with; one of no length stays where it is."""
    return length * size / moved if moved else 0.0


def _gradient_cosine(
    inputs: Tensor, steps: Tensor, dictionary: Tensor, noise_weight: float, distortion: float
) -> float:
    heads = len(dictionary) // 2
    with torch.enable_grad():
        z = inputs.clone().requires_grad_()
        signal = subspace_rate(z, dictionary[:heads], distortion=distortion)
        noise = subspace_rate(z, dictionary[heads:], distortion=distortion)
        (gradient,) = torch.autograd.grad(signal - noise_weight * noise, z)
    size = float(gradient.norm() * steps.norm())
    return float((gradient * steps).sum()) / size if size else 0.0


def _incoherence(dictionary: Float[Tensor, "G d p"], generator: torch.Generator) -> Incoherence:
    signal, noise = (group.transpose(0, 1).flatten(1) for group in dictionary.chunk(2))
    random = [
        incoherence(
            torch.randn(signal.shape, generator=generator, dtype=torch.float64),
            torch.randn(noise.shape, generator=generator, dtype=torch.float64),
        ).item()
        for _ in range(RANDOM_DICTIONARIES)
    ]
    own = incoherence(signal, noise).item()
    return Incoherence(own, statistics.fmean(random), statistics.stdev(random))
