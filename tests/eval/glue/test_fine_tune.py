import pytest
import torch

from prismlm.errors import DivergenceError, InputError
from prismlm.eval.glue.data import select_tasks
from prismlm.eval.glue.fine_tune import (
    Classifier,
    GlueModel,
    GlueOptions,
    encode,
    fine_tune,
    parameter_groups,
)
from prismlm.models.presets import build_model
from prismlm.progress import SILENT
from tests.helpers.glue_rows import CONFIGS, WORDS, save_glue_model, words_tokenizer

(SST2,) = select_tasks(["sst2"])
TRAIN = [[4 + row % 20, 2 + row % 2, 0] for row in range(40)]
LABELS = [row % 2 for row in range(40)]


@pytest.fixture
def classifier():
    torch.manual_seed(0)
    return Classifier(build_model(CONFIGS["llama"]()), 2)


def run(classifier, dev_metrics, epochs=3):
    """Fine-tune with these dev metrics; return the history and the weights at each evaluation."""
    weights, metrics = [], iter(dev_metrics)

    def evaluate():
        weights.append(classifier.out.weight.detach().clone())
        return next(metrics)

    options = GlueOptions(learning_rate=1e-2, warmup=0.1, epochs=epochs)
    with SILENT.task("") as task:
        return fine_tune(classifier, TRAIN, LABELS, evaluate, options, 0, task), weights


def test_a_run_stops_after_an_epoch_without_improvement_and_restores_the_best(classifier):
    # Two evaluations per epoch: the second is the best, the third and fourth are not better.
    history, weights = run(classifier, [0.5, 0.7, 0.6, 0.7], epochs=5)
    assert history == [0.5, 0.7, 0.6, 0.7]
    assert torch.equal(classifier.out.weight, weights[1])
    assert not torch.equal(weights[1], weights[3])


def test_embeddings_norms_and_biases_do_not_decay(classifier):
    decayed, others = parameter_groups(classifier)
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


@pytest.mark.parametrize(
    "options",
    [
        {"learning_rate": 0},
        {"warmup": 1.5},
        {"limit": 0},
        {"dev_limit": 2},
        {"epochs": 0},
        {"epochs": None},
        {"batch_size": 1.5},
    ],
)
def test_options_out_of_range_are_refused(options):
    ((name, value),) = options.items()
    with pytest.raises(InputError, match=f"{name} is {value}"):
        GlueOptions(**options)


@pytest.mark.parametrize(
    ("texts", "length", "expected"),
    [
        ([("a b",), ("c",)], 512, ["a b <eos>", "c <eos>"]),
        (
            [("a b c d e f", "g h"), ("a", "g h i j k l"), ("a b c d", "e f g h"), ("a", "b")],
            7,
            ["a b c <eos> g h <eos>", "a <eos> g h i j <eos>", "a b c <eos> e f <eos>",
             "a <eos> b <eos>"],
        ),
    ],
)  # fmt: skip
def test_one_or_two_sentences_are_encoded_and_the_longer_is_cut(texts, length, expected):
    rows = encode(words_tokenizer(), texts, length)
    assert [" ".join(WORDS[token] for token in row) for row in rows] == expected


@pytest.mark.parametrize("family", CONFIGS)
def test_a_batch_equals_single_rows(tmp_path, family):
    rows = [[5, 6, 0], [7, 8, 9, 10, 11, 12, 13, 0], [2, 0], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0]]
    lm = GlueModel(save_glue_model(tmp_path / family, family))
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


def test_every_run_starts_from_the_same_weights(tmp_path):
    lm = GlueModel(save_glue_model(tmp_path))
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
