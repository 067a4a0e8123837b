"""A table of interventions: its rows, what they come to beside controls, and its forms."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Float64
from torch import Tensor

from prismlm.errors import InputError, check_choice, check_number, check_whole
from prismlm.instruments.channels.case_files import Probe
from prismlm.instruments.channels.chance import median_interval, rank_among, rank_sum_p
from prismlm.outputs import write_table

Channel = tuple[int, int]
By = Literal["relative", "points"]
ControlFrom = Literal["layer", "model"]
SHORT = {
    "reinitialise": "random",
    "mask_write": "write",
    "mask_read": "read",
    "mask_write_renormalised": "write −∞",
    "mask_read_renormalised": "read −∞",
}
INTERVENTIONS = tuple(SHORT)
SIGNIFICANT = 0.05
CONTEXT_SHOWN = 40
CASE = ("concept", "context", "target", "measured")


@dataclass(frozen=True)
class TableOptions:
    """How a table is measured.

    Attributes:
        controls: how many channels to draw beside each one, without those that are measured.
        control_from: the same ``"layer"``, or the whole ``"model"``.
        interventions: names, of :data:`INTERVENTIONS`.
        reinitialisations: random prototypes drawn for each channel.
        minimum_probability: cases with less without an intervention are left out, and counted.
        first_token: measure the first token of a target that is several.
        seed: of controls and random prototypes.

    Raises:
        InputError: settings that no table can be measured by.
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
        check_whole("the number of interventions", len(self.interventions), 1)
        check_whole("the number of random prototypes", self.reinitialisations, 1)
        check_whole("the seed", self.seed)
        check_choice("control_from", self.control_from, ("layer", "model"))
        least, expected = self.minimum_probability, "a number between 0 and 1"
        check_number("minimum_probability", least, expected, lambda share: 0 < share < 1)


class Measured(NamedTuple):
    """Probabilities with an intervention; n cases.

    Attributes:
        probability: their mean over random prototypes.
        deviation: their standard deviation over these, or None with one.
    """

    probability: Float64[Tensor, " n"]
    deviation: Float64[Tensor, " n"] | None


@dataclass(frozen=True)
class Summary:
    """One channel and intervention over all cases, beside the channel's controls.

    Attributes:
        layer, channel, intervention: what.
        cases: n.
        median_relative: of the relative change, %.
        interval: that holds this median with 95 % confidence if cases are independent; or None.
        median_points: percentage points.
        lowered: share of cases whose probability fell.
        median_size: of |relative change|, %.
        control_sizes: the same of every control, in the order of the table's controls.
        rank: of the channel's among these, 1 the largest; ties count against it.
        p_size: over cases, that |relative change| is larger than the controls': in each case the
            channel is ranked among its controls, and the sum of ranks is compared with that of
            ranks by chance (:func:`rank_sum_p`). One side, exact. It
            says whether the difference holds over cases; whether it holds over channels is the
            rank's to say, which chance makes 1 in one of N + 1 tables.
        p_lowered: likewise, that the probability falls more than with the controls.
    """

    layer: int
    channel: int
    intervention: str
    cases: int
    median_relative: float
    interval: tuple[float, float] | None
    median_points: float
    lowered: float
    median_size: float
    control_sizes: tuple[float, ...]
    rank: int
    p_size: float
    p_lowered: float

    @property
    def beats_controls(self) -> bool:
        """Whether it moves words more than every control, over cases with p_size below 0.05."""
        return self.rank == 1 and self.p_size < SIGNIFICANT


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
        """Return the change of every case, in % or in percentage points.

        Raises:
            InputError: it was not measured, or is asked for in another unit.
        """
        if (place, intervention) not in self.measured:
            raise InputError(
                f"{intervention!r} of channel {place[1]} in layer {place[0]} was not measured."
            )
        if by not in ("relative", "points"):
            raise InputError(f"changes are 'relative' or in 'points', not {by!r}.")
        difference = self.measured[place, intervention].probability - self.baseline
        return (100 * (difference / self.baseline if by == "relative" else difference)).tolist()

    def rows(self) -> list[dict[str, Any]]:
        """Return every cell, a control once for each channel that it is drawn for.

        Its keys are ``concept``, ``context`` and ``target`` of the case; ``measured``, the text
        whose probability this is: the target, or its first token; ``layer`` and ``channel`` that
        were intervened on; ``control_of``, the channel that it is a control of, or None;
        ``intervention``; ``baseline`` p and ``probability`` p′; ``relative`` 100 (p′ / p − 1), %;
        ``points`` 100 (p′ − p); and ``deviation`` of p′ over random prototypes, or None.
        """
        rows: list[dict[str, Any]] = []
        for chosen in self.channels:
            for place in (chosen, *self.controls[chosen]):
                for name in self.options.interventions:
                    rows += self._cells(place, name, None if place == chosen else chosen)
        return rows

    def summaries(self) -> list[Summary]:
        """Return what each channel and intervention come to."""
        names = self.options.interventions
        return [self._summary(place, name) for place in self.channels for name in names]

    def to_dict(self) -> dict[str, Any]:
        """Return settings, cases, cells and summaries, for JSON."""
        return {
            "cases": len(self.probes),
            "left_out": len(self.left_out),
            "minimum_probability": self.options.minimum_probability,
            "channels": [list(place) for place in self.channels],
            "controls": [[list(c) for c in self.controls[place]] for place in self.channels],
            "control_from": self.options.control_from,
            "interventions": list(self.options.interventions),
            "reinitialisations": self.options.reinitialisations,
            "seed": self.options.seed,
            "summaries": [
                asdict(summary) | {"beats_controls": summary.beats_controls}
                for summary in self.summaries()
            ],
            "rows": self.rows(),
        }

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write the cells, one row each; ``control_of`` is two columns, null where it is none."""
        rows = self.rows()
        for row in rows:
            row["control_of_layer"], row["control_of_channel"] = row["control_of"] or (None, None)
        write_table(path, pa.Table.from_pylist(rows, schema=_SCHEMA))

    def to_markdown(self, by: By = "relative") -> str:
        """Return tables as the source's: a row for each case, then the summary.

        In brackets is the median of the controls.
        """
        unit = "%" if by == "relative" else "percentage points"
        least = 100 * self.options.minimum_probability
        lines = [
            f"{len(self.probes)} cases; {len(self.left_out)} left out whose target has a "
            f"probability below {least:.3g} %. Changes in {unit}; in brackets the median of the "
            "controls.",
            "",
        ]
        for place in self.channels:
            lines += [*self._markdown(place, by), ""]
        return "\n".join([*lines, *_summary_lines(self.summaries())]) + "\n"

    def _cells(self, place: Channel, name: str, control_of: Channel | None) -> list[dict[str, Any]]:
        layer, channel = place
        probability, deviation = self.measured[place, name]
        relative, points = (self.changes(place, name, by) for by in ("relative", "points"))
        return [
            {
                **{key: getattr(probe, key) for key in CASE},
                "layer": layer,
                "channel": channel,
                "control_of": control_of,
                "intervention": name,
                "baseline": float(self.baseline[i]),
                "probability": float(probability[i]),
                "relative": relative[i],
                "points": points[i],
                "deviation": None if deviation is None else float(deviation[i]),
            }
            for i, probe in enumerate(self.probes)
        ]

    def _summary(self, place: Channel, name: str) -> Summary:
        own = self.changes(place, name)
        others = [self.changes(control, name) for control in self.controls[place]]
        sizes = [[abs(x) for x in row] for row in (own, *others)]
        median, *controls = (statistics.median(row) for row in sizes)
        columns = list(zip(*others, strict=True))
        pairs = list(zip(own, columns, strict=True))
        by_size = [rank_among(abs(x), [abs(y) for y in c]) for x, c in pairs]
        by_fall = [rank_among(-x, [-y for y in c]) for x, c in pairs]
        return Summary(
            *place,
            name,
            len(own),
            statistics.median(own),
            median_interval(own),
            statistics.median(self.changes(place, name, "points")),
            sum(x < 0 for x in own) / len(own),
            median,
            tuple(controls),
            1 + sum(control >= median for control in controls),
            rank_sum_p(by_size, len(others)),
            rank_sum_p(by_fall, len(others)),
        )

    def _markdown(self, place: Channel, by: By) -> list[str]:
        names = [SHORT[name] for name in self.options.interventions]
        controls = ", ".join(channel_name(control) for control in self.controls[place])
        lines = [
            f"**{channel_name(place)}**, controls {controls}",
            "",
            f"| context | target | base, % | {' | '.join(names)} |",
            "|---|---|---|" + "---|" * len(names),
        ]
        columns: list[list[str]] = []
        for name in self.options.interventions:
            others = [self.changes(control, name, by) for control in self.controls[place]]
            middle = np.median(np.array(others), axis=0).tolist()
            pairs = zip(self.changes(place, name, by), middle, strict=True)
            columns.append([f"{own:+.2f} ({other:+.2f})" for own, other in pairs])
        for i, probe in enumerate(self.probes):
            cells = " | ".join(column[i] for column in columns)
            lines.append(
                f"| {shown(probe.context)} | {cell(probe.label)} | "
                f"{100 * float(self.baseline[i]):.2f} | {cells} |"
            )
        return lines


_SCHEMA = pa.schema(
    [(name, pa.string()) for name in CASE]
    + [(name, pa.int64()) for name in ("layer", "channel")]
    + [("intervention", pa.string())]
    + [(n, pa.float64()) for n in ("baseline", "probability", "relative", "points", "deviation")]
    + [(name, pa.int64()) for name in ("control_of_layer", "control_of_channel")]
)


def channel_name(place: Channel) -> str:
    """Return a channel as the source writes it: ``L9 P7``."""
    return f"L{place[0]} P{place[1]}"


def shown(context: str) -> str:
    """Return the end of a context as a cell of a table."""
    flat = " ".join(context.split())
    return cell(flat if len(flat) <= CONTEXT_SHOWN else f"…{flat[-CONTEXT_SHOWN:]}")


def cell(text: str) -> str:
    """Return text that a Markdown table takes as it is."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def interval_text(interval: tuple[float, float] | None) -> str:
    """Return an interval's ends, or a dash."""
    return "–" if interval is None else f"{interval[0]:+.2f} to {interval[1]:+.2f}"


def _summary_lines(summaries: Sequence[Summary]) -> list[str]:
    lines = [
        "| channel | intervention | cases | median change, % | 95 % interval | median size, % | "
        "controls' | rank | p size | p lowered |",
        "|" + "---|" * 10,
    ]
    for s in summaries:
        controls = f"{min(s.control_sizes):.2f} to {max(s.control_sizes):.2f}"
        lines.append(
            f"| {channel_name((s.layer, s.channel))} | {SHORT[s.intervention]} | {s.cases} | "
            f"{s.median_relative:+.2f} | {interval_text(s.interval)} | {s.median_size:.2f} | "
            f"{controls} | {s.rank} of {len(s.control_sizes) + 1} | {s.p_size:.3g} | "
            f"{s.p_lowered:.3g} |"
        )
    return lines
