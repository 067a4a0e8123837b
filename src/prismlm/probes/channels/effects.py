"""What interventions on channels do to the probability of words, with control channels.

Source: ProtoT, A.3, Tables 6 to 9. The source picks its control by hand and has no test; here
controls are drawn, a channel is compared with all of them, and tests are exact.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product, repeat
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float64
from scipy import stats
from torch import Tensor

from prismlm.errors import InputError, check_choice, check_number, check_whole
from prismlm.interventions.channels import (
    Intervention,
    MaskRead,
    MaskWrite,
    Reinitialise,
    intervene,
)
from prismlm.models.decoders.mixers import check_channel, check_layer, mixers_of
from prismlm.models.seam import run_decoder
from prismlm.outputs import write_table
from prismlm.probes.channels.case_files import Probe
from prismlm.probes.reading import of_one_length
from prismlm.probes.results import Row, Table, as_json
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Channel = tuple[int, int]
"""Layer and channel."""
By = Literal["relative", "points"]
ControlFrom = Literal["layer", "model"]
RANDOM = "reinitialise"
BUILD: dict[str, Callable[[int, int, int], Intervention]] = {
    RANDOM: Reinitialise,
    "mask_write": lambda layer, channel, _: MaskWrite(layer, channel),
    "mask_read": lambda layer, channel, _: MaskRead(layer, channel),
    "mask_write_renormalised": lambda layer, channel, _: MaskWrite(layer, channel, True),
    "mask_read_renormalised": lambda layer, channel, _: MaskRead(layer, channel, True),
}
INTERVENTIONS = tuple(BUILD)
SHORT = dict(zip(INTERVENTIONS, ("random", "write", "read", "write −∞", "read −∞"), strict=True))
SIGNIFICANT = 0.05
TOKENS_PER_BATCH = 4096
LOGIT_ROWS = 64
CASE = ("concept", "context", "target", "measured")


@dataclass(frozen=True)
class TableOptions:
    """How a table is measured.

    Attributes:
        controls: channels drawn for each one, none of them measured itself.
        control_from: the same ``"layer"``, or the whole ``"model"``.
        interventions: names, of :data:`INTERVENTIONS`.
        reinitialisations: random prototypes drawn for each channel.
        minimum_probability: cases with less without an intervention are left out, and counted.
        first_token: measure the first token of a target of several.
        seed: of controls and random prototypes.
    """

    controls: int = 5
    control_from: ControlFrom = "layer"
    interventions: Sequence[str] = INTERVENTIONS
    reinitialisations: int = 3
    minimum_probability: float = 0.01
    first_token: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.interventions:
            check_choice("an intervention", name, INTERVENTIONS)
        check_whole("the number of random prototypes", self.reinitialisations, 1)
        check_whole("the seed", self.seed)
        check_choice("control_from", self.control_from, ("layer", "model"))
        least, expected = self.minimum_probability, "a number between 0 and 1"
        check_number("minimum_probability", least, expected, lambda share: 0 < share < 1)


class Measured(NamedTuple):
    """Probabilities [n] with an intervention: mean and, of several, deviation over prototypes."""

    probability: Float64[Tensor, " n"]
    deviation: Float64[Tensor, " n"] | None


@dataclass(frozen=True, eq=False)
class EffectTable:
    """What interventions did to n cases.

    Attributes:
        probes: the cases that were measured.
        left_out: those whose baseline is below the minimum.
        baseline: p of each, float64 on the CPU.
        channels: those asked for, (layer, channel).
        controls: drawn for each of them.
        measured: by channel and intervention.
        options: how it was measured.
    """

    probes: tuple[Probe, ...]
    left_out: tuple[Probe, ...]
    baseline: Float64[Tensor, " n"]
    channels: tuple[Channel, ...]
    controls: Mapping[Channel, tuple[Channel, ...]]
    measured: Mapping[tuple[Channel, str], Measured]
    options: TableOptions

    def changes(self, place: Channel, intervention: str, by: By = "relative") -> list[float]:
        """Return the change of every case, in % or in percentage points."""
        difference = self.measured[place, intervention].probability - self.baseline
        return (100 * (difference / self.baseline if by == "relative" else difference)).tolist()

    def rows(self) -> list[Row]:
        """Return every cell, a control once for each channel that it is drawn for.

        ``measured`` is the text whose probability this is; ``control_of`` the channel that the row
        is a control of, or None; ``baseline`` p, ``probability`` p′, ``relative`` 100 (p′ / p − 1)
        %, ``points`` 100 (p′ − p), and ``deviation`` of p′ over random prototypes, or None.
        """
        rows: list[Row] = []
        for chosen in self.channels:
            places = {chosen: None} | dict.fromkeys(self.controls[chosen], chosen)
            for (place, control_of), name in product(places.items(), self.options.interventions):
                probability, deviation = self.measured[place, name]
                columns = {
                    "baseline": self.baseline.tolist(),
                    "probability": probability.tolist(),
                    "relative": self.changes(place, name),
                    "points": self.changes(place, name, "points"),
                    "deviation": repeat(None) if deviation is None else deviation.tolist(),
                }
                same = {"layer": place[0], "channel": place[1], "control_of": control_of}
                same |= {"intervention": name}
                for probe, *figures in zip(self.probes, *columns.values(), strict=False):
                    case = {key: getattr(probe, key) for key in CASE}
                    rows.append(case | same | dict(zip(columns, figures, strict=True)))
        return rows

    def summary(self) -> Table:
        """Return what each channel and intervention come to over all cases, beside controls.

        Rows have the ``median_relative`` change, %, with a 95 % interval from ``low`` to ``high``
        if cases are independent; ``median_points``; ``lowered``, the share of cases whose
        probability fell; ``median_size``, of |relative change|; ``control_sizes``, the same of
        every control; the channel's ``rank`` among these, ties against it; ``p_size``, that of
        :func:`rank_sum_p` by |relative change|, over cases and not over channels; ``p_lowered``,
        likewise by the fall; and ``beats_controls``: rank 1 and p_size < 0.05.
        """
        rows = tuple(
            self._summary(place, name)
            for place in self.channels
            for name in self.options.interventions
        )
        facts = {"cases": len(self.probes), "left_out": len(self.left_out)} | asdict(self.options)
        columns = {"layer": "", "channel": "", "intervention": "", "median_relative": "+.2f",
                   "low": "+.2f", "high": "+.2f", "median_size": ".2f", "largest_control": ".2f",
                   "rank": "", "p_size": ".3g"}  # fmt: skip
        return Table("Relative change of the probability, %", columns, rows, facts)

    def _summary(self, place: Channel, name: str) -> Row:
        changes = np.array([self.changes(p, name) for p in (place, *self.controls[place])])
        own, others = changes[0], changes[1:]
        median, *controls = np.median(abs(changes), axis=1).tolist()
        low, high = median_interval(own.tolist()) or (None, None)
        rank = 1 + sum(c >= median for c in controls)
        p_size = rank_sum_p(ranks_among(abs(own), abs(others)), len(others))
        return {
            "layer": place[0],
            "channel": place[1],
            "intervention": name,
            "cases": len(own),
            "median_relative": float(np.median(own)),
            "low": low,
            "high": high,
            "median_points": float(np.median(self.changes(place, name, "points"))),
            "lowered": float((own < 0).mean()),
            "median_size": median,
            "control_sizes": controls,
            "largest_control": max(controls),
            "rank": rank,
            "p_size": p_size,
            "p_lowered": rank_sum_p(ranks_among(-own, -others), len(others)),
            "beats_controls": rank == 1 and p_size < SIGNIFICANT,
        }

    def cases(self, place: Channel, by: By = "relative") -> Table:
        """Return the change of every case on one channel, a column for each intervention."""
        names = {SHORT[name]: name for name in self.options.interventions}
        changes = {short: self.changes(place, name, by) for short, name in names.items()}
        rows = tuple(
            {"context": probe.context, "target": probe.label, "base": float(self.baseline[i])}
            | {short: column[i] for short, column in changes.items()}
            for i, probe in enumerate(self.probes)
        )
        unit = "%" if by == "relative" else "percentage points"
        columns = {"context": "", "target": "", "base": ".2%"} | dict.fromkeys(names, "+.2f")
        facts = {"controls": list(map(channel_name, self.controls[place]))}
        return Table(f"{channel_name(place)}: change in {unit}", columns, rows, facts)

    def to_dict(self) -> Row:
        """Return settings, channels, summaries and every cell, for JSON."""
        summary = self.summary()
        controls = [self.controls[place] for place in self.channels]
        value = {"channels": self.channels, "controls": controls, "summaries": summary.rows}
        return as_json(summary.facts | value | {"rows": self.rows()})

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write the cells, one row each; ``control_of`` is two columns, null where it is none."""
        rows = self.rows()
        for row in rows:
            chosen = row.pop("control_of") or (None, None)
            row["control_of_layer"], row["control_of_channel"] = chosen
        write_table(path, pa.Table.from_pylist(rows))


def channel_name(place: Channel) -> str:
    """Return a channel as the source writes it: ``L9 P7``."""
    return f"L{place[0]} P{place[1]}"


def effects_on(
    model: PreTrainedModel,
    probes: Sequence[Probe],
    channels: Sequence[Channel],
    options: TableOptions | None = None,
    *,
    progress: Reporter = SILENT,
    **settings: Any,
) -> EffectTable:
    """Measure what interventions on channels, (layer, channel) each, do to the targets of cases.

        relative change = 100 (p′ / p − 1) %   (Table 6),   100 (p′ − p) points   (Table 7)

    p is the probability of the target after the context, p′ with the intervention, of random
    prototypes the mean over several. Without ``options``, ``settings`` are of
    :class:`TableOptions`. The model is in evaluation mode.
    """
    by = TableOptions(**settings) if options is None else options
    if not probes or not channels:
        raise InputError(
            f"{len(probes)} cases and {len(channels)} channels: expected at least 1 of both."
        )
    chosen = tuple(dict.fromkeys((int(layer), int(channel)) for layer, channel in channels))
    controls = {place: draw_controls(model, place, by, exclude=chosen) for place in chosen}
    baseline = target_probabilities(model, probes)
    enough = baseline >= by.minimum_probability
    if not enough.any():
        raise InputError(
            f"none of {len(baseline)} cases has a target of probability {by.minimum_probability:g} "
            f"or more (the highest is {float(baseline.max()):.2g}): the model does not expect "
            "these words, so their change says nothing. Give other cases or a lower minimum."
        )
    used = tuple(probe for probe, kept in zip(probes, enough, strict=True) if kept)
    left = tuple(probe for probe, kept in zip(probes, enough, strict=True) if not kept)
    measured: dict[tuple[Channel, str], Measured] = {}
    places = list(dict.fromkeys([*chosen, *(c for row in controls.values() for c in row)]))
    with progress.task("Intervening", len(places), unit="channels") as task:
        for place in places:
            for name in by.interventions:
                measured[place, name] = _measured(model, used, place, name, by)
            task.advance()
    return EffectTable(used, left, baseline[enough], chosen, controls, measured, by)


def _measured(
    model: PreTrainedModel, probes: Sequence[Probe], place: Channel, name: str, by: TableOptions
) -> Measured:
    runs: list[Tensor] = []
    for seed in range(by.seed, by.seed + (by.reinitialisations if name == RANDOM else 1)):
        with intervene(model, BUILD[name](*place, seed)):
            runs.append(target_probabilities(model, probes))
    stacked = torch.stack(runs)
    return Measured(stacked.mean(0), stacked.std(0) if len(runs) > 1 else None)


def draw_controls(
    model: PreTrainedModel, place: Channel, by: TableOptions, exclude: Sequence[Channel] = ()
) -> tuple[Channel, ...]:
    """Draw control channels for one, by the seed and the channel's place."""
    mixers = mixers_of(model)
    layer, channel = place
    check_layer(len(mixers), layer)
    check_channel(mixers[layer].channels, layer, channel)
    layers = (layer,) if by.control_from == "layer" else range(len(mixers))
    places = [(i, k) for i in layers for k in range(mixers[i].channels)]
    free = [candidate for candidate in places if candidate not in {place, *exclude}]
    if not 1 <= by.controls <= len(free):
        raise InputError(
            f"{by.controls} control channels for channel {channel} of layer {layer}: expected 1 to "
            f"{len(free)}, the channels of the {by.control_from} that are not measured themselves."
        )
    generator = np.random.default_rng([by.seed, layer, channel])
    picked = generator.choice(len(free), by.controls, replace=False)
    return tuple(free[i] for i in sorted(picked.tolist()))


@torch.no_grad()
def target_probabilities(model: PreTrainedModel, probes: Sequence[Probe]) -> Float64[Tensor, " n"]:
    """Return p(target | context) of each probe, interventions included; on the CPU.

    Contexts of one length are read together; logits are formed at the last positions only.
    """
    if model.training:
        raise InputError("the model is in training mode: call model.eval() before measuring it.")
    found = torch.empty(len(probes), dtype=torch.float64)
    for members in of_one_length([probe.ids for probe in probes], TOKENS_PER_BATCH):
        ids = torch.tensor([probes[i].ids for i in members])
        mask = torch.ones_like(ids, dtype=torch.bool)
        hidden = run_decoder(model, ids, mask).last_hidden_state[:, -1]
        targets = torch.tensor([probes[i].target_id for i in members], device=model.device)
        found[members] = probabilities_at(model, hidden, targets).cpu()
    return found


def probabilities_at(
    model: PreTrainedModel, hidden: Tensor, targets: Tensor
) -> Float64[Tensor, " n"]:
    """Return the probability of ``targets`` [n] after last hidden states [n, d]."""
    head: Any = model.get_output_embeddings()
    parts = [
        head(rows).double().log_softmax(-1).gather(1, wanted[:, None])[:, 0].exp()
        for rows, wanted in zip(hidden.split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True)
    ]
    return torch.cat(parts)


def ranks_among(values: np.ndarray, others: np.ndarray) -> list[float]:
    """Return how many of ``others`` [N, n] each of n values exceeds, ties counting half."""
    return ((values > others) + (values == others) / 2).sum(0).tolist()


def rank_sum_p(ranks: Sequence[float], others: int) -> float:
    """Return P(Σ ranks at least this large) if every rank from 0 to ``others`` is equally likely.

    A one-sided permutation test over independent cases, exact; with one other it is the sign test.
    Ties, given as halves, make it err towards large p.
    """
    one = np.zeros(2 * others + 1)
    one[::2] = 1 / (others + 1)
    total = np.ones(1)
    for _ in ranks:
        total = np.convolve(total, one)
    # Rounding must not push a sum over a half.
    return float(min(1.0, total[round(2 * sum(ranks)) :].sum()))


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return two of the values that hold the median with at least 95 % confidence, or None.

    Fewer than 6 independent values have no such interval.
    """
    low, high = stats.quantile_test(values).confidence_interval(0.95)
    return None if math.isnan(low) else (float(low), float(high))
