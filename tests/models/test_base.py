"""The base of a head: copied directories, converted GGUF files, merged adapters."""

import json
import os
import shutil
import stat

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.pytorch_utils import Conv1D

from prismlm.errors import FormatError, InputError
from prismlm.models.base import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    find_base,
    merge_adapter,
    put_adapted,
    put_base,
)
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.sidecar import META_FILE
from tests.helpers.gguf_file import write_gguf


def placed(path, out):
    out.mkdir()
    put_base(find_base(str(path)), out)
    return AutoModelForCausalLM.from_pretrained(out)


def state(directory):
    return {p.name: (p.stat().st_mode, p.stat().st_mtime_ns) for p in directory.iterdir()}


def test_merging_an_adapter_leaves_the_base_unchanged(tiny_model, tmp_path):
    adapter, out, before = tmp_path / "adapter", tmp_path / "out", state(tiny_model)
    adapter.mkdir()
    write(adapter, {})
    put_adapted(tiny_model, adapter, out)
    assert state(tiny_model) == before
    assert stat.S_IMODE((out / "model.safetensors").stat().st_mode) & 0o044
    assert not any(path.stat().st_nlink > 1 for path in out.iterdir())


def test_weights_of_a_snapshot_in_the_hubs_cache_are_linked(tiny_model, tmp_path):
    """Its files are links. Those of a head and its training are left out."""
    repository, out = tmp_path / "models--someone--tiny", tmp_path / "out"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "1234abcd"
    shutil.copytree(tiny_model, blobs)
    (blobs / "training.json").write_text("{}")
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    before = state(blobs)
    placed(snapshot, out)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert not (out / name).is_symlink()
        assert os.path.samefile(blobs / name, out / name) == (name == "model.safetensors")
        assert (blobs / name).read_bytes() == (out / name).read_bytes()
    assert not any((out / name).exists() for name in ("training.json", META_FILE, "lens"))
    assert state(blobs) == before


def test_a_gguf_file_becomes_the_same_model(tiny_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    path = write_gguf(model, tiny_model / "tokenizer.json", tmp_path / "tiny.gguf")
    converted = placed(path, tmp_path / "out").eval()
    ids = torch.arange(40)[None]
    assert torch.equal(model(input_ids=ids).logits, converted(input_ids=ids).logits)
    text = "The cell is the smallest unit — of\nlife."
    before, after = (AutoTokenizer.from_pretrained(d) for d in (tiny_model, tmp_path / "out"))
    assert before(text)["input_ids"] == after(text)["input_ids"]
    assert not list((tmp_path / "out").glob(".*"))
    assert not converted.generation_config.do_sample
    # Cut off, it leaves nothing.
    os.truncate(path, path.stat().st_size // 2)
    (tmp_path / "cut").mkdir()
    with pytest.raises(FormatError, match=r"GGUF file .* cannot be read"):
        put_base(find_base(str(path)), tmp_path / "cut")
    assert not list((tmp_path / "cut").iterdir())


def test_paths_and_names_without_a_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for name, words in (
        (str(tmp_path), r"has no config\.json or no weights"),
        ("someone/no-such-model", "nor a model that can be downloaded from the Hugging"),
    ):
        with pytest.raises(InputError, match=words):
            find_base(name)


def two_layers():
    model = nn.ModuleDict({"linear": nn.Linear(3, 2, bias=False), "transposed": Conv1D(2, 3)})
    for layer in model.values():
        nn.init.ones_(layer.weight)
    return nn.ModuleDict({"inner": model})


def write(directory, tensors, **config):
    save_file(tensors, directory / ADAPTER_WEIGHTS)
    (directory / ADAPTER_CONFIG).write_text(json.dumps({"r": 1, "lora_alpha": 2} | config))


def factors(name):
    prefix = f"base_model.model.inner.{name}"
    return {
        f"{prefix}.lora_A.weight": torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16),
        f"{prefix}.lora_B.weight": torch.tensor([[0.5], [-1.0]], dtype=torch.bfloat16),
    }


def test_merging_by_hand(tmp_path):
    model = two_layers()
    write(tmp_path, factors("linear") | factors("transposed"))
    merge_adapter(model, tmp_path)
    # 2 · [0.5, −1]ᵀ [1, 2, 3]
    update = torch.tensor([[1.0, 2.0, 3.0], [-2.0, -4.0, -6.0]])
    assert torch.equal(model["inner"]["linear"].weight, 1 + update)
    assert torch.equal(model["inner"]["transposed"].weight, 1 + update.T)


@pytest.mark.parametrize(
    ("tensors", "config", "words"),
    [
        (factors("elsewhere"), {}, "of another model"),
        (dict([*factors("linear").items()][:1]), {}, "damaged"),
        (factors("linear"), {"use_dora": True}, "cannot be merged: use_dora"),
        (None, {}, "damaged"),
    ],
)
def test_adapters_that_cannot_be_merged(tmp_path, tensors, config, words):
    write(tmp_path, tensors or {}, **config)
    if tensors is None:
        (tmp_path / ADAPTER_WEIGHTS).write_bytes(b"no tensors")
    with pytest.raises(FormatError, match=words):
        merge_adapter(two_layers(), tmp_path)


@pytest.mark.parametrize("opens", [lambda path: find_base(str(path)), read_checkpoint])
def test_an_adapter_without_its_model(tmp_path, opens):
    write(tmp_path, factors("linear"), base_model_name_or_path="some/base")
    with pytest.raises(InputError, match=r"(?s)PEFT adapter of some/base, .*merge_and_unload"):
        opens(tmp_path)
