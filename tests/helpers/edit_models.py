"""Small random models for edits, and edits done densely, without prismlm's own code."""

import copy
from types import SimpleNamespace

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from prismlm.interventions.plan import plan_for
from prismlm.layers import PrototypeHead
from prismlm.models.seam import LogitMap, capture
from prismlm.ops.prototype_head import naive

VOCABULARY, WIDTH, PROTOTYPES, PER_TOKEN = 61, 24, 40, 20
PAD = 0


class Flat(nn.Module):
    """A model that is its output embedding alone; its logits are scale · W z."""

    def __init__(self, weight, scale=1.0):
        super().__init__()
        self.lm_head = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.lm_head.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = scale

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, z):
        return self.scale * self.lm_head(z)


def make_head(width=WIDTH, prototypes=PROTOTYPES, per_token=PER_TOKEN, scale=1.7, seed=1):
    head = PrototypeHead(width, prototypes, per_token, scale=scale)
    head.reset_parameters(torch.Generator().manual_seed(seed))
    return head.eval().requires_grad_(False)


def make_model(family="llama"):
    torch.manual_seed(0)
    sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 64}
    if family == "llama":
        sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 2, "max_position_embeddings": 64}
        sizes |= {"tie_word_embeddings": False}
    sizes |= {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    with torch.no_grad():  # logits far enough apart that rounding decides nothing
        model.get_output_embeddings().weight.mul_(40)
    return model.eval().requires_grad_(False)


def plan(model, head, *edits, only=None, logit_map=None, lens=None):
    found = LogitMap(scale=model.scale) if isinstance(model, Flat) else LogitMap.of(model)
    backend = SimpleNamespace(decode=lambda ids, **_: str(ids[0]), id_to_token=str)
    tokenizer = SimpleNamespace(backend_tokenizer=backend, convert_ids_to_tokens=str)
    opened = SimpleNamespace(
        model=model, head=head, logit_map=logit_map or found, tokenizer=tokenizer, lens=lens
    )
    return plan_for(opened, edits, only)


def dense_activations(head, z):
    """Activations of all prototypes, [N, K], from the naive routing."""
    routing = naive.route(z, head.prototypes, head.prototypes_per_token, head.scale)
    dense = z.new_zeros(len(z), head.num_prototypes)
    return dense.scatter(1, routing.indices, routing.activations), routing


def edit_naive(z, prototypes, before, after):
    """Return z with every activation replaced: the residual r = z − Σ α p is kept, ẑ is rebuilt."""
    edited = []
    for state, old, new in zip(z, before, after, strict=True):
        residual = state - torch.stack([a * p for a, p in zip(old, prototypes, strict=True)]).sum(0)
        mixture = torch.stack([a * p for a, p in zip(new, prototypes, strict=True)]).sum(0)
        edited.append(residual + mixture)
    return torch.stack(edited)


class Reference(LogitsProcessor):
    """Logits of edited states, from scratch for every token: no cache, no hook, dense edits.

    ``edit(dense activations, routing, z, W)`` gives the activations after it.
    """

    def __init__(self, model, head, edit, attention_mask):
        self.model, self.head, self.edit = copy.deepcopy(model), head, edit
        self.attention_mask = attention_mask

    def __call__(self, input_ids, scores):
        beams = len(input_ids) // len(self.attention_mask)
        mask = self.attention_mask.repeat_interleave(beams, 0)
        written = input_ids.shape[1] - mask.shape[1]
        mask = torch.cat([mask, mask.new_ones(len(mask), written)], 1)
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        with torch.no_grad(), capture(self.model) as seen:
            self.model(input_ids=input_ids, attention_mask=mask, position_ids=positions)
        z = seen.z[:, -1]
        weight = self.model.get_output_embeddings().weight
        before, routing = dense_activations(self.head, z)
        after = self.edit(before.clone(), routing, z, weight)
        return (edit_naive(z, self.head.prototypes, before, after) @ weight.T).log_softmax(-1)


def generate(model, ids, mask, *, cache=True, beams=1, tokens=12, reference=None):
    return model.generate(
        inputs=ids,
        attention_mask=mask,
        max_new_tokens=tokens,
        do_sample=False,
        num_beams=beams,
        use_cache=cache,
        pad_token_id=PAD,
        logits_processor=LogitsProcessorList([] if reference is None else [reference]),
    )


# By hand, with a matrix of four tokens and one state.
WEIGHT = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, -3.0]])
STATE = torch.tensor([[3.0, 4.0]])


def small_head():
    """τ = 2 and prototypes (1, 0), (0, 2), (1, −1): at (3, 4), α = 1.2, 1.6, 0."""
    head = make_head(2, 3, 2, scale=2.0)
    head.prototypes.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, -1.0]]))
    return head
