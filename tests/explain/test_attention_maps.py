"""Attention maps of chosen heads, alone and in a trace."""

import copy
import math
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from prismlm.corpus.pieces import DITTO
from prismlm.errors import InputError
from prismlm.explain.attention_maps import AttentionMap, Head, heads_at, heads_of, read_maps
from prismlm.explain.language_model import PrismLM
from prismlm.layers import PrototypeHead
from prismlm.models.decoders.signal_noise import SignalNoiseConfig, SignalNoiseForCausalLM
from prismlm.models.seam import LogitMap
from tests.helpers.mixer_models import make_corpus, make_llama, make_model

TEXT = "The river — 日本 — carries stones"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus")).tokenizer


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    config = SignalNoiseConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=2,
        head_size=4,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
    )
    return SignalNoiseForCausalLM(config).eval()


@pytest.fixture(scope="module")
def lm(model, tokenizer):
    torch.manual_seed(1)
    head = PrototypeHead(16, 8, 4)
    head.reset_parameters()
    return PrismLM(Path("tiny"), model, tokenizer, head, LogitMap.of(model), None)


def test_a_map_by_hand():
    weights = torch.tensor([[1.0, 0, 0], [0.7, 0.3, 0], [0.2, 0.5, 0.3]])
    one = AttentionMap(Head(6, 10, "noise", 2), ("The", " frog", " sat"), (0, 1, 2), weights)
    assert one.head.title == "layer 6 · noise head 2"
    assert Head(1, 3, "attention", 3).title == "layer 1 · head 3"
    links = one.strongest(2)
    assert [link[:2] for link in links] == [(1, 0), (2, 1)]
    assert [link.weight for link in links] == pytest.approx([0.7, 0.5])
    assert len(one.strongest(9)) == 3
    assert one.on_itself() == pytest.approx(0.3)
    part = one[2:]
    assert part.positions == (2,)
    assert part.tokens == one.tokens
    assert [link[:2] for link in part.strongest()] == [(2, 1), (2, 0)]
    assert part.to_dict() == {
        "layer": 6,
        "head": 10,
        "group": "noise",
        "group_head": 2,
        "tokens": ["The", " frog", " sat"],
        "positions": [2],
        "weights": [pytest.approx([0.2, 0.5, 0.3])],
    }


def test_heads_are_chosen_by_layer_number_and_group(model, tokenizer):
    assert len(heads_of(model)) == 16
    assert heads_of(model, layer=1, head=6) == (Head(1, 6, "noise", 2),)
    assert heads_of(model, head=2, group="noise") == (
        Head(0, 6, "noise", 2),
        Head(1, 6, "noise", 2),
    )
    assert heads_at(model, [(1, 0), (0, 5), (1, 0)]) == (
        Head(1, 0, "signal", 0),
        Head(0, 5, "noise", 1),
    )
    assert heads_of(make_llama(), layer=0, head=3) == (Head(0, 3, "attention", 3),)
    for asked, words in (
        ({"layer": 2}, "no layer 2: the model's layers are 0 to 1"),
        ({"layer": -1}, "no layer -1"),
        ({"head": 8}, "no head 8: the heads of a layer are 0 to 7"),
        ({"head": 4, "group": "noise"}, "no noise head 4: the noise heads of a layer are 0 to 3"),
        ({"group": "signals"}, "Did you mean 'signal'"),
    ):
        with pytest.raises(InputError, match=words):
            heads_of(model, **asked)
    with pytest.raises(InputError, match="no attention heads"):
        heads_of(make_model())
    with pytest.raises(InputError, match=r"the layer is \[1\]: expected a whole number"):
        heads_at(model, [([1], 0)])


def test_maps_are_the_models_own_attention(tokenizer):
    llama = make_llama(len(tokenizer))
    maps = read_maps(llama, tokenizer, TEXT, heads_at(llama, [(1, 3), (0, 1)]))
    llama.set_attn_implementation("eager")
    ids = tokenizer(TEXT, return_tensors="pt", add_special_tokens=False)["input_ids"]
    theirs = llama(ids, output_attentions=True).attentions
    for one, (layer, head) in zip(maps, [(1, 3), (0, 1)], strict=True):
        assert torch.equal(one.weights, theirs[layer][0, head])
        assert one.positions == tuple(range(ids.shape[1]))
    assert "".join(token for token in maps[0].tokens if token != DITTO) == TEXT
    assert "�" not in "".join(maps[0].tokens)


def test_noise_heads_sum_to_one_and_see_no_later_token(model, tokenizer):
    maps = read_maps(model, tokenizer, TEXT, heads_of(model))
    weights = torch.stack([one.weights for one in maps])
    assert torch.allclose(weights.sum(-1), torch.ones(weights.shape[:2]), atol=1e-6)
    assert not weights.triu(1).any()
    assert len({tuple(one.weights[-1].tolist()) for one in maps}) == 16
    assert read_maps(model, tokenizer, TEXT, []) == ()


def test_texts_that_have_no_map(model, tokenizer):
    with pytest.raises(InputError, match=r"has 1 token.* at least 2"):
        read_maps(model, tokenizer, "T", heads_of(model))
    with pytest.raises(InputError, match="text is empty"):
        read_maps(model, tokenizer, "", heads_of(model))
    with pytest.raises(InputError, match="no layer 7"):
        read_maps(model, tokenizer, TEXT, [Head(7, 0, "signal", 0)])
    learned = GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=6)
    )
    with pytest.raises(InputError, match="the model reads 6"):
        read_maps(learned, tokenizer, TEXT, heads_of(learned))
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.model.layers[0].attention.projection.weight[0, 0] = math.inf
    with pytest.raises(InputError, match=r"not finite.*Take a checkpoint from before"):
        read_maps(broken, tokenizer, TEXT, heads_of(broken, layer=0, head=0))
    # One that rotates positions goes on.
    llama = make_llama(len(tokenizer))
    llama.config.max_position_embeddings = 6
    assert len(read_maps(llama, tokenizer, TEXT, heads_of(llama))[0].weights) > 6


def test_a_trace_holds_the_attention_of_its_positions(lm, model):
    trace = lm.explain("The river carries", generate=4, attention=[(1, 5), (0, 0)])
    assert [one.head for one in trace.attention] == [
        Head(1, 5, "noise", 1),
        Head(0, 0, "signal", 0),
    ]
    first = trace.attention[0]
    assert first.positions == tuple(step.position for step in trace)
    assert first.tokens == tuple(step.token for step in trace)
    ids = torch.tensor([[step.token_id for step in trace]])
    with torch.no_grad():
        tail = model(ids, use_cache=False).logits[0, -1]
    assert tail.argmax() == trace[-1].target_id
    part = trace[3:5]
    assert torch.equal(part.attention[1].weights, trace.attention[1].weights[3:5])
    assert [entry["positions"] for entry in part.to_dict()["attention"]] == [[3, 4]] * 2


def test_attention_that_a_trace_cannot_hold(lm):
    with pytest.raises(InputError, match="no head 8"):
        lm.explain("The river", attention=[(0, 8)])
    with pytest.raises(InputError, match="has 1 token"):
        lm.explain("T", attention=[(0, 1)])
    assert lm.explain("T", generate=2, attention=[(0, 1)]).attention[0].weights.shape == (2, 2)
