"""What is refused when a checkpoint is opened."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    GPTNeoXConfig,
    LlamaConfig,
)

from prismlm.corpus import Corpus
from prismlm.corpus.tokenizer import load_tokenizer
from prismlm.errors import FormatError, InputError
from prismlm.models.base import find_base
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.sidecar import HEAD_FILE
from tests.helpers import families
from tests.helpers.small_models import t5

SMALL = families.SIZES | {
    "num_hidden_layers": 1, "intermediate_size": 16, "num_attention_heads": 2, "bos_token_id": 1,
}  # fmt: skip


@pytest.fixture
def save(small_corpus, tmp_path):
    """Save a model with the tokenizer of the small corpus; by default a Llama."""

    def save(model=None):
        model = model or AutoModelForCausalLM.from_config(LlamaConfig(**SMALL))
        model.save_pretrained(tmp_path)
        Corpus.open(small_corpus).tokenizer.save_pretrained(tmp_path)
        return tmp_path

    return save


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_complete_checkpoint_even_beside_a_pickle(save):
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL))
    directory = save(model)
    (directory / "pytorch_model.bin").write_bytes(b"not even a pickle")
    opened, tokenizer = read_checkpoint(directory)
    assert not opened.training
    assert torch.equal(opened.lm_head.weight, model.lm_head.weight)
    assert len(tokenizer) == 320


def test_pickles_are_not_read(save):
    directory, name = save(), "pytorch_model-00001-of-00002.bin"
    torch.save({}, directory / name)
    (directory / "model.safetensors").unlink()
    save_file({}, directory / HEAD_FILE)  # not weights of the model
    for opens in (read_checkpoint, find_base):
        with pytest.raises(InputError, match=rf"{name}, a pickle.*\.save_pretrained\(OUT\)"):
            opens(str(directory))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: BertForMaskedLM(BertConfig(**SMALL)), r"encoder-only .*BertForMaskedLM"),
        (lambda: t5(1), "an encoder-decoder: T5ForConditionalGeneration"),
    ],
)
def test_encoders_are_refused(save, build, words):
    with pytest.raises(InputError, match=words):
        read_checkpoint(save(build()))


@pytest.mark.parametrize("config", [GPTNeoXConfig(**SMALL), BertConfig(**SMALL, is_decoder=True)])
def test_decoders_that_a_probe_has_to_recognise(save, config):
    model, _ = read_checkpoint(save(AutoModelForCausalLM.from_config(config)))
    assert model.config.model_type == config.model_type


def test_missing_weights_with_an_adapter(save):
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL))
    directory = save(model)
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(model, lora).save_pretrained(directory)
    opened, _ = read_checkpoint(directory)
    assert opened.peft_config
    (directory / "adapter_config.json").rename(directory / "aside")
    with pytest.raises(FormatError, match=r"safetensors without adapter_config\.json"):
        read_checkpoint(directory)
    (directory / "aside").rename(directory / "adapter_config.json")
    weights = load_file(directory / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FormatError, match=r"has no lm_head.weight for LlamaForCausalLM"):
        read_checkpoint(directory)


@pytest.mark.parametrize("part", ["model", "tokenizer"])
def test_code_in_a_directory_is_never_run(save, tmp_path, part):
    directory, marker = save(), tmp_path / "marker"
    code = f"open({str(marker)!r}, 'w')\nclass Config: pass\nclass Model: pass\n"
    (directory / "theirs.py").write_text(code)
    if part == "model":
        auto = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
        change(directory / "config.json", model_type="theirs", auto_map=auto)
    else:
        auto = {"AutoTokenizer": ["theirs.Model", "theirs.Model"]}
        change(directory / "tokenizer_config.json", tokenizer_class="Model", auto_map=auto)
        with pytest.raises(InputError, match="contains custom code"):
            load_tokenizer(directory)
    with pytest.raises(InputError, match=r"needs custom code \(theirs.py\)"):
        read_checkpoint(directory)
    assert not marker.exists()


def test_a_device_that_cannot_be_used_or_is_too_small(save, monkeypatch):
    with pytest.raises(InputError, match="device 'cuda:99' cannot be used"):
        read_checkpoint(save(), device="cuda:99")

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(InputError, match=r"does not fit into .*20.00 GiB.*--device balanced"):
        read_checkpoint(save())
