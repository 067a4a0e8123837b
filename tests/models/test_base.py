"""The checkpoint a head is attached to: directories are linked, GGUF files converted."""

import json
import os
import shutil
import stat

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from prismlm.errors import FormatError, InputError
from prismlm.models import base as module
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


def test_weights_are_linked_the_rest_is_copied_and_ours_is_left(tiny_model, tmp_path):
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(tiny_model, model)
    (model / "training.json").write_text("{}")
    placed(model, out)
    assert os.path.samefile(model / "model.safetensors", out / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        assert not os.path.samefile(model / name, out / name)
        assert (model / name).read_bytes() == (out / name).read_bytes()
    assert not any((out / name).exists() for name in ("training.json", META_FILE, "lens"))


def test_weights_are_copied_where_they_cannot_be_linked(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(module.os, "link", lambda *_: (_ for _ in ()).throw(OSError("no links")))
    placed(tiny_model, tmp_path / "out")
    one, other = (d / "model.safetensors" for d in (tiny_model, tmp_path / "out"))
    assert not os.path.samefile(one, other)
    assert one.read_bytes() == other.read_bytes()


def state(directory):
    return {p.name: (p.stat().st_mode, p.stat().st_mtime_ns) for p in directory.iterdir()}


@pytest.mark.parametrize("mode", [0o600, 0o444])
def test_a_base_is_as_it_was_after_it_was_adapted(tiny_model, tmp_path, mode):
    model, adapter, out = tmp_path / "model", tmp_path / "adapter", tmp_path / "out"
    shutil.copytree(tiny_model, model, ignore=shutil.ignore_patterns("lens"))
    for path in model.iterdir():
        path.chmod(mode)
    before = state(model)
    adapter.mkdir()
    save_file({}, adapter / ADAPTER_WEIGHTS)
    (adapter / ADAPTER_CONFIG).write_text('{"r": 1, "lora_alpha": 1}')
    put_adapted(model, adapter, out)
    assert state(model) == before
    # Private stays private; what this wrote is as any file.
    assert stat.S_IMODE((out / "tokenizer.json").stat().st_mode) == mode
    assert stat.S_IMODE((out / "model.safetensors").stat().st_mode) & 0o044
    assert not any(path.stat().st_nlink > 1 for path in out.iterdir())


def test_a_link_out_of_the_directory_is_refused_and_what_it_leads_to_untouched(
    tiny_model, tmp_path
):
    secret, model = tmp_path / "secret.json", tmp_path / "model"
    shutil.copytree(tiny_model, model)
    secret.write_text("{}")
    secret.chmod(0o600)
    (model / "added_tokens.json").symlink_to("../secret.json")
    with pytest.raises(InputError, match=r"added_tokens\.json is a link to .*secret\.json"):
        find_base(str(model))
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    (model / "added_tokens.json").unlink()
    (model / "vocab.json").symlink_to("tokenizer.json")
    find_base(str(model))


def test_a_snapshot_in_the_cache_of_the_hub_is_links_and_is_read(tiny_model, tmp_path):
    repository = tmp_path / "models--someone--tiny"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "1234abcd"
    shutil.copytree(tiny_model, blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    before = state(blobs)
    placed(snapshot, tmp_path / "out")
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert state(blobs) == before
    (snapshot / "merges.txt").symlink_to("/etc/hostname")
    with pytest.raises(InputError, match=r"merges\.txt is a link to /etc/hostname"):
        find_base(str(snapshot))


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


def test_a_gguf_file_that_is_cut_off(tiny_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    path = write_gguf(model, tiny_model / "tokenizer.json", tmp_path / "tiny.gguf")
    os.truncate(path, path.stat().st_size // 2)
    (tmp_path / "out").mkdir()
    with pytest.raises(FormatError, match=r"GGUF file .* cannot be read"):
        put_base(find_base(str(path)), tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_pickled_weights_are_refused_with_the_way_out(tiny_model, tmp_path):
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    shutil.copy(tiny_model / "config.json", pickled)
    torch.save({}, pickled / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model.bin, a pickle, .*save_pretrained"):
        find_base(str(pickled))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("weights.bin", "is a file, but not a GGUF file"),
        ("empty/", "has no config.json"),
        ("bare/config.json", "expected model.safetensors"),
        ("someone/no-such-model", "could not be fetched from the Hugging"),
        ("/nowhere/at all/ever", "could not be fetched from the Hugging"),
    ],
)
def test_what_is_no_model(tmp_path, made, said):
    path = tmp_path / made
    if made.endswith("/"):
        path.mkdir()
    elif "fetched" not in said:
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    given = path.parent if made == "bare/config.json" else path
    with pytest.raises(InputError, match=said):
        find_base(made if "fetched" in said else str(given))


class Conv1D(nn.Module):
    """GPT-2's: its weight is [in, out]."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 2))


def model():
    made = nn.Module()
    made.inner = nn.Module()
    made.inner.linear = nn.Linear(3, 2, bias=False)
    made.inner.turned = Conv1D()
    made.inner.linear.weight.data.fill_(1.0)
    return made


def write(directory, tensors, **config):
    save_file(tensors, directory / ADAPTER_WEIGHTS)
    (directory / ADAPTER_CONFIG).write_text(json.dumps({"r": 1, "lora_alpha": 2} | config))


def factors(name):
    prefix = f"base_model.model.inner.{name}"
    return {
        f"{prefix}.lora_A.weight": torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16),
        f"{prefix}.lora_B.weight": torch.tensor([[0.5], [-1.0]], dtype=torch.bfloat16),
    }


def test_by_hand(tmp_path):
    made = model()
    write(tmp_path, factors("linear") | factors("turned"))
    merge_adapter(made, tmp_path)
    # 2 · [0.5, −1]ᵀ [1, 2, 3]
    added = torch.tensor([[1.0, 2.0, 3.0], [-2.0, -4.0, -6.0]])
    assert torch.equal(made.inner.linear.weight, 1 + added)
    assert torch.equal(made.inner.turned.weight, added.T)


@pytest.mark.parametrize("name", ["elsewhere", "turned2"])
def test_of_another_model(tmp_path, name):
    write(tmp_path, factors(name))
    with pytest.raises(FormatError, match="of another model"):
        merge_adapter(model(), tmp_path)


@pytest.mark.parametrize("damage", ["no tensors", "half a pair", "no rank", "an endless factor"])
def test_damaged(tmp_path, damage):
    tensors = factors("linear")
    config = {"no rank": {"r": 0}, "an endless factor": {"lora_alpha": 10**400}}.get(damage, {})
    if damage == "half a pair":
        tensors.popitem()
    write(tmp_path, tensors, **config)
    if damage == "no tensors":
        (tmp_path / ADAPTER_WEIGHTS).write_bytes(b"no tensors")
    with pytest.raises(FormatError, match="damaged"):
        merge_adapter(model(), tmp_path)


def test_an_adapter_without_its_model_is_named_with_the_way_out(tmp_path):
    write(tmp_path, factors("linear"), base_model_name_or_path="some/base")
    for opens in (lambda: find_base(str(tmp_path)), lambda: read_checkpoint(tmp_path)):
        with pytest.raises(InputError, match=r"(?s)PEFT adapter of some/base, .*merge_and_unload"):
            opens()
