"""Runs with epochs, a subset of the documents, and learning-rate schedules."""

import sys
from dataclasses import replace

import numpy as np
import pytest

from prismlm.corpus import Corpus
from prismlm.errors import InputError, Interrupted
from prismlm.files import read_json
from prismlm.training import build_recipe, estimate, train
from prismlm.training.run import RUN_FILE
from prismlm.training.setup import chosen_documents, prepare, with_steps
from prismlm.training.trainer import PrismTrainer, training_arguments
from tests.helpers.runs import InterruptAfter


@pytest.fixture
def epochs(settings):
    """Two epochs of twenty documents, without a head."""
    del settings["steps"]
    settings["head"] = {"enabled": False}
    settings["data"] |= {"documents": 20}
    return settings | {"epochs": 2, "checkpoint": {"every": 5}}


def test_epochs_become_steps(epochs, tmp_path):
    epochs["data"]["documents"] = 10
    recipe = build_recipe(epochs)
    prepared = prepare(recipe)
    each = len(prepared.rows) // 4
    assert prepared.recipe.steps == 2 * each > 10
    assert estimate(recipe).steps == 2 * each
    run = train(recipe)
    assert run.steps == 2 * each
    noted = read_json(run.directory / RUN_FILE)["recipe"]
    assert (noted["epochs"], noted["steps"]) == (2, 2 * each)
    # Setting the steps gives the same run.
    without_epochs = {key: value for key, value in epochs.items() if key != "epochs"}
    counted = train(
        build_recipe(without_epochs | {"steps": 2 * each, "out": str(tmp_path / "counted")})
    )
    assert counted.ce == run.ce
    cut = build_recipe(epochs | {"out": str(tmp_path / "cut")})
    with pytest.raises(Interrupted):
        train(cut, progress=InterruptAfter(7))
    assert train(cut, resume=True).ce == run.ce
    with pytest.raises(InputError, match="epochs: 2 → 3"):
        train(build_recipe(epochs | {"epochs": 3, "out": str(tmp_path / "cut")}), resume=True)


class Noted:
    """The first ten rows, each with how often it was taken."""

    def __init__(self, rows):
        self.rows = rows
        self.taken = [0] * 10

    def __len__(self):
        return 10

    def __getitem__(self, index):
        self.taken[index] += 1
        return self.rows[index]


def test_every_epoch_takes_each_row_where_the_last_step_is_smaller(epochs, tmp_path):
    recipe = build_recipe(epochs | {"epochs": 3, "batch_size": 1, "gradient_accumulation": 4})
    prepared = prepare(recipe)
    rows = Noted(prepared.rows)
    # Steps of four, four and two rows.
    prepared = replace(prepared, recipe=with_steps(recipe, rows), rows=rows)
    assert prepared.recipe.steps == 3 * 3
    trainer = PrismTrainer(prepared, tmp_path)
    trainer.train()
    assert trainer.state.global_step == 9
    assert rows.taken == [3] * 10


def test_documents_are_the_same_for_every_seed(epochs, tiny_corpus):
    corpus = Corpus.open(tiny_corpus)
    chosen = chosen_documents(corpus, 20)
    training = corpus.split("train")
    assert len(chosen) == 20 == len(set(chosen))
    assert set(chosen) <= set(training)
    assert not np.array_equal(chosen, training[:20])
    tokens = sum(corpus.lengths[chosen])
    for seed in (0, 1):
        rows = prepare(build_recipe(epochs | {"seed": seed})).rows
        assert rows.num_tokens + rows.dropped_tokens == tokens
    assert np.array_equal(chosen_documents(corpus, None), training)
    with pytest.raises(InputError, match=f"has only {len(training)} training documents"):
        chosen_documents(corpus, len(training) + 1)


def test_the_rate_grows_with_the_root_of_the_rows(settings, tmp_path):
    def rate(**optimizer):
        recipe = build_recipe(settings | {"optimizer": {"learning_rate": 3e-3} | optimizer})
        return training_arguments(recipe, tmp_path).learning_rate

    assert rate() == rate(learning_rate_length=32) == 3e-3
    assert rate(learning_rate_length=8) == pytest.approx(6e-3)


def rates(settings, tmp_path, **optimizer):
    """Return the learning rate relative to its peak, before each of ten steps and after them."""
    changes = {"learning_rate": 1e-2, "head_learning_rate": 3e-2, "warmup": 0.2}
    settings |= {"steps": 10, "optimizer": changes | optimizer}
    trainer = PrismTrainer(prepare(build_recipe(settings)), tmp_path)
    trainer.create_optimizer_and_scheduler(10)
    peaks = [group["initial_lr"] for group in trainer.optimizer.param_groups]
    assert set(peaks) == {1e-2, 3e-2}
    actual = []
    for _ in range(11):
        groups = trainer.optimizer.param_groups
        shares = {round(group["lr"] / peak, 9) for group, peak in zip(groups, peaks, strict=True)}
        assert len(shares) == 1
        actual += shares
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    return actual


# Two steps up; then with n of 8: a cosine (1 + cos(π n / 8)) / 2, where cos(π/4) = 0.70710678.
COSINE = {2: 1, 4: 0.5 * 1.70710678, 6: 0.5, 8: 0.5 * 0.29289322, 10: 0}


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({}, COSINE),
        ({"final_learning_rate_share": 0.1}, {n: 0.1 + 0.9 * x for n, x in COSINE.items()}),
        ({"schedule": "linear"}, {2: 1, 4: 0.75, 6: 0.5, 8: 0.25, 10: 0}),
        ({"schedule": "constant"}, dict.fromkeys(COSINE, 1)),
    ],
    ids=["cosine", "floor", "linear", "constant"],
)
def test_the_rate_rises_and_falls_as_the_recipe_says(settings, tmp_path, optimizer, expected):
    actual = rates(settings, tmp_path, **optimizer)
    assert actual[:2] == [0, 0.5]
    assert {n: actual[n] for n in expected} == pytest.approx(expected)


def test_the_history_is_reported_where_the_recipe_says(settings, tmp_path, monkeypatch):
    settings["logging"]["report_to"] = ["trackio"]
    recipe = build_recipe(settings)
    assert training_arguments(recipe, tmp_path).report_to == ["trackio"]
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(InputError, match="'trackio', which is not installed: pip install trackio"):
        train(recipe)


def test_prototypes_cannot_be_initialised_after_the_last_epoch(settings):
    epochs = {key: value for key, value in settings.items() if key != "steps"} | {"epochs": 1}
    epochs["head"] = settings["head"] | {"initialise_at_step": 10**6}
    with pytest.raises(InputError, match=r"would not be trained; lower it\.$"):
        prepare(build_recipe(epochs))
