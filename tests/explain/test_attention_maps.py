"""Attention maps of chosen heads, alone and in a trace."""

import copy
import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from prismlm.corpus.pieces import DITTO
from prismlm.errors import InputError
from prismlm.explain.attention_maps import AttentionMap, Head, heads_of, read_maps
from prismlm.models.decoders.signal_noise import SignalNoiseConfig, SignalNoiseForCausalLM
from tests.helpers.mixer_models import make_corpus, make_llama, make_model

TEXT = "The river — 日本 — carries stones"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus")).tokenizer


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "head_size": 4, "initializer_range": 0.3}
    tokens = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    return SignalNoiseForCausalLM(SignalNoiseConfig(**sizes, **tokens)).eval()


def test_the_strongest_links_by_hand():
    weights = torch.tensor([[1.0, 0, 0], [0.7, 0.3, 0], [0.2, 0.5, 0.3]])
    one = AttentionMap(Head(6, 10, "noise", 2), weights, ("The", " frog", " sat"))
    assert [link[:2] for link in one.strongest(2)] == [(1, 0), (2, 1)]
    assert one.on_itself() == pytest.approx(0.3)


def test_heads_are_chosen_by_layer_number_and_group(model, tokenizer):
    assert len(heads_of(model)) == 16
    assert heads_of(model, layer=1, head=6) == (Head(1, 6, "noise", 2),)
    assert heads_of(model, head=2, group="noise") == tuple(Head(i, 6, "noise", 2) for i in (0, 1))
    for asked, words in (
        ({"layer": 2}, "no layer 2: the model's layers are 0 to 1"),
        ({"head": 4, "group": "noise"}, "no head 4: expected 0 to 3"),
        ({"group": "signals"}, "Did you mean 'signal'"),
    ):
        with pytest.raises(InputError, match=words):
            heads_of(model, **asked)
    with pytest.raises(InputError, match="no attention heads"):
        heads_of(make_model())


def test_maps_are_the_models_own_attention(tokenizer):
    llama = make_llama(len(tokenizer))
    heads = [Head(1, 3, "attention", 3), Head(0, 1, "attention", 1)]
    maps = read_maps(llama, tokenizer, TEXT, heads)
    llama.set_attn_implementation("eager")
    ids = tokenizer(TEXT, return_tensors="pt", add_special_tokens=False)["input_ids"]
    theirs = llama(ids, output_attentions=True).attentions
    for one in maps:
        assert torch.equal(one.weights, theirs[one.head.layer][0, one.head.head])
    assert "".join(token for token in maps[0].tokens if token != DITTO) == TEXT
    assert "�" not in "".join(maps[0].tokens)


def test_texts_that_have_no_map(model, tokenizer):
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 6}
    sizes |= {"vocab_size": len(tokenizer)}
    learned, broken = GPT2LMHeadModel(GPT2Config(**sizes)), copy.deepcopy(model)
    with torch.no_grad():
        broken.model.layers[0].attention.projection.weight[0, 0] = math.inf
    for reader, text, said in (
        (model, "T", r"has 1 token.* at least 2"),
        (learned, TEXT, "the model reads 6"),
        (broken, TEXT, r"not finite.*Take a checkpoint from before"),
    ):
        with pytest.raises(InputError, match=said):
            read_maps(reader, tokenizer, text, heads_of(reader, layer=0, head=0))
