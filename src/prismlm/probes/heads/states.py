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

from prismlm.errors import InputError, check_finite, check_number, check_whole
from prismlm.layers.signal_noise_attention import SignalNoiseAttention, SignalNoiseOutput
from prismlm.lens.write_cells import hashed
from prismlm.models.watch import Hook, watch
from prismlm.probes.heads.use import MIN_VISIBLE, HeadUseCollector
from prismlm.probes.reading import collect
from prismlm.probes.results import Row, Table
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
        positions: in the corpus, ascending.
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
    """Return the signal/noise attention of each layer; InputError if there is none."""
    layers = [module for module in model.modules() if isinstance(module, SignalNoiseAttention)]
    if not layers:
        kind = getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__
        raise InputError(
            f"a model of type {kind!r} has no signal and noise dictionaries: coding rates, "
            "incoherence and cross terms need signal/noise attention, as models of type "
            "'prismlm_signal_noise' have. Heads and the loss against length can be read of any "
            "decoder."
        )
    return tuple(layers)


def read_states(
    model: PreTrainedModel,
    batches: Iterable[WindowBatch],
    *,
    positions: int = POSITIONS,
    seed: int = 0,
    progress: Reporter = SILENT,
) -> tuple[AttentionStates, ...]:
    """Return what each layer's attention reads and adds at N ``positions`` drawn from the text.

    Each position that a window owns gets a hash of the seed and its place in the corpus, and the
    lowest are kept, so that the draw does not depend on batches.
    """
    collector = _StateCollector(model, positions=positions, seed=seed)
    collect(model, batches, collector.watch, title="Reading states", progress=progress)
    return collector.result()


def read_states_and_heads(
    model: PreTrainedModel, batches: Iterable[WindowBatch], *, least_visible: int = MIN_VISIBLE
) -> tuple[tuple[AttentionStates, ...], Table | None]:
    """Return :func:`read_states` and :func:`head_uses` from the same passes.

    The heads are None where no query sees ``least_visible`` tokens.
    """
    states = _StateCollector(model, positions=POSITIONS, seed=0)
    heads = HeadUseCollector(model, least_visible=least_visible)
    collect(model, batches, states.watch, heads.watch, title="Reading states and heads")
    return states.result(), heads.result() if heads.queries else None


class _StateCollector:
    """Collects the states of :func:`read_states` while the caller runs the forward passes."""

    def __init__(self, model: PreTrainedModel, *, positions: int, seed: int) -> None:
        self._layers = signal_noise_layers(model)
        self._size = check_whole("the number of positions", positions, 2)
        self._device, self._seed = model.device, seed
        # λ and U of each layer; and of the lowest hashes so far: hash, position, input and step.
        self._fixed: dict[nn.Module, tuple[float, Tensor]] = {}
        self._kept: dict[nn.Module, tuple[Tensor, ...]] = {}

    def watch(self, batch: WindowBatch) -> AbstractContextManager[None]:
        """Collect what the layers read and add in a batch's forward pass."""
        owned, positions = batch.owned.to(self._device), batch.positions[batch.owned]
        seeded = positions.numpy().astype(np.uint64) + np.uint64((self._seed % 2**32) << 32)
        # Half of each, as non-negative int64.
        hashes = hashed(seeded * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(1)
        keys = torch.from_numpy(hashes.astype(np.int64))

        def take(layer: nn.Module, args: Any, kwargs: Any, output: SignalNoiseOutput) -> None:
            assert isinstance(layer, SignalNoiseAttention)
            if layer not in self._fixed:
                # While the layer runs: a sharded model holds U whole only then.
                dictionary = layer.dictionary(args[0]).detach().cpu().clone()
                self._fixed[layer] = float(args[1]), dictionary
            states = (column[owned].detach().cpu() for column in (args[0], output.output))
            columns = (keys, positions, *states)
            if layer in self._kept:
                columns = tuple(map(torch.cat, zip(self._kept[layer], columns, strict=True)))
            lowest = columns[0].argsort()[: self._size]
            self._kept[layer] = tuple(column[lowest] for column in columns)

        return watch(Hook(layer, after=take) for layer in self._layers)

    def result(self) -> tuple[AttentionStates, ...]:
        """Return the states of each layer."""
        states: list[AttentionStates] = []
        for number, layer in enumerate(self._layers):
            _, *columns = self._kept.get(layer, (torch.empty(0),) * 4)
            if len(columns[0]) < 2:
                raise InputError(
                    "the text has fewer than two tokens, of which no coding rate can be told: read "
                    "a longer one."
                )
            # In the corpus' order, sums are the same whatever the batches were.
            order = columns[0].argsort()
            ordered = (column[order] for column in columns)
            states.append(AttentionStates(number, layer, *self._fixed[layer], *ordered))
        return tuple(states)


def layer_rates(
    states: Sequence[AttentionStates],
    *,
    distortion: float = DISTORTION,
    seed: int = 0,
    lengths: Sequence[float] | None = None,
) -> Table:
    """Return coding rates of each layer, before and after the step Z ← Z + η (S − λN).

    A step that only makes states longer raises every rate, and a longer step gains more. So the
    gain stands beside that of Z ``scaled`` to the size of what the step gives, and of steps
    ``shuffled`` over states; two models are compared at steps of one length, by ``lengths``
    ‖step‖_F / ‖Z‖_F of each layer, such as another model's.

    The step is what the layer adds to its stream, but here it is added to the normalised stream
    that it reads: the source's update has no norm, and its ΔR is of what the dictionaries see.
    Source: Prism, Eq. 2 to 7. Controls, random dictionaries and ε, ``distortion``, are ours.

    Returns:
        A row for each ``layer``: rates ``before`` and ``after``, of :func:`rates_of`; ``gain``,
        ``gain_over_scaled``, ``gain_over_shuffled`` and, with ``lengths``, ``gain_resized``: what a
        step adds to ΔR, in nats; ``step_size``, ‖η (S − λN)‖_F / ‖Z‖_F; ``gradient_cosine`` of the
        step with ∂ΔR/∂Z; and ``incoherence`` of the ``own`` and of ``random`` dictionaries of that
        shape.
    """
    check_number("the distortion ε", distortion, "a positive number", lambda number: number > 0)
    wanted = lengths if lengths is not None else [None] * len(states)
    columns = {"layer": "", "before.whole": ".1f", "before.signal": ".1f", "before.noise": ".1f",
               "before.difference": ".1f", "gain": "+.2f", "gain_over_scaled": "+.2f",
               "gain_over_shuffled": "+.2f", "gradient_cosine": "+.2f", "incoherence.own": ".3f",
               "incoherence.random": ".3f"}  # fmt: skip
    rows = tuple(
        _rates(one, distortion, seed, length) for one, length in zip(states, wanted, strict=True)
    )
    title = "Coding rates of what attention reads, nats"
    return Table(title, columns, rows, {"distortion": distortion})


def rates_of(
    points: Float[Tensor, "N d"],
    dictionary: Float[Tensor, "G d p"],
    noise_weight: float,
    *,
    distortion: float = DISTORTION,
) -> dict[str, Tensor]:
    """Return the rates of N states under a dictionary whose first half is signal heads, in nats.

    They are R(Z), ``whole``; ``signal``, R(Z | U_s) = Σ_h R(Z U_s,h); ``noise``, R(Z | U_n); and
    the ``difference`` ΔR = R(Z | U_s) − λ R(Z | U_n), by Eq. 3 and 4.
    """
    of_heads = coding_rate(points.double() @ dictionary.double(), distortion=distortion)
    signal, noise = (part.sum() for part in of_heads.chunk(2))
    whole = coding_rate(points, distortion=distortion)
    difference = signal - noise_weight * noise
    return {"whole": whole, "signal": signal, "noise": noise, "difference": difference}


def _rates(one: AttentionStates, distortion: float, seed: int, length: float | None) -> Row:
    dictionary = one.dictionary.double()
    check_finite(f"the dictionaries of layer {one.layer}", dictionary)
    steps = one.steps.double()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(steps), generator=generator)

    def rates(points: Tensor) -> dict[str, Tensor]:
        return rates_of(points, dictionary, one.noise_weight, distortion=distortion)

    def difference(points: Tensor) -> float:
        return rates(points)["difference"].item()

    with torch.enable_grad():
        z = one.inputs.double().clone().requires_grad_()
        before = rates(z)
        (gradient,) = torch.autograd.grad(before["difference"], z)
    z = z.detach()
    size, moved = float(z.norm()), float(steps.norm())
    after, start = rates(z + steps), before["difference"].item()
    end = after["difference"].item()
    stretch = float((z + steps).norm()) / size if size else 1.0
    resized = None
    if length is not None:
        # A step of no length stays where it is.
        resized = difference(z + steps * (length * size / moved if moved else 0.0)) - start
    product = float(gradient.norm() * steps.norm())
    signal, noise = (group.transpose(0, 1).flatten(1) for group in dictionary.chunk(2))
    drawn = torch.randn(
        (RANDOM_DICTIONARIES, 2, *signal.shape), generator=generator, dtype=torch.float64
    )
    random = statistics.fmean(incoherence(*pair).item() for pair in drawn)
    return {
        "layer": one.layer,
        "positions": len(z),
        "noise_weight": one.noise_weight,
        "before": {name: rate.item() for name, rate in before.items()},
        "after": {name: rate.item() for name, rate in after.items()},
        "step_size": moved / size if size else math.nan,
        "gradient_cosine": float((gradient * steps).sum()) / product if product else 0.0,
        "gain": end - start,
        "gain_over_scaled": end - difference(z * stretch),
        "gain_over_shuffled": end - difference(z + steps[order]),
        "gain_resized": resized,
        "incoherence": {"own": incoherence(signal, noise).item(), "random": random},
    }


def coding_rate(
    points: Float[Tensor, "*batch N d"], *, distortion: float = DISTORTION
) -> Float[Tensor, "*batch"]:
    """Return R(Z) = ½ log det(I + d / (N ε²) Z Zᵀ), in nats; float64.

    Z Zᵀ and Zᵀ Z have the same determinant here, so the smaller one is taken. With Z U_k of size
    [N, p] in place of Z this is the rate of one subspace, Eq. 4.

    Source: Prism, Eq. 3 and 4. The source leaves ε open; 0.5 is ours.
    """
    count, width = points.shape[-2:]
    z = points.double()
    check_finite("points", z)
    gram = z.mT @ z if width <= count else z @ z.mT
    scaled = gram * (width / (count * distortion**2))
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return torch.slogdet(scaled + identity)[1] / 2


def incoherence(signal: Float[Tensor, "d m"], noise: Float[Tensor, "d n"]) -> Float[Tensor, ""]:
    """Return ‖U_sᵀ U_n‖_F / (‖U_s‖_F ‖U_n‖_F): 0 for orthogonal dictionaries, at most 1; float64.

    Independent random directions give about 1/√d.
    """
    own, other = signal.double(), noise.double()
    return (own.mT @ other).norm() / (own.norm() * other.norm())
