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


def change(directory, **values):
    path = directory / META_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_round_trip(directory, model):
    sidecar = load_sidecar(directory, model)
    tensors = load_file(directory / HEAD_FILE)
    assert set(tensors) == {"prototypes", "scale"}
    assert tensors["scale"].item() == pytest.approx(1.25)
    assert torch.equal(sidecar.head.prototypes, tensors["prototypes"])
    assert sidecar.head.scale.item() == pytest.approx(1.25)
    assert sidecar.head.prototypes_per_token == 3
    assert sidecar.logit_map == LogitMap()
    assert sidecar.provenance == {"steps": 7}


def test_the_checkpoint_is_a_plain_one(directory, model):
    reloaded = AutoModelForCausalLM.from_pretrained(directory)
    assert type(reloaded) is type(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(reloaded.state_dict()[name], tensor), name


def test_more_per_token_than_prototypes(directory):
    change(directory, prototypes_per_token=13)
    with pytest.raises(InputError, match="there are 12 prototypes"):
        load_sidecar(directory)


@pytest.mark.parametrize("version", [2, 99])
def test_another_version(directory, version):
    change(directory, format_version=version)
    with pytest.raises(FormatError, match=f"format version {version}"):
        load_sidecar(directory)


def test_fitted_weights_come_back_and_are_of_a_version_of_their_own(directory, model, tmp_path):
    before = load_sidecar(directory, model)
    assert before.head.weights == "cosine"
    head = PrototypeHead(model.config.hidden_size, 12, 3, weights="fitted")
    head.reset_parameters()
    save_sidecar(directory, Sidecar(head, before.logit_map, before.base))
    assert json.loads((directory / META_FILE).read_text())["format_version"] == 3
    assert load_sidecar(directory, model).head.weights == "fitted"
    change(directory, weights="guessed")
    with pytest.raises(FormatError, match="weights is 'guessed'"):
        load_sidecar(directory, model)


@pytest.mark.parametrize("name", [META_FILE, HEAD_FILE])
def test_a_missing_file(directory, name):
    (directory / name).unlink()
    with pytest.raises(FormatError, match=name):
        load_sidecar(directory)


@pytest.mark.parametrize("name", [META_FILE, HEAD_FILE])
def test_a_damaged_file(directory, name):
    path = directory / name
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(FormatError):
        load_sidecar(directory)


def test_prototypes_that_are_not_finite(directory):
    tensors = load_file(directory / HEAD_FILE)
    tensors["prototypes"][0, 0] = float("nan")
    save_file(tensors, directory / HEAD_FILE)
    with pytest.raises(FormatError, match="finite"):
        load_sidecar(directory)


def test_weights_that_changed_since(directory, model):
    with torch.no_grad():
        model.get_output_embeddings().weight[0, 0] += 1
    with pytest.raises(FormatError, match=r"not the one its prototypes .* were trained with"):
        load_sidecar(directory, model)


def test_prototypes_of_another_width(directory, model):
    tensors = load_file(directory / HEAD_FILE)
    tensors["prototypes"] = tensors["prototypes"][:, :-1].contiguous()
    save_file(tensors, directory / HEAD_FILE)
    with pytest.raises(FormatError, match="prototypes of width"):
        load_sidecar(directory, model)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (("prototypes_per_token",), True),
        (("base",), None),
        (("base", "bogus"), "x"),
        (("logit_map",), []),
        (("logit_map", "scale"), None),
        (("provenance",), "text"),
    ],
)
def test_values_of_another_type(directory, key, value):
    file = directory / "prismlm.json"
    meta = json.loads(file.read_text())
    holder = meta
    for name in key[:-1]:
        holder = holder[name]
    holder[key[-1]] = value
    file.write_text(json.dumps(meta))
    with pytest.raises(FormatError, match=r"prismlm\.json"):
        load_sidecar(directory)


def test_a_flipped_byte_of_the_weights_is_found_by_verifying(directory):
    written = verify_weights(directory)
    assert written >= 1
    weights = directory / HEAD_FILE
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(bytes(data))
    with pytest.raises(FormatError, match=f"{HEAD_FILE} is damaged, missing or another file"):
        verify_weights(directory)
    weights.unlink()
    with pytest.raises(FormatError, match="missing"):
        verify_weights(directory)


def test_weights_whose_fingerprints_nobody_noted(directory):
    file = directory / "prismlm.json"
    meta = json.loads(file.read_text())
    del meta["files"]
    file.write_text(json.dumps(meta))
    assert verify_weights(directory) == 0
    load_sidecar(directory)
