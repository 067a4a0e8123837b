import pytest
import torch

from prismlm.errors import DivergenceError
from prismlm.eval.glue.data import tasks_of
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

TRAIN = [[4 + row % 20, 2 + row % 2, 0] for row in range(40)]
LABELS = [row % 2 for row in range(40)]


@pytest.fixture
def classifier():
    torch.manual_seed(0)
    return Classifier(build_model(CONFIGS["llama"]()), 2)


def run(classifier, said, **settings):
    """Fine-tune where dev says what it is told, and return which weights stood at each time."""
    weights, figures = [], iter(said)

    def judge():
        weights.append(classifier.out.weight.detach().clone())
        return next(figures)

    settings = {"learning_rate": 1e-2, "warmup": 0.1, "batch_size": 16} | settings
    with SILENT.task("") as task:
        history = fine_tune(classifier, TRAIN, LABELS, judge, GlueOptions(**settings), 0, task)
    return history, weights


def test_it_stops_after_an_epoch_without_a_rise_and_keeps_the_best(classifier):
    # Two figures an epoch: the second is best, the third and the fourth do not rise.
    history, weights = run(classifier, [0.5, 0.7, 0.6, 0.7], epochs=5)
    assert history == [0.5, 0.7, 0.6, 0.7]
    assert torch.equal(classifier.out.weight, weights[1])
    assert not torch.equal(weights[1], weights[3])


def test_embeddings_norms_and_biases_do_not_decay(classifier):
    decayed, others = parameter_groups(classifier)
    names = {id(p): name for name, p in classifier.named_parameters()}
    assert decayed["weight_decay"] > 0 == others["weight_decay"]
    assert {names[id(p)] for p in others["params"]} == {
        name
        for name in names.values()
        if "norm" in name or "embed" in name or "lm_head" in name or name.endswith("bias")
    } - {"model.lm_head.weight"} | {"out.bias"}
    assert len(decayed["params"]) + len(others["params"]) == len(names)


def test_a_loss_that_is_not_finite_ends_the_run(classifier):
    classifier.out.weight.data.fill_(float("nan"))
    with pytest.raises(DivergenceError, match=r"loss is nan at the rate 0\.01.*--search"):
        run(classifier, [])
    with pytest.raises(DivergenceError, match="outputs are not finite"):
        classifier.predict(TRAIN)


(SST2,) = tasks_of(["sst2"])
ROWS = [[5, 6, 0], [7, 8, 9, 10, 11, 12, 13, 0], [2, 0], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0]]


def read(rows):
    return [[WORDS[token] for token in row] for row in rows]


def test_one_sentence_or_two_and_what_is_cut():
    tokenizer = words_tokenizer()
    rows = encode(tokenizer, [("a b",), ("c",)], 512)
    assert read(rows) == [["a", "b", "<eos>"], ["c", "<eos>"]]
    pairs = [("a b c d e f", "g h"), ("a", "g h i j k l"), ("a b c d", "e f g h"), ("a", "b")]
    rows = encode(tokenizer, pairs, 7)
    assert read(rows) == [
        ["a", "b", "c", "<eos>", "g", "h", "<eos>"],
        ["a", "<eos>", "g", "h", "i", "j", "<eos>"],
        ["a", "b", "c", "<eos>", "e", "f", "<eos>"],
        ["a", "<eos>", "b", "<eos>"],
    ]


@pytest.mark.parametrize("family", CONFIGS)
def test_a_batch_gives_what_single_rows_give(tmp_path, family):
    lm = GlueModel(save_glue_model(tmp_path / family, family))
    classifier = lm.classifier(SST2, 0).eval()
    classifier.bf16 = False
    torch.nn.init.normal_(classifier.out.weight)
    with torch.no_grad():
        together = classifier(ROWS)
        alone = torch.cat([classifier([row]) for row in ROWS])
        assert torch.allclose(together, alone, atol=1e-5)
        # The last layer reads the state that the next token is predicted from.
        logits = lm.model(input_ids=torch.tensor([ROWS[0]])).logits[0, -1]
        weight = lm.model.get_output_embeddings().weight
        classifier.out.weight.copy_(weight[:2])
        assert torch.allclose(classifier(ROWS[:1])[0], logits[:2], atol=1e-4)
    assert torch.allclose(torch.tensor(classifier.predict(ROWS)), classifier(ROWS), atol=1e-5)
    # Every weight but the output embedding's is trained.
    classifier(ROWS).sum().backward()
    idle = [name for name, p in lm.model.named_parameters() if p.grad is None]
    assert set(idle) <= {"lm_head.weight"}


def test_every_run_begins_with_the_same_weights(tmp_path):
    lm = GlueModel(save_glue_model(tmp_path))
    before = lm.classifier(SST2, 0).state_dict()
    before = {name: value.clone() for name, value in before.items()}
    for parameter in lm.model.parameters():
        parameter.data += 1
    again = lm.classifier(SST2, 0)
    assert all(torch.equal(before[name], value) for name, value in again.state_dict().items())
    assert not torch.equal(lm.classifier(SST2, 1).out.weight, before["out.weight"])
    fresh = lm.classifier(SST2, 0, from_scratch=True).state_dict()
    assert fresh.keys() == before.keys()
    assert not torch.equal(fresh["model.model.embed_tokens.weight"], before["model.lm_head.weight"])
    assert isinstance(again, Classifier)
