"""What signal/noise attention does: coding rates and cross terms; and loss by length of context."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers import PreTrainedModel

from prismlm.corpus.store import Corpus, Split
from prismlm.corpus.windows import Sequences, WindowBatch
from prismlm.errors import InputError, check_finite
from prismlm.layers.signal_noise_attention import SignalNoiseAttention, SignalNoiseOutput
from prismlm.models.device import check_window
from prismlm.models.seam import capture, lacks
from prismlm.models.watch import Hook, evaluating, watch
from prismlm.probes.heads.attention import collect
from prismlm.probes.results import Report, Row, Table
from prismlm.probes.texts import document_numbers, losses_at
from prismlm.progress import SILENT, Reporter

POSITIONS = 2048
DISTORTION = 0.5
"""ε of the coding rates, which the source leaves open."""
RANDOM_DICTIONARIES = 8
TERMS = ("signal_noise", "signal_signal", "noise_noise")
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
        raise lacks(model, "signal and noise dictionaries", "for any decoder use --loss-only")
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
    layers = signal_noise_layers(model)
    generator = torch.Generator().manual_seed(seed)
    # Random keys, inputs and steps; the smallest keys are a uniform sample.
    samples: dict[nn.Module, tuple[Tensor, ...]] = {}

    def observe(batch: WindowBatch) -> AbstractContextManager[None]:
        owned = batch.owned.to(model.device)
        keys = torch.rand(int(batch.owned.sum()), generator=generator)

        def sample(layer: nn.Module, args: Any, kwargs: Any, output: SignalNoiseOutput) -> None:
            states = (column[owned].detach().cpu() for column in (args[0], output.output))
            columns = (keys, *states)
            if layer in samples:
                columns = tuple(map(torch.cat, zip(samples[layer], columns, strict=True)))
            chosen = columns[0].argsort()[:positions].sort().values
            samples[layer] = tuple(column[chosen] for column in columns)

        return watch(Hook(layer, after=sample) for layer in layers)

    collect(model, batches, observe, title="Reading states", progress=progress)
    noise_weight = float(cast("Any", model.get_decoder()).noise_weight)
    states: list[AttentionStates] = []
    for number, layer in enumerate(layers):
        _, inputs, steps = samples[layer]
        dictionary = layer.dictionary(inputs[None].to(model.device)).detach().cpu()
        states.append(AttentionStates(number, layer, noise_weight, dictionary, inputs, steps))
    return tuple(states)


def layer_rates(states: Sequence[AttentionStates], *, seed: int = 0) -> Table:
    """Return coding rates of each layer, before and after the step Z ← Z + η (S − λN).

    Figures and controls are defined in docs/signal_noise_attention.md.

    The layer adds the step to its stream; here it is added to the normalised stream that the layer
    reads, since the source's update has no norm and its ΔR is of what the dictionaries see.
    Source: Prism, Eq. 2 to 7. Controls, random dictionaries and ε are ours.
    """
    columns = "layer before.whole:.1f before.signal:.1f before.noise:.1f before.difference:.1f"
    columns += " gain:+.2f gain_over_scaled:+.2f gain_over_shuffled:+.2f gradient_cosine:+.2f"
    columns += " incoherence.own:.3f incoherence.random:.3f"
    rows = tuple(_rates(layer, seed) for layer in states)
    return Table("Coding rates of what attention reads, nats", columns, rows)


def rates_of(
    points: Float[Tensor, "N d"], dictionary: Float[Tensor, "G d p"], noise_weight: float
) -> dict[str, Tensor]:
    """Return the rates of N states under a dictionary whose first half is signal heads, in nats.

    R(Z), ``whole``; ``signal``, R(Z | U_s) = Σ_h R(Z U_s,h); ``noise``, R(Z | U_n); and the
    ``difference`` ΔR = R(Z | U_s) − λ R(Z | U_n), by Eq. 3 and 4.
    """
    signal, noise = (part.sum() for part in coding_rate(points @ dictionary).chunk(2))
    difference = signal - noise_weight * noise
    return {"whole": coding_rate(points), "signal": signal, "noise": noise,
            "difference": difference}  # fmt: skip


def _rates(states: AttentionStates, seed: int) -> Row:
    dictionary = states.dictionary.double()
    z, steps = states.inputs.double(), states.steps.double()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(steps), generator=generator)

    def rates(points: Tensor) -> dict[str, Tensor]:
        return rates_of(points, dictionary, states.noise_weight)

    def gain_over(points: Tensor) -> float:
        return after["difference"].item() - rates(points)["difference"].item()

    with torch.enable_grad():
        inputs = z.clone().requires_grad_()
        before = rates(inputs)
        (gradient,) = torch.autograd.grad(before["difference"], inputs)
    after, size, step_norm = rates(z + steps), float(z.norm()), float(steps.norm())
    stretch = float((z + steps).norm()) / size if size else 1.0
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
        "gain": gain_over(z),
        "gain_over_scaled": gain_over(z * stretch),
        "gain_over_shuffled": gain_over(z + steps[order]),
        "incoherence": {"own": incoherence(signal, noise).item(), "random": random},
    }


def coding_rate(
    points: Float[Tensor, "*batch N d"], *, distortion: float = DISTORTION
) -> Float[Tensor, "*batch"]:
    """Return R(Z) = ½ log det(I + d / (N ε²) Z Zᵀ), in nats; float64.

    Z Zᵀ and Zᵀ Z give the same determinant, so the smaller one is used. With Z U_k of shape [N, p]
    instead of Z this is the rate of one subspace, Eq. 4.

    Source: Prism, Eq. 3 and 4.
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


def cross_terms(states: Sequence[AttentionStates], *, length: int) -> Table:
    """Return the cross terms of each layer: position terms are means over ``length`` positions.

    Rows have the figures of docs/signal_noise_attention.md; the fact ``normalised`` is their mean.
    Source: Prism, Eq. 9 to 12 and the conjecture of §2.3.
    """
    rows = tuple(_cross_row(layer, length) for layer in states)
    columns = "layer signal_noise:.3g signal_signal:.3g noise_noise:.3g normalised:.4f"
    mean = statistics.fmean(row["normalised"] for row in rows)
    title = "Cross terms of signal and noise heads"
    return Table(title, columns, rows, {"length": length, "normalised": mean})


def _cross_row(layer: AttentionStates, length: int) -> Row:
    # The length of each rotated pair: a score is Σ over pairs of |u_i| |u_j| cos(ω τ + φ).
    amplitudes = torch.hypot(*layer.projections().chunk(2, -1)).chunk(2)
    tau = torch.arange(length, dtype=torch.float64)
    waves = [torch.outer(tau, omega.double().cpu()).cos() for omega in layer.attention.frequencies]
    pairs = zip(("signal", "noise"), amplitudes, waves, strict=True)
    groups = {str(name): (lengths, wave) for name, lengths, wave in pairs}
    row: Row = {"layer": layer.layer}
    for term in TERMS:
        (u, first), (v, second) = (groups[name] for name in term.split("_"))
        # E[C_uj C_vl] = (E_i |u_i|_j |v_i|_l)² of each pair of heads, as the two positions are
        # independent, and E_τ[cos ω_j τ cos ω_l τ]: Prism, Eq. 10.
        content = (torch.einsum("gnj,fnl->gfjl", u, v) / u.shape[1]).square().mean((0, 1))
        row[term] = float((content * (first.T @ second / length)).sum())
    size = math.sqrt(row["signal_signal"] * row["noise_noise"])
    return row | {"normalised": row["signal_noise"] / size if size > 0 else math.nan}


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
    columns = "context loss:.3f error:.3f short_loss:.3f difference:+.3f difference_error:.3f"
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
    losses = losses_at(model, captured.z[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
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


def spectra_report(
    model: PreTrainedModel,
    sequences: Sequences,
    *,
    name: str = "",
    context: int | None = None,
    trained_length: int | None = None,
    documents: int = DOCUMENTS,
    seed: int = 0,
    loss_only: bool = False,
    progress: Reporter = SILENT,
) -> Report:
    """Return rates, cross terms and the loss by length of context over a text.

    ``context`` is the window of the loss, by default twice ``trained_length``, which is by default
    that of the sequences. The tables are ``rates``, ``cross_terms`` and ``loss``; the last is left
    out if no document of the split is long enough, unless ``context`` or ``loss_only`` asks for it.
    ``loss_only`` accepts any decoder; otherwise it must have signal/noise attention.
    """
    trained = trained_length or sequences.length
    length = 2 * trained if context is None else context
    tables: dict[str, Table] = {}
    left_out: dict[str, str] = {}
    positions = 0
    if not loss_only:
        states = read_states(model, sequences.batches(), seed=seed, progress=progress)
        positions = len(states[0].inputs)
        tables["rates"] = layer_rates(states, seed=seed)
        tables["cross_terms"] = cross_terms(states, length=trained)
    try:
        tables["loss"] = loss_against_length(
            model,
            sequences.corpus,
            length=length,
            trained_length=trained_length,
            split=sequences.split,
            documents=documents,
            seed=seed,
            progress=progress,
        )
    except InputError as error:
        if loss_only or context is not None:
            raise
        left_out["loss"] = str(error)
    return Report(name, {"corpus": sequences.part(positions)}, tables, left_out)
