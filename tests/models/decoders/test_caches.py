"""What a recurrent decoder carries on: pieces, padding and generation."""

import copy

import pytest
import torch

from prismlm.errors import InputError
from prismlm.models.decoders.caches import RecurrentCache
from tests.helpers.recurrent_models import FAMILIES, recurrent_model, tokens

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return recurrent_model(request.param)


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


def greedy(model, ids, steps, mask=None):
    """Continue without a cache and without generate."""
    for _ in range(steps):
        with torch.no_grad():
            logits = model(ids, attention_mask=mask, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1)[:, None]], 1)
        mask = None if mask is None else torch.cat([mask, mask[:, -1:]], 1)
    return ids


def options(**changes):
    fixed = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return fixed | changes


def test_greedy_generation_equals_the_uncached_loop(model):
    ids = tokens(2, 11)
    expected = greedy(model, ids, 8)
    assert torch.equal(model.generate(ids, **options()), expected)
    assert torch.equal(model.generate(ids, **options(use_cache=False)), expected)
    assert torch.equal(model.generate(ids, **options(prefill_chunk_size=4)), expected)


def test_generation_goes_on_from_a_cache(model):
    ids = tokens(1, 11)
    cache = RecurrentCache(model.config.num_hidden_layers)
    first = model.generate(ids, past_key_values=cache, **options(max_new_tokens=3))
    more = torch.cat([first, tokens(1, 4, seed=5)], 1)
    # Without a mask, generate takes every token that is the padding's for padding.
    going_on = {"past_key_values": cache, "attention_mask": torch.ones_like(more)}
    assert torch.equal(model.generate(more, **going_on, **options()), greedy(model, more, 8))


def test_left_padded_batches_generate_what_each_row_generates_alone(model):
    ids = tokens(3, 12)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    mask[1, :1] = 0
    out = model.generate(ids, attention_mask=mask, **options())
    for row, first in enumerate((7, 1, 0)):
        alone = model.generate(ids[row : row + 1, first:], **options())
        assert torch.equal(out[row, 12:], alone[0, 12 - first :])


def test_beams_are_those_of_the_uncached_model(model):
    ids = tokens(2, 9)
    settings = options(num_beams=4, num_return_sequences=2, max_new_tokens=6)
    cached = model.generate(ids, **settings)
    assert torch.equal(cached, model.generate(ids, **settings, use_cache=False))
    assert not torch.equal(cached[0], cached[1])


def test_samples_follow_the_seed(model):
    ids = tokens(2, 9)
    drawn = []
    for cache in (True, False):
        torch.manual_seed(3)
        settings = options(do_sample=True, num_return_sequences=3, use_cache=cache)
        drawn.append(model.generate(ids, **settings))
    assert torch.equal(*drawn)
    assert len({tuple(row.tolist()) for row in drawn[0][:3]}) == 3


@torch.no_grad()
def test_a_mask_is_over_what_comes_or_over_the_cache_too(model):
    ids = tokens(2, 9)
    whole = model(ids).logits
    mask = torch.ones(2, 12, dtype=torch.int64)
    empty = RecurrentCache(model.config.num_hidden_layers)
    for wrong in (8, 10):
        with pytest.raises(InputError, match=rf"is \[2, {wrong}\]: expected \[2, 9\]"):
            model(ids, attention_mask=mask[:, :wrong], past_key_values=empty)
    cache = model(ids[:, :6], attention_mask=mask[:, :6], past_key_values=empty).past_key_values
    for wrong in (1, 6, 10):
        with pytest.raises(InputError, match=r"expected \[2, 3\], or \[2, 9\] with what is in the"):
            model(ids[:, 6:], attention_mask=mask[:, :wrong], past_key_values=cache)
    for width in (3, 9):
        rest = {"attention_mask": mask[:, :width], "past_key_values": copy.deepcopy(cache)}
        torch.testing.assert_close(model(ids[:, 6:], **rest).logits, whole[:, 6:], **CLOSE)


def test_another_models_cache_is_refused_and_one_that_was_reset_is_not(model):
    ids = tokens(2, 6)
    cache = model(ids, use_cache=True).past_key_values
    layers = model.config.num_hidden_layers
    more = {"num_hidden_layers": layers + 1, "initial_temperatures": None}
    deeper = type(model)(type(model.config)(**model.config.to_dict() | more)).eval()
    with pytest.raises(InputError, match=f"has {layers} layers .* the model {layers + 1} layers"):
        deeper(ids, past_key_values=cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(model(ids, past_key_values=cache).logits, model(ids).logits)
