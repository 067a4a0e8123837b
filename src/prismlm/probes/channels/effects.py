"""What interventions on channels do to the probability of words, with control channels.

Source: ProtoT, A.3, Tables 6 to 9. The source picks its control by hand and has no test; here
controls are drawn, a channel is compared with all of them, and tests are exact.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

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
"""Random prototypes drawn for each channel."""
TOKENS_PER_BATCH = 4096
LOGIT_ROWS = 64


@dataclass(frozen=True)
class TableOptions:
    """How a table is measured.

    Attributes:
        controls: channels of its layer drawn for each one, none of them measured itself.
        interventions: names, of :data:`INTERVENTIONS`.
        minimum_probability: cases with less without an intervention are left out, and counted.
        first_token: measure the first token of a target of several.
        seed: of controls and random prototypes.
    """

    controls: int = 5
    interventions: Sequence[str] = INTERVENTIONS
    minimum_probability: float = 0.01
    first_token: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.interventions:
            check_choice("an intervention", name, INTERVENTIONS)
        check_whole("the seed", self.seed)
        least, expected = self.minimum_probability, "a number between 0 and 1"
        check_number("minimum_probability", least, expected, lambda share: 0 < share < 1)


@dataclass(frozen=True, eq=False)
class EffectTable:
    """What interventions did to n cases.

    Attributes:
        probes: the cases that were measured.
        left_out: how many there are whose baseline is below the minimum.
        baseline: p of each, float64 on the CPU.
        controls: the channels drawn for each of those asked for.
        measured: p of each case by channel and intervention, of random prototypes the mean.
        options: how it was measured.
    """

    probes: tuple[Probe, ...]
    left_out: int
    baseline: Float64[Tensor, " n"]
    controls: Mapping[Channel, tuple[Channel, ...]]
    measured: Mapping[tuple[Channel, str], Float64[Tensor, " n"]]
    options: TableOptions

    def changes(self, place: Channel, intervention: str, by: By = "relative") -> list[float]:
        """Return the change of every case, in % or in percentage points."""
        difference = self.measured[place, intervention] - self.baseline
        return (100 * (difference / self.baseline if by == "relative" else difference)).tolist()

    def rows(self) -> list[Row]:
        """Return every cell, a control once for each channel that it is drawn for.

        ``measured`` is the text whose probability this is; ``control_of`` the channel that the row
        is a control of, or None; ``baseline`` p, ``probability`` p′, ``relative`` 100 (p′ / p − 1)
        %, and ``points`` 100 (p′ − p).
        """
        rows: list[Row] = []
        for chosen, controls in self.controls.items():
            places = {chosen: None} | dict.fromkeys(controls, chosen)
            for (place, control_of), name in product(places.items(), self.options.interventions):
                figures = {
                    "baseline": self.baseline.tolist(),
                    "probability": self.measured[place, name].tolist(),
                    "relative": self.changes(place, name),
                    "points": self.changes(place, name, "points"),
                }
                rows += [
                    {"concept": probe.concept, "context": probe.context, "target": probe.target}
                    | {"measured": probe.measured, "layer": place[0], "channel": place[1]}
                    | {"control_of": control_of, "intervention": name}
                    | {key: column[number] for key, column in figures.items()}
                    for number, probe in enumerate(self.probes)
                ]
        return rows

    def summary(self) -> Table:
        """Return what each channel and intervention come to over all cases, beside controls.

        Rows have the ``median_relative`` change, %, with a 95 % interval from ``low`` to ``high``
        if cases are independent; ``median_points``; ``lowered``, the share of cases whose
        probability fell; ``median_size``, of |relative change|; ``control_sizes``, the same of
        every control; the channel's ``rank`` among these, ties against it; ``p_size``, that of
        :func:`rank_sum_p` by |relative change|, over cases and not over channels; and
        ``beats_controls``: rank 1 and p_size < 0.05.
        """
        rows = tuple(
            self._summary(*chosen) for chosen in product(self.controls, self.options.interventions)
        )
        facts = {"cases": len(self.probes), "left_out": self.left_out} | asdict(self.options)
        columns = {"layer": "", "channel": "", "intervention": "", "median_relative": "+.2f",
                   "low": "+.2f", "high": "+.2f", "median_size": ".2f", "largest_control": ".2f",
                   "rank": "", "p_size": ".3g"}  # fmt: skip
        return Table("Relative change of the probability, %", columns, rows, facts)

    def _summary(self, place: Channel, name: str) -> Row:
        own, *others = np.array([self.changes(p, name) for p in (place, *self.controls[place])])
        median, *controls = (float(np.median(abs(changes))) for changes in (own, *others))
        # Fewer than 6 independent values have no such interval.
        low, high = stats.quantile_test(own).confidence_interval(0.95)
        rank = 1 + sum(size >= median for size in controls)
        p_size = rank_sum_p(ranks_among(abs(own), abs(np.array(others))), len(others))
        return {
            "layer": place[0],
            "channel": place[1],
            "intervention": name,
            "cases": len(own),
            "median_relative": float(np.median(own)),
            "low": None if math.isnan(low) else float(low),
            "high": None if math.isnan(high) else float(high),
            "median_points": float(np.median(self.changes(place, name, "points"))),
            "lowered": float((own < 0).mean()),
            "median_size": median,
            "control_sizes": controls,
            "largest_control": max(controls),
            "rank": rank,
            "p_size": p_size,
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
        value = {"channels": list(self.controls), "summaries": summary.rows, "rows": self.rows()}
        return as_json(summary.facts | {"controls": list(self.controls.values())} | value)

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
) -> EffectTable:
    """Measure what interventions on channels, (layer, channel) each, do to the targets of cases.

        relative change = 100 (p′ / p − 1) %   (Table 6),   100 (p′ − p) points   (Table 7)

    p is the probability of the target after the context, p′ with the intervention, of random
    prototypes the mean over several. The model is in evaluation mode.
    """
    by = options or TableOptions()
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
    measured: dict[tuple[Channel, str], Tensor] = {}
    places = dict.fromkeys([*chosen, *(c for row in controls.values() for c in row)])
    seeds = range(by.seed, by.seed + REINITIALISATIONS)
    with progress.task("Intervening", len(places), unit="channels") as task:
        for place in places:
            for name in by.interventions:
                tried = [Reinitialise(*place, seed) for seed in seeds]
                runs: list[Tensor] = []
                for intervention in tried if name == RANDOM else [MASKS[name](*place)]:
                    with intervene(model, intervention):
                        runs.append(target_probabilities(model, used))
                measured[place, name] = torch.stack(runs).mean(0)
            task.advance()
    left_out = len(probes) - len(used)
    return EffectTable(used, left_out, baseline[enough], controls, measured, by)


def draw_controls(
    model: PreTrainedModel, place: Channel, by: TableOptions, exclude: Sequence[Channel] = ()
) -> tuple[Channel, ...]:
    """Draw control channels for one from its layer, by the seed and the channel's place."""
    mixers = mixers_of(model)
    layer, channel = place
    check_layer(len(mixers), layer)
    count = mixers[layer].channels
    check_channel(count, layer, channel)
    free = [one for k in range(count) if (one := (layer, k)) not in {place, *exclude}]
    if not 1 <= by.controls <= len(free):
        raise InputError(
            f"{by.controls} control channels for channel {channel} of layer {layer}: expected 1 to "
            f"{len(free)}, the channels of the layer that are not measured themselves."
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
