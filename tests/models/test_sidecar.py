import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from prismlm.errors import FormatError, InputError
from prismlm.layers import PrototypeHead
from prismlm.models.presets import build_config, build_model
from prismlm.models.seam import LogitMap
from prismlm.models.sidecar import (
    HEAD_FILE,
    META_FILE,
    Sidecar,
    base_of,
    load_sidecar,
    save_sidecar,
    verify_weights,
)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return build_model(build_config({"preset": "llama-tiny"}, vocab_size=97, eos_token_id=0))


@pytest.fixture
def directory(model, tmp_path):
    head = PrototypeHead(model.config.hidden_size, 12, 3, scale=1.25)
    head.reset_parameters(torch.Generator().manual_seed(1))
    model.save_pretrained(tmp_path)
    save_sidecar(tmp_path, Sidecar(head, LogitMap.of(model), base_of(model), {"steps": 7}))
    return tmp_path


def change_meta(directory, **values):
    path = directory / META_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_round_trip(directory, model):
    sidecar = load_sidecar(directory, model)
    tensors = load_file(directory / HEAD_FILE)
    assert set(tensors) == {"prototypes", "scale"}
    assert tensors["scale"].item() == sidecar.head.scale.item() == pytest.approx(1.25)
    assert torch.equal(sidecar.head.prototypes, tensors["prototypes"])
    assert (sidecar.head.prototypes_per_token, sidecar.head.weights) == (3, "cosine")
    assert sidecar.logit_map == LogitMap()
    assert sidecar.provenance == {"steps": 7}
    # The checkpoint is a plain one.
    reloaded = AutoModelForCausalLM.from_pretrained(directory)
    assert type(reloaded) is type(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(reloaded.state_dict()[name], tensor), name
    # Fitted weights have another version.
    sidecar.head.weights = "fitted"
    save_sidecar(directory, sidecar)
    assert json.loads((directory / META_FILE).read_text())["format_version"] == 3
    assert load_sidecar(directory, model).head.weights == "fitted"


def change_prototypes(directory, change):
    tensors = load_file(directory / HEAD_FILE)
    tensors["prototypes"] = change(tensors["prototypes"]).contiguous()
    save_file(tensors, directory / HEAD_FILE)


def cut(path):
    path.write_bytes(path.read_bytes()[:40])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: change_meta(path, format_version=2), "format version 2"),
        (lambda path: change_meta(path, prototypes_per_token=13), "there are 12 prototypes"),
        (lambda path: change_meta(path, weights="guessed"), "weights is 'guessed'"),
        (lambda path: change_meta(path, base=None), r"prismlm\.json"),
        (lambda path: change_prototypes(path, lambda p: p[:, :-1]), "prototypes of width"),
        (lambda path: change_prototypes(path, lambda p: p / 0), "finite"),
        (lambda path: cut(path / META_FILE), META_FILE),
        (lambda path: cut(path / HEAD_FILE), HEAD_FILE),
        (lambda path: (path / META_FILE).unlink(), f"has no {META_FILE}"),
        (lambda path: (path / HEAD_FILE).unlink(), f"has no {HEAD_FILE}"),
    ],
)
def test_files_that_cannot_be(directory, model, change, words):
    change(directory)
    with pytest.raises((FormatError, InputError), match=words):
        load_sidecar(directory, model)


def test_weights_that_changed_since(directory, model):
    with torch.no_grad():
        model.get_output_embeddings().weight[0, 0] += 1
    with pytest.raises(FormatError, match=r"not the one its prototypes .* were trained with"):
        load_sidecar(directory, model)


def test_verifying_notices_a_flipped_byte_and_a_missing_file(directory):
    assert verify_weights(directory) >= 1
    weights = directory / HEAD_FILE
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(bytes(data))
    with pytest.raises(FormatError, match=f"{HEAD_FILE} is damaged, missing or another file"):
        verify_weights(directory)
    weights.unlink()
    with pytest.raises(FormatError, match="missing"):
        verify_weights(directory)
    change_meta(directory, files={})
    assert verify_weights(directory) == 0
