"""GLUE: its files, fine-tuning, and the study."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from prismlm.errors import DivergenceError, FormatError, InputError
from prismlm.eval import glue
from prismlm.progress import SILENT
from tests.helpers.eval_data import WORDS, save_glue_model, words_tokenizer, write_rows, write_toy

BY_NAME = {task.name: task for task in glue.TASKS}
PAIR = {"sentence1": "a", "sentence2": "b"}


@pytest.mark.parametrize(("name", "label"), [("cola", 1), ("stsb", 3.8), ("mnli", 2)])
def test_rows_of_a_split_are_read(tmp_path, name, label):
    task = BY_NAME[name]
    row = dict(zip(task.columns, "ab", strict=False)) | {"label": label, "idx": 7}
    for split in task.splits.values():
        write_rows(tmp_path, name, split, [row])
    for split in task.splits:
        texts, labels = glue.read_split(task, split, tmp_path)
        assert (texts, labels.tolist()) == ([("a", "b")[: len(task.columns)]], [label])


@pytest.mark.parametrize(
    ("name", "row", "words"),
    [
        ("sst2", {"sentence": "a", "label": -1}, "label -1: expected text and a label from 0 to 1"),
        ("stsb", PAIR | {"label": 5.5}, "label 5.5: expected text and a label from 0 to 5"),
        ("rte", {"sentence1": "a", "sentence2": None, "label": 1}, r"row 0 .* is \('a', None\)"),
        ("rte", {"sentence1": "a", "label": 1}, "columns sentence1, label: expected rows of"),
    ],
)
def test_unusable_rows_and_missing_files_are_named(tmp_path, name, row, words):
    with pytest.raises(InputError, match=rf"{name} has no train\*\.parquet, which"):
        glue.read_split(BY_NAME[name], "train", tmp_path)
    write_rows(tmp_path, name, "train", [row])
    with pytest.raises(FormatError, match=words):
        glue.read_split(BY_NAME[name], "train", tmp_path)


(SST2,) = glue.select_tasks(["sst2"])
TRAIN = [[4 + row % 20, 2 + row % 2, 0] for row in range(40)]
LABELS = [row % 2 for row in range(40)]


@pytest.fixture
def classifier(models):
    return models["llama"].classifier(SST2, 0)


def run(classifier, dev_metrics, epochs=3):
    """Fine-tune with these dev metrics; return the history and the weights at each evaluation."""
    weights, metrics = [], iter(dev_metrics)

    def evaluate():
        weights.append(classifier.out.weight.detach().clone())
        return next(metrics)

    options = glue.GlueOptions(learning_rate=1e-2, warmup=0.1, epochs=epochs)
    with SILENT.task("") as task:
        return glue.fine_tune(classifier, TRAIN, LABELS, evaluate, options, 0, task), weights


def test_a_run_stops_after_an_epoch_without_improvement_and_restores_the_best(classifier):
    # Two evaluations per epoch: the second is the best, the third and fourth are not better.
    history, weights = run(classifier, [0.5, 0.7, 0.6, 0.7], epochs=5)
    assert history == [0.5, 0.7, 0.6, 0.7]
    assert torch.equal(classifier.out.weight, weights[1])
    assert not torch.equal(weights[1], weights[3])


def test_embeddings_norms_and_biases_do_not_decay(classifier):
    decayed, others = glue.parameter_groups(classifier)
    names = {id(p): name for name, p in classifier.named_parameters()}
    assert decayed["weight_decay"] > 0 == others["weight_decay"]
    assert {names[id(p)] for p in others["params"]} == {
        name for name in names.values() if "norm" in name or "embed" in name
    } | {"out.bias"}
    assert len(decayed["params"]) + len(others["params"]) == len(names)


def test_divergence_ends_the_run(classifier):
    classifier.out.weight.data.fill_(float("nan"))
    with pytest.raises(DivergenceError, match=r"loss is nan at the rate 0\.01.*--search"):
        run(classifier, [])
    with pytest.raises(DivergenceError, match="outputs are not finite"):
        classifier.predict(TRAIN)


def encoded(*texts, length=512, tokenizer=None):
    rows = glue.encode(tokenizer or words_tokenizer(), texts, length)
    return [" ".join(WORDS[token] for token in row) for row in rows]


def test_one_or_two_sentences_are_encoded_and_the_longer_is_cut():
    assert encoded(("a b",), ("c",)) == ["a b <eos>", "c <eos>"]
    for pair, row in {
        ("a b c d e f", "g h"): "a b c <eos> g h <eos>",
        ("a b c d", "e f g h"): "a b <eos> e f g <eos>",
        ("a", "b"): "a <eos> b <eos>",
    }.items():
        assert encoded(pair, length=7) == [row]


@pytest.mark.parametrize(("eos", "row"), [("<eos>", "x x a <eos> b <eos>"), (None, "x x a b")])
def test_rows_begin_as_the_tokenizers_do(eos, row):
    tokenizer, x = words_tokenizer(), WORDS.index("x")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("x x $A", None, [("x", x)])
    # This tokenizer has no token for the newline that takes the place of the end token.
    tokenizer.eos_token = eos
    assert encoded(("a", "b"), tokenizer=tokenizer) == [row]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory, families = tmp_path_factory.mktemp("models"), ("llama", "gpt2", "mamba2", "protot")
    return {f: glue.GlueModel(save_glue_model(directory / f, f)) for f in families}


@pytest.mark.parametrize("family", ["gpt2", "mamba2", "protot"])
def test_a_batch_equals_single_rows(models, family):
    rows = [[5, 6, 0], [7, 8, 9, 10, 11, 12, 13, 0], [2, 0], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0]]
    lm = models[family]
    classifier = lm.classifier(SST2, 0).eval()
    classifier.bf16 = False
    torch.nn.init.normal_(classifier.out.weight)
    with torch.no_grad():
        single = torch.cat([classifier([row]) for row in rows])
        assert torch.allclose(classifier(rows), single, atol=1e-5)
        # The last layer reads the state that the next token is predicted from.
        logits = lm.model(input_ids=torch.tensor([rows[0]])).logits[0, -1]
        weight = lm.model.get_output_embeddings().weight
        classifier.out.weight.copy_(weight[:2])
        assert torch.allclose(classifier(rows[:1])[0], logits[:2], atol=1e-4)
    assert torch.allclose(torch.tensor(classifier.predict(rows)), classifier(rows), atol=1e-5)
    # Every weight but the output embedding's is trained.
    classifier(rows).sum().backward()
    untrained = [name for name, p in lm.model.named_parameters() if p.grad is None]
    assert set(untrained) <= {"lm_head.weight"}


def test_every_run_starts_from_the_same_weights(models):
    lm = models["llama"]
    before = {name: v.clone() for name, v in lm.classifier(SST2, 0).state_dict().items()}
    for parameter in lm.model.parameters():
        parameter.data += 1
    again = lm.classifier(SST2, 0).state_dict()
    assert all(torch.equal(before[name], value) for name, value in again.items())
    assert not torch.equal(lm.classifier(SST2, 1).out.weight, before["out.weight"])
    fresh = lm.classifier(SST2, 1, from_scratch=True).state_dict()
    assert fresh.keys() == before.keys()
    embedding = "model.model.embed_tokens.weight"
    assert not torch.equal(fresh[embedding], before[embedding])


@pytest.mark.parametrize(("family", "seeds"), [("llama", [0, 1]), ("protot", [0])])
def test_a_learnable_task_is_learned(models, tmp_path, family, seeds):
    options = glue.GlueOptions(data=write_toy(tmp_path), learning_rate=5e-3, warmup=0.1)
    out = tmp_path / "out"
    result = glue.run_glue(models[family], out, options, ["sst2"], seeds, from_scratch=True)
    assert result == json.loads((out / "glue.json").read_text())
    (row,) = result["tasks"]
    assert row["constant"] == {"accuracy": 0.5}
    for arm in ("fine_tuned", "from_scratch"):
        assert row[arm]["seeds"] == seeds
        assert row[arm]["mean"]["accuracy"] > 0.9
    assert row["fine_tuned"]["low"] <= row["fine_tuned"]["mean"]["accuracy"]
    assert (row["train"], row["measured"]) == ({"rows": 128}, {"rows": 32})


def test_scores_are_fitted(models, tmp_path):
    rows = [
        {"sentence1": "a " * (1 + row % 4) + "good", "sentence2": "b", "label": 1.0 + row % 4}
        for row in range(64)
    ]
    for split in ("train", "validation"):
        write_rows(tmp_path / "data", "stsb", split, rows)
    options = glue.GlueOptions(data=tmp_path / "data", learning_rate=1e-2, warmup=0.1, epochs=6)
    (row,) = glue.run_glue(models["llama"], tmp_path / "out", options, ["stsb"], [0])["tasks"]
    assert row["fine_tuned"]["mean"]["pearson"] > 0.8
    assert row["from_scratch"] is None


def test_a_search_is_stored_and_used(models, tmp_path):
    data, out, lm = write_toy(tmp_path / "data"), tmp_path / "out", models["llama"]
    mnli = [{"premise": "abc"[n % 3], "hypothesis": "x", "label": n % 3} for n in range(48)]
    for split in BY_NAME["mnli"].splits.values():
        write_rows(data, "mnli", split, mnli)
    options, rates = glue.GlueOptions(data=data, limit=48), (1e30, 1e-9, 1e-2)
    assert glue.with_rate(lm, out, options)[1] == "the source's"
    result = glue.search(lm, out, options, rates=rates)
    assert result["learning_rate"] == 1e-2
    tried = [(row["learning_rate"], row["warmup"]) for row in result["tried"]]
    assert tried == list(product(rates, (0.06, 0.1)))
    # A rate that diverges is not chosen.
    assert all(row["sst2"] == row["mnli"] == 0 for row in result["tried"][:2])
    best = max(result["tried"], key=lambda row: row["sst2"] + row["mnli"])
    assert result["warmup"] == best["warmup"]
    searched = replace(options, learning_rate=1e-2, warmup=best["warmup"])
    assert glue.with_rate(lm, out, options) == (searched, "searched")
    explicit, rate_from = glue.with_rate(lm, out, replace(options, learning_rate=3e-4))
    assert explicit == replace(searched, learning_rate=3e-4)
    assert rate_from == "given"
    # It is not used for another model.
    with pytest.raises(FormatError, match="of another version or damaged"):
        glue.with_rate(models["protot"], out, options)


GOLD = np.array([1, 1, 1, 0, 0, 0, 0, 1])
PREDICTED = np.array([1, 1, 0, 0, 0, 0, 1, 1])  # tp 3, fn 1, fp 1, tn 3


@pytest.mark.parametrize(
    ("task", "gold", "predicted", "expected"),
    [
        ("rte", GOLD, PREDICTED, {"accuracy": 6 / 8}),
        ("mrpc", GOLD, [1, 1, 0, 0, 0, 0, 0, 0], {"f1": 2 * 2 / (4 + 2), "accuracy": 6 / 8}),
        # (3·3 − 1·1) / √(4·4·4·4)
        ("cola", GOLD, PREDICTED, {"matthews": 8 / 16}),
        # Σ xy / √(Σ x² Σ y²), with x = −2, −1, 0, 3 and y = −1.375, −0.375, 0.625, 1.125
        ("stsb", [0.0, 1.0, 2.0, 5.0], [1.0, 2.0, 3.0, 3.5],
         {"pearson": 6.5 / np.sqrt(14 * 3.6875), "spearman": 1.0}),
        ("cola", GOLD, np.ones(8), {"matthews": 0}),
        ("stsb", GOLD, np.ones(8), {"pearson": 0, "spearman": 0}),
        ("mrpc", GOLD, np.zeros(8), {"f1": 0, "accuracy": 0.5}),
    ],
)  # fmt: skip
def test_metrics_by_hand(task, gold, predicted, expected):
    result = glue.measure(BY_NAME[task], np.array(gold), np.array(predicted))
    assert result == pytest.approx(expected)


def test_outputs_become_answers_and_a_constant_answer_is_a_baseline():
    assert glue.answers(BY_NAME["mnli"], np.array([[0, 2, 1], [3, 0, 0]])).tolist() == [1, 0]
    assert glue.answers(BY_NAME["stsb"], np.array([[-0.5], [2.5], [7]])).tolist() == [0, 2.5, 5]
    # F1 of the answer 1 for every row is 2 tp / (answers + positives).
    best = {"accuracy": 3 / 4, "f1": 2 * 1 / (4 + 1), "matthews": 0, "pearson": 0}
    assert {metric: glue.constant(metric, np.array([0, 0, 0, 1])) for metric in best} == best


def test_an_interval_contains_the_mean_over_seeds():
    rng, task = np.random.default_rng(0), BY_NAME["mrpc"]
    gold = rng.integers(0, 2, 200).astype(float)
    predicted = [np.where(rng.random(200) < 0.8, gold, 1 - gold) for _ in range(2)]
    parts = [{"dev": {"gold": gold, "given": given}} for given in predicted]
    summary = glue.summarise(task, "dev", [{"seed": 0, "measured": part} for part in parts])
    for metric in task.metrics:
        values = [glue.measure(task, gold, given)[metric] for given in predicted]
        assert summary["values"][metric] == values
        assert summary["mean"][metric] == pytest.approx(np.mean(values))
    assert summary["low"] < summary["mean"]["f1"] < summary["high"] < summary["low"] + 0.3
