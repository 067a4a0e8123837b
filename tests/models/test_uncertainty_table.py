"""The file of a table: what is in it, and what is refused with the way out."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from prismlm.errors import FormatError, InputError
from prismlm.models.uncertainty_feedback import (
    UNCERTAINTY_FILE,
    load_uncertainty,
    save_uncertainty,
    uncertainty_of,
)
from tests.helpers.feedback_families import FAMILIES, attach_drawn, build


@pytest.fixture
def model():
    return build("llama")


@pytest.fixture
def saved(model, tmp_path):
    feedback = attach_drawn(model, 64, passes=2)
    save_uncertainty(tmp_path, feedback)
    feedback.detach()
    return tmp_path


def rewrite(directory, table=None, without=(), **changes):
    """Write the file anew with another table or other metadata; without ``seen``, as of old."""
    path = directory / UNCERTAINTY_FILE
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    meta = json.loads(header["__metadata__"]["uncertainty_feedback"]) | changes
    meta = {name: value for name, value in meta.items() if name not in without}
    held = load_file(path)["embedding"] if table is None else table
    save_file({"embedding": held}, path, {"uncertainty_feedback": json.dumps(meta)})
    return held


def test_a_table_of_another_width_level_count_model_or_dtype(model, saved):
    config = FAMILIES["llama"]()
    config.hidden_size = 32
    other = build("llama")
    with torch.no_grad():
        other.get_input_embeddings().weight[0, 0] += 1
    for given in (LlamaForCausalLM(config), build("llama").bfloat16(), other):
        with pytest.raises(FormatError, match=r"cannot verify .* dtype=torch.float32"):
            load_uncertainty(saved, given)
        assert uncertainty_of(given) is None
    with pytest.raises(FormatError, match="has 64 levels, and 256 were expected"):
        load_uncertainty(saved, model, levels=256)
    with pytest.raises(FormatError, match="has no uncertainty_feedback"):
        load_uncertainty(saved / "none", other)
    assert load_uncertainty(saved, model, levels=64).passes == 2


@pytest.mark.parametrize("share", [0, 0.05, 0.999])
def test_a_truncated_file(model, saved, share):
    path = saved / UNCERTAINTY_FILE
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(FormatError, match=r"cannot be read: .* Restore the file"):
        load_uncertainty(saved, model)
    assert uncertainty_of(model) is None


@pytest.mark.parametrize(
    ("table", "changes", "words"),
    [
        (None, {"format_version": 2}, "format version 2; this prismlm reads 1"),
        (None, {"levels": 63}, "for 63 levels"),
        (None, {"passes": 0}, "0 passes"),
        (None, {"model": None}, "model is None"),
        (None, {"places": {"decoder": "gone"}}, "no decoder found"),
        (torch.full((64, 16), torch.nan), {}, "a finite table"),
        (torch.zeros(64, 8), {}, "cannot verify that the table matches"),
        (torch.zeros(16), {}, r"has torch.float32 \[16\]"),
        (torch.zeros(1, 16), {}, r"\[1, 16\] for 64 levels"),
    ],
)
def test_a_file_that_cannot_be(model, saved, table, changes, words):
    rewrite(saved, table, **changes)
    with pytest.raises((FormatError, InputError), match=words):
        load_uncertainty(saved, model)


def test_a_file_of_before_places_and_counts_is_read(model, saved):
    held = rewrite(saved, without=["places"])
    assert torch.equal(load_uncertainty(saved, model).embedding.weight, held)
