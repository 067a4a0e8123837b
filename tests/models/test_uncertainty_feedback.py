"""Codes of uncertainty from the first token on, by passes and in pieces, and what learns."""

import pytest
import torch
from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

from prismlm.models.seam import capture
from prismlm.ops.uncertainty_feedback import naive, quantise
from tests.helpers.feedback_families import FAMILIES, IMAGE, V, attach_drawn, build


@pytest.fixture(params=FAMILIES)
def model(request):
    return build(request.param)


def cache_name(model):
    return "cache_params" if model.config.model_type == "mamba" else "past_key_values"


def recursion(model, feedback, ids):
    """The meaning: one token at a time, its code from the prediction before it."""
    name, cache, code, codes, logits = cache_name(model), None, -1, [], []
    for at in range(ids.shape[1]):
        codes.append(torch.full((len(ids), 1), -1) if at == 0 else code)
        given = {name: cache, "use_cache": True, "uncertainty_codes": codes[-1]}
        output = model(ids[:, at : at + 1], **given)
        cache = output[name]
        logits.append(output.logits)
        share = naive.normalised_entropy(output.logits[:, -1]).float()
        code = quantise(share, feedback.embedding.levels)[:, None]
    return torch.cat(logits, 1), torch.cat(codes, 1)


@torch.no_grad()
def test_step_by_step_is_the_recursion_and_replayed_codes_give_it_at_once(model):
    plain = model(torch.tensor([[3, 4, 5]])).logits
    feedback = attach_drawn(model, 64)
    ids = torch.randint(2, V, (2, 7))
    expected, codes = recursion(model, feedback, ids)
    name, cache, found = cache_name(model), None, []
    for at in range(7):
        output = model(ids[:, at : at + 1], **{name: cache, "use_cache": True})
        cache = output[name]
        assert torch.equal(output.uncertainty_codes[:, 0], codes[:, at])
        found.append(output.logits)
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-4, rtol=1e-4)
    at_once = model(ids, uncertainty_codes=codes, use_cache=False)
    torch.testing.assert_close(at_once.logits, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(at_once.uncertainty_codes, codes)
    # It says something: other codes, other logits.
    other = model(ids, uncertainty_codes=(codes + 7).clamp_max(63), use_cache=False).logits
    assert (other - expected).abs().max() > 1e-3
    feedback.detach()
    assert torch.equal(model(torch.tensor([[3, 4, 5]])).logits, plain)


@torch.no_grad()
def test_more_passes_make_more_positions_exact(model):
    feedback = attach_drawn(model, 64)
    ids = torch.randint(2, V, (1, 6))
    expected, codes = recursion(model, feedback, ids)
    for passes in (1, 2, 6):
        feedback.passes = passes
        output = model(ids, use_cache=False)
        # Position 0 has no code; each further pass makes one more right.
        assert torch.equal(output.uncertainty_codes[:, :passes], codes[:, :passes])
    torch.testing.assert_close(output.logits, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_the_next_tokens_of_a_prompt_in_pieces_begin_with_its_code(model):
    feedback = attach_drawn(model, 64)
    name, ids = cache_name(model), torch.randint(2, V, (1, 6))
    first = model(ids[:, :4], use_cache=True)
    code = quantise(naive.normalised_entropy(first.logits[:, -1]).float(), 64)
    second = model(ids[:, 4:], **{name: first[name], "use_cache": True})
    assert second.uncertainty_codes.tolist() == [[code.item(), 32]]
    replayed = torch.cat([first.uncertainty_codes, second.uncertainty_codes], 1)
    whole = model(ids, uncertainty_codes=replayed, use_cache=False)
    if name == "past_key_values":
        # Hugging Face's Mamba goes on from a cache by single tokens only, with or without codes.
        torch.testing.assert_close(whole.logits[:, 4:], second.logits, atol=1e-4, rtol=1e-4)
    # A second pass over a piece leaves the cache as it was.
    feedback.passes = 2
    first = model(ids[:, :4], use_cache=True, uncertainty_codes=first.uncertainty_codes)
    before = first[name].get_seq_length() if name == "past_key_values" else None
    again = model(ids[:, 4:], **{name: first[name], "use_cache": True})
    if before is not None:
        assert first[name].get_seq_length() == before + 2
    predicted = quantise(naive.normalised_entropy(second.logits[:, 0]).float(), 64)
    assert again.uncertainty_codes.tolist() == [[code.item(), predicted.item()]]


def test_gradients_reach_the_table_and_the_model_and_not_the_codes(model):
    feedback = attach_drawn(model, 64, passes=2)
    model.train()
    ids = torch.randint(2, V, (2, 6))
    output = model(ids, labels=ids, use_cache=False)
    output.loss.backward()
    used = output.uncertainty_codes[:, 1:].unique()
    touched = feedback.embedding.weight.grad.abs().sum(1).nonzero()[:, 0]
    # The last position's vector has a part in no loss.
    inner = output.uncertainty_codes[:, 1:-1].unique()
    assert set(inner.tolist()) <= set(touched.tolist()) <= set(used.tolist())


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
