"""Four processes that share a model: its first weights, FSDP2 within groups, its checkpoints."""

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
from prismlm.training.trainer import SHARDS, latest_checkpoint
from tests.helpers.interrupted import InterruptAfter
from tests.helpers.spread_runs import assert_same_history, base_settings, launch

SMALL = {"hidden_size": 32, "num_hidden_layers": 2}
LLAMA = {"model_type": "llama", "intermediate_size": 48, "num_attention_heads": 2, **SMALL}
FAMILIES = {
    "tied": LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 1},
    # Its blocks initialise their last matrices again.
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 2},
    "mamba2": {"preset": "mamba-laptop", "num_hidden_layers": 2},
    "protot": {"preset": "protot-tiny", "num_channels": 6},
    "deltanet": {"preset": "deltanet", "num_heads": 4, "num_hidden_layers": 2},
}
RUNS = {
    "hsdp": {"parallel": "hsdp", "shard_processes": 2},
    "bf16": {"parallel": "fsdp2", "precision": "bf16"},
    "three": {"parallel": "hsdp", "shard_processes": 3},
    "stopped": {"parallel": "fsdp2"},
    "resumed": {"parallel": "fsdp2"},
}
# Micro-batches of another size have another R1.
NO_R1 = {"losses": {"prototype_pull": 0.0, "residual": 1.0, "warmup": 0.5}}


def settings_of(corpus, name):
    settings = base_settings(corpus) | {"batch_size": 2} | RUNS[name]
    if name in ("stopped", "resumed"):
        settings |= NO_R1 | {"checkpoint": {"every": 3, "keep": 1, "asynchronous": True}}
    return settings


@pytest.fixture(scope="module")
def launched(tiny_corpus, tmp_path_factory):
    """Do everything in one start of four processes."""
    directory = tmp_path_factory.mktemp("four")
    settings = {n: settings_of(tiny_corpus, n) | {"out": str(directory / n)} for n in RUNS}
    here = build_recipe(settings["resumed"] | {"batch_size": 8})
    with pytest.raises(Interrupted):
        train(here, progress=InterruptAfter(5))
    runs = {
        name: (one, 5 if name == "stopped" else 0, name == "resumed")
        for name, one in settings.items()
    }
    initial = {family: (model,) for family, model in FAMILIES.items()}
    jobs = {"initial": initial, "prepared": {"prepared": (settings["hsdp"],)}, "runs": runs}
    return settings, launch(directory, jobs, 4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_built_by_shards_has_the_weights_of_one_built_whole(launched, family):
    torch.manual_seed(3)
    model = build_model(build_config(FAMILIES[family], 50, 0))
    following = torch.rand(1).item()
    expected = model.state_dict() | dict(model.named_buffers())
    for results in launched[1]:
        actual = results[family]
        assert actual["weights"].keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(actual["weights"][name], value), name
        assert actual["drawn"] == following
        # Rows that do not divide by four are rounded up.
        assert actual["share"] < 0.35


def test_groups_that_share_a_copy_train_as_one_process(launched, tmp_path):
    settings, results = launched
    here = settings["hsdp"] | {"out": str(tmp_path / "one"), "gradient_accumulation": 4}
    del here["shard_processes"]
    reference = train(build_recipe(here | {"parallel": "auto"}))
    history, quality, _ = results[0]["hsdp"]
    assert_same_history(reference.history, history)
    assert quality.ce == pytest.approx(reference.quality.ce, rel=1e-5)


def test_processes_that_groups_do_not_divide_are_refused(launched):
    for results in launched[1]:
        # Models are sharded as soon as their rows are packed.
        assert results["prepared"]
        assert "shard_processes is 3, which does not divide the 4 processes" in results["three"]
    assert not Path(launched[0]["three"]["out"]).exists()


def test_bf16_shards_learn_what_float32_does(launched):
    settings, results = launched
    history, quality, _ = results[0]["bf16"]
    plain = results[0]["hsdp"][1]
    assert quality.ce == pytest.approx(plain.ce, rel=2e-2)
    assert quality.ce != plain.ce
    # Weights and their sums stay float32.
    out = Path(settings["bf16"]["out"])
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.float32
    with safe_open(out / "model.safetensors", "pt") as file:
        weight = file.get_tensor("model.embed_tokens.weight")
    assert not torch.equal(weight, weight.bfloat16().float())
    assert [row["step"] for row in history if "loss" in row] == [2, 4, 6, 8, 10, 12]


def test_checkpoints_of_four_processes_and_of_one_resume_in_the_other(launched, tmp_path):
    """They were written in the background, and the four parts of a step are one here."""
    settings, results = launched
    assert len({one["stopped"] for one in results}) == 1
    out = Path(settings["stopped"]["out"])
    checkpoint = latest_checkpoint(out / "checkpoints")
    assert checkpoint.name == results[0]["stopped"]
    assert [path.name for path in checkpoint.parent.iterdir()] == [checkpoint.name]
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
    history, quality, _ = results[0]["resumed"]
    pairs = [[r["ce"] for r in rows if "ce" in r] for rows in (reference.history, history)]
    assert pairs[1] == pytest.approx(pairs[0], rel=1e-3)
    assert quality.ce == pytest.approx(reference.quality.ce, rel=1e-3)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_written_in_several_files(tmp_path, monkeypatch, tied):
    monkeypatch.setattr(parallel, "FILE_BYTES", 8000)
    settings = LLAMA | {"tie_word_embeddings": tied}
    model = build_model(build_config(settings, 50, 0))
    parallel.save_pretrained(model, tmp_path)
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 2
    index = json.loads((tmp_path / parallel.INDEX_FILE).read_text())["weight_map"]
    assert {name for file in files for name in load_file(file)} == index.keys()
    assert ("lm_head.weight" in index) == (not tied)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(opened.state_dict()[name], value), name
