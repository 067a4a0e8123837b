"""What interventions on channels do to the probability of words, with control channels.

A file of cases holds JSON lines, ``{"concept": "women", "context": "…", "target": "women"}``.
Source: ProtoT, A.3, Tables 6 to 9, with other sentences. The source picks its control by hand and
has no test; here controls are random, a channel is compared with all of them, and tests are exact.

Channels that are written at the words of a concept are found by

    d_k = (mean write gate at the words − mean write gate) / standard deviation of the write gate

over positions of a corpus; a word of several tokens counts at its last. Source: ProtoT, §5.1 and
A.3.1, where concepts are read off the sequences that write most, by eye.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, compress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Bool, Float, Float64, Int64
from pyarrow.json import ParseOptions, read_json
from scipy import stats
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from prismlm.corpus.encode import encode_text
from prismlm.corpus.pieces import decode_token, pieces_of
from prismlm.corpus.store import Corpus
from prismlm.corpus.tokenizer import check_tokenizer_of
from prismlm.corpus.windows import Sequences
from prismlm.errors import InputError, shown, suggest
from prismlm.interventions.channels import (
    Intervention,
    MaskRead,
    MaskWrite,
    Reinitialise,
    intervene,
)
from prismlm.models.decoders.protot import check_channel, check_layer, mixers_of
from prismlm.models.seam import Text, read_texts
from prismlm.models.watch import evaluating
from prismlm.probes.channels.activations import Activations, read_activations
from prismlm.probes.results import Report, Row, Table
from prismlm.probes.texts import losses_at
from prismlm.progress import SILENT, Reporter

BUNDLED = Path(__file__).parent / "cases"
Channel = tuple[int, int]
"""Layer and channel."""
RANDOM = "reinitialise"
# Masking the read gate without renormalising is the same as masking the write gate.
MASKS: dict[str, Callable[[int, int], Intervention]] = {
    "mask_write": MaskWrite,
    "mask_write_renormalised": partial(MaskWrite, renormalise=True),
    "mask_read_renormalised": partial(MaskRead, renormalise=True),
}
INTERVENTIONS = (RANDOM, *MASKS)
SHORT = dict(zip(INTERVENTIONS, ("random", "mask", "write −∞", "read −∞"), strict=True))
SIGNIFICANT = 0.05
MIN_PROBABILITY = 0.01
REINITIALISATIONS = 3
"""Random prototypes per channel, over which probabilities are averaged."""
NEIGHBOURS = 50
"""A control word is drawn from this many words of the most similar frequency."""
EMERGES = 0.05
Forms = Mapping[str, tuple[tuple[int, ...], ...]]
"""The tokens of each form of a word."""


@dataclass(frozen=True)
class Case:
    """A context and the word whose probability after it is measured, without the space between."""

    concept: str
    context: str
    target: str


@dataclass(frozen=True)
class Probe(Case):
    """A case as tokens."""

    ids: tuple[int, ...]  # of the context
    target_id: int
    document: int | None = None  # its number, if the case comes from a corpus


def load_cases(source: str | os.PathLike[str]) -> tuple[Case, ...]:
    """Read cases from a file, or a bundled set by its name."""
    names = sorted(path.stem for path in BUNDLED.glob("*.jsonl"))
    path = BUNDLED / f"{source}.jsonl" if str(source) in names else Path(source)
    if not path.is_file():
        raise InputError(
            f"{str(source)!r} is neither a file of cases nor one of the bundled sets "
            f"{', '.join(names)}.{suggest(str(source), names)}"
        )
    return tuple(Case(**row) for row in read_rows(path, ("concept", "context", "target")))


def read_rows(path: Path, keys: Sequence[str]) -> list[dict[str, str]]:
    """Return the texts of each line of a file of cases."""
    schema = pa.schema([(key, pa.string()) for key in keys])
    options = ParseOptions(explicit_schema=schema, unexpected_field_behavior="error")
    expected = f"expected lines of JSON with {', '.join(keys)}, each a text"
    try:
        rows = read_json(path, parse_options=options).to_pylist()
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise InputError(f"{path} cannot be read ({error}): {expected}.") from error
    if not rows:
        raise InputError(f"{path} holds no cases: {expected}.")
    for number, row in enumerate(rows, 1):
        if not all((row[key] or "").strip() for key in keys):
            raise InputError(f"row {number} of {path} is {shown(row)}: {expected}.")
    return rows


def probe_of(tokenizer: PreTrainedTokenizerBase, case: Case, *, first_token: bool = False) -> Probe:
    """Return a case as tokens; context and target are encoded together, then split.

    A target of several tokens is an error, unless ``first_token`` says to measure the first.
    """
    context, target = case.context.rstrip(), case.target.strip()
    end = context if len(context) <= 30 else f"…{context[-30:]}"
    context_ids = encode_text(tokenizer, context, end=False)
    all_ids = encode_text(tokenizer, f"{context} {target}", end=False)
    ids = all_ids[len(context_ids) :]
    if not context_ids or all_ids[: len(context_ids)] != context_ids or not ids:
        raise InputError(
            f"the target {target!r} changes the tokens of the context {end!r} before it, "
            "so its probability is undefined: move words between the two."
        )
    tokens = [piece.label for piece in pieces_of(tokenizer, ids)]
    if len(ids) > 1 and not first_token:
        raise InputError(
            f"the target {target!r} after {end!r} is {len(ids)} tokens, "
            f"{', '.join(map(repr, tokens))}: expected one. Choose another target, or measure only "
            "the first token (first_token, --first-token)."
        )
    if len(ids) > 1:
        target = f"{tokens[0].strip() or '␣'}… of {target}"
    return Probe(case.concept, context, target, tuple(context_ids), ids[0])


def channel_name(channel: Channel) -> str:
    """Return a channel as the source writes it: ``L9 P7``."""
    return f"L{channel[0]} P{channel[1]}"


def effects_on(
    model: PreTrainedModel,
    probes: Sequence[Probe],
    channels: Sequence[Channel],
    *,
    name: str = "",
    controls: int = 5,
    interventions: Sequence[str] = INTERVENTIONS,
    minimum_probability: float = MIN_PROBABILITY,
    seed: int = 0,
    progress: Reporter = SILENT,
) -> Report:
    """Measure the effects of interventions on (layer, channel) on the targets of cases.

        relative change = 100 (p′ / p − 1) %   (Table 6)

    p is the probability of the target after the context, p′ with the intervention; for random
    prototypes the mean over several. Cases with p below ``minimum_probability`` are left out.

    The tables are ``summary``, with a row of :func:`effect_of` for each channel and intervention,
    and by :func:`channel_name` the changes of every case. ``controls`` are so many random channels
    of the layer.
    """
    chosen = tuple(dict.fromkeys((int(layer), int(channel)) for layer, channel in channels))
    drawn = {channel: draw_controls(model, channel, controls, seed, chosen) for channel in chosen}
    baseline = target_probabilities(model, probes)
    likely = baseline >= minimum_probability
    if not likely.any():
        raise InputError(
            f"none of {len(baseline)} cases has a target with a probability of at least "
            f"{minimum_probability:g} (the highest is {float(baseline.max()):.2g}), so changes "
            "would mean nothing. Use other cases, or a lower minimum."
        )
    kept, baseline = list(compress(probes, likely)), baseline[likely]
    every = [*chosen, *chain.from_iterable(drawn.values())]
    changes: dict[Channel, dict[str, np.ndarray]] = {channel: {} for channel in every}
    with progress.task("Intervening", len(changes), unit="channels") as task:
        for channel, by_name in changes.items():
            for intervention in interventions:
                after = changed_probabilities(model, kept, channel, intervention, seed)
                by_name[intervention] = (100 * (after / baseline - 1)).numpy()
            task.advance()
    tables = {"summary": _summary(changes, drawn)}
    for channel in chosen:
        by_case = {SHORT[name]: change.tolist() for name, change in changes[channel].items()}
        rows = tuple(
            {"context": probe.context, "target": probe.target, "base": float(baseline[number])}
            | {short: column[number] for short, column in by_case.items()}
            for number, probe in enumerate(kept)
        )
        columns = {"context": "", "target": "", "base": ".2%"} | dict.fromkeys(by_case, "+.2f")
        title, drawn_names = channel_name(channel), list(map(channel_name, drawn[channel]))
        tables[title] = Table(f"{title}: change in %", columns, rows, {"controls": drawn_names})
    return Report(name, {"cases": len(kept), "left_out_cases": len(likely) - len(kept)}, tables)


def _summary(
    changes: Mapping[Channel, Mapping[str, np.ndarray]], drawn: Mapping[Channel, Sequence[Channel]]
) -> Table:
    rows = tuple(
        {"layer": channel[0], "channel": channel[1], "intervention": name}
        | effect_of(change, np.stack([changes[control][name] for control in controls]))
        for channel, controls in drawn.items()
        for name, change in changes[channel].items()
    )
    columns = "layer channel intervention median_relative:+.2f low:+.2f high:+.2f median_size:.2f"
    columns += " largest_control:.2f rank p_size:.3g"
    return Table("Relative change of the probability, %", columns, rows)


def changed_probabilities(
    model: PreTrainedModel, probes: Sequence[Probe], channel: Channel, name: str, seed: int
) -> Float64[Tensor, " n"]:
    """Return the probability of each target with an intervention on a channel."""
    interventions = (
        [Reinitialise(*channel, seed + number) for number in range(REINITIALISATIONS)]
        if name == RANDOM
        else [MASKS[name](*channel)]
    )
    runs: list[Tensor] = []
    for intervention in interventions:
        with intervene(model, intervention):
            runs.append(target_probabilities(model, probes))
    return torch.stack(runs).mean(0)


def effect_of(changes: Float[np.ndarray, " n"], controls: Float[np.ndarray, "m n"]) -> Row:
    """Summarise the changes of n cases for one channel and for m control channels.

    ``low`` and ``high`` are a 95 % interval of ``median_relative`` if cases are independent;
    ``median_size`` is the median |relative change|, by which the channel has its ``rank`` among the
    controls, ties against it, and ``p_size``, of :func:`rank_sum_p`, over cases and not channels.
    """
    # Fewer than 6 independent values have no such interval.
    low, high = stats.quantile_test(changes).confidence_interval(0.95)
    sizes, others = abs(changes), abs(controls)
    median, control_sizes = float(np.median(sizes)), np.median(others, axis=1).tolist()
    rank = 1 + sum(size >= median for size in control_sizes)
    # Ties count half.
    ranks = ((sizes > others) + (sizes == others) / 2).sum(0).tolist()
    p_size = rank_sum_p(ranks, len(others))
    return {
        "cases": len(changes),
        "median_relative": float(np.median(changes)),
        "low": None if math.isnan(low) else float(low),
        "high": None if math.isnan(high) else float(high),
        "median_size": median,
        "control_sizes": control_sizes,
        "largest_control": max(control_sizes),
        "rank": rank,
        "p_size": p_size,
        "beats_controls": rank == 1 and p_size < SIGNIFICANT,
    }


def draw_controls(
    model: PreTrainedModel, channel: Channel, count: int, seed: int, exclude: Sequence[Channel] = ()
) -> tuple[Channel, ...]:
    """Draw ``count`` control channels from a channel's layer, by the seed and the channel."""
    mixers, (layer, number) = mixers_of(model), channel
    check_layer(len(mixers), layer)
    channels = mixers[layer].channels
    check_channel(channels, layer, number)
    available = [(layer, k) for k in range(channels) if (layer, k) not in {channel, *exclude}]
    if not 1 <= count <= len(available):
        raise InputError(
            f"{count} control channels for channel {number} of layer {layer}: expected "
            f"1 to {len(available)}, the other channels of the layer that are not measured."
        )
    indices = np.random.default_rng([seed, layer, number]).choice(len(available), count, False)
    return tuple(available[i] for i in sorted(indices.tolist()))


@torch.no_grad()
def target_probabilities(model: PreTrainedModel, probes: Sequence[Probe]) -> Float64[Tensor, " n"]:
    """Return p(target | context) of each probe, interventions included; on the CPU."""
    texts = [Text([*probe.ids, probe.target_id], len(probe.ids)) for probe in probes]
    with evaluating(model):
        z, targets, numbers = read_texts(model, texts)
        return losses_at(model, z, targets).neg().exp()[numbers.argsort().cpu()]


def rank_sum_p(ranks: Sequence[float], others: int) -> float:
    """Return P(Σ ranks at least this large) if every rank from 0 to ``others`` is equally likely.

    A one-sided permutation test over independent cases, exact; with one other it is the sign test.
    Ties, given as halves, make p conservative.
    """
    single = np.zeros(2 * others + 1)
    single[::2] = 1 / (others + 1)
    total = np.ones(1)
    for _ in ranks:
        total = np.convolve(total, single)
    # Ranks are multiples of a half.
    return float(min(1.0, total[round(2 * sum(ranks)) :].sum()))


def word_forms(tokenizer: PreTrainedTokenizerBase, words: Iterable[str]) -> Forms:
    """Return the tokens of words after a space, as written and capitalised.

    A form of two words counts for the first; a word without forms of its own, such as "Women" after
    "women", is left out.
    """
    forms: dict[str, tuple[tuple[int, ...], ...]] = {}
    used: set[tuple[int, ...]] = set()
    for word in dict.fromkeys(word.strip() for word in words):
        spellings = dict.fromkeys((word, word[:1].upper() + word[1:]))
        tokens = [ids for spelling in spellings if (ids := _after_a_space(tokenizer, spelling))]
        if not word or not tokens:
            raise InputError(f"{word!r} is not a word: the tokenizer makes no token of it.")
        if new := tuple(form for form in dict.fromkeys(tokens) if form not in used):
            forms[word] = new
            used.update(new)
    return forms


def _after_a_space(tokenizer: PreTrainedTokenizerBase, word: str) -> tuple[int, ...]:
    """Return the tokens of a word after a space, which some tokenizers add themselves."""
    alone, after = (
        tuple(encode_text(tokenizer, text, start=False, end=False)) for text in (word, f" {word}")
    )
    return alone if alone and decode_token(tokenizer, alone[0])[:1] == " " else after


def word_ends(
    tokenizer: PreTrainedTokenizerBase, forms: Forms, activations: Activations
) -> dict[str, Int64[Tensor, " n"]]:
    """Return the tokens at which each word ends in a text; "girl" is not in "girls"."""
    ids, lengths, continues = activations.tokens, activations.lengths, continues_word(tokenizer)
    # How many tokens of its sequence stand before each token.
    before = torch.arange(len(ids)) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    continued = torch.zeros(len(ids), dtype=torch.bool)
    continued[:-1] = continues[ids[1:]] & (before[1:] > 0)
    ends: dict[str, Tensor] = {}
    for word, word_tokens in forms.items():
        hits = torch.zeros(len(ids), dtype=torch.bool)
        for form in word_tokens:
            match = before >= len(form) - 1
            for back, token in enumerate(reversed(form)):
                match &= ids.roll(back) == token
            hits |= match
        ends[word] = (hits & ~continued).nonzero()[:, 0]
    return ends


def continues_word(tokenizer: PreTrainedTokenizerBase) -> Bool[Tensor, " V"]:
    """Return which tokens continue a word: those whose text begins with a letter or a digit."""
    texts = (decode_token(tokenizer, token) for token in range(len(tokenizer)))
    return torch.tensor([text[:1].isalnum() for text in texts])


def whole_words(tokenizer: PreTrainedTokenizerBase) -> Bool[Tensor, " V"]:
    """Return which tokens are a space and then only letters, at least three."""
    texts = (decode_token(tokenizer, token) for token in range(len(tokenizer)))
    return torch.tensor([t[:1] == " " and len(t) > 3 and t[1:].isalpha() for t in texts])


def standardised_difference(
    write: Float64[Tensor, "N R"], means: Float64[Tensor, "... R"]
) -> Float64[Tensor, "... R"]:
    """Return d of each channel from mean write gates at some positions; 0 of a constant gate."""
    deviation = write.std(0, correction=0)
    shift = means - write.mean(0)
    return torch.where(deviation > 1e-12, shift / deviation.clamp(min=1e-12), 0.0)


def find_channels(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    words: Iterable[str],
    sequences: Sequences,
    *,
    progress: Reporter = SILENT,
    **settings: int,
) -> Table:
    """Rank all channels by the standardised difference of their write gate at a concept's words.

    ``settings`` are those of :func:`rank_channels`. Memory: 4 bytes for each token that is read and
    each channel of the model.
    """
    activations = read_activations(model, sequences, ("write",), progress=progress)
    return rank_channels(activations, tokenizer, words, **settings)


def rank_channels(
    activations: Activations,
    tokenizer: PreTrainedTokenizerBase,
    words: Iterable[str],
    *,
    min_occurrences: int = 20,
    count: int = 10,
    shuffles: int = 999,
    seed: int = 0,
) -> Table:
    """Rank channels as :func:`find_channels`, from write gates.

    At least ``min_occurrences`` of all words together are required; each of the ``shuffles`` of the
    control replaces every word by a random whole-word token of like frequency.

    There are rows of the ``count`` best channels, with ``difference`` d and mean write gates. Facts
    are ``words`` with their occurrences; mean and deviation of the best d of each shuffle; and
    ``p``, the share of shuffles and the original whose best d is at least as large.
    """
    forms = word_forms(tokenizer, words)
    ends = word_ends(tokenizer, forms, activations)
    positions = torch.cat(list(ends.values()))
    if len(positions) < min_occurrences:
        raise InputError(
            f"{', '.join(ends)} occur {len(positions)} times in {len(activations.tokens):,} "
            f"tokens: expected at least {min_occurrences}. Read more text, or choose other words."
        )
    occurrences = {word: len(tokens) for word, tokens in ends.items()}
    ids, inverse, times = activations.tokens.unique(return_inverse=True, return_counts=True)
    counts = [n for n in occurrences.values() if n]
    random = _random_words(tokenizer, forms, ids, times, counts, shuffles, seed)
    null = torch.full((shuffles,), -torch.inf, dtype=torch.float64)
    rows: list[Row] = []
    for (_, layer), gates in activations.values.items():
        write = gates.double()
        at_words = write[positions].mean(0)
        difference = standardised_difference(write, at_words)
        sums = torch.zeros(len(ids), write.shape[1], dtype=torch.float64)
        sums.index_add_(0, inverse, write)
        means = sums[random].sum(1) / times[random].sum(1, keepdim=True)
        null = torch.maximum(null, standardised_difference(write, means).amax(1))
        columns = (column.tolist() for column in (difference, at_words, write.mean(0)))
        rows += [
            {"layer": layer, "channel": channel, "difference": d, "at_words": at, "mean": mean}
            for channel, (d, at, mean) in enumerate(zip(*columns, strict=True))
        ]
    rows.sort(key=lambda row: -row["difference"])
    facts = {
        "words": occurrences,
        "shuffled_mean": float(null.mean()),
        "shuffled_deviation": float(null.std()),
        "p": (1 + int((null >= rows[0]["difference"]).sum())) / (1 + shuffles),
    }
    columns = "layer channel difference:+.2f at_words:.3f mean:.3f"
    title = "Channels that are written at the words more than elsewhere"
    return Table(title, columns, tuple(rows[:count]), facts)


def _random_words(
    tokenizer: PreTrainedTokenizerBase,
    forms: Forms,
    ids: Int64[Tensor, " U"],
    times: Int64[Tensor, " U"],
    counts: Sequence[int],
    shuffles: int,
    seed: int,
) -> Int64[Tensor, "shuffles words"]:
    """Return random words with frequencies similar to ``counts``, as indices of ``ids``."""
    excluded = torch.tensor([token for word in forms.values() for form in word for token in form])
    candidates = whole_words(tokenizer).nonzero()[:, 0]
    free = (torch.isin(ids, candidates) & ~torch.isin(ids, excluded)).nonzero()[:, 0]
    if len(free) < 2 * len(counts):
        raise InputError(
            f"the text has {len(free)} other words, too few for a control of {len(counts)} words: "
            "read more text."
        )
    frequency = times[free].double().log()
    distance = (frequency - torch.tensor(counts).double().log()[:, None]).abs()
    pools = free[distance.argsort(dim=1, stable=True)[:, :NEIGHBOURS]].numpy()
    generator = np.random.default_rng(seed)
    return torch.from_numpy(np.stack([generator.choice(pool, shuffles) for pool in pools], axis=1))


def concept_in_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cases: Sequence[Case],
    *,
    name: str = "",
    channels: Sequence[Channel] = (),
    corpus: Corpus | None = None,
    max_tokens: int | None = None,
    first_token: bool = False,
    progress: Reporter = SILENT,
    **settings: Any,
) -> Report:
    """Intervene on the named channels, or on the one that is written most at the cases' targets.

    That channel is found in the training split of a corpus, in at most ``max_tokens`` tokens, and
    checked in the held-out one. Over several models this asks whether a channel for the concept
    emerges in each. Source: ProtoT, A.3.2.

    The report is that of :func:`effects_on`, which gets ``settings``. For a channel that was found
    it begins with the table ``found``, of :func:`rank_channels`, and the facts ``emerges``, whether
    d beats random words of like frequency, p < 0.05, and d and occurrences of the words in held-out
    text.
    """
    settings |= {"name": name, "progress": progress}
    probes = [probe_of(tokenizer, case, first_token=first_token) for case in cases]
    if channels:
        return effects_on(model, probes, channels, **settings)
    if corpus is None:
        raise InputError("name channels, or a corpus to find one in.")
    check_tokenizer_of(corpus, tokenizer, name)
    words = [case.target for case in cases]
    train = Sequences(corpus, "train", max_tokens=max_tokens)
    ranking = find_channels(model, tokenizer, words, train, progress=progress)
    layer, channel = ranking.rows[0]["layer"], ranking.rows[0]["channel"]
    heldout = Sequences(corpus, "heldout", max_tokens=max_tokens)
    activations = read_activations(model, heldout, ("write",), (layer,))
    ends = word_ends(tokenizer, word_forms(tokenizer, words), activations)
    positions = torch.cat(list(ends.values()))
    facts: Row = {"emerges": ranking["p"] < EMERGES, "heldout_difference": None}
    if len(positions):
        write = activations.values["write", layer].double()
        difference = standardised_difference(write, write[positions].mean(0))[channel]
        facts["heldout_difference"] = float(difference)
    facts["heldout_occurrences"] = len(positions)
    report = effects_on(model, probes, [(layer, channel)], **settings)
    return replace(report, facts=report.facts | facts, tables={"found": ranking, **report.tables})
