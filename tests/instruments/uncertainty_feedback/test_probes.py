"""Attention received by code, the code in hidden states, and the report of all checks."""

import json

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    RwkvConfig,
    RwkvForCausalLM,
)

from prismlm.errors import InputError
from prismlm.instruments.uncertainty_feedback import (
    InspectOptions,
    Sample,
    Signal,
    attention_probe,
    code_probe,
    estimate_inspection,
    inspect_uncertainty,
    own_codes,
    plan,
)
from prismlm.instruments.uncertainty_feedback.attention import received
from prismlm.models.decoders.signal_noise import SignalNoiseConfig
from prismlm.models.uncertainty_feedback import attach_uncertainty
from tests.helpers.feedback_models import (
    LEVELS,
    make_fed_gpt2,
    make_fed_protot,
    random_texts,
    set_table,
)
from tests.helpers.uncertain_families import FAMILIES, V

FAST = InspectOptions(permutations=2, passes=2, tokens=10, window=2, mistakes=1)


@torch.no_grad()
def test_attention_received_is_the_mean_over_later_tokens():
    model, _ = make_fed_gpt2()
    texts = random_texts(6, 6)
    codes = own_codes(model, texts, Signal())
    found = received(model, texts, codes)
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    for number, text in enumerate(texts):
        output = model(
            text[None],
            uncertainty_codes=codes[number][None],
            output_attentions=True,
            use_cache=False,
        )
        for layer, weights in enumerate(output.attentions):
            expected = [
                sum(float(weights[0, :, i, j].mean()) for i in range(j + 1, 6)) / (5 - j)
                for j in range(5)
            ]
            np.testing.assert_allclose(found[layer, number], [*expected, 0], atol=1e-6)


def test_texts_are_cut_to_one_length_and_compared_with_nothing_fed():
    model, feedback = make_fed_gpt2()
    texts = random_texts(30, 24, 40, 24, 26, 12, 24, 28)
    codes = own_codes(model, texts, Signal())
    found = attention_probe(model, texts, codes, permutations=49)
    # The lower of the middle two of 12, 24, 24, 24, 26, 28, 30, 40.
    assert (found.length, found.texts, found.left_out) == (24, 7, 1)
    assert found.positions == 24 - 1 - 8
    assert len(found.layers) == 2
    for one in found.layers:
        assert -1 <= one.correlation <= 1
        assert 1 / 50 <= one.p <= one.q <= 1
        assert one.added.value == pytest.approx(one.correlation - one.without)
    # Texts too short by themselves change nothing, however many they are.
    several = [*texts, *random_texts(*[5] * 20)]
    mixed = attention_probe(model, several, own_codes(model, several, Signal()), permutations=49)
    assert (mixed.length, mixed.texts, mixed.left_out) == (24, 7, 21)
    assert mixed.layers == found.layers
    # Cut off is as never read.
    alike = attention_probe(
        model,
        [text[:24] for text in texts if len(text) >= 24],
        [row[:24] for row in codes if len(row) >= 24],
        permutations=49,
    )
    assert alike.layers == found.layers
    # With a table of zeros, nothing fed is the same.
    set_table(feedback, torch.zeros(1, 16))
    for one in attention_probe(model, texts, codes, permutations=49).layers:
        assert one.correlation == one.without
        assert (one.added.low, one.added.high) == (0, 0)


def test_codes_that_draw_attention_are_found():
    """A table whose vector is what every query looks for."""
    model, feedback = make_fed_gpt2(layers=1)
    with torch.no_grad():
        block = model.transformer.h[0]
        # Keys are the first coordinate, and every query is 1.
        block.attn.c_attn.weight.zero_()
        block.attn.c_attn.bias.zero_()
        block.attn.c_attn.bias[:16] = 1.0
        block.attn.c_attn.weight[0, 16:32] = 0.5
        model.transformer.wpe.weight.zero_()
        model.transformer.wte.weight[:, 0] = 0
    table = torch.zeros(LEVELS, 16)
    table[:, 0] = torch.linspace(-3, 3, LEVELS)
    set_table(feedback, table)
    texts = random_texts(*[24] * 12)
    generator = torch.Generator().manual_seed(0)
    codes = tuple(torch.randint(0, LEVELS, (24,), generator=generator) for _ in texts)
    for row in codes:
        row[0] = -1
    (layer,) = attention_probe(model, texts, codes).layers
    assert layer.correlation > 0.8
    assert layer.p == layer.q == 1 / 1000
    assert layer.matched_top > 2 * layer.matched_bottom
    assert layer.top > 2 * layer.bottom
    assert abs(layer.without) < 0.3
    assert layer.added.above_zero
    found = attention_probe(model, texts, codes)
    assert "the signal itself adds to it in 1" in found.verdict
    # Turned round, low codes draw it.
    set_table(feedback, table.flip(0))
    turned = attention_probe(model, texts, codes)
    assert turned.layers[0].correlation < -0.8
    assert turned.verdict.startswith("No later layer")


def test_texts_too_few_for_the_attention_probe():
    model, _ = make_fed_gpt2()
    texts = random_texts(20, 20, 20)
    with pytest.raises(InputError, match="at least 4, of at least 10 tokens"):
        attention_probe(model, texts, own_codes(model, texts, Signal()))
    protot, _ = make_fed_protot()
    with pytest.raises(InputError, match="no attention heads to read"):
        attention_probe(protot, texts, own_codes(protot, texts, Signal()))


@pytest.mark.parametrize("make", [make_fed_gpt2, make_fed_protot])
def test_a_code_that_is_fed_can_be_read_and_a_shuffled_one_cannot(make):
    model, feedback = make()
    texts = random_texts(*[40] * 30)
    table = torch.zeros(LEVELS, 16)
    table[:, 3] = torch.linspace(-20, 20, LEVELS)
    set_table(feedback, table)
    generator = torch.Generator().manual_seed(0)
    codes = tuple(torch.randint(0, LEVELS, (40,), generator=generator) for _ in texts)
    for row in codes:
        row[0] = -1
    found = code_probe(model, texts, codes)
    assert (found.fitted_on, found.tested_on, found.positions) == (20, 10, 20 * 39)
    assert [one.layer for one in found.layers] == [0, 1, 2]
    assert [one.depth for one in found.layers] == [0, 0.5, 1]
    first = found.layers[0]
    assert first.code.low > 0.95
    assert abs(first.shuffled.value) < 0.1
    assert abs(first.without.value) < 0.1
    assert first.added.low > 0.9
    assert found.peak is first
    assert found.verdict.startswith("The code is read best at depth 0.00 (layer 0 of 2; about 0.67")
    # What nothing is fed of, the fed states do not have.
    set_table(feedback, torch.zeros(1, 16))
    nothing = code_probe(model, texts, codes)
    for one in nothing.layers:
        assert one.code == one.without
        assert (one.added.low, one.added.high) == (0, 0)
    assert nothing.verdict.startswith("No layer lets the code be read")


@torch.no_grad()
def test_the_next_entropy_is_that_of_the_prediction_at_the_position():
    model, _ = make_fed_gpt2()
    texts = random_texts(*[24] * 30)
    found = code_probe(model, texts, own_codes(model, texts, Signal()))
    # The last state gives the logits, so it tells of their entropy more than the first does.
    assert found.layers[-1].next_entropy.value > found.layers[0].next_entropy.value
    with pytest.raises(InputError, match="at least 4"):
        code_probe(model, texts[:3], own_codes(model, texts[:3], Signal()))


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models

    vocabulary = {f"w{number}": number for number in range(37)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w0")


def test_a_report_has_every_check_or_its_reason(tokenizer):
    model, _ = make_fed_protot()
    sample = Sample("some", tuple(random_texts(*[20] * 8)))
    found = inspect_uncertainty(model, tokenizer, sample, name="it", options=FAST)
    assert set(found.left_out) == {"attention"}
    assert "no attention heads" in found.left_out["attention"]
    assert set(found.verdicts) == {"ablation", "prefill", "hedging", "mistakes", "probe"}
    value = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert value["attention"] is None
    assert value["ablation"]["conditions"][2]["signal"] == "shuffled"
    assert value["verdicts"]["ablation"] == found.ablation.verdict
    again = inspect_uncertainty(model, tokenizer, sample, name="it", options=FAST)
    assert again.to_dict() == found.to_dict()
    chosen = inspect_uncertainty(model, tokenizer, sample, ["attention", "probe"], options=FAST)
    assert set(chosen.verdicts) == {"probe"}
    assert set(chosen.left_out) == {"attention"}


@pytest.mark.parametrize("name", [*FAMILIES, "signal-noise"])
def test_every_family_is_read(name, tokenizer):
    torch.manual_seed(0)
    if name == "signal-noise":
        config = SignalNoiseConfig(
            vocab_size=V, hidden_size=16, num_hidden_layers=2, head_size=4, initializer_range=0.4
        )
    else:
        config = FAMILIES[name]()
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    attach_uncertainty(model, 64)
    sample = Sample("some", tuple(random_texts(*[14] * 8, vocabulary=V)))
    options = InspectOptions(permutations=1, passes=1, tokens=4, window=2, mistakes=1)
    found = inspect_uncertainty(model, tokenizer, sample, options=options)
    assert set(found.left_out) == ({"attention"} if name == "mamba" else set())
    assert len(found.probe.layers) == 3
    assert found.prefill.rounding < 1e-3
    if found.attention is not None:
        assert len(found.attention.layers) == 2


def test_a_model_without_a_cache_is_read_without_what_needs_one(tokenizer):
    torch.manual_seed(0)
    config = RwkvConfig(
        vocab_size=V, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16,
        intermediate_size=24,
    )  # fmt: skip
    model = RwkvForCausalLM(config).eval().requires_grad_(False)
    attach_uncertainty(model, 64)
    sample = Sample("some", tuple(random_texts(*[14] * 8, vocabulary=V)))
    found = inspect_uncertainty(model, tokenizer, sample, options=FAST)
    assert set(found.left_out) == {"attention", "prefill", "hedging"}
    assert "carries no codes" in found.left_out["hedging"]
    assert found.ablation is not None
    assert found.mistakes.texts == 8
    # Nothing is measured token by token, which it cannot do.
    expected = estimate_inspection(model, sample, options=FAST)
    assert (expected.checks, expected.steps) == (("ablation", "mistakes", "probe"), 0)


def test_texts_that_do_not_do_are_named():
    model, _ = make_fed_gpt2()
    few = Sample("few", tuple(random_texts(20, 20, 20)))
    with pytest.raises(InputError, match=r"ablation needs at least 4 texts .* few has 3"):
        plan(model, few, ["ablation"])
    with pytest.raises(InputError, match="no check can be done"):
        plan(model, few)
    some = Sample("some", tuple(random_texts(20, 20, 20, 20, 6)))
    planned, left_out = plan(model, some)
    assert planned == ("ablation", "prefill", "hedging", "mistakes")
    assert "needs at least 8 texts of at least 10 tokens" in left_out["attention"]
    # 16 tokens and 48 more of 64 fit; the model has just as many.
    assert plan(model, some, ["hedging"])[0] == ("hedging",)
    with pytest.raises(InputError, match=r"there is no check 'ablatoin'.*Did you mean 'ablation'"):
        plan(model, some, ["ablatoin"])
    with pytest.raises(InputError, match="hold token 99 and the model has 37"):
        plan(model, Sample("other", (torch.tensor([1, 99, 3]),)))
    with pytest.raises(InputError, match="learned an embedding of 64"):
        plan(model, Sample("long", tuple(random_texts(70))))


def test_an_estimate_counts_passes():
    model, _ = make_fed_gpt2()
    sample = Sample("some", tuple(random_texts(*[20] * 4, *[12] * 4)))
    found = estimate_inspection(model, sample, ["ablation", "prefill"])
    # Own codes in one pass more than the first, 3 + 5 and 1 + 3; token by token 20 + 12.
    assert (found.passes, found.steps) == (1 + 8 + 4, 32)
    assert found.seconds > 0
    # Its prompts are of 10 tokens and of 6: two batches, and three signals.
    written = estimate_inspection(model, sample, ["hedging"], FAST)
    assert written.steps == 3 * FAST.tokens * 2
    true = estimate_inspection(
        model, sample, ["mistakes"], InspectOptions(signal=Signal("recursion"), mistakes=2)
    )
    assert (true.passes, true.steps) == (2 + 2 * 4, 32 * 3)
