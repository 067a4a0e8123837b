"""The table as a part of its model: in optimizers, checkpoints, adapters and saved directories."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import prismlm
from prismlm.models.uncertainty_feedback import load_uncertainty, uncertainty_of
from prismlm.ops.uncertainty_feedback import embed_codes
from tests.helpers.feedback_families import V, attach_drawn, build

TABLE = "prismlm_uncertainty.weight"
FAMILIES = ["llama", "gpt2", "protot", "mamba"]
IDS = torch.tensor([[3, 4, 5, 6, 7], [1, 7, 6, 5, 4]])


def texts(count=16):
    rows = torch.randint(2, V, (count, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer_of(model, directory, steps, **settings):
    arguments = TrainingArguments(
        str(directory), max_steps=steps, per_device_train_batch_size=4, learning_rate=0.01,
        save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, **settings,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=texts())


@torch.no_grad()
def logits_of(model):
    return model.eval()(IDS).logits


@pytest.mark.parametrize("name", FAMILIES)
def test_a_plain_trainer_trains_saves_and_resumes_the_table(name, tmp_path):
    model = build(name)
    feedback = prismlm.attach_uncertainty(model)
    assert feedback.embedding.weight.shape == (64, 16)
    assert not feedback.embedding.weight.any()
    assert torch.equal(logits_of(model), logits_of(build(name)))
    trainer = trainer_of(model, tmp_path, 4)
    trainer.train()
    assert any(p is feedback.embedding.weight for p in trainer.optimizer.state)
    assert feedback.embedding.weight.abs().max() > 1e-3
    expected = logits_of(model)
    trainer.save_model(str(tmp_path / "saved"))
    for directory in (tmp_path / "checkpoint-4", tmp_path / "saved"):
        again = type(build(name)).from_pretrained(directory)
        assert (logits_of(again) - expected).abs().max() > 1e-4
        load_uncertainty(directory, again)
        assert torch.equal(logits_of(again), expected)
        assert torch.equal(uncertainty_of(again).embedding.seen, feedback.embedding.seen)
    # Of a run that was cut off, the table goes on where it was.
    half = build(name)
    prismlm.attach_uncertainty(half)
    trainer_of(half, tmp_path, 4).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(logits_of(half), expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_saved_directory_is_that_of_the_model_without_the_table(name, tmp_path):
    model, plain = build(name), build(name)
    attach_drawn(model, 64)
    names = {n for n, _ in model.named_parameters()} - {n for n, _ in plain.named_parameters()}
    assert names == {TABLE}
    model.save_pretrained(tmp_path / "fed")
    plain.save_pretrained(tmp_path / "plain")
    for file in ("config.json", "generation_config.json", "model.safetensors"):
        fed, bare = ((tmp_path / kind / file).read_bytes() for kind in ("fed", "plain"))
        assert fed == bare
    assert set(load_file(tmp_path / "fed" / "uncertainty_feedback.safetensors")) == {
        "embedding",
        "seen",
    }
    opened, found = AutoModelForCausalLM.from_pretrained(tmp_path / "fed", output_loading_info=True)
    assert not found["unexpected_keys"]
    assert torch.equal(logits_of(opened), logits_of(plain))


def test_an_adapter_trains_and_saves_the_table_with_it(tmp_path):
    base = build("llama")
    prismlm.attach_uncertainty(base)
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["prismlm_uncertainty"])
    adapted = get_peft_model(copy.deepcopy(base), config)
    trainer_of(adapted, tmp_path / "run", 2, label_names=["labels"]).train()
    expected = logits_of(adapted)
    assert (expected - logits_of(base)).abs().max() > 1e-4
    assert (logits_of(adapted.base_model.model) - expected).abs().max() == 0
    adapted.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter")
    assert torch.equal(logits_of(again), expected)
    written = adapted.generate(input_ids=IDS, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert torch.equal(
        again.generate(input_ids=IDS, max_new_tokens=3, do_sample=False, pad_token_id=0), written
    )


def test_the_table_moves_with_its_model_and_goes_with_detach():
    model = build("llama")
    feedback = attach_drawn(model, 64)
    model.to(torch.bfloat16)
    assert feedback.embedding.weight.dtype == torch.bfloat16
    feedback.detach()
    assert type(model) is type(build("llama"))
    assert model.state_dict().keys() == build("llama").state_dict().keys()


def test_by_default_neighbouring_codes_have_neighbouring_vectors():
    model = build("llama")
    table = prismlm.attach_uncertainty(model).embedding
    with torch.no_grad():
        table.weight.normal_(generator=torch.Generator().manual_seed(0))
    codes = torch.arange(0, 65534, 251)
    drawn = torch.randn(65536, 16, generator=torch.Generator().manual_seed(1))
    for rows, least, most in ((table.weight, 0.0, 0.01), (drawn, 1.3, 1.6)):
        one, next_to_it = (embed_codes(codes + step, rows, 65536) for step in (0, 1))
        assert least < (one - next_to_it).norm() / one.norm() < most
