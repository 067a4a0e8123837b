"""Uncertainty feedback on encoder-decoders and on models with images; its file."""

import pytest
import torch
from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

from prismlm.models.seam import capture
from prismlm.ops.uncertainty_feedback import naive, quantise
from tests.helpers.feedback_families import IMAGE, V, attach_drawn, build


def code_of(logits):
    return quantise(naive.normalised_entropy(logits).float(), 64)


@pytest.fixture
def t5():
    return build("t5")


@pytest.fixture
def llava():
    return build("llava")


@torch.no_grad()
def test_the_decoder_of_an_encoder_decoder(t5):
    source = torch.randint(2, V, (2, 5))
    encoded = t5.encoder(source).last_hidden_state
    plain = t5(source, labels=source).logits
    attach_drawn(t5, 64)
    assert torch.equal(t5.encoder(source).last_hidden_state, encoded)
    # Labels alone say what the decoder reads.
    output = t5(source, labels=source, use_cache=False)
    assert output.uncertainty_codes.tolist() == [[-1, 32, 32, 32, 32]] * 2
    assert torch.equal(output.logits[:, 0], plain[:, 0])
    assert (output.logits - plain)[:, 1:].abs().amax(-1).min() > 1e-3


@torch.no_grad()
def test_only_text_has_codes_where_there_are_images(llava):
    ids = torch.tensor([[1, 5, *[IMAGE] * 4, 7, 8]])
    pixels = torch.randn(1, 3, 8, 8)
    plain = llava(input_ids=ids, pixel_values=pixels).logits
    feedback = attach_drawn(llava, 64)
    given = {"input_ids": ids, "pixel_values": pixels}
    none = llava(**given, uncertainty_codes=torch.full((1, 8), -1))
    torch.testing.assert_close(none.logits, plain)
    output = llava(**given)
    # Nothing before the first token, on images, and after the last of them.
    assert output.uncertainty_codes.tolist() == [[-1, 32, -1, -1, -1, -1, -1, 32]]
    assert (output.logits[:, 1:] - plain[:, 1:]).abs().max() > 1e-3
    assert torch.equal(output.logits[:, 0], plain[:, 0])
    feedback.passes = 2
    second = llava(**given).uncertainty_codes
    predicted = code_of(output.logits)
    assert second[0, 7] == predicted[0, 6]
    assert second[0, 1] == predicted[0, 0]


@torch.no_grad()
@pytest.mark.parametrize("logits", [True, False])
def test_the_states_that_are_seen_are_those_of_the_last_pass(logits):
    model = build("llama")
    attach_drawn(model, 64, passes=3)
    ids = torch.tensor([[3, 4, 5, 6]])
    expected = model(ids, use_cache=False)
    with capture(model, logits=logits) as seen:
        found = model(ids, use_cache=False)
    assert torch.equal(found.uncertainty_codes, expected.uncertainty_codes)
    torch.testing.assert_close(seen.z @ model.lm_head.weight.T, expected.logits)
    assert found.logits.shape[1] == (4 if logits else 0)
    # Nothing is left behind: the next call begins anew.
    assert torch.equal(model(ids, use_cache=False).logits, expected.logits)


def test_a_cache_that_is_written_to_and_not_returned():
    torch.manual_seed(0)
    model = RecurrentGemmaForCausalLM(
        RecurrentGemmaConfig(
            vocab_size=V, hidden_size=16, intermediate_size=48, num_hidden_layers=3,
            num_attention_heads=2, lru_width=16, attention_window_size=32, initializer_range=0.4,
            pad_token_id=0, bos_token_id=1, eos_token_id=None,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        # Predictions that are not all alike.
        model.lm_head.weight.mul_(8)
    attach_drawn(model, 1024, deviation=2.0)
    calls = []
    model.register_forward_hook(lambda *call: calls.append(call[-1].uncertainty_codes))
    ids = torch.randint(2, V, (2, 6), generator=torch.Generator().manual_seed(2))
    model.generate(ids, max_new_tokens=5, do_sample=False)
    fed = torch.cat(calls, 1)
    assert fed.shape == (2, 10)
    assert len(fed[:, 6:].unique()) > 3
