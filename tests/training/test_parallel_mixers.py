"""Own decoders in DDP and FSDP2: two real processes against one, and recomputed blocks."""

import csv
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from prismlm.training import build_recipe, train
from prismlm.training.parallel import blocks, recompute_activations
from prismlm.training.training_signal import ShuffledSignal
from tests.helpers import forked
from tests.helpers.micro_batches import WEIGHTS, uneven_rows
from tests.helpers.spread_runs import (
    ONE_PASS,
    TWO_PASSES,
    assert_same_history,
    base_settings,
)
from tests.helpers.tiny_head import make
from tests.helpers.two_processes import gradients_of

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
RUNS = [
    ("protot", "fsdp2"),
    ("deltanet", "ddp"),
    ("signal-noise", "fsdp2"),
    ("fed-back", "fsdp2"),
    ("fed-back-ddp", "ddp"),
    ("shuffled", "ddp"),
]
# Runs of these train uncertainty feedback too.
FED_BACK = ("fed-back", "fed-back-ddp", "shuffled")
CODES = torch.arange(-1, 19).view(4, 5)
LLAMA = {"preset": "llama-tiny", "num_attention_heads": 4, "num_key_value_heads": 4}


def arguments_of(family):
    # The head's losses reach the decoder, so that its gradients are of all of them.
    return {"weights": WEIGHTS, "detach": False, **FAMILIES[family]}


def packed_rows():
    """Rows of different lengths, two of which hold two documents."""
    rows = uneven_rows()
    rows["position_ids"] = rows["position_ids"].clone()
    rows["position_ids"][0] = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4, 5])
    rows["position_ids"][4] = torch.tensor([*range(7), 0, 1, 2])
    return rows


def between(*bounds):
    return [{k: v[first:last] for k, v in packed_rows().items()} for first, last in bounds]


def jobs_of_gradients():
    """Return each family spread in each way; with two micro-batches, and recomputed, for one."""
    jobs = {
        f"{family} {spread}": (arguments_of(family), spread, False, [between(*b) for b in ONE_PASS])
        for family in FAMILIES
        for spread in ("ddp", "fsdp2")
    }
    for spread in ("ddp", "fsdp2"):
        for family in ("protot", "deltanet"):
            batches = [between(*b) for b in TWO_PASSES]
            jobs[f"{family} {spread} recomputed twice"] = (
                arguments_of(family),
                spread,
                True,
                batches,
            )
    return jobs


def run_settings(corpus, family, spread):
    model = {"num_hidden_layers": 2, "hidden_size": 32} | FAMILIES.get(family, LLAMA)
    head = base_settings(corpus)["head"] | {"detach": True}
    changes = {"model": model, "head": head, "parallel": spread, "steps": 8}
    changes |= {"gradient_checkpointing": spread == "fsdp2", "checkpoint": {"every": 4}}
    changes |= {"evaluation": {"every": 3, "tokens": 500, "final_tokens": 800}}
    settings = base_settings(corpus) | changes
    if family in FED_BACK:
        signal = "shuffled" if family == "shuffled" else "own"
        settings["uncertainty_feedback"] = {
            "enabled": True,
            "levels": 64,
            "rows": 9,
            "signal": signal,
        }
    if family == "deltanet":
        # With seed 0 one gradient of 65,536 is nothing but rounding, of which AdamW makes a step.
        settings["seed"] = 1
    settings["evaluation"] |= {"channel_tokens": 400, "attention_head_tokens": 400}
    return settings


@pytest.fixture(scope="module")
def launched(tiny_corpus, tmp_path_factory):
    """Do everything in one start of two processes."""
    directory = tmp_path_factory.mktemp("mixers")
    runs = [
        (family, run_settings(tiny_corpus, family, spread) | {"out": str(directory / family)}, 0)
        for family, spread in RUNS
    ]
    jobs = {"gradients": {}, "spread": jobs_of_gradients(), "runs": runs}
    jobs["shuffled"] = {"codes": CODES.split(2)}
    (directory / "jobs.pickle").write_bytes(pickle.dumps(jobs))
    worker = Path(__file__).parents[1] / "helpers" / "two_processes.py"
    done = forked.run_script(worker, directory)
    assert done.returncode == 0, done.stderr
    results = [pickle.loads((directory / f"rank-{i}.pickle").read_bytes()) for i in (0, 1)]
    return {name: settings for name, settings, _ in runs}, results


@pytest.mark.parametrize("name", jobs_of_gradients())
def test_two_processes_have_the_loss_and_the_gradients_of_one(launched, name):
    arguments, *_, batches = jobs_of_gradients()[name]
    model = make(**arguments).train()
    expected, losses = gradients_of_trained(model, [row for own in batches for row in own])
    for rank in (0, 1):
        gradients, loss = launched[1][rank][name]
        torch.testing.assert_close(loss, losses["loss"], rtol=1e-5, atol=1e-6)
        assert gradients.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(gradients[key], value, rtol=5e-5, atol=5e-7, msg=key)
    layer = "attention" if name.startswith("signal-noise") else "mixer"
    assert any(layer in key and value.abs().max() > 1e-5 for key, value in expected.items())


def gradients_of_trained(model, batches):
    """As ``gradients_of``, of a model that may hold parameters without a gradient."""
    for p in model.parameters():
        if not p.requires_grad:
            p.grad = torch.zeros_like(p)
    gradients, losses = gradients_of(model, batches)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    return {name: gradients[name] for name in trained}, losses


def test_two_processes_shuffle_codes_as_one(launched):
    expected = ShuffledSignal(5)(CODES)
    found = torch.cat([launched[1][rank]["codes"] for rank in (0, 1)])
    assert torch.equal(found, expected)
    # Codes went from one process to the other.
    assert (found[:2] > CODES[:2].max()).any()


@pytest.mark.parametrize(("family", "spread"), RUNS)
def test_a_run_in_two_processes_is_the_run_in_one(launched, family, spread, tmp_path):
    here = launched[0][family] | {"out": str(tmp_path / "one"), "parallel": "auto"}
    here |= {"gradient_checkpointing": False, "gradient_accumulation": 2}
    reference = train(build_recipe(here))
    history, quality, tokens = launched[1][0][family]
    assert_same_history(reference.history, history)
    assert tokens == reference.tokens
    assert quality.ce == pytest.approx(reference.quality.ce, rel=1e-5)
    out = Path(launched[0][family]["out"])
    assert_same_weights(out, reference.directory)
    for kind, file in (("protot", "channels.csv"), ("signal-noise", "heads.csv")):
        if family.startswith(kind):
            assert_same_rows(out / file, reference.directory / file)
        else:
            assert not (out / file).exists()


def assert_same_weights(first, second):
    files = [path.name for path in second.glob("*.safetensors")]
    assert len(files) >= 2
    for file in files:
        ours, theirs = load_file(first / file), load_file(second / file)
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-5, msg=key)


def assert_same_rows(first, second):
    tables = [list(csv.DictReader(file.read_text().splitlines())) for file in (first, second)]
    assert [row["step"] for row in tables[0]] == [
        str(step) for step in (3, 6, 8) for _ in range(len(tables[0]) // 3)
    ]
    for ours, theirs in zip(*tables, strict=True):
        for name, value in theirs.items():
            assert float(ours[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_activations_give_the_same_loss_and_gradients(family, dropout):
    """With dropout too: the second pass draws what the first drew."""
    found, calls = [], []
    for recompute in (False, True):
        model = make(**arguments_of(family) | {"dropout": dropout}).train()
        if recompute:
            recompute_activations(model.model)
        runs = []
        block = blocks(model.model)[0]
        inner = block.attention if family == "signal-noise" else block.mixer
        inner.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        torch.manual_seed(5)
        found.append(gradients_of_trained(model, [packed_rows()]))
        calls.append(len(runs))
    assert calls == [1, 2]
    (plain, losses), (again, repeated) = found
    torch.testing.assert_close(losses, repeated)
    for name, value in plain.items():
        torch.testing.assert_close(again[name], value, rtol=1e-5, atol=1e-7, msg=name)
