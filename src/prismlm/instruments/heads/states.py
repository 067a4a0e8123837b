"""What signal/noise attention reads and adds at positions of a text, and its coding rates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from prismlm.errors import InputError, check_finite, check_whole
from prismlm.index.positions import hashed
from prismlm.instruments.forward import collect
from prismlm.instruments.heads.use import LEAST_VISIBLE, HeadUseCollector
from prismlm.instruments.results import Row, Table
from prismlm.layers.signal_noise_attention import SignalNoiseAttention, SignalNoiseOutput
from prismlm.models.watch import Hook, watch
from prismlm.ops.dictionaries import coding_rate, incoherence, subspace_rate
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prismlm.corpus.windows import WindowBatch

POSITIONS = 2048
DISTORTION = 0.5
RANDOM_DICTIONARIES = 8


@dataclass(frozen=True)
class AttentionStates:
    """One layer's attention at N positions, on the CPU.

    Attributes:
        layer: from 0.
        attention: the layer itself.
        noise_weight: λ.
        dictionary: U of each head, signal heads first.
        positions: where in the corpus, ascending.
        inputs: Z, the normalised stream that the attention reads.
        steps: η (S − λN), what it adds.
    """

    layer: int
    attention: SignalNoiseAttention
    noise_weight: float
    dictionary: Float[Tensor, "G d p"]
    positions: Int64[Tensor, " N"]
    inputs: Float[Tensor, "N d"]
    steps: Float[Tensor, "N d"]

    def projections(self) -> Float[Tensor, "G N p"]:
        """Return Z U of each head; float64."""
        return self.inputs.double() @ self.dictionary.double()


def signal_noise_layers(model: nn.Module) -> tuple[SignalNoiseAttention, ...]:
    """Return the signal/noise attention of each layer.

    Raises:
        InputError: the model has none.
    """
    found = [module for module in model.modules() if isinstance(module, SignalNoiseAttention)]
    if not found:
        kind = getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__
        raise InputError(
            f"a model of type {kind!r} has no signal and noise dictionaries: coding rates, "
            "incoherence and cross terms need signal/noise attention, as models of type "
            "'prismlm_signal_noise' have. Heads and the loss against length can be read of any "
            "decoder."
        )
    return tuple(found)


def read_states(
    model: PreTrainedModel,
    batches: Iterable[WindowBatch],
    *,
    positions: int = POSITIONS,
    seed: int = 0,
    progress: Reporter = SILENT,
) -> tuple[AttentionStates, ...]:
    """Return what each layer's attention reads and adds at positions drawn from the text.

    Which positions is a matter of the seed and of where in the corpus they are, not of batches:
    each gets a hash, and the lowest are kept.

    Args:
        model: a decoder of signal/noise attention.
        batches: text; tokens count that their window owns.
        positions: N, or all there are if that is fewer.
        seed: of the draw.
        progress: shows the reading.

    Raises:
        InputError: a model without signal/noise heads, fewer than two tokens, or N below 2.
    """
    collector = StateCollector(model, positions=positions, seed=seed)
    collect(model, batches, collector, title="Reading states", progress=progress)
    return collector.result()


class StateCollector:
    """Collects the states of :func:`read_states` while the caller runs the forward passes.

    Args:
        model, positions, seed: as of :func:`read_states`.

    Raises:
        InputError: a model without signal/noise heads, or N below 2.
    """

    def __init__(self, model: PreTrainedModel, *, positions: int, seed: int) -> None:
        self._layers = signal_noise_layers(model)
        check_whole("the number of positions", positions, 2)
        self._device, self._size, self._seed = model.device, positions, seed
        # λ and U of each layer; and of the lowest keys so far key, position, input and step.
        self._fixed: dict[nn.Module, tuple[float, Tensor]] = {}
        self._kept: dict[nn.Module, tuple[Tensor, ...]] = {}
        self._places = self._keys = self._owned = torch.empty(0)

    def listening(self) -> AbstractContextManager[None]:
        """Take in what the layers read and add during the block."""
        return watch(Hook(layer, after=self._take) for layer in self._layers)

    def begin(self, batch: WindowBatch) -> None:
        """Say which batch the next forward pass is of."""
        self._places = batch.positions[batch.owned]
        self._keys = _hashed(self._places, self._seed)
        self._owned = batch.owned.to(self._device)

    def _take(self, layer: nn.Module, args: Any, kwargs: Any, output: SignalNoiseOutput) -> None:
        assert isinstance(layer, SignalNoiseAttention)
        if layer not in self._fixed:
            # While the layer runs: a sharded model holds U whole only then.
            dictionary = layer.dictionary(args[0]).detach().cpu().clone()
            self._fixed[layer] = float(args[1]), dictionary
        states = (column[self._owned].detach().cpu() for column in (args[0], output.output))
        columns = (self._keys, self._places, *states)
        if layer in self._kept:
            columns = tuple(map(torch.cat, zip(self._kept[layer], columns, strict=True)))
        lowest = columns[0].argsort()[: self._size]
        self._kept[layer] = tuple(column[lowest] for column in columns)

    def result(self) -> tuple[AttentionStates, ...]:
        """Return the states of each layer.

        Raises:
            InputError: fewer than two tokens were read.
        """
        found: list[AttentionStates] = []
        for number, layer in enumerate(self._layers):
            _, places, inputs, steps = self._kept.get(layer, (torch.empty(0),) * 4)
            if len(places) < 2:
                raise InputError(
                    "the text has fewer than two tokens, of which no coding rate can be told: read "
                    "a longer one."
                )
            # In the corpus' order, sums are the same whatever batches they came in.
            order = places.argsort()
            columns = (places[order], inputs[order], steps[order])
            found.append(AttentionStates(number, layer, *self._fixed[layer], *columns))
        return tuple(found)


def read_states_and_heads(
    model: PreTrainedModel,
    batches: Iterable[WindowBatch],
    *,
    least_visible: int = LEAST_VISIBLE,
) -> tuple[tuple[AttentionStates, ...], Table | None]:
    """Return what :func:`read_states` and :func:`head_uses` do, in one forward pass a batch.

    The heads are None where no query sees enough tokens: the states are there all
    the same.

    Args:
        model: a decoder of signal/noise attention.
        batches: text; tokens count that their window owns.
        least_visible: a query of a head counts from so many visible positions on.

    Raises:
        InputError: as both, but for queries.
    """
    states = StateCollector(model, positions=POSITIONS, seed=0)
    heads = HeadUseCollector(model, least_visible=least_visible)
    collect(model, batches, states, heads, title="Reading states and heads")
    return states.result(), heads.result() if heads.queries else None


def _hashed(positions: Tensor, seed: int) -> Tensor:
    """Return a hash of each position and the seed, as int64 that are not negative."""
    apart = positions.numpy().astype(np.uint64) + np.uint64(seed % 2**32) * np.uint64(2**32)
    keys = hashed(apart * np.uint64(0x9E3779B97F4A7C15))
    return torch.from_numpy((keys >> np.uint64(1)).astype(np.int64))


def layer_rates(
    states: Sequence[AttentionStates],
    *,
    distortion: float = DISTORTION,
    seed: int = 0,
    lengths: Sequence[float] | None = None,
) -> Table:
    """Return coding rates of each layer, before and after the step Z ← Z + η (S − λN).

    A step that only makes states longer raises every rate. ``scaled`` is Z stretched to the size
    of what the step gives; ``shuffled`` adds to each state the step of another. And a longer step
    gains more: two models are compared at steps of one length, which ``resized`` has.

    The step is what the layer adds to its stream, but here it is added to the normalised stream
    that it reads: the source's update has no norm, and its ΔR is of what the dictionaries see.

    Source: Prism, Eq. 2 to 7. Controls and the random dictionaries are ours; so is ε, which the
    source leaves open.

    Args:
        states: what the layers read and add.
        distortion: ε.
        seed: of the permutation and of the random dictionaries.
        lengths: ‖step‖_F / ‖Z‖_F of each layer, such as another model's, for ``resized``.

    Returns:
        A row for each ``layer``. ``before``, ``after``, ``scaled``, ``shuffled`` and, with
        ``lengths``, ``resized`` are of :func:`rates_of`; ``gain``, ``gain_over_scaled``,
        ``gain_over_shuffled`` and ``gain_resized`` what a step adds to ΔR, in nats, against each.
        ``step_size``: ‖η (S − λN)‖_F / ‖Z‖_F. ``gradient_cosine``: of the step with ∂ΔR/∂Z, over
        all N states together. ``incoherence``: ‖U_sᵀU_n‖_F / (‖U_s‖_F ‖U_n‖_F), ``own`` and of
        ``random`` dictionaries of that shape, mean and standard deviation.

    Raises:
        InputError: a distortion that is not positive, or states or weights that are not finite.
    """
    wanted = lengths if lengths is not None else [None] * len(states)
    pairs = zip(states, wanted, strict=True)
    return Table(
        "Coding rates of what attention reads, nats",
        {"layer": "", "before.whole": ".1f", "before.signal": ".1f", "before.noise": ".1f",
         "before.difference": ".1f", "gain": "+.2f", "gain_over_scaled": "+.2f",
         "gain_over_shuffled": "+.2f", "gradient_cosine": "+.2f", "incoherence.own": ".3f",
         "incoherence.random": ".3f"},
        tuple(_rates(one, distortion, seed, length) for one, length in pairs),
        {"distortion": distortion},
    )  # fmt: skip


def rates_of(
    points: Float[Tensor, "N d"],
    dictionary: Float[Tensor, "G d p"],
    noise_weight: float,
    *,
    distortion: float = DISTORTION,
) -> dict[str, float]:
    """Return the rates of N states under a dictionary whose first half is signal heads, in nats.

    They are R(Z), ``whole``; ``signal``, R(Z | U_s) = Σ_h R(Z U_s,h); ``noise``, R(Z | U_n); and
    the ``difference`` ΔR = R(Z | U_s) − λ R(Z | U_n), by Eq. 3 and 4.

    Raises:
        InputError: as :func:`prismlm.ops.dictionaries.subspace_rate`.
    """
    heads = len(dictionary) // 2
    signal = subspace_rate(points, dictionary[:heads], distortion=distortion).item()
    noise = subspace_rate(points, dictionary[heads:], distortion=distortion).item()
    whole = coding_rate(points, distortion=distortion).item()
    difference = signal - noise_weight * noise
    return {"whole": whole, "signal": signal, "noise": noise, "difference": difference}


def _rates(one: AttentionStates, distortion: float, seed: int, length: float | None) -> Row:
    dictionary = one.dictionary.double()
    check_finite(f"the dictionaries of layer {one.layer}", dictionary)
    inputs, steps = one.inputs.double(), one.steps.double()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(steps), generator=generator)
    after = inputs + steps
    size, moved = float(inputs.norm()), float(steps.norm())
    points = {
        "before": inputs,
        "after": after,
        "scaled": inputs * (float(after.norm()) / size if size else 1.0),
        "shuffled": inputs + steps[order],
    }
    if length is not None:
        # A step of no length stays where it is.
        points["resized"] = inputs + steps * (length * size / moved if moved else 0.0)
    rates = {
        name: rates_of(z, dictionary, one.noise_weight, distortion=distortion)
        for name, z in points.items()
    }
    at = {name: found["difference"] for name, found in rates.items()}
    return {
        "layer": one.layer,
        "positions": len(inputs),
        "noise_weight": one.noise_weight,
        "step_size": moved / size if size else math.nan,
        "gradient_cosine": _gradient_cosine(
            inputs, steps, dictionary, one.noise_weight, distortion
        ),
        "gain": at["after"] - at["before"],
        "gain_over_scaled": at["after"] - at["scaled"],
        "gain_over_shuffled": at["after"] - at["shuffled"],
        "gain_resized": None if length is None else at["resized"] - at["before"],
        "resized_length": length,
        "incoherence": _incoherence(dictionary, generator),
    } | rates


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


def _incoherence(dictionary: Float[Tensor, "G d p"], generator: torch.Generator) -> Row:
    signal, noise = (group.transpose(0, 1).flatten(1) for group in dictionary.chunk(2))
    random = [
        incoherence(
            torch.randn(signal.shape, generator=generator, dtype=torch.float64),
            torch.randn(noise.shape, generator=generator, dtype=torch.float64),
        ).item()
        for _ in range(RANDOM_DICTIONARIES)
    ]
    return {
        "own": incoherence(signal, noise).item(),
        "random": statistics.fmean(random),
        "random_deviation": statistics.stdev(random),
    }
