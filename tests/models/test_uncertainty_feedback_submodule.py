"""The table as a part of its model: in Trainer, checkpoints and adapters."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import prismlm
from prismlm.models.uncertainty_feedback import load_uncertainty, uncertainty_of
from tests.helpers.feedback_families import V, attach_drawn, build

IDS = torch.tensor([[3, 4, 5, 6, 7], [1, 7, 6, 5, 4]])


def texts(count=16):
    rows = torch.randint(2, V, (count, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer_of(model, directory, steps, **settings):
    arguments = TrainingArguments(
        str(directory), max_steps=steps, per_device_train_batch_size=4, learning_rate=0.01,
        save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, **settings,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=texts())


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
    trainer = trainer_of(model, tmp_path, 2)
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
    trainer_of(resumed, tmp_path, 2).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
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
    trainer_of(adapted, tmp_path / "run", 2, label_names=["labels"]).train()
    expected = logits_of(adapted)
    assert (expected - logits_of(base)).abs().max() > 1e-4
    assert (logits_of(adapted.base_model.model) - expected).abs().max() == 0
    adapted.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter")
    assert torch.equal(logits_of(again), expected)
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    outputs = (model.generate(input_ids=IDS, **options) for model in (adapted, again))
    assert torch.equal(*outputs)


def test_the_table_is_cast_with_its_model_and_removed_by_detach():
    model = build("llama")
    feedback = attach_drawn(model, 64)
    model.to(torch.bfloat16)
    assert feedback.embedding.weight.dtype == torch.bfloat16
    feedback.detach()
    assert type(model) is type(build("llama"))
    assert model.state_dict().keys() == build("llama").state_dict().keys()
