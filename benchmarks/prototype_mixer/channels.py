"""What the channels of trained ProtoTs hold: five unselected, and concepts put to the test.

    python -m benchmarks.prototype_mixer.channels MODEL [MODEL …] --corpus DIR
    python -m benchmarks.render channels

Several models are seeds of one recipe. Five channels of the first are drawn by a seed. Concepts are
proposed by the write gate on the training split; then their words are predicted in held-out text
with and without the channel, and with random channels of its layer as controls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.cli.output import ConsoleReporter
from prismlm.corpus import Corpus
from prismlm.corpus.pieces import decode_token
from prismlm.corpus.tokenizer import check_tokenizer_of
from prismlm.corpus.windows import Sequences, WindowBatch
from prismlm.errors import InputError
from prismlm.files import write_json
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.decoders.protot import half_lives
from prismlm.models.seam import run_decoder
from prismlm.probes.channels.activations import Activations, read_activations
from prismlm.probes.channels.effects import (
    EMERGES,
    Probe,
    effects_on,
    rank_channels,
    rank_sum_p,
    whole_words,
)
from prismlm.probes.channels.report import channel_report, measure_layers
from prismlm.probes.texts import losses_at
from prismlm.statistics import spearman

# The intervention by which a concept is judged, chosen before any was run.
TESTED = "mask_write"
SEED, CONTROLS = 0, 5
# Concepts, the words of each, and the least cases of one that is tested.
CONCEPTS, WORDS, MINIMUM_CASES, MINIMUM_PROBABILITY = 6, 4, 10, 0.01
# Of words: their occurrences at least, and how many of the most frequent tokens are left out.
LEAST, COMMON = 100, 100
TRAIN_TOKENS, LAG_TOKENS = 1_000_000, 20_000
CHANNELS_SHOWN, TOKENS_SHOWN, LEAST_SHOWN = 5, 8, 20
Row = dict[str, Any]
MAX_CASES = 200
CONTEXT_TOKENS = 24


class Loaded(NamedTuple):
    """A model with its tokenizer."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def main() -> None:
    """Measure and write."""
    parser = script_options(__doc__, RESULTS / "channels.json")
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    parser.add_argument("--corpus", type=Path, required=True)
    args = parser.parse_args()
    corpus = Corpus.open(args.corpus)
    models: list[Loaded] = []
    for path in args.models:
        model, tokenizer = read_checkpoint(path)
        check_tokenizer_of(corpus, tokenizer, Path(path).name)
        models.append(Loaded(path.resolve().name, model, tokenizer))
    write_json(args.out, study(models, corpus))
    print(f"wrote {args.out}")


def study(models: list[Loaded], corpus: Corpus) -> Row:
    """Return everything that the page shows."""
    first = models[0]
    train = Sequences(corpus, "train", max_tokens=TRAIN_TOKENS)
    heldout = Sequences(corpus, "heldout")
    gates = TokenGates.from_activations(write_gates(first, train), first.model.config.vocab_size)
    concepts, cases = choose_concepts(first, gates, heldout)
    tested = [concept_row(first, c, cases[c.name]) for c in concepts]
    lives = half_lives(first.model)
    return {
        "environment": environment(),
        "settings": {
            "corpus": corpus.name,
            "tested": TESTED,
            "controls": CONTROLS,
            "minimum_cases": MINIMUM_CASES,
            "minimum_probability": MINIMUM_PROBABILITY,
            "train_tokens": TRAIN_TOKENS,
        },
        "model": {
            "name": first.name,
            "parameters": sum(p.numel() for p in first.model.parameters()),
            "layers": len(lives),
            "channels": [len(life) for life in lives],
        },
        "channels": unselected(first, gates),
        "concepts": tested,
        "overall": overall(tested),
        "models": [words_in(loaded, concepts, train, heldout) for loaded in models],
        "locality": locality(first, heldout),
        "measures": {
            kind: list(measure_layers(first.model, heldout, kind)) for kind in ("write", "read")
        },
        "lags": lags(first, corpus),
    }


def write_gates(loaded: Loaded, train: Sequences) -> Activations:
    """Return the write gates of every position."""
    return read_activations(loaded.model, train, ("write",), progress=ConsoleReporter())


def cases_of(
    loaded: Loaded, concepts: Iterable[Concept], heldout: Sequences
) -> dict[str, tuple[Probe, ...]]:
    """Return the held-out cases of each concept."""
    tokens = {c.name: [token.token_id for token in c.tokens] for c in concepts}
    return heldout_cases(loaded.model, loaded.tokenizer, tokens, heldout)


def choose_concepts(
    loaded: Loaded, gates: TokenGates, heldout: Sequences
) -> tuple[list[Concept], dict[str, tuple[Probe, ...]]]:
    """Return the first concepts with enough held-out cases, and cases."""
    candidates = propose_concepts(gates, loaded.tokenizer, count=8 * CONCEPTS)
    cases = cases_of(loaded, candidates, heldout)
    enough = [c for c in candidates if len(cases[c.name]) >= MINIMUM_CASES]
    return enough[:CONCEPTS], cases


def concept_row(loaded: Loaded, concept: Concept, cases: tuple[Probe, ...]) -> Row:
    """Return what masking a concept's channel does to its words in held-out text."""
    place = concept.layer, concept.channel
    return {
        "layer": concept.layer,
        "channel": concept.channel,
        "words": [asdict(token) for token in concept.tokens],
        "difference": concept.difference,
        "half_life": float(half_lives(loaded.model)[concept.layer][concept.channel]),
        "effects": [effect_of(loaded, cases, place)],
    }


def effect_of(loaded: Loaded, cases: tuple[Probe, ...], place: tuple[int, int]) -> Row:
    """Return the effect of the tested intervention on a channel, with its controls."""
    report = effects_on(
        loaded.model,
        cases,
        [place],
        controls=CONTROLS,
        minimum_probability=MINIMUM_PROBABILITY,
        seed=SEED,
        interventions=(TESTED,),
    )
    (row,) = report["summary"].rows
    left_out = ("low", "high", "largest_control")
    interval = None if row["low"] is None else (row["low"], row["high"])
    return {k: v for k, v in row.items() if k not in left_out} | {"interval": interval}


def overall(concepts: Iterable[Row], controls: int = CONTROLS) -> float:
    """Return the chance that ranks among controls are at least this good over all concepts.

    Channels vary here, not cases: a concept counts once, by the rank of its channel's median size.
    """
    ranks = [controls + 1 - effect["rank"] for c in concepts for effect in c["effects"]]
    return rank_sum_p(ranks, controls)


def words_in(
    loaded: Loaded, concepts: Sequence[Concept], train: Sequences, heldout: Sequences
) -> Row:
    """Return for every concept which channel of one model its words write into."""
    cases = cases_of(loaded, concepts, heldout)
    read = write_gates(loaded, train)
    return {
        "model": loaded.name,
        "rows": [word_row(loaded, read, c, cases[c.name]) for c in concepts],
    }


def word_row(loaded: Loaded, read: Activations, concept: Concept, cases: tuple[Probe, ...]) -> Row:
    """Return the channel that a concept's words write into most, and its effect on them."""
    row: Row = {"name": concept.name, "found": None, "effect": None, "said": None}
    try:
        ranks = rank_channels(read, loaded.tokenizer, concept.words, seed=SEED)
        best = ranks.rows[0]
        row["found"] = best | {"p": ranks["p"], "emerges": ranks["p"] < EMERGES}
        row["effect"] = effect_of(loaded, cases, (best["layer"], best["channel"]))
    except InputError as error:
        row["said"] = str(error)
    return row


def unselected(loaded: Loaded, gates: TokenGates) -> list[Row]:
    """Return channels drawn by a seed, with the tokens that write most."""
    lives = half_lives(loaded.model)
    places = [(layer, channel) for layer, life in enumerate(lives) for channel in range(len(life))]
    order = np.random.default_rng(SEED).permutation(len(places))[:CHANNELS_SHOWN].tolist()
    texts = [decode_token(loaded.tokenizer, t) for t in range(len(loaded.tokenizer))]
    eligible = gates.count >= LEAST_SHOWN
    return [
        {
            "layer": layer,
            "channel": channel,
            "half_life": float(lives[layer][channel]),
            "tokens": [
                asdict(token)
                for token in top_tokens(gates, texts, (layer, channel), eligible, TOKENS_SHOWN)
            ],
        }
        for layer, channel in (places[i] for i in order)
    ]


def locality(loaded: Loaded, text: Sequences) -> Row:
    """Return the rank correlation of half-life and repetition over all channels."""
    report = channel_report(loaded.model, loaded.tokenizer, text)
    channels = [channel for layer in report.layers for channel in layer.channels]
    lives, scores = (
        np.array([channel[key] for channel in channels], dtype=np.float64)
        for key in ("half_life", "repetition")
    )
    rho, p = spearman(lives, scores)
    return {"spearman": {"rho": rho, "p": p, "count": len(channels)}}


def lags(loaded: Loaded, corpus: Corpus) -> list[Row]:
    """Return by layer at which lag the read and write gates of channels correlate most."""
    text = Sequences(corpus, "heldout", max_tokens=LAG_TOKENS)
    rows: list[Row] = []
    for layer in channel_report(loaded.model, loaded.tokenizer, text, seed=SEED).layers:
        figures = layer.lags
        assert figures is not None
        peaks = figures["peak"][torch.isfinite(figures["p"])].tolist()
        counts = {str(lag): peaks.count(lag) for lag in figures["lags"].tolist()}
        rows.append({"layer": layer.layer, "channels": len(peaks), "peaks": counts})
    return rows


# -- concepts: the words that write into a channel most, and where text repeats them


@dataclass(frozen=True, eq=False)
class TokenGates:
    """Write gates summed by token, float64.

    Attributes:
        count: occurrences of each token [V].
        sums: Σ write over the positions of each token, for each layer [V, R].
        deviations: of each channel's write gate over positions, for each layer [R].
    """

    count: Tensor
    sums: tuple[Tensor, ...]
    deviations: tuple[Tensor, ...]

    @classmethod
    def from_activations(cls, read: Activations, vocabulary: int) -> TokenGates:
        """Sum the write gates of all positions."""
        gates = [gate.double() for gate in read.values.values()]
        return cls(
            read.tokens.bincount(minlength=vocabulary),
            tuple(w.new_zeros(vocabulary, w.shape[1]).index_add_(0, read.tokens, w) for w in gates),
            tuple(write.std(0, correction=0) for write in gates),
        )

    def mean(self, layer: int) -> Tensor:
        """Return each channel's mean write gate [R]."""
        return self.sums[layer].sum(0) / self.count.sum()

    def difference(self, layer: int, tokens: list[int]) -> Tensor:
        """Return Cohen's d of each channel at the occurrences of some tokens [R]."""
        deviation = self.deviations[layer]
        shift = self.sums[layer][tokens].sum(0) / self.count[tokens].sum() - self.mean(layer)
        return torch.where(deviation > 1e-12, shift / deviation.clamp(min=1e-12), 0.0)


@dataclass(frozen=True)
class ConceptToken:
    """A token that writes into a channel; ``ratio`` is its mean gate over the channel's."""

    token_id: int
    text: str
    count: int
    gate: float
    ratio: float


@dataclass(frozen=True)
class Concept:
    """A channel and the whole words that write into it most.

    ``difference`` is Cohen's d of the channel at all their occurrences.
    """

    layer: int
    channel: int
    tokens: tuple[ConceptToken, ...]
    difference: float

    @property
    def words(self) -> tuple[str, ...]:
        """The words, without the space before them."""
        return tuple(token.text.strip() for token in self.tokens)

    @property
    def name(self) -> str:
        """The words, joined."""
        return ", ".join(self.words)


def top_tokens(
    gates: TokenGates, texts: Sequence[str], place: tuple[int, int], eligible: Tensor, count: int
) -> tuple[ConceptToken, ...]:
    """Return the eligible tokens [V] with the largest mean gate in a layer's channel."""
    layer, channel = place
    mean = float(gates.mean(layer)[channel])
    gate = gates.sums[layer][:, channel] / gates.count.clamp(min=1)
    order = torch.where(eligible, gate, -1.0).argsort(descending=True, stable=True)
    return tuple(
        ConceptToken(i, texts[int(i)], int(gates.count[i]), float(gate[i]), float(gate[i]) / mean)
        for i in order[: min(count, int(eligible.sum()))].tolist()
    )


def propose_concepts(
    gates: TokenGates,
    tokenizer: PreTrainedTokenizerBase,
    *,
    count: int,
    words: int = WORDS,
    least: int = LEAST,
    common: int = COMMON,
) -> tuple[Concept, ...]:
    """Return the channels whose most written words stand out most, with these words.

    Words are whole-word tokens of three letters or more that occur ``least`` times, without the
    ``common`` most frequent tokens. Channels rank by d; a channel that shares a word with an
    earlier one is left out.
    """
    known = whole_words(tokenizer)[: len(gates.count)]
    eligible = torch.zeros(len(gates.count), dtype=torch.bool)
    eligible[: len(known)] = known
    eligible[gates.count.argsort(descending=True, stable=True)[:common]] = False
    eligible &= gates.count >= least
    texts = [decode_token(tokenizer, token) for token in range(len(tokenizer))]
    concepts: list[Concept] = []
    for layer, sums in enumerate(gates.sums):
        for channel in range(sums.shape[1]):
            tokens = top_tokens(gates, texts, (layer, channel), eligible, words)
            pooled = gates.difference(layer, [token.token_id for token in tokens])
            concepts.append(Concept(layer, channel, tokens, float(pooled[channel])))
    concepts.sort(key=lambda c: (-c.difference, c.layer, c.channel))
    taken: set[str] = set()
    chosen: list[Concept] = []
    for concept in concepts:
        if len(chosen) < count and not taken & set(concept.words):
            chosen.append(concept)
            taken |= set(concept.words)
    return tuple(chosen)


@torch.no_grad()
def heldout_cases(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    concepts: Mapping[str, Sequence[int]],
    sequences: Sequences,
    *,
    minimum_probability: float = MINIMUM_PROBABILITY,
) -> dict[str, tuple[Probe, ...]]:
    """Return for each concept where one of its tokens comes next, at most one case per document.

    One of the tokens must also occur two or more positions before the predicted one, so that a
    channel can hold it when the last position of the context reads, and the model must give the
    predicted token ``minimum_probability``. No intervention is looked at.
    """
    members = {name: torch.zeros(model.config.vocab_size, dtype=torch.bool) for name in concepts}
    for name, tokens in concepts.items():
        members[name][list(tokens)] = True
    # By concept and document: the position of the first case, and the case.
    first: dict[str, dict[int, tuple[int, Probe]]] = {name: {} for name in concepts}
    for batch in sequences.batches():
        hits = {name: _repeated(batch, flags) for name, flags in members.items()}
        wanted = [n for n, hit in hits.items() if hit.any() and len(first[n]) < MAX_CASES]
        if not wanted:
            continue
        hidden = run_decoder(model, batch.input_ids, batch.attention_mask).last_hidden_state
        for name in wanted:
            for position, probe in _probes(
                model, tokenizer, name, batch, hits[name], hidden, minimum_probability
            ):
                assert probe.document is not None
                before = first[name].get(probe.document)
                if before is None or position < before[0]:
                    first[name][probe.document] = position, probe
    return {
        name: tuple(probe for _, probe in cases.values())[:MAX_CASES]
        for name, cases in first.items()
    }


def _repeated(batch: WindowBatch, members: Tensor) -> Tensor:
    """Return which tokens are members that have a member two or more positions before them."""
    hits = members[batch.input_ids] & batch.owned
    before = torch.zeros_like(hits)
    before[:, 2:] = hits[:, :-2].cumsum(1) > 0
    return hits & before


def _probes(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    batch: WindowBatch,
    hits: Tensor,
    hidden: Tensor,
    minimum: float,
) -> list[tuple[int, Probe]]:
    row, column = hits.nonzero(as_tuple=True)
    targets = batch.input_ids[row, column]
    states = hidden[row.to(hidden.device), (column - 1).to(hidden.device)]
    likely = losses_at(model, states, targets).neg().exp() >= minimum
    cases: list[tuple[int, Probe]] = []
    kept = (values[likely].tolist() for values in (row, column, targets))
    for r, end, target in zip(*kept, strict=True):
        ids: list[int] = batch.input_ids[r, :end].tolist()
        context, word = (
            str(tokenizer.decode(part, clean_up_tokenization_spaces=False))
            for part in (ids[-CONTEXT_TOKENS:], [target])
        )
        probe = Probe(name, context, word.strip(), tuple(ids), target, int(batch.document[r]))
        cases.append((int(batch.positions[r, end]), probe))
    return cases


if __name__ == "__main__":
    main()
