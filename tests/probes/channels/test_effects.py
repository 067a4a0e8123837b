"""Tables of interventions against one forward pass for each cell, and exact tests over cases."""

import dataclasses
import itertools
import json
import statistics

import pyarrow.parquet as pq
import pytest
import torch

from prismlm.errors import InputError
from prismlm.interventions.channels import MaskRead, MaskWrite, Reinitialise, intervene
from prismlm.probes.channels import effects, effects_on
from prismlm.probes.channels.case_files import Case, Probe
from prismlm.probes.channels.concepts import concept_in_model
from prismlm.probes.channels.effects import (
    INTERVENTIONS,
    TableOptions,
    draw_controls,
    rank_sum_p,
    target_probabilities,
)
from tests.helpers.mixer_models import CHANNELS, make_model, tokens

LENGTHS = (7, 3, 12, 5, 12, 1, 9, 4)
PLACE = (1, 2)


def probes():
    found = []
    for i, length in enumerate(LENGTHS):
        ids = tokens(length + 1, seed=i).tolist()
        found.append(Probe("c", f"context {i}", f"w{i}", tuple(ids[:-1]), ids[-1]))
    return found


@pytest.fixture(scope="module")
def model():
    # Sharp gates: one channel is not like the other.
    # In float64: float32 sums differ from processor to processor, and deviations with them.
    model = make_model().double()
    for block in model.model.layers:
        block.mixer.prototypes.mul_(4)
    return model


@pytest.fixture(scope="module")
def table(model):
    # Two of the cases are left out.
    least = target_probabilities(model, probes()).sort().values[2].item()
    options = TableOptions(controls=3, minimum_probability=least, seed=7)
    return effects_on(model, probes(), [PLACE], options)


def alone(model, probe):
    logits = model(torch.tensor([probe.ids]), use_cache=False).logits[0, -1]
    return logits.double().softmax(-1)[probe.target_id].item()


@pytest.mark.parametrize("tokens_per_batch", [1, 24, 4096])
def test_probabilities_are_those_of_each_context_alone(model, tokens_per_batch, monkeypatch):
    monkeypatch.setattr(effects, "TOKENS_PER_BATCH", tokens_per_batch)
    found = target_probabilities(model, probes())
    expected = [alone(model, probe) for probe in probes()]
    assert found.tolist() == pytest.approx(expected, rel=1e-4)
    with pytest.raises(InputError, match="training mode"):
        target_probabilities(make_model().train(), probes())


def test_every_cell_is_one_forward_pass(model, table):
    assert (len(table.probes), table.left_out) == (len(LENGTHS) - 2, 2)
    assert len(table.controls[PLACE]) == 3
    rows = table.rows()
    assert len(rows) == len(table.probes) * 4 * len(INTERVENTIONS)
    by_context = {probe.context: (probe, alone(model, probe)) for probe in probes()}
    for row in rows:
        probe, base = by_context[row["context"]]
        place = (row["layer"], row["channel"])
        assert row["control_of"] == (None if place == PLACE else PLACE)
        if row["intervention"] == "reinitialise":
            made = [Reinitialise(*place, seed) for seed in (7, 8, 9)]
        else:
            kind = MaskWrite if "write" in row["intervention"] else MaskRead
            made = [kind(*place, renormalise="renormalised" in row["intervention"])]
        after = []
        for intervention in made:
            with intervene(model, intervention):
                after.append(alone(model, probe))
        mean = statistics.mean(after)
        assert row["baseline"] == pytest.approx(base, rel=1e-4)
        assert row["probability"] == pytest.approx(mean, rel=1e-4)
        assert row["relative"] == pytest.approx(100 * (mean / base - 1), rel=1e-2, abs=1e-2)
        assert row["points"] == pytest.approx(100 * (mean - base), rel=1e-2, abs=1e-4)


def test_summaries_by_hand(table):
    # Two cases, one channel, two controls, all figures made up.
    measured = {
        (place, "mask_write"): torch.tensor(values, dtype=torch.float64)
        for place, values in {
            (1, 2): [0.1, 0.6],
            (1, 0): [0.19, 0.4],
            (1, 1): [0.22, 0.25],
        }.items()
    }
    small = dataclasses.replace(
        table,
        probes=table.probes[:2],
        baseline=torch.tensor([0.2, 0.4], dtype=torch.float64),
        controls={PLACE: ((1, 0), (1, 1))},
        measured=measured,
        options=TableOptions(interventions=("mask_write",)),
    )
    assert small.changes(PLACE, "mask_write") == pytest.approx([-50, 50])
    assert small.changes((1, 1), "mask_write", "points") == pytest.approx([2, -15])
    (summary,) = small.summary().rows
    assert summary["median_relative"] == pytest.approx(0, abs=1e-9)
    assert summary["median_points"] == pytest.approx(5)
    assert summary["lowered"] == 0.5
    assert summary["low"] is summary["high"] is None
    assert summary["median_size"] == pytest.approx(50)
    assert summary["control_sizes"] == pytest.approx([2.5, 23.75])
    assert summary["rank"] == 1
    # The largest of three in both cases: one of the nine ways to rank them.
    assert summary["p_size"] == pytest.approx(1 / 9)
    assert not summary["beats_controls"]


def test_forms(table, tmp_path):
    value = json.loads(json.dumps(table.to_dict(), allow_nan=False))
    assert value["cases"] + value["left_out"] == len(LENGTHS)
    assert len(value["summaries"]) == len(INTERVENTIONS)
    assert value["rows"][0]["relative"] == table.rows()[0]["relative"]
    table.to_parquet(tmp_path / "table.parquet")
    rows = pq.read_table(tmp_path / "table.parquet").to_pylist()
    assert len(rows) == len(table.rows())
    assert rows[0]["control_of_layer"] is None
    assert (rows[-1]["control_of_layer"], rows[-1]["control_of_channel"]) == PLACE
    assert rows[-1]["probability"] == table.rows()[-1]["probability"]


def test_controls_are_drawn_by_seed_and_place(model):
    drawn = draw_controls(model, PLACE, TableOptions(4, seed=3))
    assert drawn == draw_controls(model, PLACE, TableOptions(4, seed=3))
    assert all(layer == 1 and channel != 2 for layer, channel in drawn)
    assert len(set(drawn)) == 4
    seeds = [TableOptions(3, seed=seed) for seed in range(20)]
    anywhere = {c for by in seeds for c in draw_controls(model, PLACE, by, [(1, 0)])}
    assert anywhere == {(1, channel) for channel in (1, 3, 4, 5)}
    assert CHANNELS == 6
    with pytest.raises(InputError, match=r"6 control channels.*1 to 5"):
        draw_controls(model, PLACE, TableOptions(6))
    with pytest.raises(InputError, match="no channel 6 in layer 1"):
        draw_controls(model, (1, 6), TableOptions(1))


def test_cases_become_tokens(corpus):
    model = make_model(len(corpus.tokenizer))
    context = "Old maps forgets letters"
    ids = corpus.tokenizer(context + " in")["input_ids"]
    assert len(ids) == len(corpus.tokenizer(context)["input_ids"]) + 1
    cases = [Case("c", context, "in")]
    options = TableOptions(controls=1, minimum_probability=1e-9)
    found = concept_in_model(
        model, corpus.tokenizer, cases, channels=[(2, 0)], options=options
    ).table
    assert (*found.probes[0].ids, found.probes[0].target_id) == tuple(ids)
    with pytest.raises(InputError, match="tokens"):
        concept_in_model(model, corpus.tokenizer, [Case("c", context, "zzz")], channels=[(2, 0)])


def test_what_cannot_be_measured_is_refused(model):
    with pytest.raises(InputError, match=r"none of 8 cases.*the highest is"):
        effects_on(model, probes(), [PLACE], TableOptions(minimum_probability=0.9))
    for settings, message in (
        ({"minimum_probability": 1.0}, "between 0 and 1"),
        ({"seed": -1}, "the seed is -1"),
        ({"interventions": ("mask_writes",)}, "Did you mean 'mask_write'"),
    ):
        with pytest.raises(InputError, match=message):
            TableOptions(**settings)


@pytest.mark.parametrize(("ranks", "others"), [([2, 1, 2], 2), ([0.5, 3, 1], 3), ([0, 0], 4)])
def test_the_rank_sum_is_that_of_every_way_to_rank(ranks, others):
    ways = [sum(way) for way in itertools.product(range(others + 1), repeat=len(ranks))]
    expected = sum(way >= sum(ranks) for way in ways) / len(ways)
    assert rank_sum_p(ranks, others) == pytest.approx(expected)
