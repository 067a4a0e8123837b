"""The codes that a call feeds back; what calls of one model share: threads, errors, caches.

The matrix test has generation, padding and caches of every family.
"""

import copy
import threading

import pytest
import torch

from prismlm.errors import InputError
from prismlm.models.seam import capture
from prismlm.models.uncertainty_feedback import uncertainty_of
from tests.helpers.feedback_families import IMAGE, V, attach_drawn, build, codes_of

IDS = torch.tensor([[1, 4, 5, 6, 7], [1, 7, 6, 5, 4]])
NEUTRAL = 32
SETTINGS = {"max_new_tokens": 5, "pad_token_id": 0, "eos_token_id": None, "do_sample": False}


@pytest.fixture
def model():
    return build("llama")


@torch.no_grad()
def test_a_call_that_failed_leaves_nothing_behind(model):
    plain = model.model(IDS).last_hidden_state
    attach_drawn(model, 64, passes=2)

    def fail(*_args):
        raise OSError("broken")

    handle = model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(OSError, match="broken"):
        model(IDS)
    handle.remove()
    assert torch.equal(model.model(IDS).last_hidden_state, plain)


@torch.no_grad()
def test_threads_and_copies(model):
    """Two threads in the middle of a call at the same time."""
    feedback = attach_drawn(model, 64, passes=2)
    texts = [IDS, torch.tensor([[1, 9, 8]])]
    expected = [model(ids, use_cache=False) for ids in texts]
    outputs, barrier = {}, threading.Barrier(2, timeout=60)

    def wait(*_args):
        barrier.wait()

    handle = model.model.layers[0].register_forward_hook(wait)

    def run(number):
        with torch.no_grad():
            outputs[number] = model(texts[number], use_cache=False)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    handle.remove()
    for number, output in enumerate(expected):
        assert torch.equal(outputs[number].uncertainty_codes, output.uncertainty_codes)
        torch.testing.assert_close(outputs[number].logits, output.logits)
    again = copy.deepcopy(model)
    assert uncertainty_of(again) is not feedback
    assert torch.equal(again(IDS, use_cache=False).logits, expected[0].logits)
    assert torch.equal(again.generate(IDS, **SETTINGS), model.generate(IDS, **SETTINGS))


@torch.no_grad()
def test_a_model_whose_state_cannot_carry_codes():
    model = build("rwkv")
    attach_drawn(model, 64)
    with pytest.raises(InputError, match="state cannot carry the code"):
        model.generate(IDS, **SETTINGS)
    assert model(IDS, use_cache=True).uncertainty_codes.shape == IDS.shape


@torch.no_grad()
def test_logits_of_some_positions(model):
    attach_drawn(model, 64)
    expected = model(IDS, use_cache=True).past_key_values.prismlm_codes.following
    for keep in (torch.tensor([1, 4]), torch.tensor([0, -1]), 1):
        cache = model(IDS, use_cache=True, logits_to_keep=keep).past_key_values
        assert torch.equal(cache.prismlm_codes.following, expected)
    keep = torch.tensor([1, 2])
    with pytest.raises(InputError, match="needs the logits of the last position"):
        model(IDS, use_cache=True, logits_to_keep=keep)
    # Without a cache no next token needs a code.
    assert model(IDS, use_cache=False, logits_to_keep=keep).logits.shape[1] == 2


@torch.no_grad()
def test_caches_of_other_rows_or_lengths(model):
    feedback = attach_drawn(model, 64)
    first, second = (model(IDS, use_cache=True).past_key_values for _ in range(2))
    last = IDS[:, :1]
    with pytest.raises(InputError, match=r"codes of 2 rows, .* has 1: .*batch_select_indices"):
        model(last[:1], past_key_values=first)
    following = first.prismlm_codes.following
    first.batch_select_indices(torch.tensor([1]))
    first.batch_repeat_interleave(2)
    codes = model(last, past_key_values=first).uncertainty_codes
    assert torch.equal(codes, following[[1, 1]])
    feedback.detach()
    model(last, past_key_values=second)
    attach_drawn(model, 64)
    with pytest.raises(InputError, match="codes of 5 positions, and this call has 6"):
        model(last, past_key_values=second)


@torch.no_grad()
def test_a_cache_without_codes_and_one_that_was_reset(model):
    cache = model(IDS, use_cache=True).past_key_values
    attach_drawn(model, 64)
    codes = model(IDS[:, :1], past_key_values=cache).uncertainty_codes
    assert codes.tolist() == [[NEUTRAL]] * 2
    cache.reset()
    expected = model(IDS[:1]).uncertainty_codes
    assert torch.equal(model(IDS[:1], past_key_values=cache).uncertainty_codes, expected)


@torch.no_grad()
def test_the_decoder_of_an_encoder_decoder():
    t5 = build("t5")
    source = torch.randint(2, V, (2, 5))
    encoded = t5.encoder(source).last_hidden_state
    plain = t5(source, labels=source).logits
    attach_drawn(t5, 64)
    assert torch.equal(t5.encoder(source).last_hidden_state, encoded)
    # The decoder's input follows from the labels.
    output = t5(source, labels=source, use_cache=False)
    assert output.uncertainty_codes.tolist() == [[-1, 32, 32, 32, 32]] * 2
    assert torch.equal(output.logits[:, 0], plain[:, 0])
    assert (output.logits - plain)[:, 1:].abs().amax(-1).min() > 1e-3


@torch.no_grad()
def test_tokens_that_stand_for_images_and_video_have_no_codes(model):
    llava = build("llava")
    inputs = {
        "input_ids": torch.tensor([[1, 5, *[IMAGE] * 4, 7, 8]]),
        "pixel_values": torch.randn(1, 3, 8, 8),
    }
    plain = llava(**inputs).logits
    feedback = attach_drawn(llava, 64)
    none = llava(**inputs, uncertainty_codes=torch.full((1, 8), -1))
    torch.testing.assert_close(none.logits, plain)
    output = llava(**inputs)
    # The first token, image tokens, and the token after them.
    assert output.uncertainty_codes.tolist() == [[-1, 32, -1, -1, -1, -1, -1, 32]]
    assert (output.logits[:, 1:] - plain[:, 1:]).abs().max() > 1e-3
    assert torch.equal(output.logits[:, 0], plain[:, 0])
    feedback.passes = 2
    second, predicted = llava(**inputs).uncertainty_codes, codes_of(output.logits)
    assert second[0, [1, 7]].tolist() == predicted[0, [0, 6]].tolist()
    model.config.video_token_id = 6
    attach_drawn(model, 64)
    codes = model(input_ids=IDS, use_cache=False).uncertainty_codes
    assert codes.tolist() == [[-1, NEUTRAL, NEUTRAL, -1, -1], [-1, NEUTRAL, -1, -1, NEUTRAL]]


@torch.no_grad()
def test_captured_states_are_those_of_the_last_pass(model):
    attach_drawn(model, 64, passes=3)
    expected = model(IDS, use_cache=False)
    with capture(model, logits=False) as captured:
        output = model(IDS, use_cache=False)
    assert torch.equal(output.uncertainty_codes, expected.uncertainty_codes)
    torch.testing.assert_close(captured.z @ model.lm_head.weight.T, expected.logits)


def test_a_cache_that_the_model_does_not_return_carries_codes():
    model = build("recurrent-gemma", 3)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)  # for varied predictions
    attach_drawn(model, 1024, deviation=2.0)
    calls = []
    model.register_forward_hook(lambda *call: calls.append(call[-1].uncertainty_codes))
    ids = torch.randint(2, V, (2, 6), generator=torch.Generator().manual_seed(2))
    model.generate(ids, max_new_tokens=5, do_sample=False)
    assert len(torch.cat(calls, 1)[:, 6:].unique()) > 3
