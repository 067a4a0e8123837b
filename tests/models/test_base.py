"""The checkpoint a head is attached to: directories are linked, GGUF files converted."""

import os
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from prismlm.errors import FormatError, InputError
from prismlm.models import base as module
from prismlm.models.base import find_base, put_base
from prismlm.models.sidecar import META_FILE
from tests.helpers.gguf_file import write_gguf


def placed(path, out):
    out.mkdir()
    put_base(find_base(str(path)), out)
    return AutoModelForCausalLM.from_pretrained(out)


def test_files_of_a_directory_are_linked_and_ours_are_left(tiny_model, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    (model / "training.json").write_text("{}")
    placed(model, tmp_path / "out")
    assert not (tmp_path / "out" / "training.json").exists()
    assert os.path.samefile(model / "config.json", tmp_path / "out" / "config.json")
    assert not (tmp_path / "out" / META_FILE).exists()
    assert not (tmp_path / "out" / "lens").exists()


def test_files_are_copied_where_they_cannot_be_linked(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(module.os, "link", lambda *_: (_ for _ in ()).throw(OSError("no links")))
    placed(tiny_model, tmp_path / "out")
    one, other = (d / "model.safetensors" for d in (tiny_model, tmp_path / "out"))
    assert not os.path.samefile(one, other)
    assert one.read_bytes() == other.read_bytes()


def test_a_gguf_file_becomes_the_same_model(tiny_model, tmp_path):
    pytest.importorskip("gguf")
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
    pytest.importorskip("gguf")
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
        ("weights.bin", "is a file and no GGUF file"),
        ("empty/", "has no config.json"),
        ("bare/config.json", "expected model.safetensors"),
        (None, "could not be fetched from the Hugging Face hub"),
    ],
)
def test_what_is_no_model(tmp_path, made, said):
    path = tmp_path / (made or "x")
    if made is None:
        path = "someone/no-such-model"
    elif made.endswith("/"):
        path.mkdir()
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    with pytest.raises(InputError, match=said):
        find_base(str(path.parent if made == "bare/config.json" else path))


def test_a_name_that_no_hub_could_have():
    with pytest.raises(InputError, match="there is no /nowhere/at all/ever"):
        find_base("/nowhere/at all/ever")
