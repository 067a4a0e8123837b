"""Our decoders as Hugging Face models: caches, padding, packing, generation, checkpoints."""

import copy
import math

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache

from prismlm.errors import InputError
from prismlm.models.presets import build_config
from prismlm.models.seam import LogitMap, capture, verify_logit_map
from prismlm.training.parallel import recompute_activations
from prismlm.training.setup import supports_packed_documents
from tests.helpers.own_models import CLOSE, END, FAMILIES, VOCABULARY, gradients, own_model, tokens

OPTIONS = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return own_model(request.param)


@torch.no_grad()
def test_cached_logits_equal_uncached_in_any_pieces(model):
    ids = tokens(2, 40)
    whole = model(ids, use_cache=False)
    assert whole.past_key_values is None
    for sizes in ([1] * 40, [17, 1, 1, 21], [40]):
        cache, parts = None, []
        for piece in ids.split(sizes, dim=1):
            output = model(piece, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            parts.append(output.logits)
        torch.testing.assert_close(torch.cat(parts, 1), whole.logits, **CLOSE)
        assert cache.get_seq_length() == 40


@torch.no_grad()
def test_no_position_sees_what_comes_after_it(model):
    ids = tokens(1, 30)
    changed = ids.clone()
    changed[0, 20:] = tokens(10, seed=1)
    before, after = model(ids).logits[0], model(changed).logits[0]
    torch.testing.assert_close(before[:20], after[:20], rtol=0, atol=0)
    assert (before[20:] - after[20:]).abs().amax(-1).min() > 1e-3


@torch.no_grad()
def test_dropout_acts_only_in_training(model):
    model, ids = copy.deepcopy(model), tokens(1, 10)
    model.config.dropout = 0.0
    for block in model.model.layers:
        block.dropout = 0.5
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_padding_changes_no_logits(model, side):
    ids = tokens(2, 24)
    short = {"left": slice(9, 24), "right": slice(0, 15), "middle": [0, 3, *range(10, 23)]}[side]
    mask = torch.ones(2, 24, dtype=torch.int64)
    mask[1] = 0
    mask[1, short] = 1
    together = model(ids, attention_mask=mask)
    alone = model(ids[1:, short])
    torch.testing.assert_close(together.logits[1:, short], alone.logits, **CLOSE)
    torch.testing.assert_close(together.logits[:1], model(ids[:1]).logits, **CLOSE)
    # Padding in the cache is ignored too.
    more = tokens(2, 3, seed=3)
    longer = torch.cat([mask, torch.ones(2, 3, dtype=torch.int64)], 1)
    cached = model(more, attention_mask=longer, past_key_values=together.past_key_values)
    plain = model(more[1:], past_key_values=alone.past_key_values)
    torch.testing.assert_close(cached.logits[1:], plain.logits, **CLOSE)


@torch.no_grad()
def test_packed_documents_do_not_see_each_other(model):
    assert supports_packed_documents(model)
    pieces = [tokens(1, n, seed=n) for n in (7, 1, 30, 12)]
    position_ids = torch.cat([torch.arange(p.shape[1]) for p in pieces])[None]
    empty = type(model(pieces[0], use_cache=True).past_key_values)(model.config.num_hidden_layers)
    expected = torch.cat([model(piece).logits for piece in pieces], 1)
    for caching in ({"use_cache": False}, {"use_cache": True}, {"past_key_values": empty}):
        packed = model(torch.cat(pieces, 1), position_ids=position_ids, **caching).logits
        torch.testing.assert_close(packed, expected, **CLOSE)


@pytest.mark.parametrize(
    "way",
    [{"num_beams": 4, "num_return_sequences": 2}, {"do_sample": True}],
    ids=["beams", "sampled"],
)
def test_generation_with_a_cache_equals_generation_without(model, way):
    ids, generated = tokens(2, 9), []
    for use_cache in (True, False):
        torch.manual_seed(3)
        generated.append(model.generate(ids, **OPTIONS | way, use_cache=use_cache))
    assert torch.equal(*generated)


def test_left_padded_batches_generate_what_each_row_generates_alone(model):
    ids = tokens(3, 12)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    mask[1, :1] = 0
    out = model.generate(ids, attention_mask=mask, **OPTIONS)
    for row, first in enumerate((7, 1, 0)):
        alone = model.generate(ids[row : row + 1, first:], **OPTIONS)
        assert torch.equal(out[row, 12:], alone[0, 12 - first :])


def test_checkpoints_round_trip(model, tmp_path):
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(model)
    assert not [*info["missing_keys"], *info["unexpected_keys"]]
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    tied = model.config.tie_word_embeddings
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    ids = tokens(1, 9)
    assert torch.equal(loaded.eval()(ids).logits, model(ids).logits)
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == loaded.config.to_dict()
    bare = AutoModel.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(
        bare(ids).last_hidden_state @ loaded.lm_head.weight.T, model(ids).logits
    )


def test_half_precision_checkpoints_load_and_run(model, tmp_path):
    copy.deepcopy(model).bfloat16().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
    assert loaded.dtype == torch.bfloat16
    logits = loaded(tokens(1, 30)).logits
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - model(tokens(1, 30)).logits).abs().mean() < 0.15


def test_gradient_checkpointing_gives_the_same_gradients_without_a_cache(model):
    model, ids, runs = copy.deepcopy(model), tokens(2, 20), []
    cache = model(ids, use_cache=True).past_key_values
    plain = gradients(model.train(), input_ids=ids, labels=ids)
    assert all(g is not None and g.abs().max() > 0 for g in plain.values())
    recompute_activations(model)
    handle = model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    again = gradients(model, input_ids=ids, labels=ids)
    handle.remove()
    assert len(runs) == 2
    torch.testing.assert_close(again, plain, rtol=1e-5, atol=1e-7)
    assert model(ids, use_cache=True).past_key_values is None
    with pytest.raises(InputError, match=r"none with positions while it trains with gradient"):
        model(ids, past_key_values=cache)


@torch.no_grad()
def test_the_head_sees_the_state_before_the_output_embedding(model):
    assert LogitMap.of(model) == LogitMap()
    assert verify_logit_map(model, LogitMap()) < 1e-6
    ids = tokens(2, 9)
    with capture(model) as seen:
        output = model(ids, output_hidden_states=True)
    assert torch.equal(seen.z, output.hidden_states[-1])
    assert len(output.hidden_states) == model.config.num_hidden_layers + 1
    for keep, at in ((2, slice(-2, None)), (torch.tensor([1, 4]), [1, 4])):
        torch.testing.assert_close(model(ids, logits_to_keep=keep).logits, output.logits[:, at])
    embeds = model.get_input_embeddings()(ids)
    torch.testing.assert_close(model(inputs_embeds=embeds).logits, output.logits)


def test_wrong_input(model):
    ids = tokens(2, 6)
    for inputs, words in (
        ({}, "and not both"),
        ({"input_ids": ids, "past_key_values": DynamicCache()}, "Cache that it returned"),
    ):
        with pytest.raises(InputError, match=words):
            model(**inputs)
    cache = model(ids, use_cache=True).past_key_values
    cache.reset()
    assert cache.get_seq_length() == 0


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("family", "wrong"),
    [
        (
            "protot",
            {
                "temperature_mode": "multipy",
                "alpha": math.nan,
                "dropout": 1.0,
                "convolution_layers": [5],
                "initial_temperatures": [1.0],
                "gate_temperature": 0.0,
                "num_channels": 1.5,
            },
        ),
        ("signal_noise", {"hidden_size": "6", "noise_weight": 1.01, "frequency_ratio": math.inf}),
    ],
)
def test_settings_out_of_range(family, wrong):
    settings = {"model_type": f"prismlm_{family}", "num_hidden_layers": 2}
    for name, value in wrong.items():
        with pytest.raises(InputError, match=name):
            build_config(settings | {name: value}, VOCABULARY, END)
