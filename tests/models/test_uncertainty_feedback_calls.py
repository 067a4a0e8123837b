"""What calls of one model know of each other: rows, threads, errors, and what a cache carries."""

import copy
import pickle
import threading

import pytest
import torch
from transformers import RwkvConfig, RwkvForCausalLM

from prismlm.errors import InputError
from prismlm.models.uncertainty_feedback import carried_code, uncertainty_of
from tests.helpers.feedback_families import V, attach_drawn, build

IDS = torch.tensor([[1, 4, 5, 6, 7], [1, 7, 6, 5, 4]])
NEUTRAL = 32
MADE = {"max_new_tokens": 5, "pad_token_id": 0, "eos_token_id": None, "do_sample": False}


@pytest.fixture
def model():
    return build("llama")


@torch.no_grad()
def test_calls_without_a_cache_know_nothing_of_each_other(model):
    attach_drawn(model, 64)
    expected = model(IDS, use_cache=False).logits
    model(IDS[:, :3], use_cache=False)
    assert torch.equal(model(IDS, use_cache=False).logits, expected)
    model.generate(IDS, **MADE)
    assert torch.equal(model(IDS, use_cache=False).logits, expected)


@torch.no_grad()
def test_arguments_without_names():
    model = build("gpt2")
    attach_drawn(model, 64, passes=2)
    caches = [model(IDS, use_cache=True).past_key_values for _ in range(2)]
    named = model(IDS[:, :2], past_key_values=caches[0])
    found = model(IDS[:, :2], caches[1])
    assert caches[1].get_seq_length() == caches[0].get_seq_length() == 7
    assert torch.equal(found.logits, named.logits)
    with pytest.raises(TypeError, match="input_ids"):
        model(IDS, input_ids=IDS)
    with pytest.raises(ValueError, match="longer"):
        model(IDS, *[None] * 40)


@torch.no_grad()
@pytest.mark.parametrize("passes", [1, 2])
def test_nothing_is_left_of_a_call_that_an_error_ended(model, passes):
    plain = model.model(IDS).last_hidden_state
    attach_drawn(model, 64, passes=passes)

    def broken(*_given):
        raise OSError("broken")

    handle = model.model.layers[1].register_forward_hook(broken)
    with pytest.raises(OSError, match="broken"):
        model(IDS)
    handle.remove()
    assert torch.equal(model.model(IDS).last_hidden_state, plain)


@torch.no_grad()
def test_two_threads(model):
    """Each reads its own rows, one of them while the other is in the middle of a call."""
    feedback = attach_drawn(model, 64, passes=2)
    texts = [IDS, torch.tensor([[1, 9, 8]])]
    expected = [model(ids, use_cache=False) for ids in texts]
    found, turn = {}, threading.Barrier(2, timeout=60)

    def wait(*_given):
        turn.wait()

    handle = model.model.layers[0].register_forward_hook(wait)

    def read(number):
        with torch.no_grad():
            found[number] = model(texts[number], use_cache=False)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    handle.remove()
    for number, output in enumerate(expected):
        assert torch.equal(found[number].uncertainty_codes, output.uncertainty_codes)
        torch.testing.assert_close(found[number].logits, output.logits)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert uncertainty_of(again) is not feedback
        assert torch.equal(again(IDS, use_cache=False).logits, expected[0].logits)
        assert torch.equal(again.generate(IDS, **MADE), model.generate(IDS, **MADE))


@torch.no_grad()
def test_a_model_whose_cache_carries_no_codes_reads_a_text_at_once():
    config = RwkvConfig(
        vocab_size=V, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16,
        intermediate_size=24,
    )  # fmt: skip
    model = RwkvForCausalLM(config).eval()
    attach_drawn(model, 64)
    with pytest.raises(InputError, match=r"generates without a cache, .*\(past_key_values or"):
        model.generate(IDS, **MADE)
    output = model(IDS, use_cache=True)
    assert output.uncertainty_codes.shape == IDS.shape
    with pytest.raises(InputError, match="state cannot carry the code"):
        model(IDS[:, :1], state=output.state)


@torch.no_grad()
def test_a_batch_that_changes_its_size_while_its_cache_goes_on(model):
    attach_drawn(model, 64)
    cache = model(IDS, use_cache=True).past_key_values
    with pytest.raises(InputError, match=r"codes of 2 rows, .* has 1: .*batch_select_indices"):
        model(IDS[:1, :1], past_key_values=cache)


@torch.no_grad()
def test_logits_of_some_positions(model):
    attach_drawn(model, 64)
    expected = carried_code(model(IDS, use_cache=True).past_key_values).following
    for kept in (torch.tensor([4, 1]), torch.tensor([0, -1]), 1, 2):
        cache = model(IDS, use_cache=True, logits_to_keep=kept).past_key_values
        assert torch.equal(carried_code(cache).following, expected)
    for kept in (torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64)):
        with pytest.raises(InputError, match="do not include the last position, 4"):
            model(IDS, use_cache=True, logits_to_keep=kept)
        # Without a cache no next token needs a code.
        output = model(IDS, use_cache=False, logits_to_keep=kept)
        assert output.logits.shape[1] == len(kept)


@torch.no_grad()
def test_a_cache_of_other_levels_or_that_went_on_without_feedback(model):
    feedback = attach_drawn(model, 64)
    caches = [model(IDS, use_cache=True).past_key_values for _ in range(2)]
    feedback.detach()
    feedback.detach()
    last = IDS[:, :1]
    model(last, past_key_values=caches[1])
    feedback = attach_drawn(model, 8)
    with pytest.raises(InputError, match="codes of 64 levels, and this call has 8"):
        model(last, past_key_values=caches[0])
    feedback.detach()
    feedback = attach_drawn(model, 64)
    with pytest.raises(InputError, match="codes of 5 positions, and this call has 6"):
        model(last, past_key_values=caches[1])
    feedback.detach()
    cache = model(IDS, use_cache=True).past_key_values
    attach_drawn(model, 64)
    first = model(last, past_key_values=cache).uncertainty_codes
    assert first.tolist() == [[NEUTRAL]] * 2
    cache.crop(-1)
    with pytest.raises(InputError, match="codes of 6 positions, and this call has 5"):
        model(last, past_key_values=cache)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma3", "t5"])
def test_a_static_cache_is_refused(name):
    model = build(name)
    attach_drawn(model, 64)
    with pytest.raises(InputError, match=r"static cache: .*Leave cache_implementation out"):
        model.generate(IDS, **MADE, cache_implementation="static")


@torch.no_grad()
def test_the_mask_of_one_token(model):
    """Of the last position, whose padding has no code and leaves none to the next token."""
    attach_drawn(model, 64)
    ones, padded = torch.ones(1, 6, dtype=torch.int64), torch.tensor([[1, 1, 1, 1, 1, 0]])
    codes = []
    for mask in (None, ones, padded):
        cache = model(IDS[:1], use_cache=True).past_key_values
        output = model(IDS[:1, :1], past_key_values=cache, attention_mask=mask)
        codes.append((output.uncertainty_codes.item(), carried_code(cache).following.item()))
    assert codes[0] == codes[1]
    assert min(codes[0]) >= 0
    assert codes[2] == (-1, -1)


@torch.no_grad()
def test_a_cache_that_is_reset_begins_anew(model):
    attach_drawn(model, 64)
    cache = model(IDS, use_cache=True).past_key_values
    cache.reset()
    expected = model(IDS[:1]).uncertainty_codes
    assert torch.equal(model(IDS[:1], past_key_values=cache).uncertainty_codes, expected)


def test_a_cache_with_a_gradient(model):
    attach_drawn(model, 64, passes=2)
    cache = model(IDS, use_cache=True).past_key_values
    model(IDS[:, :2], past_key_values=cache).logits.sum().backward()
    assert cache.get_seq_length() == 7


@torch.no_grad()
@pytest.mark.parametrize("said", ["video_token_id", "audio_token_index"])
def test_places_of_video_and_sound_are_no_text(model, said):
    setattr(model.config, said, 6)
    attach_drawn(model, 64)
    codes = model(input_ids=IDS, use_cache=False).uncertainty_codes
    # None at the start, at the place, and after it, where nothing was predicted from text.
    assert codes.tolist() == [[-1, NEUTRAL, NEUTRAL, -1, -1], [-1, NEUTRAL, -1, -1, NEUTRAL]]
