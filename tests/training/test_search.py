"""Searches for hyper-parameters: what may be chosen from, and real trials, stopped and resumed."""

import json
import re
import shutil
import statistics
import sys
from dataclasses import asdict

import optuna
import pytest
import yaml
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from typer.testing import CliRunner

from prismlm.cli.app import app
from prismlm.errors import InputError, Interrupted
from prismlm.files import read_json
from prismlm.training import build_recipe, load_recipe, search, train
from prismlm.training.search import check_space, recipe_with
from tests.helpers import forked
from tests.helpers.interrupted import InterruptAfter, wait_for
from tests.helpers.spread_runs import base_settings

RATES = {"low": 1e-3, "high": 3e-2, "log": True}
SPACE = {"batch_size": [4, 8], "optimizer.learning_rate": RATES}


def settings_of(corpus, out):
    """Three trials of two seeds, a thousand tokens each, of a model of 40,000 parameters."""
    changes = {
        "out": str(out),
        "model": {"preset": "protot-tiny", "hidden_size": 16, "num_channels": 4},
        "head": {"enabled": False, "prototypes": 16, "prototypes_per_token": 2},
        "losses": {},
        "optimizer": {},
        "steps": 8,
        "evaluation": {"every": 0, "tokens": 300, "final_tokens": 300},
        "checkpoint.every": 2,
        "logging.every": 4,
        "search": {"trials": 3, "startup_trials": 2, "seeds": 2, "space": SPACE},
    }
    return base_settings(corpus, changes)


def with_search(settings, **changes):
    return settings | {"search": settings["search"] | changes}


def outcomes(result):
    return [(trial.values, trial.ce, trial.seeds) for trial in result.trials]


@pytest.fixture
def toy(tiny_corpus, tmp_path):
    return settings_of(tiny_corpus, tmp_path / "out")


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        ({"optimizer.learning_rat": [1e-3, 1e-2]}, "Did you mean 'optimizer.learning_rate'?"),
        ({"model.num_chanels": [4, 8]}, "Did you mean 'num_channels'?"),
        ({"data.length": [32, 64]}, "cannot be searched over"),
        ({"optimizer.learning_rate": {"low": 0, "high": 1, "log": True}}, "has no logarithm"),
        ({"optimizer.learning_rate": {"low": -1.0, "high": 1.0}}, "learning_rate is -1.0"),
        ({"batch_size": [4, 8.5]}, "batch_size is 8.5"),
        ({"batch_size": {"low": 4}}, "search.space.batch_size.high is missing"),
        ({"head.scale": [1.0, 2.0]}, "no gradient of the head reaches the model"),
    ],
)
def test_a_wrong_space_names_the_key_and_what_is_allowed(toy, space, expected):
    with pytest.raises(InputError, match="search") as error:
        check_space(build_recipe(with_search(toy, space=space)))
    assert expected in str(error.value)


def test_trials_of_other_batches_train_on_as_many_positions(toy):
    toy |= {"steps": 400, "checkpoint": {"every": 100}, "evaluation": {"every": 50}}
    toy["head"] |= {"enabled": True, "detach": False, "initialise_at_step": 30}
    recipe = build_recipe(toy)
    larger = recipe_with(recipe, {"batch_size": 8})
    assert larger.positions_per_step * larger.steps == recipe.positions_per_step * recipe.steps
    assert (larger.steps, larger.checkpoint.every, larger.evaluation.every) == (200, 50, 25)
    assert larger.head.initialise_at_step == 15
    assert recipe_with(recipe, {"steps": 100, "batch_size": 8}).steps == 100


@pytest.fixture(scope="module")
def straight(tiny_corpus, tmp_path_factory):
    """A complete search: the recipe, its result and the trials passed to on_trial."""
    recipe = build_recipe(settings_of(tiny_corpus, tmp_path_factory.mktemp("straight") / "out"))
    finished = []
    return recipe, search(recipe, on_trial=finished.append), finished


@pytest.fixture(scope="module")
def drawn(tiny_corpus, tmp_path_factory):
    """Four trials of one seed whose values are drawn at random, in one go."""
    settings = settings_of(tiny_corpus, tmp_path_factory.mktemp("drawn") / "out")
    return search(build_recipe(with_search(settings, sampler="random", seeds=1, trials=4)))


def test_a_search_measures_each_trial_and_leaves_a_recipe_that_trains_to_the_best(straight):
    _, result, finished = straight
    assert finished == list(result.trials)
    for number, trial in enumerate(result.trials):
        assert trial.trial == number
        assert trial.values["batch_size"] in (4, 8)
        assert 1e-3 <= trial.values["optimizer.learning_rate"] <= 3e-2
        assert len(trial.seeds) == 2
        assert trial.ce == statistics.fmean(trial.seeds)
        assert trial.seeds[0] != trial.seeds[1]
    assert result.best.ce == min(trial.ce for trial in result.trials)
    backend = JournalFileBackend(str(result.directory / "study.journal"))
    study = optuna.load_study(study_name="prismlm", storage=JournalStorage(backend))
    assert [trial.value for trial in study.trials] == [trial.ce for trial in result.trials]
    assert study.best_trial.params == result.best.values

    best = load_recipe(result.best_recipe)
    assert best.batch_size == result.best.values["batch_size"]
    # The same run as the first of the trial.
    assert train(best).ce == result.best.seeds[0]

    saved = read_json(result.directory / "search.json")["trials"]
    assert saved == [asdict(trial) for trial in result.trials]
    runs = [{path.name for path in run.iterdir()} for run in result.directory.glob("trials/*/*")]
    assert runs == [{"training.json", "training.jsonl"}] * 6


def test_a_study_in_a_database(toy, tmp_path):
    url = f"sqlite:///{tmp_path}/study.db"
    settings = with_search(toy, sampler="random", trials=1, seeds=1, storage=url)
    result = search(build_recipe(settings))
    name = str(result.directory.resolve())
    assert optuna.load_study(study_name=name, storage=url).best_value == result.best.ce
    assert url not in (result.directory / "search.json").read_text()
    shutil.rmtree(result.directory.parent)
    with pytest.raises(InputError, match="has another search of"):
        search(build_recipe(settings))
    settings["search"]["storage"] = "nosuch://host/name"
    with pytest.raises(InputError, match=r"search\.storage cannot be opened"):
        search(build_recipe(settings))


def test_a_stopped_search_keeps_its_finished_trials_and_comes_to_the_same_ones(toy, drawn):
    settings = with_search(toy, sampler="random", seeds=1)
    recipe = build_recipe(settings)
    # Those of the first trial, its measurement, and one of the second trial.
    steps = 32 // drawn.trials[0].values["batch_size"] + 2
    with pytest.raises(Interrupted, match="search stopped; finished trials are kept"):
        search(recipe, progress=InterruptAfter(steps))
    first = recipe.out / "search" / "trials" / "0000" / "seed-0" / "training.jsonl"
    written = first.stat().st_mtime_ns
    resumed = search(recipe, resume=True)
    assert outcomes(resumed) == outcomes(drawn)[:3]
    assert first.stat().st_mtime_ns == written
    longer = search(build_recipe(with_search(settings, trials=4)), resume=True)
    assert outcomes(longer) == outcomes(drawn)


def test_another_search_is_not_resumed_and_the_differences_are_named(tiny_corpus, straight):
    settings = settings_of(tiny_corpus, straight[0].out) | {"steps": 9}
    changed = with_search(settings, sampler="random", space={"batch_size": [4, 16]})
    differences = r"search\.sampler: botorch → random; search\.space.*; steps: 8 → 9"
    with pytest.raises(InputError, match=f"begun as another search .*{differences}"):
        search(build_recipe(changed), resume=True)


def test_what_is_in_the_way_is_named(toy, straight, monkeypatch):
    recipe = build_recipe(toy)
    recipe.out.mkdir(parents=True)
    (recipe.out / "thesis.tex").write_text("text")
    with pytest.raises(InputError, match="does not hold a search"):
        search(recipe, resume=True)
    with pytest.raises(InputError, match=r"Train its best recipe, .*best\.yaml"):
        train(straight[0])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="without torchrun"):
        search(straight[0], resume=True)


def test_values_that_do_not_go_together_fail_their_trial_alone(toy):
    """The text cannot fill so large a batch."""
    space = {"batch_size": [4, 100_000]}
    settings = with_search(toy, space=space, sampler="random", seeds=1) | {"seed": 3}
    trials = search(build_recipe(settings)).trials
    failed = {trial.values["batch_size"]: trial.ce is None for trial in trials}
    assert failed == {4: False, 100_000: True}


def test_a_missing_package_names_the_extra(toy, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(InputError, match=r"optuna.*pip install 'prismlm\[search\]'"):
        search(build_recipe(toy))


def test_the_command_goes_on_after_trials_that_diverge(toy, tmp_path):
    """It prints a table or one JSON document."""

    def run(*options):
        return CliRunner().invoke(app, ["train", str(path), "--search", *options])

    # With this seed the first two draws are the first choice, and the third is the other.
    space = {"optimizer.learning_rate": [1e30, 3e-3]}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(with_search(toy, sampler="random", space=space) | {"seed": 3}))
    assert "of one run" in run("--dry-run").stderr
    shown = run()
    assert shown.exit_code == 0, shown.output
    assert "3 trials, 2 failed" in shown.stdout
    assert "best.yaml" in shown.stdout
    failed, ce, key = r"failed: .*(nan|not finite)", r"\d\.\d{4}", r"optimizer\.learning_rate"
    assert re.search(rf"^trial 1 of 3 \({key} 1e\+30\): {failed}", shown.stderr, re.M)
    assert re.search(rf"^trial 2 of 3 \({key} 0\.003\): CE {ce} ± {ce}$", shown.stderr, re.M)
    assert re.search(rf"^ *2 +{ce} +{ce} +{key} 0\.003 *$", shown.stdout, re.M)
    document = json.loads(run("--resume", "--json").stdout)
    assert [trial["ce"] is None for trial in document["trials"]] == [True, True, False]
    assert document["best"] == document["trials"][2]
    assert "--resume" in run().stderr


def test_the_sampler_is_asked_after_the_start_which_is_drawn_at_random(straight, drawn):
    asked, random = ([trial.values for trial in each.trials] for each in (straight[1], drawn))
    assert asked[:2] == random[:2]
    assert asked[2] != random[2]
    rates = [values["optimizer.learning_rate"] for values in random]
    assert len(set(rates)) == 4


def test_processes_share_the_trials_and_train_again_what_a_killed_one_left(toy, drawn, tmp_path):
    """One is killed in a trial, and two others share it and the rest."""
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(with_search(toy, sampler="random", trials=4, seeds=1)))
    command = ("train", path, "--search", "--resume", "--json")
    killed = forked.start(*command, cwd=tmp_path)
    directory = tmp_path / "out" / "search" / "trials" / "0000"
    wait_for(lambda: list(directory.glob("seed-*/training.json")))
    killed.kill()
    wait_for(lambda: killed.poll() is not None)
    workers = [forked.start(*command, cwd=tmp_path) for _ in range(2)]
    results = [json.loads(worker.communicate(200)[0])["trials"] for worker in workers]
    saved = read_json(tmp_path / "out" / "search" / "search.json")["trials"]
    # The last to finish has all of them, each trained once.
    assert saved == max(results, key=len)
    assert [(trial["values"], trial["ce"], trial["seeds"]) for trial in saved] == outcomes(drawn)
    # What either trained is not in the other's messages.
    messages = [worker.path("stderr").read_text() for worker in workers]
    assert all(sum(f"trial {n} of 4 (" in one for one in messages) == 1 for n in range(4))
