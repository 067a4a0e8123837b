"""Cases as tokens; effects against one forward pass for each cell; exact tests over cases."""

import itertools
import json
import statistics

import numpy as np
import pytest
import torch

from prismlm.errors import InputError
from prismlm.interventions.channels import MaskRead, MaskWrite, Reinitialise, intervene
from prismlm.probes.channels import effects
from prismlm.probes.channels.effects import (
    Case,
    Probe,
    draw_controls,
    effect_of,
    effects_on,
    load_cases,
    probe_of,
    rank_sum_p,
    target_probabilities,
)
from tests.helpers.mixer_models import CHANNELS, make_model, tokens


def test_the_bundled_sets():
    contexts = []
    for name in ("covid", "men", "mental_health", "new_zealand", "women"):
        cases = load_cases(name)
        assert 12 <= len(cases) <= 20
        assert len({case.concept for case in cases}) == 1
        for case in cases:
            # The loader joins by one space, and Table 6's contexts end before the target.
            assert case.context == case.context.strip()
            assert case.target.isalpha()
        contexts += [case.context for case in cases]
    assert len(set(contexts)) == len(contexts)


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "own.jsonl"
    row = {"concept": "river", "context": "The river carries", "target": "stones"}
    path.write_text(json.dumps(row) + "\n\n" + json.dumps(row | {"context": "Old"}) + "\n")
    assert load_cases(path) == (
        Case("river", "The river carries", "stones"),
        Case("river", "Old", "stones"),
    )
    # JSON may have it inside a text as it is.
    apart = row | {"context": "The river\u2028carries"}
    path.write_text(json.dumps(apart, ensure_ascii=False), encoding="utf-8")
    assert load_cases(path) == (Case(**apart),)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"concept": "a", "context": "b"}',
            "line 2: expected a JSON object of concept, context, target",
        ),
        ('{"concept": "a", "context": " ", "target": "c"}', "line 2: .* each a text"),
        ('{"concept": "a", "context": "\\ud800", "target": "c"}', "'context' holds half of a"),
        ("[1]", r"line 2: .* found \[1\]"),
        ("concept", "line 2: .* found concept"),
    ],
)
def test_a_line_that_is_no_case_is_named(tmp_path, line, message):
    path = tmp_path / "own.jsonl"
    path.write_text('{"concept": "a", "context": "b", "target": "c"}\n' + f"{line}\n")
    with pytest.raises(InputError, match=message):
        load_cases(path)
    with pytest.raises(InputError, match=r"bundled sets covid, men.*Did you mean 'women'"):
        load_cases("woman")


def test_targets_in_tokens(tokenizer):
    whole = tokenizer("The river carries stones", add_special_tokens=False)["input_ids"]
    pieces = tokenizer.tokenize(" stones")
    context = "The river carries "
    if len(pieces) == 1:
        result = probe_of(tokenizer, Case("c", context, " stones"))
        assert (*result.ids, result.target_id) == tuple(whole)
        assert result.context == "The river carries"
    case = Case("c", context, "zebras")
    pieces = [tokenizer.decode([i]) for i in tokenizer(" zebras")["input_ids"]]
    assert len(pieces) > 1
    with pytest.raises(InputError, match=f"is {len(pieces)} tokens, ' '?") as error:
        probe_of(tokenizer, case)
    assert ", ".join(map(repr, pieces)) in str(error.value)
    assert "'The river carries'" in str(error.value)
    first = probe_of(tokenizer, case, first_token=True)
    assert first.target_id == tokenizer(" zebras")["input_ids"][0]
    shown = pieces[0].strip() or "␣"
    assert first.target == f"{shown}… of zebras"


LENGTHS = (7, 3, 12, 7, 12, 1, 12, 3)
PLACE = (1, 2)


def probes():
    result = []
    for i, length in enumerate(LENGTHS):
        ids = tokens(length + 1, seed=i).tolist()
        result.append(Probe("c", f"context {i}", f"w{i}", tuple(ids[:-1]), ids[-1]))
    return result


@pytest.fixture(scope="module")
def sharp_model():
    # Sharp gates: one channel is not like the other.
    # In float64: float32 sums differ from processor to processor, and deviations with them.
    model = make_model(num_hidden_layers=2).double()
    for block in model.model.layers:
        block.mixer.prototypes.mul_(4)
    return model


@pytest.fixture(scope="module")
def report(sharp_model):
    # Two of the cases are left out.
    least = target_probabilities(sharp_model, probes()).sort().values[2].item()
    settings = {"controls": 3, "minimum_probability": least, "seed": 7}
    return effects_on(sharp_model, probes(), [PLACE], **settings)


def alone(model, probe):
    logits = model(torch.tensor([probe.ids]), use_cache=False).logits[0, -1]
    return logits.double().softmax(-1)[probe.target_id].item()


def test_probabilities_are_those_of_each_context_alone(sharp_model, monkeypatch):
    expected = [alone(sharp_model, probe) for probe in probes()]
    for tokens_per_batch in (1, 24, 4096):
        monkeypatch.setattr(effects, "BATCH_TOKENS", tokens_per_batch)
        result = target_probabilities(sharp_model, probes())
        assert result.tolist() == pytest.approx(expected, rel=1e-4)
    sharp_model.train()
    assert torch.equal(target_probabilities(sharp_model, probes()), result)
    assert sharp_model.training
    sharp_model.eval()


def test_every_cell_is_one_forward_pass(sharp_model, report):
    assert report.facts == {"cases": len(LENGTHS) - 2, "left_out_cases": 2}
    table = report["L1 P2"]
    assert len(table.rows) == len(LENGTHS) - 2
    assert table["controls"] == [f"L1 P{k}" for _, k in draw_controls(sharp_model, PLACE, 3, 7)]
    made = {
        "random": [Reinitialise(*PLACE, seed) for seed in (7, 8, 9)],
        "mask": [MaskWrite(*PLACE)],
        "write −∞": [MaskWrite(*PLACE, renormalise=True)],
        "read −∞": [MaskRead(*PLACE, renormalise=True)],
    }
    by_context = {probe.context: probe for probe in probes()}
    for row in table.rows:
        probe = by_context[row["context"]]
        base = alone(sharp_model, probe)
        assert row["base"] == pytest.approx(base, rel=1e-4)
        for name, interventions in made.items():
            after = []
            for intervention in interventions:
                with intervene(sharp_model, intervention):
                    after.append(alone(sharp_model, probe))
            expected = 100 * (statistics.mean(after) / base - 1)
            assert row[name] == pytest.approx(expected, rel=1e-2, abs=1e-2)


def test_a_summary_is_of_the_cells_and_of_the_controls(sharp_model, report):
    (mask,) = (row for row in report["summary"].rows if row["intervention"] == "mask_write")
    cells = {row["context"]: row["mask"] for row in report["L1 P2"].rows}
    assert mask["median_relative"] == pytest.approx(statistics.median(cells.values()))
    chosen = [probe for probe in probes() if probe.context in cells]
    before = target_probabilities(sharp_model, chosen)
    sizes = []
    for control in draw_controls(sharp_model, PLACE, 3, 7):
        with intervene(sharp_model, MaskWrite(*control)):
            changes = 100 * (target_probabilities(sharp_model, chosen) / before - 1)
        sizes.append(statistics.median(changes.abs().tolist()))
    assert mask["control_sizes"] == pytest.approx(sizes)


def test_summaries_by_hand():
    # Two cases, one channel, two controls.
    row = effect_of(np.array([-50.0, 50.0]), np.array([[-5.0, 0.0], [10.0, -37.5]]))
    assert row["median_relative"] == 0
    assert row["lowered"] == 0.5
    assert row["low"] is row["high"] is None
    assert row["median_size"] == 50
    assert row["control_sizes"] == [2.5, 23.75]
    assert row["rank"] == 1
    # The largest of three in both cases: one of the nine ways to rank them.
    assert row["p_size"] == pytest.approx(1 / 9)
    assert not row["beats_controls"]


def test_controls_are_drawn_by_seed_and_place(sharp_model):
    drawn = draw_controls(sharp_model, PLACE, 4, 3)
    assert drawn == draw_controls(sharp_model, PLACE, 4, 3)
    assert all(layer == 1 and channel != 2 for layer, channel in drawn)
    assert len(set(drawn)) == 4
    drawn = [draw_controls(sharp_model, PLACE, 3, seed, [(1, 0)]) for seed in range(20)]
    anywhere = {control for controls in drawn for control in controls}
    assert anywhere == {(1, channel) for channel in (1, 3, 4, 5)}
    assert CHANNELS == 6
    with pytest.raises(InputError, match=r"6 control channels.*1 to 5"):
        draw_controls(sharp_model, PLACE, 6, 0)
    with pytest.raises(InputError, match="no channel 6 in layer 1"):
        draw_controls(sharp_model, (1, 6), 1, 0)


def test_what_cannot_be_measured_is_refused(sharp_model):
    with pytest.raises(InputError, match=r"none of 8 cases.*the highest is"):
        effects_on(sharp_model, probes(), [PLACE], minimum_probability=0.9)


@pytest.mark.parametrize(("ranks", "others"), [([2, 1, 2], 2), ([0.5, 3, 1], 3), ([0, 0], 4)])
def test_the_rank_sum_is_that_of_every_way_to_rank(ranks, others):
    ways = [sum(way) for way in itertools.product(range(others + 1), repeat=len(ranks))]
    expected = sum(way >= sum(ranks) for way in ways) / len(ways)
    assert rank_sum_p(ranks, others) == pytest.approx(expected)
