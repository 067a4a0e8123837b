"""Figures of a model's channels, and their report with half-lives, sequences and a text's curves.

a_n is a gate at token n in one group of P channels; means are over N tokens. Each group is measured
separately, and a figure is the mean over groups. Figures of one position use absolute values
(ProtoT, A.8, Eq. 3 to 6).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int64
from scipy import stats
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from prismlm.corpus.tokenizer import check_tokenizer_of
from prismlm.corpus.windows import Sequences
from prismlm.layers import PrototypeMixer
from prismlm.models.decoders.protot import chosen_layers, half_life, has_mixers, mixers_of
from prismlm.probes.channels.activations import (
    Activations,
    Kind,
    Passage,
    TextCurves,
    read_activations,
    read_passages,
    read_text,
)
from prismlm.probes.results import Row, Table, as_json
from prismlm.progress import SILENT, Reporter
from prismlm.statistics import spearman

GATES: tuple[Kind, ...] = ("write", "read")
SIGNIFICANT = 0.05
BINS, MAX_LAG, SHUFFLES = 8, 4, 99
MIN_VARIANCE = 1e-28
"""The variance below which a gate counts as constant."""


def sparsity_ratio(activations: Float[Tensor, "... P"]) -> Float[Tensor, "..."]:
    """Return max_p |a_p| / mean_p |a_p|, float64: 1 if all are equal, P if only one is not 0."""
    a = activations.double().abs()
    return a.amax(-1) / a.mean(-1)


def gini(activations: Float[Tensor, "... P"]) -> Float[Tensor, "..."]:
    """Return the Gini coefficient, float64: 0 if all are equal, 1 − 1/P if only one is not 0.

    G = (P + 1 − 2 Σ_p (P + 1 − p) a↑_p / Σ_p a_p) / P,   a↑ ascending, p from 1
    """
    a = activations.double().abs().sort(-1).values
    count = a.shape[-1]
    weights = torch.arange(count, 0, -1, dtype=a.dtype, device=a.device)
    return (count + 1 - 2 * (a * weights).sum(-1) / a.sum(-1)) / count


def entropy(activations: Float[Tensor, "... P"]) -> Float[Tensor, "..."]:
    """Return −Σ_p q_p ln q_p with q = |a| / Σ |a|, in nats, float64: ln P if all are equal."""
    a = activations.double().abs()
    return torch.special.entr(a / a.sum(-1, keepdim=True)).sum(-1)


def measure_layers(
    model: PreTrainedModel,
    sequences: Sequences,
    kind: Kind = "write",
    *,
    progress: Reporter = SILENT,
) -> tuple[Row, ...]:
    """Return the :func:`metrics` of every layer: of gates, or of the norms of value heads."""
    activations = read_activations(model, sequences, (kind,), progress=progress)
    return tuple(metrics(model, activations, kind, layer) for _, layer in activations.values)


def metrics(model: nn.Module, activations: Activations, kind: Kind, layer: int) -> Row:
    """Return sparsity, Gini, entropy and mutual information of a ``layer`` (ProtoT, A.8).

    ``entropy_share`` is of ln P, NaN for P = 1. ``mutual_information`` with the token, nats, is
    biased upwards by few positions; the corrected one is after Miller and Madow.
    """
    # The heads of attention are one group.
    groups = mixers_of(model)[layer].groups if kind in ("write", "read") else 1
    values = activations.values[kind, layer]
    parts = values.unflatten(-1, (groups, -1))
    width, nats = parts.shape[-1], entropy(parts).mean().item()
    plain, corrected = mutual_information(activations.tokens, values)
    return {
        "layer": layer,
        "width": width,
        "positions": len(values),
        "sparsity_ratio": sparsity_ratio(parts).mean().item(),
        "gini": gini(parts).mean().item(),
        "entropy": nats,
        "entropy_share": nats / math.log(width) if width > 1 else math.nan,
        "mutual_information": float(plain.mean()),
        "mutual_information_corrected": float(corrected.mean()),
    }


def mutual_information(
    tokens: Int64[Tensor, " N"], activations: Float[Tensor, "N P"], bins: int = BINS
) -> tuple[Float[np.ndarray, " P"], Float[np.ndarray, " P"]]:
    """Return I(T; ã_p) = H(T) + H(ã_p) − H(T, ã_p) of each channel, nats, and corrected.

    ã_p is the bin of channel p's activation, of ``bins`` with equally many positions each (ProtoT,
    A.8, Eq. 6, which leaves the bins open). The plain estimate from few positions is too high; the
    Miller–Madow correction may make it negative:

        corrected:  I + (K_T + K_B − K_TB − 1) / 2n,   K: numbers of distinct values or pairs
    """
    ids = tokens.unique(return_inverse=True)[1].numpy()
    # An edge is the last value of the bin below it, and belongs to that bin.
    edges = np.ceil(np.arange(1, bins) * len(ids) / bins).astype(np.int64) - 1
    rows: list[tuple[float, float]] = []
    for column in activations.abs().T.numpy():
        pairs = ids * bins + np.searchsorted(np.sort(column)[edges], column)
        counts = np.bincount(pairs, minlength=bins * (int(ids.max()) + 1)).reshape(-1, bins)
        margins = (counts.sum(1), counts.sum(0), counts.ravel())
        plain = float(np.dot((1, 1, -1), [stats.entropy(margin) for margin in margins]))
        distinct = np.dot((1, 1, -1), [np.count_nonzero(margin) for margin in margins]) - 1
        rows.append((plain, plain + distinct / (2 * len(ids))))
    plain, corrected = np.array(rows).T
    return plain, corrected


def lag_correlation(
    writes: Float[Tensor, "N R"],
    reads: Float[Tensor, "N R"],
    lengths: Sequence[int],
    *,
    max_lag: int = MAX_LAG,
    shuffles: int = SHUFFLES,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Cross-correlate the read and write gates of R channels along sequences of these lengths.

        c(ℓ) = Σ_i r_i w_{i+ℓ} / √(Σ_i r_i² · Σ_i w_i²),   gates minus their mean over the sequence

    A peak at ℓ = 1 means that the channel is read one position before it is written. The null
    shuffles the read gate's positions within each sequence, which also destroys autocorrelation:
    a small p says that read and write correlate at some lag, the peak says which.
    Source: ProtoT, §5.1, which shows the pattern by example and has no figure for it.

    Returned are ``lags`` −L to L; ``correlation`` c(ℓ), float64 [R, lags]; ``peak``, the lag of the
    largest c(ℓ); and ``p``, the share of shuffles and the original with as large a peak. They are
    NaN if a gate is constant.
    """
    generator = torch.Generator().manual_seed(seed)
    channels = writes.shape[1]
    # The first order is the original one.
    products = torch.zeros(shuffles + 1, channels, 2 * max_lag + 1, dtype=torch.float64)
    energy = torch.zeros(2, channels, dtype=torch.float64)
    for gates in zip(writes.split(lengths), reads.split(lengths), strict=True):
        write, read = (gate.double() - gate.double().mean(0) for gate in gates)
        energy += torch.stack([write.square().sum(0), read.square().sum(0)])
        orders = torch.rand(shuffles, len(write), generator=generator).argsort(1)
        orders = torch.cat([torch.arange(len(write))[None], orders])
        # windows[r, i] holds w_{i−L} to w_{i+L}, with zeros beyond the ends.
        padded = torch.nn.functional.pad(write.T, (max_lag, max_lag))
        windows = padded.unfold(1, 2 * max_lag + 1, 1)
        products += torch.bmm(read.T[:, orders], windows).transpose(0, 1)
    scale = energy.prod(0).sqrt()
    # Smaller energy is rounding of the means.
    varies = scale > MIN_VARIANCE * len(writes)
    correlation = products / torch.where(varies, scale, torch.nan)[None, :, None]
    observed, null = correlation[0], correlation[1:]
    exceeding = (null.amax(2) >= observed.amax(1)).sum(0)
    lags = torch.arange(-max_lag, max_lag + 1)
    p = torch.where(varies, (exceeding.double() + 1) / len(correlation), torch.nan)
    return {"lags": lags, "correlation": observed, "peak": lags[observed.argmax(1)], "p": p}


@dataclass(frozen=True)
class LayerReport:
    """One layer; ``lags`` and ``channels`` are empty without prototype mixers."""

    layer: int
    shared_gates: bool
    metrics: Mapping[Kind, Row]
    lags: Mapping[str, Tensor] | None  # of :func:`lag_correlation`; None without a corpus
    channels: tuple[Row, ...]  # number, decay, half-life in positions, and :func:`channel_row`


@dataclass(frozen=True)
class ChannelReport:
    """A model's channels, or the value heads of a model without channels.

    ``passages`` are the texts of the top sequences, by start.
    """

    model: str
    of: Literal["channels", "heads"]
    corpus: dict[str, Any] | None
    layers: tuple[LayerReport, ...]
    passages: Mapping[int, Passage]
    text: TextCurves | None = None

    @property
    def metrics(self) -> Table:
        """The figures of each layer and gate, of :func:`measure_layers`."""
        rows = [
            {"gate": kind} | row for layer in self.layers for kind, row in layer.metrics.items()
        ]
        columns = "layer gate sparsity_ratio:.2f width gini:.3f entropy:.3f entropy_share:.0%"
        columns += " mutual_information:.3f mutual_information_corrected:.3f"
        return Table(f"Figures of the layers of {self.model}", columns, tuple(rows))

    @property
    def locality(self) -> Table | None:
        """Half-life against repetition of all channels; None without a corpus or channels."""
        if self.of == "heads" or self.corpus is None:
            return None
        return locality_table([channel for layer in self.layers for channel in layer.channels])

    @property
    def lags(self) -> Table:
        """Whether channels are read before they are written, by layer.

        Channels are ``clear`` if read and write correlate at some lag at p < 0.05. Layers with
        shared gates correlate at lag 0.
        """
        rows = [
            {"layer": layer.layer, "shared_gates": str(layer.shared_gates)} | _lag_row(layer.lags)
            for layer in self.layers
            if layer.lags is not None
        ]
        columns = "layer shared_gates channels clear read_first one_before at_once written_first"
        return Table("Is a channel read before it is written?", columns, tuple(rows))

    @property
    def tables(self) -> tuple[Table, ...]:
        """Every table that is not empty."""
        tables = (self.metrics, self.locality, self.lags)
        return tuple(table for table in tables if table and (table.rows or table.facts))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; non-finite numbers become None."""
        locality, text = self.locality, None
        if self.text is not None:
            names = ("layer", "half_life", "write", "read", "mass")
            text = {
                "tokens": self.text.text.tokens,
                "token_ids": self.text.token_ids,
                "words": self.text.text.words,
                "tokens_of_words": self.text.text.counts,
                "layers": [
                    {name: getattr(layer, name) for name in names} for layer in self.text.curves
                ],
            }
        value = {"model": self.model, "of": self.of, "corpus": self.corpus, "layers": self.layers}
        return as_json(value | {"locality": locality and locality.to_dict(), "text": text})


def channel_report(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sequences: Sequences | None = None,
    *,
    text: str | None = None,
    name: str = "",
    layers: Sequence[int] | None = None,
    seed: int = 0,
    progress: Reporter = SILENT,
) -> ChannelReport:
    """Return all figures of a model's channels over a corpus, and the curves of a text.

    Without a corpus there are half-lives and the text's curves. A model without prototype mixers
    but with value heads, as LLaMA, has figures of their norms over a corpus, and no channels.
    ``seed`` is that of the shuffled lags. Memory: 8 bytes for each token of the corpus that is read
    and each channel. Source: ProtoT, §5.1, A.8 and A.9.
    """
    if sequences is not None:
        check_tokenizer_of(sequences.corpus, tokenizer, name)
        if not has_mixers(model) and text is None:
            rows = measure_layers(model, sequences, "values", progress=progress)
            numbers = chosen_layers(len(rows), layers)
            heads = tuple(LayerReport(n, False, {"values": rows[n]}, None, ()) for n in numbers)
            return ChannelReport(name, "heads", sequences.part(rows[0]["positions"]), heads, {})
    mixers = mixers_of(model)
    layers = chosen_layers(len(mixers), layers)
    curves = None if text is None else read_text(model, tokenizer, text, layers)
    part, activations, lengths = None, None, list[int]()
    top: dict[int, list[list[Row]]] = {}
    passages: dict[int, Passage] = {}
    if sequences is not None:
        activations = read_activations(model, sequences, GATES, layers, progress)
        part, lengths = sequences.part(len(activations.tokens)), activations.lengths.tolist()
        top = {layer: activations.top_sequences("write", layer) for layer in layers}
        chosen = chain.from_iterable(chain.from_iterable(top.values()))
        spans = ((row["document"], row["position"], row["length"]) for row in chosen)
        passages = {p.start: p for p in read_passages(sequences.corpus, spans).values()}
    reports: list[LayerReport] = []
    for layer in layers:
        figures: dict[Kind, Row] = {}
        lags = None
        if activations is not None:
            figures = {gate: metrics(model, activations, gate, layer) for gate in GATES}
            write, read = (activations.values[gate, layer] for gate in GATES)
            lags = lag_correlation(write, read, lengths, seed=seed)
        channels = _channels(mixers[layer], top.get(layer), passages)
        reports.append(LayerReport(layer, mixers[layer].shared_gates, figures, lags, channels))
    return ChannelReport(name, "channels", part, tuple(reports), passages, curves)


def _channels(
    mixer: PrototypeMixer, top: Sequence[Sequence[Row]] | None, passages: Mapping[int, Passage]
) -> tuple[Row, ...]:
    decays = lives = [None] * mixer.channels
    if mixer.decay_map is None:
        decay = mixer.decay.detach().cpu()
        decays, lives = decay.tolist(), half_life(decay).tolist()
    return tuple(
        {"channel": number, "decay": decays[number], "half_life": lives[number]}
        | channel_row(sequences, passages)
        for number, sequences in enumerate(top or [()] * mixer.channels)
    )


def channel_row(sequences: Iterable[Row], passages: Mapping[int, Passage]) -> Row:
    """Return what a channel holds, from its :meth:`Activations.top_sequences`.

    ``sequences`` get their ``doc_id`` and texts; ``tokens`` are those among all of these by total
    write gate, with the ``text`` where they write most, ``count`` and mean ``gate``; and
    ``repetition`` is 1 − distinct / all over them, None without a corpus. The source takes it as a
    proxy for locality, without a definition (ProtoT, A.8, Table 21).
    """
    rows: list[Row] = []
    by_token: dict[int, list[Row]] = {}
    for sequence in sequences:
        passage, start = passages[sequence["position"]], sequence["position"]
        texts = passage.text.tokens
        tokens = [t | {"text": texts[t["position"] - start]} for t in sequence["tokens"]]
        for token in tokens:
            by_token.setdefault(token["token_id"], []).append(token)
        row: Row = {name: sequence[name] for name in ("total", "position", "length")}
        row |= {"doc_id": passage.document["doc_id"], "text": "".join(passage.text.words)}
        rows.append(row | {"tokens": tokens})
    summary: list[Row] = []
    for number, uses in by_token.items():
        text = max(uses, key=lambda token: token["gate"])["text"]
        gate = sum(token["gate"] for token in uses) / len(uses)
        summary.append({"token_id": number, "text": text, "count": len(uses), "gate": gate})
    summary.sort(key=lambda token: (-token["gate"] * token["count"], token["token_id"]))
    total = sum(token["count"] for token in summary)
    repetition = 1 - len(summary) / total if total else None
    return {"repetition": repetition, "tokens": summary, "sequences": rows}


def locality_table(channels: Iterable[Row]) -> Table:
    """Return repetition by quartile of half-life, over all channels that have a half-life.

    The shortest come first; a channel at a bound is in the shorter quartile. Facts are Spearman's
    ``rho`` with its ``p``, 0 and 1 if half-lives or repetitions are equal, and ``cohens_d``, (mean
    of the first quartile − mean of the last) / pooled standard deviation, where both have two
    channels. There are no rows for fewer than four channels, as where decays depend on the token.
    """
    columns = "quartile half_life_to:.3g channels repetition:.3f"
    title = "Do channels of a short half-life keep to few tokens?"
    pairs = [(c["half_life"], c["repetition"]) for c in channels if c["half_life"] is not None]
    if len(pairs) < 4:
        return Table(title, columns, (), {"channels": len(pairs)})
    lives, scores = np.array(pairs, dtype=np.float64).T
    rho, p = spearman(lives, scores)
    bounds = np.quantile(lives, [0.25, 0.5, 0.75, 1])
    parts = [scores[np.searchsorted(bounds, lives) == number] for number in range(4)]
    rows = tuple(
        {"quartile": number, "half_life_to": float(bound), "channels": len(part)}
        | {"repetition": float(part.mean())}
        for number, (bound, part) in enumerate(zip(bounds, parts, strict=True), 1)
        if len(part)
    )
    facts = {"channels": len(pairs), "rho": rho, "p": p}
    first, last = parts[0], parts[3]
    if min(len(first), len(last)) > 1:
        freedom = len(first) + len(last) - 2
        pooled = math.sqrt((first.var() * len(first) + last.var() * len(last)) / freedom)
        facts["cohens_d"] = float(first.mean() - last.mean()) / pooled if pooled else math.nan
    return Table(title, columns, rows, facts)


def _lag_row(lags: Mapping[str, Tensor]) -> Row:
    p = lags["p"]
    peaks = lags["peak"][p < SIGNIFICANT]
    row: Row = {"channels": len(p), "clear": len(peaks)}
    row |= {"read_first": int((peaks > 0).sum()), "one_before": int((peaks == 1).sum())}
    return row | {"at_once": int((peaks == 0).sum()), "written_first": int((peaks < 0).sum())}
