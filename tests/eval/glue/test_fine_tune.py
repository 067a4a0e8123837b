import pytest
import torch

from prismlm.errors import DivergenceError
from prismlm.eval.glue.fine_tune import (
    Classifier,
    Examples,
    GlueOptions,
    fine_tune,
    parameter_groups,
    trainer,
)
from prismlm.models.presets import build_model
from prismlm.progress import SILENT
from tests.helpers.glue_rows import CONFIGS

TRAIN = Examples(
    [[4 + row % 20, 2 + row % 2, 0] for row in range(40)], [row % 2 for row in range(40)]
)


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
        history = fine_tune(classifier, TRAIN, judge, GlueOptions(**settings), 0, task)
    return history, weights


def test_it_stops_after_an_epoch_without_a_rise_and_keeps_the_best(classifier):
    # Two figures an epoch: the second is best, the third and the fourth do not rise.
    history, weights = run(classifier, [0.5, 0.7, 0.6, 0.7], epochs=5)
    assert history == [0.5, 0.7, 0.6, 0.7]
    assert torch.equal(classifier.out.weight, weights[1])
    assert not torch.equal(weights[1], weights[3])


def test_it_goes_on_while_dev_rises(classifier):
    history, weights = run(classifier, [0.1, 0.1, 0.2, 0.1, 0.1, 0.3], epochs=3)
    assert len(history) == 6
    assert torch.equal(classifier.out.weight, weights[5])


def test_the_same_seed_gives_the_same_weights():
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        classifier = Classifier(build_model(CONFIGS["gpt2"]()), 1)  # it has dropout
        run(classifier, [0.1, 0.2], epochs=1)
        found.append(classifier.out.weight)
    assert torch.equal(*found)


def test_the_rate_rises_and_falls(classifier, monkeypatch):
    rates = []
    step = torch.optim.AdamW.step

    def noted(self, *given, **named):
        rates.append(self.param_groups[0]["lr"])
        return step(self, *given, **named)

    monkeypatch.setattr(torch.optim.AdamW, "step", noted)
    take = trainer(classifier, GlueOptions(learning_rate=1.0, warmup=0.2), 10)
    for _ in range(10):
        take(Examples(TRAIN.rows[:2], TRAIN.labels[:2]))
    assert rates == pytest.approx([0, 0.5, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])


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
        classifier.predict(TRAIN.rows)
