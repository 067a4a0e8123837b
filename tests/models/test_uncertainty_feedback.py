"""Uncertainty feedback: the codes of a call, caches, threads, files, training, and what is refused.

The matrix test has generation, padding and caches of every family.
"""

import copy
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    GenerationConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    XLNetConfig,
    XLNetLMHeadModel,
)

import prismlm
from prismlm.errors import FormatError, InputError
from prismlm.models.seam import capture
from prismlm.models.uncertainty_feedback import (
    UNCERTAINTY_FILE,
    load_uncertainty,
    save_uncertainty,
    uncertainty_of,
)
from tests.helpers.small_models import COMMON, IMAGE, V, attach_drawn, build, codes_of

IDS = torch.tensor([[1, 4, 5, 6, 7], [1, 7, 6, 5, 4]])
NEUTRAL = 32
SETTINGS = {"max_new_tokens": 5, "pad_token_id": 0, "eos_token_id": None, "do_sample": False}
ENCODER = COMMON | {"intermediate_size": 24, "num_attention_heads": 2}


@pytest.fixture
def model():
    return build("llama")


@pytest.mark.parametrize("passes", [1, 2])
@torch.no_grad()
def test_a_call_that_failed_leaves_nothing_behind(model, passes):
    plain = model.model(IDS).last_hidden_state
    attach_drawn(model, 64, passes=passes)
    expected, broken = model(IDS).uncertainty_codes, torch.zeros(2, 5, V)
    broken[1, -1, 4] = torch.nan

    def fail(*_args):
        raise OSError("broken")

    for module, hook, error, words in (
        (model.model.layers[1], fail, OSError, "broken"),
        (model.lm_head, lambda _, args, logits: logits + broken, InputError, r"NaN or \+∞"),
    ):
        handle = module.register_forward_hook(hook)
        with pytest.raises(error, match=words):
            model(IDS, use_cache=True)
        handle.remove()
        assert torch.equal(model.model(IDS).last_hidden_state, plain)
        assert torch.equal(model(IDS, use_cache=True).uncertainty_codes, expected)


@torch.no_grad()
def test_threads_and_copies(model):
    """Two threads in the middle of a call at the same time."""
    feedback = attach_drawn(model, 64, passes=2)
    texts = [IDS, torch.tensor([[1, 9, 8]])]
    run = torch.no_grad()(lambda ids: model(ids, use_cache=False))
    expected, barrier = [run(ids) for ids in texts], threading.Barrier(2, timeout=60)

    def wait(*_args):
        barrier.wait()

    handle = model.model.layers[0].register_forward_hook(wait)
    with ThreadPoolExecutor(2) as pool:
        outputs = list(pool.map(run, texts))
    handle.remove()
    for output, alone in zip(outputs, expected, strict=True):
        assert torch.equal(output.uncertainty_codes, alone.uncertainty_codes)
        torch.testing.assert_close(output.logits, alone.logits)
    again = copy.deepcopy(model)
    assert uncertainty_of(again) is not feedback
    assert torch.equal(again(IDS, use_cache=False).logits, expected[0].logits)
    assert torch.equal(again.generate(IDS, **SETTINGS), model.generate(IDS, **SETTINGS))


@torch.no_grad()
def test_a_model_whose_state_cannot_carry_codes():
    model = build("rwkv")
    attach_drawn(model, 64)
    with pytest.raises(InputError, match="state cannot carry the code"):
        model.generate(IDS, **SETTINGS)
    assert model(IDS, use_cache=True).uncertainty_codes.shape == IDS.shape


@torch.no_grad()
def test_logits_of_some_positions(model):
    attach_drawn(model, 64)
    expected = model(IDS, use_cache=True).past_key_values.prismlm_codes.following
    for keep in (torch.tensor([1, 4]), torch.tensor([0, -1]), 1):
        cache = model(IDS, use_cache=True, logits_to_keep=keep).past_key_values
        assert torch.equal(cache.prismlm_codes.following, expected)
    keep = torch.tensor([1, 2])
    with pytest.raises(InputError, match="needs the logits of the last position"):
        model(IDS, use_cache=True, logits_to_keep=keep)
    # Without a cache no next token needs a code.
    assert model(IDS, use_cache=False, logits_to_keep=keep).logits.shape[1] == 2


@torch.no_grad()
def test_caches_of_other_rows_or_lengths(model):
    feedback = attach_drawn(model, 64)
    first, second = (model(IDS, use_cache=True).past_key_values for _ in range(2))
    last = IDS[:, :1]
    with pytest.raises(InputError, match=r"codes of 2 rows, .* has 1: .*batch_select_indices"):
        model(last[:1], past_key_values=first)
    following = first.prismlm_codes.following
    first.batch_select_indices(torch.tensor([1]))
    first.batch_repeat_interleave(2)
    codes = model(last, past_key_values=first).uncertainty_codes
    assert torch.equal(codes, following[[1, 1]])
    feedback.detach()
    model(last, past_key_values=second)
    attach_drawn(model, 64)
    with pytest.raises(InputError, match="codes of 5 positions, and this call has 6"):
        model(last, past_key_values=second)


@torch.no_grad()
def test_a_cache_without_codes_and_one_that_was_reset(model):
    cache = model(IDS, use_cache=True).past_key_values
    attach_drawn(model, 64)
    codes = model(IDS[:, :1], past_key_values=cache).uncertainty_codes
    assert codes.tolist() == [[NEUTRAL]] * 2
    cache.reset()
    expected = model(IDS[:1]).uncertainty_codes
    assert torch.equal(model(IDS[:1], past_key_values=cache).uncertainty_codes, expected)


@torch.no_grad()
def test_the_decoder_of_an_encoder_decoder():
    t5 = build("t5")
    source = torch.randint(2, V, (2, 5))
    encoded = t5.encoder(source).last_hidden_state
    plain = t5(source, labels=source).logits
    attach_drawn(t5, 64)
    assert torch.equal(t5.encoder(source).last_hidden_state, encoded)
    # The decoder's input follows from the labels.
    output = t5(source, labels=source, use_cache=False)
    assert output.uncertainty_codes.tolist() == [[-1, 32, 32, 32, 32]] * 2
    assert torch.equal(output.logits[:, 0], plain[:, 0])
    assert (output.logits - plain)[:, 1:].abs().amax(-1).min() > 1e-3


@torch.no_grad()
def test_tokens_that_stand_for_images_and_video_have_no_codes(model):
    llava = build("llava")
    inputs = {
        "input_ids": torch.tensor([[1, 5, *[IMAGE] * 4, 7, 8]]),
        "pixel_values": torch.randn(1, 3, 8, 8),
    }
    plain = llava(**inputs).logits
    feedback = attach_drawn(llava, 64)
    none = llava(**inputs, uncertainty_codes=torch.full((1, 8), -1))
    torch.testing.assert_close(none.logits, plain)
    output = llava(**inputs)
    # The first token, image tokens, and the token after them.
    assert output.uncertainty_codes.tolist() == [[-1, 32, -1, -1, -1, -1, -1, 32]]
    assert (output.logits[:, 1:] - plain[:, 1:]).abs().max() > 1e-3
    assert torch.equal(output.logits[:, 0], plain[:, 0])
    feedback.passes = 2
    second, predicted = llava(**inputs).uncertainty_codes, codes_of(output.logits)
    assert second[0, [1, 7]].tolist() == predicted[0, [0, 6]].tolist()
    model.config.video_token_id = 6
    attach_drawn(model, 64)
    codes = model(input_ids=IDS, use_cache=False).uncertainty_codes
    assert codes.tolist() == [[-1, NEUTRAL, NEUTRAL, -1, -1], [-1, NEUTRAL, -1, -1, NEUTRAL]]


@torch.no_grad()
def test_captured_states_are_those_of_the_last_pass(model):
    attach_drawn(model, 64, passes=3)
    expected = model(IDS, use_cache=False)
    with capture(model, logits=False) as captured:
        output = model(IDS, use_cache=False)
    assert torch.equal(output.uncertainty_codes, expected.uncertainty_codes)
    torch.testing.assert_close(captured.z @ model.lm_head.weight.T, expected.logits)


def test_a_cache_that_the_model_does_not_return_carries_codes():
    model = build("recurrent-gemma", 3)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)  # for varied predictions
    attach_drawn(model, 1024, deviation=2.0)
    calls = []
    model.register_forward_hook(lambda *call: calls.append(call[-1].uncertainty_codes))
    ids = torch.randint(2, V, (2, 6), generator=torch.Generator().manual_seed(2))
    model.generate(ids, max_new_tokens=5, do_sample=False)
    assert len(torch.cat(calls, 1)[:, 6:].unique()) > 3


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
        ({"input_ids": IDS, "uncertainty_codes": torch.full((2, 5), 8)}, r"-1 \(none\) to 7"),
        ({"input_ids": IDS, "uncertainty_codes": torch.zeros(2, 4).long()}, r"numbers \[2, 5\]"),
    ):
        with pytest.raises(InputError, match=words):
            model(**inputs)


@torch.no_grad()
def test_generation_that_would_change_codes(model):
    attach_drawn(model, 8)
    settings = {"max_new_tokens": 3, "pad_token_id": 0}
    words = "not possible with uncertainty feedback"
    for refused, match in (
        ({"assistant_model": build("llama")}, words),
        ({"prompt_lookup_num_tokens": 2}, words),
        ({"generation_config": GenerationConfig(**settings, prefill_chunk_size=2)}, words),
        ({"use_cache": False}, words),
        ({"cache_implementation": "static"}, "static cache lacks"),
    ):
        with pytest.raises(InputError, match=match):
            model.generate(IDS[:1], **settings, **refused)
    # What another configuration leaves open is the model's own.
    model.generation_config.use_cache = False
    with pytest.raises(InputError, match=r"use_cache=False is not possible with uncertainty"):
        model.generate(IDS, generation_config=GenerationConfig(**settings))
    model.generate(IDS, **settings, use_cache=True)
    with pytest.raises(InputError, match=r"continuous batching .* Use generate\(\)"):
        model.generate_batch(IDS.tolist())


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


def trainer_of(model, directory, **settings):
    rows = torch.randint(2, V, (16, 8), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        str(directory), max_steps=2, per_device_train_batch_size=4, learning_rate=0.01,
        save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, **settings,
    )  # fmt: skip
    return Trainer(
        model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows]
    )


@torch.no_grad()
def logits_of(model):
    return model.eval()(IDS).logits


@pytest.mark.parametrize("name", ["llama", "protot"])
def test_trainer_trains_saves_and_resumes_the_table(name, tmp_path):
    model = build(name)
    feedback = prismlm.attach_uncertainty(model)
    assert feedback.embedding.weight.shape == (64, 16)
    assert not feedback.embedding.weight.any()
    assert torch.equal(logits_of(model), logits_of(build(name)))
    trainer = trainer_of(model, tmp_path)
    trainer.train()
    assert any(p is feedback.embedding.weight for p in trainer.optimizer.state)
    assert feedback.embedding.weight.abs().max() > 1e-3
    expected = logits_of(model)
    trainer.save_model(str(tmp_path / "saved"))
    for directory in (tmp_path / "checkpoint-2", tmp_path / "saved"):
        again = type(build(name)).from_pretrained(directory)
        assert (logits_of(again) - expected).abs().max() > 1e-4
        load_uncertainty(directory, again)
        assert torch.equal(logits_of(again), expected)
        assert torch.equal(uncertainty_of(again).embedding.seen, feedback.embedding.seen)
    resumed = build(name)
    prismlm.attach_uncertainty(resumed)
    trainer_of(resumed, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert torch.equal(logits_of(resumed), expected)


def test_save_pretrained_writes_the_plain_model_and_the_table(tmp_path):
    model, plain = build("mamba"), build("mamba")
    attach_drawn(model, 64)
    names = {n for n, _ in model.named_parameters()} - {n for n, _ in plain.named_parameters()}
    assert names == {"prismlm_uncertainty.weight"}
    model.save_pretrained(tmp_path / "fed")
    plain.save_pretrained(tmp_path / "plain")
    for file in ("config.json", "generation_config.json", "model.safetensors"):
        assert (tmp_path / "fed" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()
    table = load_file(tmp_path / "fed" / "uncertainty_feedback.safetensors")
    assert set(table) == {"embedding", "seen"}
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "fed")
    assert torch.equal(logits_of(opened), logits_of(plain))


def test_an_adapter_trains_and_saves_the_table(tmp_path):
    base = build("llama")
    prismlm.attach_uncertainty(base)
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["prismlm_uncertainty"])
    adapted = get_peft_model(copy.deepcopy(base), config)
    trainer_of(adapted, tmp_path / "run", label_names=["labels"]).train()
    expected = logits_of(adapted)
    assert (expected - logits_of(base)).abs().max() > 1e-4
    assert (logits_of(adapted.base_model.model) - expected).abs().max() == 0
    adapted.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter")
    assert torch.equal(logits_of(again), expected)
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    outputs = (model.generate(input_ids=IDS, **options) for model in (adapted, again))
    assert torch.equal(*outputs)


def test_the_table_is_cast_with_its_model_attached_once_and_removed_by_detach(model):
    feedback = attach_drawn(model, 8)
    with pytest.raises(InputError, match=r"has uncertainty feedback already: detach\(\)"):
        attach_drawn(model, 8)
    model.to(torch.bfloat16)
    assert feedback.embedding.weight.dtype == torch.bfloat16
    feedback.detach()
    assert type(model) is type(build("llama"))
    assert model.state_dict().keys() == build("llama").state_dict().keys()
    again = attach_drawn(model, 16)
    assert model(IDS).uncertainty_codes.max() == 8
    assert uncertainty_of(model) is again
