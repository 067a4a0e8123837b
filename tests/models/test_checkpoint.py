"""What is refused where a checkpoint is opened, and that each refusal says how to go on."""

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
    LlamaModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

from prismlm.corpus.tokenizer import load_tokenizer
from prismlm.errors import FormatError, InputError
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.sidecar import HEAD_FILE
from tests.helpers import families

SMALL = {
    "vocab_size": 320,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "initializer_range": 0.4,
}


@pytest.fixture
def saved(small_corpus, tmp_path):
    """Save a model with the tokenizer of the small corpus."""

    def save(model):
        model.save_pretrained(tmp_path)
        families.opened_corpus(small_corpus).tokenizer.save_pretrained(tmp_path)
        return tmp_path

    return save


def as_pickle(directory, name="pytorch_model.bin"):
    model = AutoModelForCausalLM.from_pretrained(directory)
    torch.save(model.state_dict(), directory / name)
    (directory / "model.safetensors").unlink()


def test_a_checkpoint_that_is_whole(saved):
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL))
    opened, tokenizer = read_checkpoint(saved(model))
    assert not opened.training
    assert torch.equal(opened.lm_head.weight, model.lm_head.weight)
    assert len(tokenizer) == 320


def test_a_tokenizer_that_cannot_read_a_text(saved):
    directory = saved(AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)))
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    damaged = json.dumps(settings | {"model_max_length": {}})
    (directory / "tokenizer_config.json").write_text(damaged)
    with pytest.raises(FormatError, match="cannot be read"):
        read_checkpoint(directory)
    with pytest.raises(InputError, match="No tokenizer could be loaded"):
        load_tokenizer(directory)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin"])
def test_pickles_alone_are_not_read(saved, name):
    directory = saved(AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)))
    as_pickle(directory, name)
    # A head's file is no weight of the model.
    save_file({}, directory / HEAD_FILE)
    with pytest.raises(InputError, match=rf"{name}, a pickle") as refused:
        read_checkpoint(directory)
    assert "use_safetensors=False).save_pretrained(OUT)" in str(refused.value)


def test_a_pickle_beside_safetensors_is_left_alone(saved):
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL))
    directory = saved(model)
    (directory / "pytorch_model.bin").write_bytes(b"not even a pickle")
    opened, _ = read_checkpoint(directory)
    assert torch.equal(opened.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        # The first opens like a decoder; transformers has no decoder of the second's type.
        (lambda: BertForMaskedLM(BertConfig(**SMALL)), r"encoder-only .*BertForMaskedLM"),
        (
            lambda: ModernBertForMaskedLM(
                ModernBertConfig(**SMALL | {"cls_token_id": 1, "sep_token_id": 1})
            ),
            r"encoder-only .*ModernBertForMaskedLM",
        ),
        (
            lambda: T5ForConditionalGeneration(
                T5Config(vocab_size=320, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
            ),
            "an encoder-decoder: T5ForConditionalGeneration",
        ),
    ],
)
def test_encoders_are_refused(saved, make, words):
    with pytest.raises(InputError, match=words):
        read_checkpoint(saved(make()))


@pytest.mark.parametrize("config", [GPTNeoXConfig(**SMALL), BertConfig(**SMALL, is_decoder=True)])
def test_decoders_of_kinds_that_are_not_always(saved, config):
    model, _ = read_checkpoint(saved(AutoModelForCausalLM.from_config(config)))
    assert model.config.model_type == config.model_type


def test_a_model_without_its_head(saved):
    with pytest.raises(FormatError, match=r"has no lm_head.weight for LlamaForCausalLM"):
        read_checkpoint(saved(LlamaModel(LlamaConfig(**SMALL))))


def test_weights_that_are_missing_under_an_adapter(saved):
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL))
    directory = saved(model)
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(model, lora).save_pretrained(directory)
    opened, _ = read_checkpoint(directory)
    assert opened.peft_config
    weights = load_file(directory / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FormatError, match=r"has no lm_head.weight for LlamaForCausalLM"):
        read_checkpoint(directory)


@pytest.mark.parametrize("device", ["meta", "cuda:99", "nowhere"])
def test_a_device_that_cannot_compute(saved, device):
    directory = saved(AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)))
    with pytest.raises(InputError, match=f"device '{device}' cannot be used"):
        read_checkpoint(directory, device=device)


def test_code_that_a_model_brings_is_never_run(saved, tmp_path):
    directory = saved(AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)))
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w')\nclass Config: pass\nclass Model: pass\n"
    (directory / "modeling_theirs.py").write_text(code)
    path = directory / "config.json"
    auto = {"AutoConfig": "modeling_theirs.Config", "AutoModelForCausalLM": "modeling_theirs.Model"}
    config = json.loads(path.read_text()) | {"model_type": "theirs", "auto_map": auto}
    path.write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"needs custom code \(modeling_theirs.py\)"):
        read_checkpoint(directory)
    assert not ran.exists()


def test_code_that_a_tokenizer_brings_is_never_run(saved, tmp_path):
    directory = saved(AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)))
    ran = tmp_path / "ran"
    (directory / "theirs.py").write_text(f"open({str(ran)!r}, 'w')\nclass Tokenizer: pass\n")
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    auto = {"auto_map": {"AutoTokenizer": ["theirs.Tokenizer", "theirs.Tokenizer"]}}
    path.write_text(json.dumps(config | {"tokenizer_class": "Tokenizer"} | auto))
    with pytest.raises(InputError, match=r"needs custom code \(theirs.py\)"):
        read_checkpoint(directory)
    with pytest.raises(InputError, match="contains custom code"):
        load_tokenizer(directory)
    assert not ran.exists()
