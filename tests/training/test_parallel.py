"""Two and four real processes, in DDP and FSDP2, against one with as many rows a step."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from prismlm.errors import InputError, Interrupted
from prismlm.models.presets import build_config, build_model
from prismlm.training import build_recipe, parallel, train
from prismlm.training.setup import ShuffledSignal
from prismlm.training.trainer import SHARDS, latest_checkpoint
from tests.helpers.interrupted import InterruptAfter
from tests.helpers.processes import gradients_of
from tests.helpers.spread_runs import (
    ONE_PASS,
    TWO_PASSES,
    assert_same_history,
    base_settings,
    launch,
)
from tests.helpers.tiny_head import WEIGHTS, make, uneven_rows

PROTOT = {"preset": "protot-tiny", "num_channels": 6}
DELTANET = {"preset": "deltanet", "num_heads": 4, "num_hidden_layers": 2}
LLAMA = {"model_type": "llama", "intermediate_size": 48, "num_attention_heads": 2}
LLAMA |= {"hidden_size": 32, "num_hidden_layers": 2}
# Built by shards.
BUILT = {
    "tied": LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 1},
    # Its blocks initialise their last matrices again.
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 2},
    "mamba2": {"preset": "mamba-laptop", "num_hidden_layers": 2},
    "protot": PROTOT,
    "deltanet": DELTANET,
}
# With a head.
SPREAD = {
    "protot": PROTOT | {"num_hidden_layers": 3},
    # With parameters that are frozen and in no forward pass.
    "protot-layout": {
        "preset": "protot-tiny",
        "num_channels": 5,
        "num_hidden_layers": 2,
        "paper_parameter_layout": True,
    },
    "signal-noise": {"preset": "signal-noise-tiny", "head_size": 8, "num_hidden_layers": 2},
    "deltanet": DELTANET | {"dropout": 0.0},
}
FED = {"steps": 8, "checkpoint.every": 4, "head.detach": True}
FED["uncertainty_feedback"] = {"enabled": True, "levels": 64, "rows": 9}
ONLY_CE = {"losses.prototype_only_ce": 0.5}
DETACHED = {"head.detach": True, "head.position_share": 0.5}
DETACHED |= {"batch_size": 2, "gradient_accumulation": 2}
TWO = {
    "ddp": {"parallel": "ddp"},
    "detached": ONLY_CE | DETACHED | {"parallel": "ddp"},
    "fsdp2": ONLY_CE | {"parallel": "fsdp2"},
    "fed-back": FED | {"parallel": "fsdp2", "gradient_checkpointing": True},
    "shuffled": FED | {"parallel": "ddp", "uncertainty_feedback.signal": "shuffled"},
}
# Micro-batches of another size have another R1.
RESUMED = {"parallel": "fsdp2", "losses": {"prototype_pull": 0.0, "residual": 1.0, "warmup": 0.5}}
RESUMED["checkpoint"] = {"every": 3, "keep": 1, "asynchronous": True}
FOUR = {
    "hsdp": {"parallel": "hsdp", "shard_processes": 2},
    "bf16": {"parallel": "fsdp2", "precision": "bf16"},
    "three": {"parallel": "hsdp", "shard_processes": 3},
    "stopped": RESUMED,
    "resumed": RESUMED,
}
STOP_AT = 4
CODES = torch.arange(-1, 19).view(4, 5)


def packed_rows():
    """Rows of different lengths, two of which hold two documents."""
    rows = uneven_rows()
    rows["position_ids"] = rows["position_ids"].clone()
    rows["position_ids"][0] = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4, 5])
    rows["position_ids"][4] = torch.tensor([*range(7), 0, 1, 2])
    return rows


def arguments_of(family):
    # The head's losses reach the decoder, so that its gradients are of all of them.
    return {"weights": WEIGHTS, "detach": False, **SPREAD[family]}


def spread_jobs():
    """Return each family spread in each way; with two micro-batches, and recomputed, for two."""
    rows = packed_rows()
    once, twice = (
        [[{k: v[first:last] for k, v in rows.items()} for first, last in b] for b in bounds]
        for bounds in (ONE_PASS, TWO_PASSES)
    )
    jobs = {}
    for spread in ("ddp", "fsdp2"):
        for family in SPREAD:
            jobs[f"{family} {spread}"] = (arguments_of(family), spread, False, once)
        jobs[f"protot {spread} recomputed twice"] = (arguments_of("protot"), spread, True, twice)
    return jobs


@pytest.fixture(scope="module")
def launched(tiny_corpus, tmp_path_factory):
    """Do everything in one start of two processes and one of four.

    Returns the settings of runs, and of each job what each process found.
    """
    settings, four = {}, {name: changes | {"batch_size": 2} for name, changes in FOUR.items()}
    directory = tmp_path_factory.mktemp("processes")
    for name, changes in (TWO | four).items():
        settings[name] = base_settings(tiny_corpus, changes | {"out": str(directory / name)})
    with pytest.raises(Interrupted):
        train(build_recipe(settings["resumed"] | {"batch_size": 8}), progress=InterruptAfter(5))
    runs = {"fsdp2 stopped": (settings["fsdp2"], STOP_AT, False)}
    runs |= {name: (settings[name], 0, name == "fsdp2") for name in TWO}
    jobs = {"spread": spread_jobs(), "shuffled": {"codes": CODES.split(2)}, "runs": runs}
    by_rank = [launch(directory, jobs)]
    initial = {family: (model,) for family, model in BUILT.items()}
    runs = {n: (settings[n], 5 if n == "stopped" else 0, n == "resumed") for n in FOUR}
    jobs = {"initial": initial, "prepared": {"prepared": (settings["hsdp"],)}, "runs": runs}
    by_rank.append(launch(directory, jobs, 4))
    return settings, {name: [one[name] for one in ranks] for ranks in by_rank for name in ranks[0]}


@pytest.mark.parametrize("family", BUILT)
def test_a_model_built_by_shards_has_the_weights_of_one_built_whole(launched, family):
    torch.manual_seed(3)
    model = build_model(build_config(BUILT[family], 50, 0))
    following = torch.rand(1).item()
    expected = model.state_dict() | dict(model.named_buffers())
    for actual in launched[1][family]:
        assert actual["weights"].keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(actual["weights"][name], value), name
        assert actual["drawn"] == following
        # Rows that do not divide by four are rounded up.
        assert actual["share"] < 0.35


@pytest.mark.parametrize("name", spread_jobs())
def test_a_spread_model_has_the_loss_and_the_gradients_of_a_whole_one(launched, name):
    arguments, *_, batches = spread_jobs()[name]
    model = make(**arguments).train()
    expected, total = gradients_of(model, [row for part in batches for row in part])
    for gradients, loss in launched[1][name]:
        torch.testing.assert_close(loss, total, rtol=1e-5, atol=1e-6)
        assert gradients.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(gradients[key], value, rtol=5e-5, atol=5e-7, msg=key)
    layer = "attention" if name.startswith("signal-noise") else "mixer"
    assert any(layer in key and value.abs().max() > 1e-5 for key, value in expected.items())


def test_two_processes_shuffle_codes_as_one(launched):
    actual = torch.cat(launched[1]["codes"])
    assert torch.equal(actual, ShuffledSignal(5)(CODES))
    # Codes went from one process to the other.
    assert (actual[:2] > CODES[:2].max()).any()


@pytest.mark.parametrize("name", [*TWO, "hsdp"])
def test_a_run_in_several_processes_is_the_run_in_one(launched, name, tmp_path):
    settings, results = launched
    here = settings[name] | {"out": str(tmp_path / "one"), "parallel": "auto"}
    here.pop("shard_processes", None)
    # The same passes, one after another: R1 is a mean over them.
    here["gradient_accumulation"] = len(results[name]) * here.get("gradient_accumulation", 1)
    reference = train(build_recipe(here | {"gradient_checkpointing": False}))
    history, quality, _ = results[name][0]
    assert_same_history(reference.history, history)
    assert {tokens for *_, tokens in results[name]} == {reference.tokens}
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
    first, second = results["fsdp2 stopped"]
    assert first == second
    assert first in ("checkpoint-4", "checkpoint-5")
    out = Path(settings["ddp"]["out"])
    rows = [json.loads(line) for line in (out / "training.jsonl").read_text().splitlines()]
    assert rows == results["ddp"][0][0]
    assert (out / "checkpoints" / "checkpoint-12" / "rng_state_1.pth").is_file()


def test_other_numbers_of_processes_are_refused_that_cannot_resume_or_be_divided(launched):
    settings, results = launched
    with pytest.raises(InputError, match="processes: 2 → 1"):
        train(build_recipe(settings["ddp"]), resume=True)
    # Models are sharded as soon as their rows are packed.
    assert all(results["prepared"])
    for refused in results["three"]:
        assert "shard_processes is 3, which does not divide the 4 processes" in refused
    assert not Path(settings["three"]["out"]).exists()


@pytest.mark.parametrize("family", SPREAD)
def test_recomputed_activations_give_the_same_loss_and_gradients(family):
    """With dropout: the second pass draws what the first drew."""
    results, runs = [], []
    for recompute in (False, True):
        model = make(**arguments_of(family) | {"dropout": 0.3}).train()
        if recompute:
            parallel.recompute_activations(model.model)
        block = parallel.blocks(model.model)[0]
        mixer = block.attention if family == "signal-noise" else block.mixer
        mixer.register_forward_hook(lambda *_, recompute=recompute: runs.append(recompute))
        torch.manual_seed(5)
        results.append(gradients_of(model, [packed_rows()]))
    assert runs == [False, True, True]
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-7)


def test_bf16_shards_learn_what_float32_does(launched):
    settings, results = launched
    history, quality, _ = results["bf16"][0]
    plain = results["hsdp"][0][1]
    assert quality.ce == pytest.approx(plain.ce, rel=2e-2)
    assert quality.ce != plain.ce
    # Weights and their sums stay float32.
    out = Path(settings["bf16"]["out"])
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.float32
    with safe_open(out / "model.safetensors", "pt") as file:
        weight = file.get_tensor("model.embed_tokens.weight")
    assert not torch.equal(weight, weight.bfloat16().float())
    assert [row["step"] for row in history if "loss" in row] == [2, 4, 6, 8, 10, 12]


def test_checkpoints_of_four_processes_and_of_one_resume_in_the_other(launched, tmp_path):
    """They were written in the background, and the four parts of a step are one here."""
    settings, results = launched
    (name,) = {*results["stopped"]}
    out = Path(settings["stopped"]["out"])
    checkpoint = latest_checkpoint(out / "checkpoints")
    assert [path.name for path in checkpoint.parent.iterdir()] == [checkpoint.name] == [name]
    shards = sorted(path.name for path in (checkpoint / SHARDS).glob("*.distcp"))
    assert shards == [f"__{i}_0.distcp" for i in range(4)]
    here = settings["stopped"] | {"batch_size": 8, "out": str(tmp_path / "resumed")}
    shutil.copytree(out, here["out"])
    with pytest.raises(InputError, match="batch_size · processes: 8 → 4"):
        train(build_recipe(here | {"batch_size": 4}), resume=True)
    resumed = train(build_recipe(here), resume=True)
    reference = train(build_recipe(here | {"out": str(tmp_path / "whole")}))
    # Five steps were rounded otherwise.
    pairs = [[r for r in run.history if r["step"] > 6] for run in (reference, resumed)]
    for theirs, ours in zip(*pairs, strict=True):
        assert ours == pytest.approx(theirs, rel=5e-4)
    assert resumed.quality.ce == pytest.approx(reference.quality.ce, rel=1e-5)
    assert resumed.tokens == reference.tokens
    # R1 and RES are of a micro-batch, which is a quarter of one here.
    history, quality, _ = results["resumed"][0]
    pairs = [[r["ce"] for r in rows if "ce" in r] for rows in (reference.history, history)]
    assert pairs[1] == pytest.approx(pairs[0], rel=1e-3)
    assert quality.ce == pytest.approx(reference.quality.ce, rel=1e-3)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_written_in_several_files(tmp_path, monkeypatch, tied):
    monkeypatch.setattr(parallel, "FILE_BYTES", 8000)
    model = build_model(build_config(LLAMA | {"tie_word_embeddings": tied}, 50, 0))
    parallel.save_pretrained(model, tmp_path)
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 2
    index = json.loads((tmp_path / parallel.INDEX_FILE).read_text())["weight_map"]
    assert {name for file in files for name in load_file(file)} == index.keys()
    assert ("lm_head.weight" in index) == (not tied)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(opened.state_dict()[name], value), name
