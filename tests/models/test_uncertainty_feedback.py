"""The codes that a call feeds back: by the number of passes, on other kinds of models, in a cache.

The matrix test has generation, padding and caches of every family.
"""

import pytest
import torch
from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

from prismlm.models.seam import capture
from prismlm.ops.uncertainty_feedback import naive, quantise
from tests.helpers.feedback_families import IMAGE, V, attach_drawn, build


def code_of(logits):
    return quantise(naive.normalised_entropy(logits).float(), 64)


def recursion(model, ids):
    """The definition: one token at a time, its code from the prediction before it."""
    name = "cache_params" if model.config.model_type == "mamba" else "past_key_values"
    cache, code, codes, logits = None, torch.full((len(ids), 1), -1), [], []
    for token in ids.split(1, 1):
        codes.append(code)
        output = model(token, **{name: cache, "use_cache": True, "uncertainty_codes": code})
        cache = output[name]
        logits.append(output.logits)
        code = code_of(output.logits)
    return torch.cat(logits, 1), torch.cat(codes, 1)


@torch.no_grad()
@pytest.mark.parametrize("family", ["gpt2", "llama", "mamba"])
def test_more_passes_make_more_positions_exact(family):
    model = build(family)
    feedback = attach_drawn(model, 64)
    ids = torch.randint(2, V, (1, 6))
    expected, codes = recursion(model, ids)
    for passes in (1, 2, 6):
        feedback.passes = passes
        output = model(ids, use_cache=False)
        # Position 0 has no code; each further pass makes one more exact.
        assert torch.equal(output.uncertainty_codes[:, :passes], codes[:, :passes])
    torch.testing.assert_close(output.logits, expected, atol=1e-4, rtol=1e-4)


def test_gradients_reach_the_rows_of_used_codes():
    model = build("llama")
    feedback = attach_drawn(model, 64, passes=2)
    model.train()
    ids = torch.randint(2, V, (2, 6))
    output = model(ids, labels=ids, use_cache=False)
    output.loss.backward()
    touched = set(feedback.embedding.weight.grad.abs().sum(1).nonzero()[:, 0].tolist())
    # The vector of the last position is in no loss.
    used, in_loss = (set(output.uncertainty_codes[:, 1:end].unique().tolist()) for end in (6, 5))
    assert in_loss <= touched <= used


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
def test_image_tokens_have_no_codes():
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
    second, predicted = llava(**inputs).uncertainty_codes, code_of(output.logits)
    assert second[0, [1, 7]].tolist() == predicted[0, [0, 6]].tolist()


@torch.no_grad()
@pytest.mark.parametrize("logits", [True, False])
def test_captured_states_are_those_of_the_last_pass(logits):
    model = build("llama")
    attach_drawn(model, 64, passes=3)
    ids = torch.tensor([[3, 4, 5, 6]])
    expected = model(ids, use_cache=False)
    with capture(model, logits=logits) as captured:
        output = model(ids, use_cache=False)
    assert torch.equal(output.uncertainty_codes, expected.uncertainty_codes)
    torch.testing.assert_close(captured.z @ model.lm_head.weight.T, expected.logits)
    assert output.logits.shape[1] == (4 if logits else 0)
    assert torch.equal(model(ids, use_cache=False).logits, expected.logits)


def test_a_cache_that_the_model_does_not_return_carries_codes():
    torch.manual_seed(0)
    model = RecurrentGemmaForCausalLM(
        RecurrentGemmaConfig(
            vocab_size=V, hidden_size=16, intermediate_size=48, num_hidden_layers=3,
            num_attention_heads=2, lru_width=16, attention_window_size=32, initializer_range=0.4,
            pad_token_id=0, bos_token_id=1, eos_token_id=None,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        model.lm_head.weight.mul_(8)  # for varied predictions
    attach_drawn(model, 1024, deviation=2.0)
    calls = []
    model.register_forward_hook(lambda *call: calls.append(call[-1].uncertainty_codes))
    ids = torch.randint(2, V, (2, 6), generator=torch.Generator().manual_seed(2))
    model.generate(ids, max_new_tokens=5, do_sample=False)
    codes = torch.cat(calls, 1)
    assert codes.shape == (2, 10)
    assert len(codes[:, 6:].unique()) > 3
