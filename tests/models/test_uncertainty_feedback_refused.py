"""What uncertainty feedback refuses, and that nothing is left behind."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    GenerationConfig,
    LlamaForCausalLM,
    XLNetConfig,
    XLNetLMHeadModel,
)

from prismlm.errors import FormatError, InputError
from prismlm.models.uncertainty_feedback import (
    UNCERTAINTY_FILE,
    load_uncertainty,
    save_uncertainty,
    uncertainty_of,
)
from tests.helpers.feedback_families import COMMON, V, attach_drawn, build

IDS = torch.tensor([[3, 4, 5], [5, 6, 7]])
ENCODER = COMMON | {"intermediate_size": 24, "num_attention_heads": 2}


@pytest.fixture
def model():
    return build("llama")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"levels": 1}, "of uncertainty is 1: expected a whole number from 2 on"),
        ({"deviation": -0.1}, "expected a number from 0 on"),
        ({"passes": 0}, "number of passes is 0"),
    ],
)
def test_settings_that_no_table_can_have(model, settings, words):
    with pytest.raises(InputError, match=words):
        attach_drawn(model, **{"levels": 8} | settings)
    assert uncertainty_of(model) is None


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "build_model",
    [
        lambda: torch.nn.DataParallel(build("llama")),
        lambda: BertForMaskedLM(BertConfig(**ENCODER)),
        # Classes for language modelling that see later tokens.
        lambda: BertLMHeadModel(BertConfig(**ENCODER)),
        lambda: XLNetLMHeadModel(
            XLNetConfig(vocab_size=V, d_model=16, n_layer=1, n_head=2, d_inner=32)
        ),
    ],
)
def test_what_predicts_no_next_token(build_model):
    model = build_model().train()
    with pytest.raises(InputError, match=r"predicts no next token.* is_decoder=True"):
        attach_drawn(model, 8)
    assert uncertainty_of(model) is None
    assert model.training


@torch.no_grad()
def test_models_that_do_not_declare_their_parts_or_do_not_call_them(model, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "get_decoder", lambda self: self)
        with pytest.raises(InputError, match=r"get_decoder\(\)"):
            attach_drawn(model, 8)
    unused = torch.nn.Embedding(V, 16)
    monkeypatch.setattr(LlamaForCausalLM, "get_input_embeddings", lambda self: unused)
    attach_drawn(model, 8)
    with pytest.raises(InputError, match="nothing was added to the input of this LlamaForCausalLM"):
        model(IDS)


@torch.no_grad()
def test_a_call_without_ids_or_with_codes_that_cannot_be_replayed(model):
    embeds = model.get_input_embeddings()(IDS)
    attach_drawn(model, 8)
    for inputs, words in (
        ({"inputs_embeds": embeds}, "expects input_ids, token ids"),
        ({"input_ids": IDS, "uncertainty_codes": torch.full((2, 3), 8)}, r"-1 \(none\) to 7"),
        ({"input_ids": IDS, "uncertainty_codes": torch.zeros(2, 4).long()}, r"numbers \[2, 3\]"),
    ):
        with pytest.raises(InputError, match=words):
            model(**inputs)


@torch.no_grad()
def test_nan_logits(model):
    attach_drawn(model, 8)
    added = torch.zeros(2, 3, V)
    added[1, 2, 4] = torch.nan
    handle = model.lm_head.register_forward_hook(lambda _module, _args, logits: logits + added)
    with pytest.raises(InputError, match=r"NaN or \+∞"):
        model(IDS, use_cache=True)
    handle.remove()
    # The next call starts afresh.
    assert model(IDS, use_cache=True).uncertainty_codes[:, 0].tolist() == [-1, -1]


@torch.no_grad()
def test_generation_that_would_change_codes(model):
    attach_drawn(model, 8)
    settings = {"max_new_tokens": 3, "pad_token_id": 0}
    for refused in (
        {"assistant_model": build("llama")},
        {"prompt_lookup_num_tokens": 2},
        {"generation_config": GenerationConfig(**settings, prefill_chunk_size=2)},
        {"use_cache": False},
    ):
        with pytest.raises(InputError, match=r"not possible with uncertainty feedback"):
            model.generate(IDS[:1], **settings, **refused)
    # What another configuration leaves open is the model's own.
    model.generation_config.use_cache = False
    with pytest.raises(InputError, match=r"use_cache=False is not possible with uncertainty"):
        model.generate(IDS, generation_config=GenerationConfig(**settings))
    model.generate(IDS, **settings, use_cache=True)
    with pytest.raises(InputError, match=r"continuous batching .* Use generate\(\)"):
        model.generate_batch(IDS.tolist())


@torch.no_grad()
def test_a_static_cache(model):
    attach_drawn(model, 64)
    with pytest.raises(InputError, match="static cache lacks"):
        model.generate(IDS, max_new_tokens=3, cache_implementation="static")


def test_attaching_twice(model):
    feedback = attach_drawn(model, 8)
    with pytest.raises(InputError, match=r"has uncertainty feedback already: detach\(\)"):
        attach_drawn(model, 8)
    feedback.detach()
    again = attach_drawn(model, 16)
    assert model(IDS).uncertainty_codes.max() == 8
    assert uncertainty_of(model) is again


@pytest.fixture
def saved(model, tmp_path):
    feedback = attach_drawn(model, 64, passes=2)
    save_uncertainty(tmp_path, feedback)
    feedback.detach()
    return tmp_path


def test_a_table_of_another_model_or_dtype(model, saved):
    other = build("llama")
    with torch.no_grad():
        other.get_input_embeddings().weight[0, 0] += 1
    for wrong in (build("llama").bfloat16(), other):
        with pytest.raises(FormatError, match=r"other input embeddings .* dtype=torch.float32"):
            load_uncertainty(saved, wrong)
        assert uncertainty_of(wrong) is None
    with pytest.raises(FormatError, match="has no uncertainty_feedback"):
        load_uncertainty(saved / "none", other)
    assert load_uncertainty(saved, model).passes == 2


@pytest.mark.parametrize(
    ("table", "changes", "words"),
    [
        (None, {"format_version": 2}, "expected format version 1"),
        (None, {"levels": 63}, "cannot be read: .*size mismatch"),
        (torch.full((64, 16), torch.nan), {}, "a finite table"),
        (torch.zeros(64, 8), {}, "other input embeddings"),
        ("cut off", {}, r"cannot be read: .* Restore the file"),
    ],
)
def test_a_file_that_cannot_be(model, saved, table, changes, words):
    path = saved / UNCERTAINTY_FILE
    if isinstance(table, str):
        path.write_bytes(path.read_bytes()[:40])
    else:
        with safe_open(path, "pt") as file:
            meta = json.loads(file.metadata()["uncertainty_feedback"]) | changes
        tensors = load_file(path) | ({} if table is None else {"embedding": table})
        save_file(tensors, path, {"uncertainty_feedback": json.dumps(meta)})
    with pytest.raises((FormatError, InputError), match=words):
        load_uncertainty(saved, model)
    assert uncertainty_of(model) is None
