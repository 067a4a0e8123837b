"""A prototype head beside every family; what trains and exports models, on Llama alone."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import prismlm
from prismlm.corpus import Corpus
from prismlm.layers import PrototypeHead
from prismlm.models.seam import LogitMap, capture
from prismlm.models.sidecar import Sidecar, base_of, save_sidecar
from prismlm.ops.prototype_head import naive
from prismlm.training import PrismForCausalLM
from tests.helpers import families
from tests.helpers.edit_models import edit_naive
from tests.helpers.families import FAMILIES, INT8, MAPS, PER_TOKEN, PROTOTYPES, WIDTH

NEW = 5
TEXT = "The patient was given the drug twice a day."
# Mamba's own class refuses the last two.
STRATEGIES = (
    {"do_sample": False},
    {"do_sample": True, "temperature": 1.5, "top_k": 40},
    {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    {"do_sample": False, "prompt_lookup_num_tokens": 3},
    {"do_sample": False, "assistant_model": "itself"},
)


every_family = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name == INT8 else []) for name in FAMILIES],
)


@pytest.fixture(scope="module")
def family_of(small_corpus, tmp_path_factory):
    """A function that returns a family opened by prismlm, and plainly."""
    corpus = Corpus.open(small_corpus)

    @functools.cache
    def family(name):
        if name == INT8:
            pytest.importorskip("torchao")
        directory = families.make_directory(name, corpus, tmp_path_factory.mktemp(name))
        plain = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
        opened = SimpleNamespace(name=name, directory=directory, corpus=corpus, plain=plain)
        opened.lm = prismlm.load(directory)
        opened.ids = opened.lm.encode(TEXT)
        opened.tolerance = 2e-2 if plain.dtype is torch.bfloat16 else 1e-3
        opened.logit_map = MAPS.get(name, LogitMap())
        output = plain.get_output_embeddings()
        opened.weight, bias = output.weight.detach().float(), getattr(output, "bias", None)
        opened.bias = torch.zeros(len(opened.weight)) if bias is None else bias.detach().float()
        return opened

    return family


def fresh(family):
    """Return a model to be trained, and a head."""
    model = AutoModelForCausalLM.from_pretrained(family.directory, dtype="auto")
    head = PrototypeHead(WIDTH, PROTOTYPES, PER_TOKEN)
    head.load_state_dict(family.lm.head.state_dict())
    return model, head.requires_grad_(True).train()


def rows_of(family, rows=4, length=12):
    ids = family.corpus.tokens(0, rows * length).astype(np.int64).reshape(rows, length)
    return torch.from_numpy(ids)


def assert_close(found, expected, tolerance):
    """Compare relative to max(1, |expected|)."""
    assert float(((found - expected).abs() / expected.abs().clamp_min(1)).max()) <= tolerance


@every_family
@torch.no_grad()
def test_parts_sum_to_the_logits_of_a_plain_pass(name, family_of):
    family = family_of(name)
    assert family.lm.logit_map == family.logit_map
    trace = family.lm.explain(TEXT)
    logits = family.plain(input_ids=family.ids).logits[0].float()
    for step in trace:
        parts = sum(use.contribution for use in step.prototypes) + step.residual + step.bias
        cap, summed = family.logit_map.softcap, torch.tensor(parts)
        summed = summed if cap is None else cap * torch.tanh(summed / cap)
        assert_close(summed, logits[step.position, step.target_id], family.tolerance)
        row = family.weight[step.target_id]
        for use in step.prototypes:
            product = use.activation * float(row @ family.lm.head.prototypes[use.id])
            expected = pytest.approx(family.logit_map.scale * product, rel=1e-3, abs=1e-4)
            assert use.contribution == expected
    assert any(step.bias for step in trace) == family.logit_map.bias


@every_family
@torch.no_grad()
def test_edits_give_the_logits_of_their_equation(name, family_of):
    family = family_of(name)
    model, head, ids = family.lm.model, family.lm.head, family.ids
    with capture(model) as seen:
        before = model(input_ids=ids).logits
    z = seen.z[0].float()
    routing = naive.route(z, head.prototypes, PER_TOKEN, head.scale)
    dense = torch.zeros(len(z), PROTOTYPES).scatter(1, routing.indices, routing.activations)
    doubled, removed = dense[-1].topk(2).indices.tolist()
    after = dense.clone()
    after[:, doubled] *= 2
    after[:, removed] = 0
    edited = edit_naive(z, head.prototypes, dense, after).float()
    with family.lm.edit(prismlm.Scale(doubled, 2.0), prismlm.Ablate(removed)):
        found = model(input_ids=ids).logits
    expected = family.logit_map(edited @ family.weight.T + family.bias)
    assert_close(found[0].float(), expected, family.tolerance)
    assert (found - before).abs().max() > 0.05
    assert torch.equal(model(input_ids=ids).logits, before)
    assert torch.equal(family.plain(input_ids=ids).logits, before)


@every_family
@torch.no_grad()
def test_every_strategy_generates_the_same_with_the_sidecar_opened(name, family_of):
    family = family_of(name)
    for settings in STRATEGIES[: 3 if name == "mamba" else None]:
        given = settings | {"max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 0}
        if "assistant_model" in settings:
            given["assistant_model"] = family.plain
        outputs = []
        for model in (family.plain, family.lm.model):
            torch.manual_seed(5)
            mask = torch.ones_like(family.ids)
            outputs.append(model.generate(inputs=family.ids, attention_mask=mask, **given))
        assert torch.equal(*outputs)
        assert outputs[0].shape[1] == family.ids.shape[1] + NEW


def test_peft_trains_adapter_and_head_alone_and_saves_both(family_of, tmp_path):
    family = family_of("llama")
    model, head = fresh(family)
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["prototype_head"])
    adapted = get_peft_model(PrismForCausalLM(model, head, detach=False), config)
    before = {name: p.detach().clone() for name, p in adapted.named_parameters()}
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
    ids = rows_of(family)
    for _ in range(2):
        adapted(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    changed = {n for n, p in adapted.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {n for n in before if "lora_" in n or "modules_to_save" in n}
    adapted.eval().save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(PrismForCausalLM(*fresh(family)), tmp_path).eval()
    with torch.no_grad():
        made, same = adapted(input_ids=ids), again(input_ids=ids)
    assert torch.equal(same.logits, made.logits)
    assert torch.equal(same.routing.indices, made.routing.indices)


def trained(model, family, tmp_path):
    """Return a model after two steps of the Trainer."""
    # Otherwise it divides the loss of an unknown class by the tokens of all positions.
    model.accepts_loss_kwargs = False
    # Clipping all gradients together would scale the model's by the head's.
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "run"), max_steps=2, per_device_train_batch_size=2, use_cpu=True,
        learning_rate=0.1, optim="sgd", max_grad_norm=0.0, save_strategy="no", report_to=[],
        disable_tqdm=True, lr_scheduler_type="constant", logging_strategy="no",
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in rows_of(family)]
    Trainer(model=model, args=arguments, train_dataset=rows).train()
    return model.eval()


def test_trainer_trains_the_model_as_without_a_head(family_of, tmp_path):
    family = family_of("llama")
    beside, head = fresh(family)
    trained(PrismForCausalLM(beside, head), family, tmp_path)
    plain, start = (
        trained(fresh(family)[0], family, tmp_path),
        dict(family.plain.named_parameters()),
    )
    for name, parameter in plain.named_parameters():
        assert not torch.equal(parameter, start[name])
        assert_close(beside.get_parameter(name), parameter, 1e-4)
    for name, parameter in head.named_parameters():
        assert not torch.equal(parameter, family.lm.head.get_parameter(name))
    beside.save_pretrained(tmp_path / "saved")
    family.lm.tokenizer.save_pretrained(tmp_path / "saved")
    save_sidecar(tmp_path / "saved", Sidecar(head, LogitMap.of(beside), base_of(beside)))
    # It would refuse parts that do not sum to the logits.
    assert len(prismlm.load(tmp_path / "saved").explain(TEXT)) > 1


@pytest.mark.parametrize("weights", ["cosine", "fitted"])
def test_an_exported_program_gives_logits_and_routing_of_other_tokens(family_of, weights):
    family = family_of("llama")
    model, head = fresh(family)
    head.weights = weights
    both = PrismForCausalLM(model, head).eval()
    first, second = rows_of(family, 2), rows_of(family, 4)[2:]
    with torch.no_grad():
        program = torch.export.export(both, (first,), strict=False)
        found, expected = program.module()(second), both(second)
    torch.testing.assert_close(found.logits, expected.logits)
    assert torch.equal(found.routing.indices, expected.routing.indices)
    torch.testing.assert_close(found.routing.activations, expected.routing.activations)
