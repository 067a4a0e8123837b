"""What a cell of the matrix of families asserts, for columns of one process.

Every function takes an opened family and returns a note to show, or None.
"""

import json
import re
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, pipeline
from typer.testing import CliRunner

import prismlm
from prismlm.cli.app import app
from prismlm.corpus import Corpus
from prismlm.errors import InputError
from prismlm.layers import PrototypeHead
from prismlm.models.seam import LogitMap, capture
from prismlm.models.sidecar import Sidecar, base_of, save_sidecar
from prismlm.ops.prototype_head import naive
from prismlm.training import PrismForCausalLM
from tests.helpers.families import (
    ADAPTED,
    MAPS,
    PER_TOKEN,
    PROTOTYPES,
    QUANTISED,
    WIDTH,
)
from tests.helpers.naive_edits import edit_naive

NEW = 5
TEXT = "The patient was given the drug twice a day."
STRATEGIES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.5, "top_k": 40, "top_p": 0.9},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "beam sampling": {"do_sample": True, "num_beams": 3},
    "prompt lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
    "assisted": {"do_sample": False},
    "contrastive": {"do_sample": False, "penalty_alpha": 0.6, "top_k": 4},
}


@dataclass
class Family:
    """A family's model directory, opened both ways."""

    name: str
    directory: Path
    corpus: Corpus

    @cached_property
    def lm(self):
        """As a user of prismlm opens it."""
        return prismlm.load(self.directory)

    @cached_property
    def plain(self):
        """As a user who knows nothing of prismlm opens it."""
        return AutoModelForCausalLM.from_pretrained(self.directory, dtype="auto").eval()

    @property
    def low(self):
        """Whether the model's own logits are rounded to 8 bits."""
        return self.plain.dtype is torch.bfloat16

    @property
    def tolerance(self):
        return 2e-2 if self.low else 1e-3

    @cached_property
    def weight(self):
        return self.plain.get_output_embeddings().weight.detach().float()

    @cached_property
    def bias(self):
        bias = getattr(self.plain.get_output_embeddings(), "bias", None)
        return torch.zeros(len(self.weight)) if bias is None else bias.detach().float()

    @property
    def logit_map(self):
        """What the equation of the family says, not what prismlm found."""
        return MAPS.get(self.name, LogitMap())

    def logits_of(self, z):
        """The logits of states, by the equation."""
        return self.logit_map(z.float() @ self.weight.T + self.bias)

    def ids(self, text=TEXT):
        return self.lm.encode(text)

    def fresh(self):
        """A model to be trained, and a head; dropout is 0 in all."""
        model = AutoModelForCausalLM.from_pretrained(self.directory, dtype="auto")
        head = PrototypeHead(WIDTH, PROTOTYPES, PER_TOKEN)
        head.load_state_dict(self.lm.head.state_dict())
        return model, head.requires_grad_(True).train()

    def rows(self, rows=4, length=12):
        ids = self.corpus.tokens(0, rows * length).astype(np.int64).reshape(rows, length)
        return torch.from_numpy(ids)


def equal(found, expected):
    """Whether all bits are the same, of quantised weights too."""
    if not hasattr(found, "__tensor_flatten__"):
        return torch.equal(found, expected)
    parts = found.__tensor_flatten__()[0]
    return all(torch.equal(getattr(found, n), getattr(expected, n)) for n in parts)


def close(found, expected, tolerance):
    """Compare relative to max(1, |expected|)."""
    error = (found - expected).abs() / expected.abs().clamp_min(1)
    assert float(error.max()) <= tolerance, float(error.max())


@torch.no_grad()
def rounding(trace):
    return max(abs(s.logit - s.model_logit) / max(1, abs(s.model_logit)) for s in trace)


def explain(family, _tmp):
    """Parts sum to the logits of a plain forward pass, and each is what it is said to be."""
    assert family.lm.logit_map == family.logit_map
    trace = family.lm.explain(TEXT)
    ids = family.ids()
    logits = family.plain(input_ids=ids).logits[0].float()
    for step in trace:
        own = logits[step.position, step.target_id]
        parts = sum(use.contribution for use in step.prototypes) + step.residual + step.bias
        capped = family.logit_map.softcap
        summed = torch.tensor(parts)
        close(
            summed if capped is None else capped * torch.tanh(summed / capped),
            own,
            family.tolerance,
        )
        row = family.weight[step.target_id]
        for use in step.prototypes:
            expected = use.activation * float(row @ family.lm.head.prototypes[use.id])
            assert use.contribution == pytest.approx(
                family.logit_map.scale * expected, rel=1e-3, abs=1e-4
            )
        probability = float(logits[step.position].softmax(-1)[step.target_id])
        assert step.probability == pytest.approx(probability, rel=family.tolerance, abs=1e-4)
    assert any(step.bias for step in trace) == family.logit_map.bias
    assert len(family.lm.explain(TEXT, generate=NEW)) > len(trace)
    return f"parts differ from its own logits by {rounding(trace):.0e}" if family.low else None


@torch.no_grad()
def steer(family, _tmp):
    """An edit gives the logits of z′ = z + Σ (α′ − α) p; once it is left nothing is changed."""
    model, head, ids = family.lm.model, family.lm.head, family.ids()
    with capture(model) as seen:
        before = model(input_ids=ids).logits
    z = seen.z[0].float()
    routing = naive.route(z, head.prototypes, PER_TOKEN, head.scale)
    dense = torch.zeros(len(z), PROTOTYPES).scatter(1, routing.indices, routing.activations)
    doubled, removed = dense[-1].topk(2).indices.tolist()
    after = dense.clone()
    after[:, doubled] *= 2
    after[:, removed] = 0
    expected = family.logits_of(edit_naive(z, head.prototypes, dense, after))
    with family.lm.edit(prismlm.Scale(doubled, 2.0), prismlm.Ablate(removed)):
        found = model(input_ids=ids).logits
        written = family.lm.generate(TEXT, tokens=NEW)
    close(found[0].float(), expected, family.tolerance)
    assert (found - before).abs().max() > 0.05
    assert torch.equal(model(input_ids=ids).logits, before)
    assert torch.equal(family.plain(input_ids=ids).logits, before)
    assert written.startswith(TEXT)


@torch.no_grad()
def index(family, _tmp):
    """The best place of each prototype is that of a search of all; passages are of the corpus."""
    lens, corpus = family.lm.lens, family.corpus
    best = torch.full((PROTOTYPES,), -1.0)
    for document in corpus.split("all").tolist():
        ids = corpus.tokens(int(corpus.starts[document]), int(corpus.lengths[document]) - 1)
        with capture(family.plain) as seen:
            family.plain(input_ids=torch.from_numpy(ids.astype(np.int64))[None])
        cosines = F.normalize(seen.z[0].float(), dim=-1) @ F.normalize(family.lm.head.prototypes).T
        best = torch.maximum(best, cosines.amax(0))
    first = lens.index.filter(np.array(lens.index["rank"]) == 0)
    assert first["prototype"].to_pylist() == list(range(PROTOTYPES))
    close(torch.tensor(first["cosine"].to_pylist()), best, 1e-2 if family.low else 1e-5)
    assert lens.cells is not None
    trace = family.lm.explain(TEXT)
    targets = {step.target_id for step in trace}
    passages = trace.passages(5)
    assert passages
    for passage in passages:
        number = corpus.doc_ids.index(passage.doc_id)
        start = int(corpus.starts[number])
        assert start <= passage.position < start + int(corpus.lengths[number])
        assert int(corpus.tokens(passage.position, 1)[0]) in targets
        assert 0 < passage.share <= 1


def inspect(family, _tmp):
    """The command tells of the lens what the corpus says."""
    found = json.loads(_printed("inspect", family.directory, "--json"))
    documents = len(family.corpus.split("all"))
    assert found["documents"] == documents
    assert found["tokens"] == family.corpus.num_tokens - documents
    assert (found["prototypes"], found["with_contexts"]) == (PROTOTYPES, PROTOTYPES)
    printed = _printed("inspect", family.directory)
    assert re.search(rf"^prototypes +{PROTOTYPES} *$", printed, re.MULTILINE)


def _printed(*words):
    done = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@torch.no_grad()
def generate(family, _tmp):
    """Every strategy gives the same with the sidecar opened as without, or is refused by both."""
    refused, ids = [], family.ids()
    for name, settings in STRATEGIES.items():
        given = settings | {"max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 0}
        if name == "assisted":
            given["assistant_model"] = family.plain
        found = [_written(model, ids, given) for model in (family.plain, family.lm.model)]
        with family.lm.edit():
            found.append(_written(family.lm.model, ids, given))
        if isinstance(found[0], str):
            assert found == [found[0]] * 3
            if name != "contrastive":
                refused.append(name)
            continue
        assert name != "contrastive"
        assert found[0].shape[1] == ids.shape[1] + NEW
        for other in found[1:]:
            assert torch.equal(other, found[0]), name
    return f"its own class refuses {' and '.join(refused)}" if refused else None


def _written(model, ids, given):
    torch.manual_seed(5)
    try:
        return model.generate(inputs=ids, attention_mask=torch.ones_like(ids), **given)
    except ValueError as error:
        return str(error)


def lora(family, tmp):
    """Adapter and head train and nothing else does; what is saved gives the same again."""
    model, head = family.fresh()
    config = LoraConfig(
        r=2,
        target_modules=ADAPTED.get(family.name, ["q_proj", "v_proj"]),
        modules_to_save=["prototype_head"],
    )
    adapted = get_peft_model(PrismForCausalLM(model, head, detach=False), config)
    before = {name: p.detach().clone() for name, p in adapted.named_parameters()}
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
    ids = family.rows()
    for _ in range(2):
        adapted(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    changed = {n for n, p in adapted.named_parameters() if not equal(p, before[n])}
    expected = {n for n in before if "lora_" in n or "modules_to_save" in n}
    assert changed == expected
    assert {n.rpartition(".")[2] for n in changed if "lora_" not in n} == {
        "prototypes", "log_scale"
    }  # fmt: skip
    adapted.eval().save_pretrained(tmp)
    model, head = family.fresh()
    again = PeftModel.from_pretrained(PrismForCausalLM(model, head), tmp).eval()
    with torch.no_grad():
        made, same = adapted(input_ids=ids), again(input_ids=ids)
        bare = family.plain(input_ids=ids).logits
    assert torch.equal(same.logits, made.logits)
    assert torch.equal(same.routing.indices, made.routing.indices)
    assert (made.logits - bare).abs().max() > 1e-3


class Rows(torch.utils.data.Dataset):
    """Rows of token ids, as a Trainer takes them."""

    def __init__(self, ids):
        self.ids = ids

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, number):
        return {"input_ids": self.ids[number], "labels": self.ids[number]}


def trainer(family, tmp):
    """Hugging Face's Trainer trains the model as it does without a head, and the head beside it."""
    frozen = family.name in QUANTISED
    beside, head = family.fresh()
    _trained(PrismForCausalLM(beside.requires_grad_(not frozen), head), family, tmp)
    start = dict(family.plain.named_parameters())
    moved = {name for name, p in beside.named_parameters() if not equal(p, start[name])}
    if frozen:
        assert not moved
        with pytest.raises(ValueError, match="fine-tuning on purely quantized models"):
            _trained(family.fresh()[0], family, tmp)
    else:
        plain = _trained(family.fresh()[0], family, tmp)
        assert moved == set(start)
        for name, parameter in plain.named_parameters():
            close(beside.get_parameter(name).float(), parameter.float(), 1e-4)
    for name, parameter in head.named_parameters():
        assert not torch.equal(parameter, family.lm.head.get_parameter(name))
    if frozen:
        shutil.copytree(family.directory, tmp / "saved", ignore=lambda *_: ["lens"])
    else:
        beside.save_pretrained(tmp / "saved")
        family.lm.tokenizer.save_pretrained(tmp / "saved")
    save_sidecar(tmp / "saved", Sidecar(head, LogitMap.of(beside), base_of(beside)))
    again = prismlm.load(tmp / "saved")
    assert torch.equal(again.head.prototypes, head.prototypes)
    assert rounding(again.explain(TEXT)) <= family.tolerance
    return "its head alone: transformers trains no int8 weights" if frozen else None


def _trained(model, family, tmp):
    """Return a model after two steps of the Trainer."""
    # Or it would divide the loss of a class it does not know by the tokens of all positions.
    model.accepts_loss_kwargs = False
    # Clipping all gradients together would scale the model's by the head's.
    arguments = TrainingArguments(
        output_dir=str(tmp / "run"), max_steps=2, per_device_train_batch_size=2, use_cpu=True,
        learning_rate=0.1, optim="sgd", max_grad_norm=0.0, save_strategy="no", report_to=[],
        disable_tqdm=True, lr_scheduler_type="constant", logging_strategy="no",
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=Rows(family.rows())).train()
    return model.eval()


def export(family, _tmp):
    """The exported program of model and head gives their logits and routing for other tokens."""
    model, head = family.fresh()
    both = PrismForCausalLM(model, head).eval()
    first, second = family.rows(2), family.rows(4)[2:]
    with torch.no_grad():
        program = torch.export.export(both, (first,), strict=False)
        found, expected = program.module()(second), both(second)
    torch.testing.assert_close(found.logits, expected.logits)
    assert torch.equal(found.routing.indices, expected.routing.indices)
    assert (expected.logits - both(first).logits).abs().max() > 0.1


def pipelines(family, _tmp):
    """From the directory alone, and of the opened model, edited or not."""
    asked = {"max_new_tokens": NEW, "do_sample": False}
    alone = pipeline("text-generation", model=str(family.directory), device="cpu")
    opened = pipeline(
        "text-generation", model=family.lm.model, tokenizer=family.lm.tokenizer, device="cpu"
    )
    expected = family.lm.generate(TEXT, tokens=NEW)
    assert alone(TEXT, **asked)[0]["generated_text"] == expected
    assert opened(TEXT, **asked)[0]["generated_text"] == expected
    with family.lm.edit(only="prototypes"):
        edited = family.lm.generate(TEXT, tokens=NEW)
        assert opened(TEXT, **asked)[0]["generated_text"] == edited
    assert edited != expected


CELLS = {
    "explain": explain,
    "steer": steer,
    "index": index,
    "inspect": inspect,
    "generate": generate,
    "PEFT LoRA": lora,
    "Trainer": trainer,
    "torch.export": export,
    "pipeline": pipelines,
}
NEED_NO_DIRECTORY = ("PEFT LoRA", "Trainer", "accelerate launch", "torch.export")


def refused(family, column):
    """A model whose W is quantised is refused with the reason, wherever prismlm is handed one."""
    why = "output embedding lm_head of LlamaForCausalLM is quantised .*Int8Tensor"
    head = PrototypeHead(WIDTH, PROTOTYPES, PER_TOKEN)
    with pytest.raises(InputError, match=why) as said:
        _ = (
            PrismForCausalLM(family.plain, head)
            if column in NEED_NO_DIRECTORY
            else prismlm.load(family.directory)
        )
    assert "modules_to_not_convert=['lm_head']" in str(said.value)
    return "refused: its output embedding is quantised, and logits are split by that weight itself"
