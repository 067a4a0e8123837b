"""Two real processes, in DDP and FSDP2, against one with as many rows a step."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from prismlm.errors import InputError
from prismlm.training import build_recipe, train
from prismlm.training.parallel import blocks, recompute_activations
from prismlm.training.setup import ShuffledSignal
from tests.helpers.processes import gradients_of
from tests.helpers.spread_runs import (
    ONE_PASS,
    TWO_PASSES,
    assert_same_history,
    base_settings,
    launch,
)
from tests.helpers.tiny_head import WEIGHTS, make, uneven_rows

FAMILIES = {
    "protot": {"preset": "protot-tiny", "num_channels": 6, "num_hidden_layers": 3},
    # With parameters that are frozen and in no forward pass.
    "protot-layout": {
        "preset": "protot-tiny",
        "num_channels": 5,
        "num_hidden_layers": 2,
        "paper_parameter_layout": True,
    },
    "signal-noise": {"preset": "signal-noise-tiny", "head_size": 8, "num_hidden_layers": 2},
    "deltanet": {"preset": "deltanet", "num_heads": 4, "num_hidden_layers": 2, "dropout": 0.0},
}
RUNS = {
    "ddp": "ddp",
    "detached": "ddp",
    "fsdp2": "fsdp2",
    "fed-back": "fsdp2",
    "shuffled": "ddp",
}
STOP_AT = 4
CODES = torch.arange(-1, 19).view(4, 5)


def settings_of(corpus, name):
    settings = base_settings(corpus) | {"parallel": RUNS[name]}
    only_ce = settings["losses"] | {"prototype_only_ce": 0.5}
    if name == "detached":
        settings["head"] |= {"detach": True, "position_share": 0.5}
        return settings | {"losses": only_ce, "batch_size": 2, "gradient_accumulation": 2}
    if name in ("ddp", "fsdp2"):
        return settings | ({"losses": only_ce} if name == "fsdp2" else {})
    settings |= {"steps": 8, "checkpoint": {"every": 4}}
    settings["head"]["detach"] = True
    settings["gradient_checkpointing"] = name == "fed-back"
    signal = "shuffled" if name == "shuffled" else "own"
    feedback = {"enabled": True, "levels": 64, "rows": 9, "signal": signal}
    return settings | {"uncertainty_feedback": feedback}


def packed_rows():
    """Rows of different lengths, two of which hold two documents."""
    rows = uneven_rows()
    rows["position_ids"] = rows["position_ids"].clone()
    rows["position_ids"][0] = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4, 5])
    rows["position_ids"][4] = torch.tensor([*range(7), 0, 1, 2])
    return rows


def between(rows, bounds):
    return [{k: v[first:last] for k, v in rows.items()} for first, last in bounds]


def arguments_of(family):
    # The head's losses reach the decoder, so that its gradients are of all of them.
    return {"weights": WEIGHTS, "detach": False, **FAMILIES[family]}


def spread_jobs():
    """Return each family spread in each way; with two micro-batches, and recomputed, for two."""
    once = [between(packed_rows(), bounds) for bounds in ONE_PASS]
    twice = [between(packed_rows(), bounds) for bounds in TWO_PASSES]
    jobs = {}
    for spread in ("ddp", "fsdp2"):
        for family in FAMILIES:
            jobs[f"{family} {spread}"] = (arguments_of(family), spread, False, once)
        jobs[f"protot {spread} recomputed twice"] = (arguments_of("protot"), spread, True, twice)
    return jobs


@pytest.fixture(scope="module")
def launched(tiny_corpus, tmp_path_factory):
    """Do everything in one start of two processes."""
    directory = tmp_path_factory.mktemp("processes")
    settings = {
        name: settings_of(tiny_corpus, name) | {"out": str(directory / name)} for name in RUNS
    }
    runs = {"fsdp2 stopped": (settings["fsdp2"], STOP_AT, False)}
    runs |= {name: (one, 0, name == "fsdp2") for name, one in settings.items()}
    jobs = {"spread": spread_jobs(), "shuffled": {"codes": CODES.split(2)}, "runs": runs}
    return settings, launch(directory, jobs)


@pytest.mark.parametrize("name", spread_jobs())
def test_a_spread_model_has_the_loss_and_the_gradients_of_a_whole_one(launched, name):
    arguments, *_, batches = spread_jobs()[name]
    model = make(**arguments).train()
    expected, total = gradients_of(model, [row for part in batches for row in part])
    for rank in (0, 1):
        gradients, loss = launched[1][rank][name]
        torch.testing.assert_close(loss, total, rtol=1e-5, atol=1e-6)
        assert gradients.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(gradients[key], value, rtol=5e-5, atol=5e-7, msg=key)
    layer = "attention" if name.startswith("signal-noise") else "mixer"
    assert any(layer in key and value.abs().max() > 1e-5 for key, value in expected.items())


def test_two_processes_shuffle_codes_as_one(launched):
    expected = ShuffledSignal(5)(CODES)
    actual = torch.cat([launched[1][rank]["codes"] for rank in (0, 1)])
    assert torch.equal(actual, expected)
    # Codes went from one process to the other.
    assert (actual[:2] > CODES[:2].max()).any()


@pytest.mark.parametrize("name", RUNS)
def test_a_run_in_two_processes_is_the_run_in_one(launched, name, tmp_path):
    settings, (first, second) = launched
    here = settings[name] | {"out": str(tmp_path / "one"), "parallel": "auto"}
    # The same passes, one after another: R1 is a mean over them.
    here["gradient_accumulation"] = 2 * here.get("gradient_accumulation", 1)
    reference = train(build_recipe(here | {"gradient_checkpointing": False}))
    history, quality, tokens = first[name]
    assert_same_history(reference.history, history)
    assert tokens == second[name][2] == reference.tokens
    assert quality.ce == pytest.approx(reference.quality.ce, rel=1e-5)
    expected = reference.quality.prototype_only_ce
    assert quality.prototype_only_ce == pytest.approx(expected, rel=1e-5)
    out = Path(settings[name]["out"])
    files = [path.name for path in reference.directory.glob("*.safetensors")]
    assert len(files) >= 2
    rtol, atol = (1e-4, 1e-5) if "uncertainty_feedback" in here else (1e-5, 2e-6)
    for file in files:
        ours, theirs = load_file(out / file), load_file(reference.directory / file)
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, rtol=rtol, atol=atol, msg=key)


def test_both_processes_stopped_at_the_same_step_and_one_wrote(launched):
    settings, results = launched
    stopped = [each["fsdp2 stopped"] for each in results]
    assert stopped[0] == stopped[1]
    assert stopped[0] in ("checkpoint-4", "checkpoint-5")
    out = Path(settings["ddp"]["out"])
    rows = [json.loads(line) for line in (out / "training.jsonl").read_text().splitlines()]
    assert rows == results[0]["ddp"][0]
    assert (out / "checkpoints" / "checkpoint-12" / "rng_state_1.pth").is_file()


def test_another_number_of_processes_does_not_resume(launched):
    with pytest.raises(InputError, match="processes: 2 → 1"):
        train(build_recipe(launched[0]["ddp"]), resume=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_activations_give_the_same_loss_and_gradients(family):
    """With dropout: the second pass draws what the first drew."""
    results, runs = [], []
    for recompute in (False, True):
        model = make(**arguments_of(family) | {"dropout": 0.3}).train()
        if recompute:
            recompute_activations(model.model)
        block = blocks(model.model)[0]
        mixer = block.attention if family == "signal-noise" else block.mixer
        mixer.register_forward_hook(lambda *_, recompute=recompute: runs.append(recompute))
        torch.manual_seed(5)
        results.append(gradients_of(model, [packed_rows()]))
    assert runs == [False, True, True]
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-7)
