"""What signal/noise attention does: coding rates and cross terms; and loss by length of context."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from prismlm.corpus.windows import Sequences
from prismlm.errors import InputError, NotFiniteError, check_finite, check_number, check_whole
from prismlm.layers.signal_noise_attention import SignalNoiseAttention, SignalNoiseOutput
from prismlm.models.device import check_window
from prismlm.models.seam import LogitMap, capture, output_embedding
from prismlm.models.watch import Hook, evaluating, watch
from prismlm.ops.signal_noise_attention import SCALINGS, Scaling, group_frequencies
from prismlm.probes.heads.attention import collect
from prismlm.probes.results import Report, Row, Table
from prismlm.probes.texts import document_numbers, losses_at
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prismlm.corpus.store import Corpus, Split
    from prismlm.corpus.windows import WindowBatch

POSITIONS = 2048
DISTORTION = 0.5
RANDOM_DICTIONARIES = 8
GOLDEN = (1 + math.sqrt(5)) / 2
RATIOS = {"π": math.pi, "3": 3.0, "22/7": 22 / 7, "golden": GOLDEN, "2": 2.0, "1": 1.0}
TERMS = ("signal_noise", "signal_signal", "noise_noise")
ORDER = 22
"""The smallest order at which 22/7, the source's neighbour of π, resonates."""
ROUNDING = 1e-12
"""|n ω_S − m ω_N| / (n ω_S) up to which float64 frequencies count as equal."""
DOCUMENTS = 32
BATCH_TOKENS = 4096


@dataclass(frozen=True)
class AttentionStates:
    """One layer's attention at N positions of a text, in reading order; on the CPU."""

    layer: int
    attention: SignalNoiseAttention
    noise_weight: float  # λ
    dictionary: Float[Tensor, "G d p"]  # U of each head, signal heads first
    inputs: Float[Tensor, "N d"]  # Z, the normalised stream that the attention reads
    steps: Float[Tensor, "N d"]  # η (S − λN), what it adds

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
            "incoherence and cross terms need signal/noise attention, as in models of type "
            "'prismlm_signal_noise'. For any decoder use `prismlm inspect heads` or --loss-only."
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
    """Return what each layer's attention reads and adds at N random ``positions`` of the text."""
    check_whole("the number of positions", positions, 2)
    layers = signal_noise_layers(model)
    generator = torch.Generator().manual_seed(seed)
    parameters: dict[nn.Module, tuple[float, Tensor]] = {}
    # Random keys, inputs and steps; the smallest keys are a uniform sample.
    samples: dict[nn.Module, tuple[Tensor, ...]] = {}

    def observe(batch: WindowBatch) -> AbstractContextManager[None]:
        owned = batch.owned.to(model.device)
        keys = torch.rand(int(batch.owned.sum()), generator=generator)

        def sample(layer: nn.Module, args: Any, kwargs: Any, output: SignalNoiseOutput) -> None:
            assert isinstance(layer, SignalNoiseAttention)
            if layer not in parameters:
                # A sharded model holds the whole U only while the layer runs.
                dictionary = layer.dictionary(args[0]).detach().cpu().clone()
                parameters[layer] = float(args[1]), dictionary
            states = (column[owned].detach().cpu() for column in (args[0], output.output))
            columns = (keys, *states)
            if layer in samples:
                columns = tuple(map(torch.cat, zip(samples[layer], columns, strict=True)))
            chosen = columns[0].argsort()[:positions].sort().values
            samples[layer] = tuple(column[chosen] for column in columns)

        return watch(Hook(layer, after=sample) for layer in layers)

    collect(model, batches, observe, title="Reading states", progress=progress)
    if not samples or len(samples[layers[0]][0]) < 2:
        raise InputError(
            "the text has fewer than two tokens, too few for a coding rate: use a longer text."
        )
    return tuple(
        AttentionStates(number, layer, *parameters[layer], *samples[layer][1:])
        for number, layer in enumerate(layers)
    )


def layer_rates(
    states: Sequence[AttentionStates],
    *,
    distortion: float = DISTORTION,
    seed: int = 0,
    lengths: Sequence[float] | None = None,
) -> Table:
    """Return coding rates of each layer, before and after the step Z ← Z + η (S − λN).

    Figures and controls are defined in docs/signal_noise_attention.md. Two models are compared at
    steps of equal length, ``gain_resized``, with ``lengths`` ‖step‖_F / ‖Z‖_F for each layer, such
    as another model's ``step_size``.

    The layer adds the step to its stream; here it is added to the normalised stream that the layer
    reads, since the source's update has no norm and its ΔR is of what the dictionaries see.
    Source: Prism, Eq. 2 to 7. Controls, random dictionaries and ε, ``distortion``, are ours.
    """
    check_number("the distortion ε", distortion, "a positive number", lambda x: x > 0)
    targets = lengths if lengths is not None else [None] * len(states)
    columns = {"layer": "", "before.whole": ".1f", "before.signal": ".1f", "before.noise": ".1f",
               "before.difference": ".1f", "gain": "+.2f", "gain_over_scaled": "+.2f",
               "gain_over_shuffled": "+.2f", "gradient_cosine": "+.2f", "incoherence.own": ".3f",
               "incoherence.random": ".3f"}  # fmt: skip
    pairs = zip(states, targets, strict=True)
    rows = tuple(_rates(layer, distortion, seed, length) for layer, length in pairs)
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

    R(Z), ``whole``; ``signal``, R(Z | U_s) = Σ_h R(Z U_s,h); ``noise``, R(Z | U_n); and the
    ``difference`` ΔR = R(Z | U_s) − λ R(Z | U_n), by Eq. 3 and 4.
    """
    by_head = coding_rate(points.double() @ dictionary.double(), distortion=distortion)
    signal, noise = (part.sum() for part in by_head.chunk(2))
    whole = coding_rate(points, distortion=distortion)
    difference = signal - noise_weight * noise
    return {"whole": whole, "signal": signal, "noise": noise, "difference": difference}


def _rates(states: AttentionStates, distortion: float, seed: int, length: float | None) -> Row:
    dictionary = states.dictionary.double()
    check_finite(f"the dictionaries of layer {states.layer}", dictionary)
    steps = states.steps.double()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(steps), generator=generator)

    def rates(points: Tensor) -> dict[str, Tensor]:
        return rates_of(points, dictionary, states.noise_weight, distortion=distortion)

    def difference(points: Tensor) -> float:
        return rates(points)["difference"].item()

    with torch.enable_grad():
        z = states.inputs.double().clone().requires_grad_()
        before = rates(z)
        (gradient,) = torch.autograd.grad(before["difference"], z)
    z = z.detach()
    size, step_norm = float(z.norm()), float(steps.norm())
    after, start = rates(z + steps), before["difference"].item()
    end = after["difference"].item()
    stretch = float((z + steps).norm()) / size if size else 1.0
    resized = None
    if length is not None:
        scale = length * size / step_norm if step_norm else 0.0
        resized = difference(z + steps * scale) - start
    product = float(gradient.norm()) * step_norm
    signal, noise = (group.transpose(0, 1).flatten(1) for group in dictionary.chunk(2))
    shape = (RANDOM_DICTIONARIES, 2, *signal.shape)
    draws = torch.randn(shape, generator=generator, dtype=torch.float64)
    random = statistics.fmean(incoherence(*pair).item() for pair in draws)
    return {
        "layer": states.layer,
        "positions": len(z),
        "noise_weight": states.noise_weight,
        "before": {name: rate.item() for name, rate in before.items()},
        "after": {name: rate.item() for name, rate in after.items()},
        "step_size": step_norm / size if size else math.nan,
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

    Z Zᵀ and Zᵀ Z give the same determinant, so the smaller one is used. With Z U_k of shape [N, p]
    instead of Z this is the rate of one subspace, Eq. 4.

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
    signal, noise = signal.double(), noise.double()
    return (signal.mT @ noise).norm() / (signal.norm() * noise.norm())


def cross_terms(states: Sequence[AttentionStates], *, length: int, order: int = ORDER) -> Table:
    """Return the cross terms of a model's own rotations, then of each ratio and scaling.

    E[C_u C_v] is measured on the model as it is; only the position term, a mean over ``length``
    positions, changes with the ratio. This says nothing about a model trained with that ratio.
    Source: Prism, Eq. 9 to 12 and the conjecture of §2.3.

    There is a row for each ``ratio``, ``own`` or one of :data:`RATIOS`, and ``scaling``, of the
    base of the rotations or of their angle, with the figures of docs/signal_noise_attention.md:
    means over the ``layers``, and in ``position`` with E[C_u C_v] = 1. ``least_in_step`` names the
    ratios and scalings with the smallest ``normalised``, to four decimals.
    """
    check_whole("the number of positions", length, 1)
    check_whole("the order of denominators", order, 1)
    contents, attention = _contents(states), states[0].attention
    base, own_ratio, own_scaling = attention.rotation
    rotations: list[tuple[str, float, Scaling]] = [
        ("own", own_ratio, own_scaling),
        *((name, ratio, scaling) for scaling in SCALINGS for name, ratio in RATIOS.items()),
    ]
    rows: list[Row] = []
    for name, ratio, scaling in rotations:
        rotation = (attention.head_size, base, ratio, scaling)
        row: Row = {"ratio": name, "value": ratio, "scaling": scaling}
        row |= _cross_row(contents, group_frequencies(*rotation), length)
        # In float64, since float32 would round exact resonances away.
        signal, noise = group_frequencies(*rotation, dtype=torch.float64)
        row["denominator"] = denominator(signal, noise, order)
        later = denominator(signal[1:], noise[1:], order) if len(signal) > 1 else None
        rows.append(row | {"later_denominator": later})
    columns = {"ratio": "", "scaling": "", "signal_noise": ".3g", "signal_signal": ".3g",
               "noise_noise": ".3g", "normalised": ".4f", "position.normalised": ".4f",
               "denominator": ".2g", "later_denominator": ".2g"}  # fmt: skip
    by_size: dict[float, list[str]] = {}
    for row in rows[1:]:
        name = f"{row['ratio']} of the {row['scaling']}"
        by_size.setdefault(round(row["normalised"], 4), []).append(name)
    facts = {"length": length, "order": order, "least_in_step": by_size[min(by_size)]}
    title = "Cross terms of signal and noise heads, means over layers"
    return Table(title, columns, tuple(rows), facts)


def _contents(states: Sequence[AttentionStates]) -> list[list[Tensor]]:
    """Return E[C_u C_v] of each layer and of each of :data:`TERMS`, means over pairs of heads."""
    contents: list[list[Tensor]] = []
    for layer in states:
        # The length of each rotated pair: a score is Σ over pairs of |u_i| |u_j| cos(ω τ + φ).
        amplitudes = torch.hypot(*layer.projections().chunk(2, -1))
        check_finite(f"the projections of layer {layer.layer}", amplitudes)
        pairs = _pairs(*amplitudes.chunk(2))
        contents.append([content_term(*pair).mean((0, 1)) for pair in pairs])
    return contents


def _pairs(signal: Tensor, noise: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return the two groups of each of :data:`TERMS`."""
    return (signal, noise), (signal, signal), (noise, noise)


def _cross_row(
    contents: list[list[Tensor]], frequencies: tuple[Tensor, Tensor], length: int
) -> Row:
    positions = [position_term(*pair, length) for pair in _pairs(*frequencies)]

    def terms(content: Sequence[Tensor]) -> Row:
        pairs = zip(TERMS, content, positions, strict=True)
        row = {term: float((c * position).sum()) for term, c, position in pairs}
        size = math.sqrt(row["signal_signal"] * row["noise_noise"])
        return row | {"normalised": row["signal_noise"] / size if size > 0 else math.nan}

    layers = [terms(content) for content in contents]
    means = {term: statistics.fmean(row[term] for row in layers) for term in layers[0]}
    bare = terms([torch.ones_like(positions[0])] * 3)
    return means | {"layers": layers, "position": bare}


def position_term(
    first: Float[Tensor, " m"], second: Float[Tensor, " n"], length: int
) -> Float[Tensor, "m n"]:
    """Return E_τ[cos ω_u τ cos ω_v τ] over τ = 0 … T − 1, float64. Source: Prism, Eq. 10."""
    tau = torch.arange(length, dtype=torch.float64)
    u, v = (torch.outer(omega.double(), tau).cos() for omega in (first, second))
    return u @ v.T / length


def content_term(
    first: Float[Tensor, "G N m"], second: Float[Tensor, "F N n"]
) -> Float[Tensor, "G F m n"]:
    """Return E[C_uj C_vl] of each pair of heads u, v and of their rotated pairs j, l.

    C_uj = |u_i|_j |u_i'|_j for two positions i and i' drawn independently, so that
    E[C_uj C_vl] = (E_i |u_i|_j |v_i|_l)²: the same two positions for both heads, whose amplitudes
    are ``first`` and ``second``. Source: Prism, Eq. 10.
    """
    return (torch.einsum("gnj,fnl->gfjl", first, second) / first.shape[1]).square()


def denominator(signal: Float[Tensor, " m"], noise: Float[Tensor, " n"], order: int) -> float:
    """Return the smallest |n ω_S − m ω_N| over n, m from 1 to ``order`` and all pairs.

    In radians per position; exact resonances of float64 frequencies give 0. Source: Prism, §2.3.
    """
    factors = torch.arange(1, order + 1, dtype=torch.float64)
    multiples = torch.outer(factors, signal.double()).flatten()[:, None]
    gaps = (multiples - torch.outer(factors, noise.double()).flatten()).abs()
    return float(gaps.masked_fill(gaps <= ROUNDING * multiples.abs(), 0.0).min())


def loss_against_length(
    model: PreTrainedModel,
    corpus: Corpus,
    *,
    length: int,
    trained_length: int | None = None,
    split: Split = "heldout",
    documents: int = DOCUMENTS,
    seed: int = 0,
    progress: Reporter = SILENT,
) -> Table:
    """Return the loss by length of context, over documents of at least ``length`` tokens.

    At most ``documents`` are sampled. There is a row for each length of context, from ``low`` to
    ``high`` tokens: the mean ``loss`` over the same documents, nats per token, and its standard
    ``error``, NaN for one document. Later parts of a document may be easier to predict, so with a
    trained length the control, ``short_loss``, reads the same tokens beyond it with at least half
    and less than this context; ``difference_error`` is paired by document.
    """
    check_window(model, length)
    numbers = np.random.default_rng(seed).permutation(document_numbers(corpus, split, length))
    starts = corpus.starts[numbers[:documents]].tolist()
    texts = torch.from_numpy(
        np.stack([corpus.read_tokens(start, length) for start in starts]).astype(np.int64)
    )
    long_losses: list[Tensor] = []
    short_losses: list[Tensor] = []
    with evaluating(model), progress.task("Reading lengths", texts.numel()) as task:
        for ids in texts.split(max(1, BATCH_TOKENS // length)):
            long_losses.append(token_losses(model, ids))
            if trained_length is not None and trained_length < length:
                short_losses.append(_short_losses(model, ids, trained_length, corpus.prefix))
            task.advance(ids.numel())
    long, short = torch.cat(long_losses), torch.cat(short_losses) if short_losses else None
    rows: list[Row] = []
    for low, end in pairwise(context_edges(length, trained_length)):
        # Token t has t tokens of context, and its loss is in column t − 1.
        bucket = slice(low - 1, end - 1)
        loss = long[:, bucket].mean(1)
        row: Row = {"context": str(low) if low == end - 1 else f"{low}–{end - 1}", "low": low}
        row |= {"high": end - 1, "loss": loss.mean().item(), "error": _error(loss)}
        row |= dict.fromkeys(("short_loss", "difference", "difference_error"))
        # Up to the trained length both have the same context.
        if short is not None and trained_length is not None and low >= trained_length:
            control = short[:, bucket].mean(1)
            row["short_loss"] = control.mean().item()
            row["difference"] = (loss - control).mean().item()
            row["difference_error"] = _error(loss - control)
        rows.append(row)
    columns = {"context": "", "loss": ".3f", "error": ".3f", "short_loss": ".3f",
               "difference": "+.3f", "difference_error": ".3f"}  # fmt: skip
    facts = {"length": length, "trained_length": trained_length, "documents": len(texts)}
    return Table("Loss by length of context, nats per token", columns, tuple(rows), facts)


@torch.no_grad()
def token_losses(
    model: PreTrainedModel, input_ids: Int64[Tensor, "B T"]
) -> Float[Tensor, "B T_less_1"]:
    """Return the cross-entropy of each token but a row's first, nats; float64, on the CPU."""
    ids = input_ids.to(model.device)
    with capture(model, logits=False) as captured:
        model(input_ids=ids, use_cache=False)
    embedding, logit_map = output_embedding(model), LogitMap.of(model)
    states, targets = captured.z[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    losses = losses_at(lambda z: logit_map(embedding(z)), states, targets)
    check_finite("losses", losses)
    return losses.view(len(ids), -1)


def context_edges(length: int, trained_length: int | None = None) -> tuple[int, ...]:
    """Return where buckets of context start, ascending, and T, where the last ends.

    1, 2, 4, 8, 16, 24, 32, 48, 64, 96, …: doublings, from 16 on in halves; and the trained
    length, so that no bucket lies on both sides of it.
    """
    edges = {1, length, trained_length or 1} | {2**k for k in range(1, length.bit_length())}
    edges |= {3 * 2**k for k in range(3, length.bit_length())}
    return tuple(sorted(edge for edge in edges if edge <= length))


def _short_losses(
    model: PreTrainedModel, ids: Tensor, trained: int, prefix: Sequence[int] = ()
) -> Tensor:
    """Return each token's loss with less than ``trained`` tokens of context, at least half."""
    length, stride = ids.shape[1], max(1, trained // 2)
    losses = torch.empty(len(ids), length - 1, dtype=torch.float64)
    filled = start = 0
    while filled < length - 1:
        window = ids[:, start : start + trained].clone()
        window[:, : len(prefix)] = torch.tensor(prefix, dtype=ids.dtype)
        window_losses = token_losses(model, window)
        # Token t of the document is the loss at t − 1; this window's first is start + 1.
        end = start + window_losses.shape[1]
        losses[:, filled:end] = window_losses[:, filled - start :]
        filled, start = end, start + stride
    return losses


def _error(values: Tensor) -> float:
    return values.std().item() / math.sqrt(len(values)) if len(values) > 1 else math.nan


class SpectraOptions(NamedTuple):
    """Settings of rates, cross terms and the loss by length."""

    positions: int = POSITIONS  # of rates and of the content in cross terms
    distortion: float = DISTORTION  # ε
    order: int = ORDER  # of the small denominators
    context: int | None = None  # tokens of the loss's windows; default: twice the trained length
    trained_length: int | None = None  # tokens of a training row; default: the sequences'
    documents: int = DOCUMENTS  # of the loss
    seed: int = 0

    def check(self) -> None:
        """Raise InputError for invalid settings, before minutes of forward passes."""
        check_number("the distortion ε", self.distortion, "a positive number", lambda x: x > 0)
        minima = {"positions": 2, "order": 1, "documents": 1, "trained_length": 1, "context": 2}
        for name, minimum in (minima | {"seed": 0}).items():
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), minimum)


DEFAULTS = SpectraOptions()


def spectra_report(
    model: PreTrainedModel,
    sequences: Sequences,
    *,
    name: str = "",
    options: SpectraOptions = DEFAULTS,
    loss_only: bool = False,
    progress: Reporter = SILENT,
) -> Report:
    """Return rates, cross terms and the loss by length of context over a text.

    The tables are ``rates``, ``cross_terms`` and ``loss``; the last is left out if no document of
    the split is long enough, unless ``context`` or ``loss_only`` asks for it. ``loss_only``
    accepts any decoder; otherwise it must have signal/noise attention.
    """
    options.check()
    tables: dict[str, Table] = {}
    left_out: dict[str, str] = {}
    positions, trained = 0, options.trained_length or sequences.length
    if not loss_only:
        sampling = {"positions": options.positions, "seed": options.seed, "progress": progress}
        states = read_states(model, sequences.batches(), **sampling)
        positions = len(states[0].inputs)
        tables["rates"] = layer_rates(states, distortion=options.distortion, seed=options.seed)
        tables["cross_terms"] = cross_terms(states, length=trained, order=options.order)
    try:
        tables["loss"] = loss_against_length(
            model,
            sequences.corpus,
            length=2 * trained if options.context is None else options.context,
            trained_length=options.trained_length,
            split=sequences.split,
            documents=options.documents,
            seed=options.seed,
            progress=progress,
        )
    except NotFiniteError:
        raise
    except InputError as error:
        if loss_only or options.context is not None:
            raise
        left_out["loss"] = str(error)
    facts = {"corpus": asdict(sequences.part(positions)), "options": options._asdict()}
    return Report(name, facts, tables, left_out)
