"""Pairs of texts; next-token distributions, by hand and of tiny models; clamped routing."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from prismlm.errors import FormatError, InputError
from prismlm.eval import robustness
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.seam import last_logits

ROW = {"id": "0", "slice": "typo", "original": "It was good.", "perturbed": "It was giod."}


def write(path, *rows, schema=robustness.COLUMNS):
    pq.write_table(pa.Table.from_pylist(list(rows), schema), path)
    return path


def test_pairs_come_slice_by_slice_and_a_limit_samples_each(tmp_path):
    rows = [ROW | {"id": f"{s}-{n}", "slice": s} for s in ("gender", "typo") for n in range(9)]
    path = write(tmp_path / "a.parquet", *rows)
    assert [pair.slice for pair in robustness.read_pairs(path)] == ["typo"] * 9 + ["gender"] * 9
    sample = robustness.read_pairs(path, 3)
    assert [pair.slice for pair in sample] == ["typo"] * 3 + ["gender"] * 3
    assert sample == robustness.read_pairs(path, 3) != robustness.read_pairs(path, 3, seed=1)


def test_other_rows_and_files_are_refused(tmp_path):
    for message, *rows in (
        ("has 0 rows",),
        ("row 1 of .*'tpyo'.*one of the slices synonym, typo", ROW, ROW | {"slice": "tpyo"}),
        ("row 0 of .*expected texts", ROW | {"perturbed": None}),
    ):
        with pytest.raises(FormatError, match=message):
            robustness.read_pairs(write(tmp_path / "a.parquet", *rows))
    (tmp_path / "a.parquet").write_text("text")
    with pytest.raises(FormatError, match="cannot be read as Parquet"):
        robustness.read_pairs(tmp_path / "a.parquet")
    ids = pa.schema([robustness.COLUMNS.field("id")])
    with pytest.raises(FormatError, match="expected rows of id, slice, original, perturbed"):
        robustness.read_pairs(write(tmp_path / "b.parquet", {"id": "a"}, schema=ids))


KINDS = ("protot", "llama", "gpt2", "mamba")


def log(*probabilities):
    return torch.tensor([probabilities], dtype=torch.float64).log()


def test_divergence_and_ranks_by_hand():
    for p, q, expected in (
        # H(¾, ¼) − ½ H(½, ½) − ½ H(1, 0), in bits
        ((0.5, 0.5), (1, 0), -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25)) - 0.5),
        ((1, 0), (0.5, 0.5), 0.311278),
        ((0, 1), (1, 0), 1),
        ((0.5, 0.5), (0.5, 0.5), 0),
    ):
        js = robustness.jensen_shannon(log(*p), log(*q))
        assert js.item() == pytest.approx(expected, abs=1e-6)
    p, q = log(0.4, 0.3, 0.2, 0.1), log(0.1, 0.3, 0.35, 0.25)
    assert float(robustness.top_overlap(p, q, 2)) == 0.5
    assert float(robustness.top_overlap(p, q, 10)) == 1
    assert float(robustness.same_top(p, q)) == 0
    assert float(robustness.same_top(p, p)) == 1
    # Ranks 4 3 2 1 and 1 3 4 2: 1 − 6 (9 + 0 + 4 + 1) / (4 · 15)
    assert float(robustness.rank_correlation(p, q)) == pytest.approx(-0.4)
    # Of the top two of either, tokens 0, 1 and 2: ranks 3 2 1 and 1 2 3.
    assert float(robustness.rank_correlation(p, q, 2)) == pytest.approx(-1)


def test_a_temperature_gives_the_target_entropy():
    logits = np.random.default_rng(0).normal(size=(100, 9)).astype(np.float32)
    rows = np.arange(0, 100, 2)
    for target in (0.3, 1.2, 1.5):
        temperature = robustness.matching_temperature(logits, rows, target)
        assert robustness.mean_entropy(logits, rows, temperature) == pytest.approx(target, abs=1e-5)


@pytest.mark.parametrize("kind", ["protot", "gpt2"])
def test_logits_of_a_batch_equal_those_of_single_texts(studied, kind):
    model, tokenizer = read_checkpoint(studied / kind)
    sentence = "A teacher describes the names of birds."
    rows = robustness.encode(model, tokenizer, ["The river", sentence, "Old maps", "The river c"])
    counts = []
    logits = robustness.logits_on_disk(model, [*rows, []], counts.append)
    assert sum(counts) == 4
    assert not logits[4].any()
    for row, ids in zip(logits, rows, strict=False):
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([ids])).logits[0, -1]
        assert np.allclose(row, expected, atol=1e-5)


def test_texts_get_the_tokenizers_prefix_but_not_its_suffix(studied):
    model, tokenizer = read_checkpoint(studied / "llama")
    (plain,) = robustness.encode(model, tokenizer, ["The river"])
    assert plain == tokenizer("The river", add_special_tokens=False)["input_ids"]
    name, number = tokenizer.eos_token, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{name} $A {name}", special_tokens=[(name, number)]
    )
    assert tokenizer("The river")["input_ids"] == [number, *plain, number]
    assert robustness.encode(model, tokenizer, ["The river", ""]) == [[number, *plain], []]


# -- models compared


@pytest.fixture(scope="module", autouse=True)
def few_resamples():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prismlm.statistics.RESAMPLES", 100)
        yield


@pytest.fixture(scope="module")
def models(studied):
    return [robustness.OpenedModel(kind, *read_checkpoint(studied / kind)) for kind in KINDS]


@pytest.fixture(scope="module")
def pairs(studied):
    return robustness.read_pairs(studied / "pairs.parquet")


def test_every_slice_has_figures_of_each_model_and_differences(models, pairs):
    result = robustness.measure_robustness(models, pairs)
    counts = [(part["name"], part["pairs"]) for part in result["slices"]]
    assert counts == [("synonym", 6), ("typo", 6), ("punctuation", 6), ("negation", 7)]
    assert (result["comparable"], result["left_out"]) == (True, 0)
    for part in result["slices"]:
        assert tuple(part["models"]) == KINDS
        for figures in part["models"].values():
            assert 0 < figures["js"].low <= figures["js"].value <= figures["js"].high < 1
        assert len(part["differences"]) == 6
        for figures in part["differences"]:
            first, second = (part["models"][name] for name in figures["of"])
            for key in robustness.MEASURES:
                difference = first[key].value - second[key].value
                assert figures[key].value == pytest.approx(difference)
    # A slice's JS is the mean over its pairs.
    name, model, tokenizer = models[1]

    def distribution(text):
        rows = robustness.encode(model, tokenizer, [text])
        return robustness.log_probabilities(last_logits(model, rows))

    js = [
        robustness.jensen_shannon(distribution(pair.original), distribution(pair.perturbed)).item()
        for pair in pairs
        if pair.slice == "typo"
    ]
    assert result["slices"][1]["models"][name]["js"].value == pytest.approx(np.mean(js), rel=1e-4)
    # Entropies are matched to the lowest.
    sharpest = min(result["models"], key=lambda model: model["entropy"])
    assert (sharpest["entropy"], sharpest["temperature"]) == (result["target"], 1)
    assert all(model["temperature"] < 1 for model in result["models"] if model is not sharpest)
    for part in result["slices"]:
        figures = part["models"][sharpest["name"]]
        assert figures["js"] == figures["js_matched"]


def test_a_pair_that_one_model_cannot_read_is_left_out_for_all(models, pairs):
    with pytest.raises(InputError, match="nothing to compare"):
        robustness.measure_robustness([], pairs[:2])
    long = robustness.Pair("x", "typo", "river " * 70, "rivers " * 70)
    result = robustness.measure_robustness(models, [*pairs, long])
    assert result["left_out"] == 1
    assert result["slices"][1]["pairs"] == 6
    # The Llama alone reads it.
    assert robustness.measure_robustness(models[1:2], [long])["slices"][0]["pairs"] == 1


def test_mediation_by_hand():
    results = [
        robustness.Divergences("typo", 0.4, 0.3, 0.5),
        robustness.Divergences("typo", 0.2, 0.3, math.nan),
        robustness.Divergences("typo", 0.00009, 0.5, 0.5),
    ]
    row = robustness.slice_mediation("typo", results, ["typo", "synonym", "typo"])
    assert [row[name] for name in ("pairs", "unaligned", "below_floor")] == [2, 2, 1]
    clamped, control = row["clamped"], row["control"]
    # PMR is 0.25 and −0.5.
    values = [clamped[name].value for name in ("base", "mean", "pooled", "js")]
    assert values == pytest.approx([0.3, -0.125, 0, 0.3])
    assert control["pairs"] == 1
    assert control["mean"].value == pytest.approx(-0.25)
    assert row["gain"].value == pytest.approx(0.2)
    empty = robustness.slice_mediation("typo", results[2:], [])
    assert (empty["pairs"], empty["below_floor"]) == (0, 1)
    assert empty["clamped"] is empty["gain"] is None


@pytest.mark.parametrize(
    ("original", "changed", "alignment"),
    [
        # Equal length: by position.
        ([1, 2, 3], [1, 9, 3], [0, 1, 2]),
        ([5], [6], [0]),
        # An inserted token has no counterpart, a removed one is skipped.
        ([1, 2, 3], [1, 7, 2, 3], [0, -1, 1, 2]),
        ([1, 2, 3, 4], [1, 3, 4], [0, 2, 3]),
        # A word of more tokens ends where it ended.
        ([1, 2, 3], [1, 7, 8, 3], [0, -1, 1, 2]),
        ([1, 7, 8, 3], [1, 2, 3], [0, 2, 3]),
        # Nothing is unchanged; two of five have a counterpart, and two of four.
        ([1, 2], [3, 4, 5], None),
        ([1, 2], [1, 7, 8, 9, 2], None),
        ([1, 2], [1, 7, 8, 2], [0, -1, -1, 1]),
    ],
)
def test_alignment_by_hand(original, changed, alignment):
    assert robustness.align(original, changed) == alignment


def test_a_control_is_as_long_as_the_original_or_the_next_longer():
    texts, generator = [[1] * 3, [2] * 5, [3] * 5, [4] * 7], np.random.default_rng(0)
    drawn = [robustness.random_text(texts, 4, generator) for _ in range(20)]
    assert set(map(tuple, drawn)) == {(2,) * 5, (3,) * 5}
    assert robustness.random_text(texts, 3, generator) == [1] * 3
    assert robustness.random_text(texts, 8, generator) is None


@pytest.mark.parametrize(("kind", "routing"), [("protot", "channels"), ("gpt2", "attention")])
def test_every_kind_of_routing_is_clamped(models, pairs, kind, routing):
    model = models[KINDS.index(kind)]
    result = robustness.measure_clamping(model, pairs)
    assert result["routing"] == routing
    bases = robustness.measure_robustness([model], pairs)["slices"]
    for part, plain in zip(result["slices"], bases, strict=True):
        js, base = part["clamped"]["js"].value, part["clamped"]["base"].value
        assert js != base != part["control"]["js"].value
        if not (left_out := part["unaligned"] + part["below_floor"]):
            assert base == pytest.approx(plain["models"][kind]["js"].value)
        assert part["pairs"] + left_out == plain["pairs"]
        assert part["clamped"]["pooled"].value == pytest.approx(1 - js / base)
    # "ZQ" has nothing in common with its original.
    assert [part["unaligned"] for part in result["slices"]] == [0, 0, 0, 1]
    # A text's own routing changes nothing, and another's does.
    _, decoder, tokenizer = model
    texts = ["The river carries letters in a box.", "The council forgets letters in a box."]
    text, other = robustness.encode(decoder, tokenizer, texts)
    before, clamp = last_logits(decoder, [text]), robustness.routing_of(decoder)[1]
    with clamp(text, list(range(len(text)))):
        assert torch.allclose(last_logits(decoder, [text]), before, atol=1e-5)
    with clamp(other, list(range(len(text)))):
        assert (last_logits(decoder, [text]) - before).abs().max() > 1e-2
