"""What interventions on channels do to the probability of words, with control channels.

A file of cases holds JSON lines, ``{"concept": "women", "context": "…", "target": "women"}``.
Source: ProtoT, A.3, Tables 6 to 9, with other sentences. The source picks its control by hand and
has no test; here controls are random, a channel is compared with all of them, and tests are exact.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Float64
from scipy import stats
from torch import Tensor

from prismlm.corpus.encode import encode_text
from prismlm.corpus.pieces import pieces_of
from prismlm.errors import InputError, check_choice, check_number, check_text, check_whole, suggest
from prismlm.files import read_text
from prismlm.interventions.channels import (
    Intervention,
    MaskRead,
    MaskWrite,
    Reinitialise,
    intervene,
)
from prismlm.models.decoders.protot import check_channel, check_layer, mixers_of
from prismlm.models.seam import run_decoder
from prismlm.models.watch import evaluating
from prismlm.probes.results import Row, Table, as_json
from prismlm.probes.texts import equal_length_batches, losses_at
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BUNDLED = Path(__file__).parent / "cases"
Channel = tuple[int, int]
"""Layer and channel."""
Unit = Literal["relative", "points"]
RANDOM = "reinitialise"
MASKS: dict[str, Callable[[int, int], Intervention]] = {
    "mask_write": MaskWrite,
    "mask_read": MaskRead,
    "mask_write_renormalised": partial(MaskWrite, renormalise=True),
    "mask_read_renormalised": partial(MaskRead, renormalise=True),
}
INTERVENTIONS = (RANDOM, *MASKS)
SHORT = dict(zip(INTERVENTIONS, ("random", "write", "read", "write −∞", "read −∞"), strict=True))
SIGNIFICANT = 0.05
REINITIALISATIONS = 3
"""Random prototypes per channel, over which probabilities are averaged."""
BATCH_TOKENS = 4096


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
    first: str | None = None  # the first token's text, if the target has several


def load_cases(source: str | os.PathLike[str]) -> tuple[Case, ...]:
    """Read cases from a file, or a bundled set by its name."""
    names = sorted(path.stem for path in BUNDLED.glob("*.jsonl"))
    path = BUNDLED / f"{source}.jsonl" if str(source) in names else Path(source)
    if not path.is_file():
        raise InputError(
            f"{str(source)!r} is neither a file of cases nor one of the bundled sets "
            f"{', '.join(names)}.{suggest(str(source), names)}"
        )
    rows = read_rows(path, ("concept", "context", "target"))
    return tuple(Case(**row) for row in rows.values())


def read_rows(path: Path, keys: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the texts of each line of a file of cases; keys name the lines for messages."""
    rows: dict[str, dict[str, str]] = {}
    # Not splitlines: texts may contain other line ends, such as U+2028.
    for number, content in enumerate(read_text(path).split("\n"), 1):
        if not content.strip():
            continue
        line = f"{path}, line {number}"
        try:
            row: Any = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{line}: not a JSON object ({error}).") from error
        if not isinstance(row, dict) or set(row) != set(keys):
            actual = ", ".join(row) if isinstance(row, dict) else f"a {type(row).__name__}"
            raise InputError(
                f"{line}: expected a JSON object with the keys {', '.join(keys)}, found "
                f"{actual or 'none'}."
            )
        for key, text in row.items():
            if not isinstance(text, str) or not text.strip():
                raise InputError(f"{line}: {key!r} is {text!r}, expected a non-empty text.")
            check_text(f"{line}: {key!r}", text)
        rows[line] = row
    if not rows:
        raise InputError(
            f"{path} holds no cases: expected a JSON object per line, with {', '.join(keys)}."
        )
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
    first = tokens[0].strip() or "␣" if len(ids) > 1 else None
    return Probe(case.concept, context, target, tuple(context_ids), ids[0], first=first)


def words_of(cases: Iterable[Case]) -> tuple[str, ...]:
    """Return the distinct targets of cases."""
    return tuple(dict.fromkeys(case.target.strip() for case in cases))


@dataclass(frozen=True)
class TableOptions:
    """How effects are measured."""

    controls: int = 5  # random channels of its layer for each channel
    interventions: Sequence[str] = INTERVENTIONS
    minimum_probability: float = 0.01  # cases below it without an intervention are left out
    first_token: bool = False  # measure the first token of a target of several
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.interventions:
            check_choice("an intervention", name, INTERVENTIONS)
        check_whole("the seed", self.seed)
        minimum, expected = self.minimum_probability, "a number between 0 and 1"
        check_number("minimum_probability", minimum, expected, lambda share: 0 < share < 1)


@dataclass(frozen=True, eq=False)
class EffectTable:
    """The effects of interventions on n cases."""

    probes: tuple[Probe, ...]
    left_out: int  # cases whose baseline is below the minimum
    baseline: Float64[Tensor, " n"]  # p of each case, on the CPU
    controls: Mapping[Channel, tuple[Channel, ...]]
    measured: Mapping[tuple[Channel, str], Float64[Tensor, " n"]]  # p′ by intervention
    options: TableOptions

    def changes(self, channel: Channel, intervention: str, by: Unit = "relative") -> list[float]:
        """Return the change of every case, in % or in percentage points."""
        difference = self.measured[channel, intervention] - self.baseline
        return (100 * (difference / self.baseline if by == "relative" else difference)).tolist()

    def rows(self) -> list[Row]:
        """Return every cell; ``control_of`` is the channel whose control the row is, or None."""
        rows: list[Row] = []
        for measured, controls in self.controls.items():
            channels = {measured: None} | dict.fromkeys(controls, measured)
            for (channel, control_of), name in product(
                channels.items(), self.options.interventions
            ):
                figures = {
                    "baseline": self.baseline.tolist(),
                    "probability": self.measured[channel, name].tolist(),
                    "relative": self.changes(channel, name),
                    "points": self.changes(channel, name, "points"),
                }
                rows += [
                    {"concept": probe.concept, "context": probe.context, "target": probe.target}
                    | {"measured": probe.first or probe.target}
                    | {"layer": channel[0], "channel": channel[1]}
                    | {"control_of": control_of, "intervention": name}
                    | {key: column[number] for key, column in figures.items()}
                    for number, probe in enumerate(self.probes)
                ]
        return rows

    def summary(self) -> Table:
        """Return a row for each channel and intervention, over all cases.

        ``low`` and ``high`` are a 95 % interval of ``median_relative`` if cases are independent;
        ``lowered`` is the share of cases whose probability fell; ``median_size`` that of |relative
        change|, by which the channel has its ``rank`` among the controls, ties against it, and
        ``p_size``, of :func:`rank_sum_p`, over cases and not over channels.
        """
        pairs = product(self.controls, self.options.interventions)
        rows = tuple(self._summary(*pair) for pair in pairs)
        facts = {"cases": len(self.probes), "left_out": self.left_out} | asdict(self.options)
        columns = {"layer": "", "channel": "", "intervention": "", "median_relative": "+.2f",
                   "low": "+.2f", "high": "+.2f", "median_size": ".2f", "largest_control": ".2f",
                   "rank": "", "p_size": ".3g"}  # fmt: skip
        return Table("Relative change of the probability, %", columns, rows, facts)

    def _summary(self, channel: Channel, name: str) -> Row:
        channels = (channel, *self.controls[channel])
        changes, *others = np.array([self.changes(c, name) for c in channels])
        median, *controls = (float(np.median(abs(row))) for row in (changes, *others))
        # Fewer than 6 independent values have no such interval.
        low, high = stats.quantile_test(changes).confidence_interval(0.95)
        rank = 1 + sum(size >= median for size in controls)
        sizes, other_sizes = abs(changes), abs(np.array(others))
        # Ties count half.
        ranks = ((sizes > other_sizes) + (sizes == other_sizes) / 2).sum(0).tolist()
        p_size = rank_sum_p(ranks, len(others))
        return {
            "layer": channel[0],
            "channel": channel[1],
            "intervention": name,
            "cases": len(changes),
            "median_relative": float(np.median(changes)),
            "low": None if math.isnan(low) else float(low),
            "high": None if math.isnan(high) else float(high),
            "median_points": float(np.median(self.changes(channel, name, "points"))),
            "lowered": float((changes < 0).mean()),
            "median_size": median,
            "control_sizes": controls,
            "largest_control": max(controls),
            "rank": rank,
            "p_size": p_size,
            "beats_controls": rank == 1 and p_size < SIGNIFICANT,
        }

    def cases(self, channel: Channel, by: Unit = "relative") -> Table:
        """Return the change of every case for one channel, with a column for each intervention."""
        names = {SHORT[name]: name for name in self.options.interventions}
        changes = {short: self.changes(channel, name, by) for short, name in names.items()}
        rows = tuple(
            {"context": probe.context, "base": float(self.baseline[i])}
            | {"target": f"{probe.first}… of {probe.target}" if probe.first else probe.target}
            | {short: column[i] for short, column in changes.items()}
            for i, probe in enumerate(self.probes)
        )
        unit = "%" if by == "relative" else "percentage points"
        columns = {"context": "", "target": "", "base": ".2%"} | dict.fromkeys(names, "+.2f")
        facts = {"controls": list(map(channel_name, self.controls[channel]))}
        return Table(f"{channel_name(channel)}: change in {unit}", columns, rows, facts)

    def to_dict(self) -> Row:
        """Return settings, channels, summaries and every cell, for JSON."""
        summary = self.summary()
        value = {"channels": list(self.controls), "summaries": summary.rows, "rows": self.rows()}
        return as_json(summary.facts | {"controls": list(self.controls.values())} | value)


def channel_name(channel: Channel) -> str:
    """Return a channel as the source writes it: ``L9 P7``."""
    return f"L{channel[0]} P{channel[1]}"


def effects_on(
    model: PreTrainedModel,
    probes: Sequence[Probe],
    channels: Sequence[Channel],
    options: TableOptions | None = None,
    *,
    progress: Reporter = SILENT,
) -> EffectTable:
    """Measure the effects of interventions on (layer, channel) on the targets of cases.

        relative change = 100 (p′ / p − 1) %   (Table 6),   100 (p′ − p) points   (Table 7)

    p is the probability of the target after the context, p′ with the intervention; for random
    prototypes the mean over several.
    """
    options = options or TableOptions()
    if not probes or not channels:
        raise InputError(
            f"{len(probes)} cases and {len(channels)} channels: expected at least 1 of both."
        )
    chosen = tuple(dict.fromkeys((int(layer), int(channel)) for layer, channel in channels))
    controls = {channel: draw_controls(model, channel, options, chosen) for channel in chosen}
    baseline = target_probabilities(model, probes)
    likely = baseline >= options.minimum_probability
    if not likely.any():
        raise InputError(
            f"none of {len(baseline)} cases has a target with a probability of at least "
            f"{options.minimum_probability:g} (the highest is {float(baseline.max()):.2g}), so "
            "changes would mean nothing. Use other cases, or a lower minimum."
        )
    probes = tuple(probe for probe, keep in zip(probes, likely, strict=True) if keep)
    measured: dict[tuple[Channel, str], Tensor] = {}
    every = dict.fromkeys([*chosen, *(c for row in controls.values() for c in row)])
    seeds = range(options.seed, options.seed + REINITIALISATIONS)
    with progress.task("Intervening", len(every), unit="channels") as task:
        for channel in every:
            for name in options.interventions:
                random = [Reinitialise(*channel, seed) for seed in seeds]
                runs: list[Tensor] = []
                for intervention in random if name == RANDOM else [MASKS[name](*channel)]:
                    with intervene(model, intervention):
                        runs.append(target_probabilities(model, probes))
                measured[channel, name] = torch.stack(runs).mean(0)
            task.advance()
    left_out = len(baseline) - len(probes)
    return EffectTable(probes, left_out, baseline[likely], controls, measured, options)


def draw_controls(
    model: PreTrainedModel, channel: Channel, options: TableOptions, exclude: Sequence[Channel] = ()
) -> tuple[Channel, ...]:
    """Draw control channels from a channel's layer, by the seed and the channel."""
    mixers = mixers_of(model)
    layer, number = channel
    check_layer(len(mixers), layer)
    count = mixers[layer].channels
    check_channel(count, layer, number)
    available = [(layer, k) for k in range(count) if (layer, k) not in {channel, *exclude}]
    if not 1 <= options.controls <= len(available):
        raise InputError(
            f"{options.controls} control channels for channel {number} of layer {layer}: expected "
            f"1 to {len(available)}, the other channels of the layer that are not measured."
        )
    generator = np.random.default_rng([options.seed, layer, number])
    indices = generator.choice(len(available), options.controls, replace=False)
    return tuple(available[i] for i in sorted(indices.tolist()))


@torch.no_grad()
def target_probabilities(model: PreTrainedModel, probes: Sequence[Probe]) -> Float64[Tensor, " n"]:
    """Return p(target | context) of each probe, interventions included; on the CPU."""
    probabilities = torch.empty(len(probes), dtype=torch.float64)
    with evaluating(model):
        for batch in equal_length_batches([probe.ids for probe in probes], BATCH_TOKENS):
            ids = torch.tensor([probes[i].ids for i in batch])
            hidden = run_decoder(model, ids, torch.ones_like(ids).bool()).last_hidden_state[:, -1]
            targets = torch.tensor([probes[i].target_id for i in batch])
            probabilities[batch] = probabilities_at(model, hidden, targets)
    return probabilities


def probabilities_at(
    model: PreTrainedModel, hidden: Tensor, targets: Tensor
) -> Float64[Tensor, " n"]:
    """Return the probability of ``targets`` [n] after last hidden states [n, d]."""
    head: Any = model.get_output_embeddings()
    return losses_at(head, hidden, targets).neg().exp()


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
