"""Hedging words after steps, and predictions after a planted mistake."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from prismlm.errors import InputError
from prismlm.instruments.uncertainty_feedback import Signal, hedging, mistakes, own_codes
from prismlm.instruments.uncertainty_feedback.continuation import choose, continuations
from prismlm.instruments.uncertainty_feedback.hedges import hedge_starts
from prismlm.instruments.uncertainty_feedback.hedging import hedges_after
from prismlm.instruments.uncertainty_feedback.mistakes import excess, plant_mistake
from prismlm.instruments.uncertainty_feedback.signal import Replay
from tests.helpers.feedback_models import (
    LEVELS,
    VOCABULARY,
    make_fed_gpt2,
    make_fed_protot,
    random_texts,
    set_table,
    silence_blocks,
)

PIECES = ("<end>", "It", "Ġis", "Ġper", "haps", "Ġmight", "y", "Ġmaybe", ".", "Per", "Ġlikely")


@pytest.fixture(scope="module")
def tokenizer():
    """One in which words may have several tokens, with as many tokens as the model."""
    vocabulary = {piece: number for number, piece in enumerate(PIECES)}
    vocabulary |= {f"Ġword{number}": number for number in range(len(PIECES), 37)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


def starts(tokenizer, prompt, added):
    numbers = {piece: number for number, piece in enumerate(PIECES)}
    ids = ([numbers[piece] for piece in row] for row in (prompt, added))
    return hedge_starts(tokenizer, *ids)


def test_hedging_words_are_whole_words_and_begin_in_a_token(tokenizer):
    added = ["Ġper", "haps", "Ġis", "Ġmight", "y", "Ġmight", ".", "Ġlikely"]
    # "mighty" is another word; "perhaps" begins in its first token, at a space or not.
    expected = [True, False, False, False, False, True, False, True]
    assert starts(tokenizer, ["It"], added) == expected
    assert starts(tokenizer, ["It", "."], ["Per", "haps"]) == [True, False]
    # Begun in the prompt.
    assert starts(tokenizer, ["It", "Ġper"], ["haps", "Ġmaybe"]) == [False, True]
    assert starts(tokenizer, ["It"], []) == []


def test_words_after_high_and_low_steps_by_hand():
    # Steps 0 to 3 have two tokens after their own.
    shares = [np.array([0.9, 0.1, 0.5, 0.5, 0.0, 1.0])]
    begun = [np.array([0, 0, 1, 0, 1, 1], dtype=bool)]
    found, steps = hedges_after(shares, begun, 2)
    # After step 0 are tokens 1 and 2: one word. After step 1, 2 and 3: one. Quartiles of
    # (0.9, 0.1, 0.5, 0.5) are 0.4 and 0.6.
    assert steps == 4
    assert found.tolist() == [[1, 2, 1, 2]]
    shares.append(np.array([0.95, 0.95, 0.95]))
    begun.append(np.array([1, 0, 1], dtype=bool))
    # Of five steps the quartiles are 0.5 and 0.9: two steps each are as low or lower, as high.
    found, steps = hedges_after(shares, begun, 2)
    assert steps == 5
    # Low: steps 1 to 3, with one, one and two words after them.
    assert found.tolist() == [[1, 2, 4, 6], [1, 2, 0, 0]]
    nothing = [np.array([0.5] * 4)]
    assert hedges_after(nothing, [np.ones(4, dtype=bool)], 2)[0].sum() == 0


def test_choosing_at_a_quantile():
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log().expand(4, -1)
    draws = torch.tensor([0.1, 0.21, 0.69, 0.99])
    assert choose(logits, draws, 1.0).tolist() == [0, 1, 1, 2]
    assert choose(logits, draws, 0).tolist() == [1, 1, 1, 1]
    # Colder is nearer to the likeliest: 4, 25 and 9 in 38.
    assert choose(logits, torch.tensor([0.1, 0.12, 0.76, 0.77]), 0.5).tolist() == [0, 1, 1, 2]


@torch.no_grad()
@pytest.mark.parametrize("make", [make_fed_gpt2, make_fed_protot])
def test_what_is_written_is_what_the_model_generates(make):
    model, feedback = make()
    prompts = random_texts(5, 8, 5)
    codes = own_codes(model, prompts, Signal("passes", 2))
    found = continuations(model, prompts, codes, 6, temperature=0)
    feedback.passes = 2
    for prompt, one in zip(prompts, found, strict=True):
        feedback.reset_uncertainty()
        whole = model.generate(
            prompt[None], max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert torch.equal(whole[0, len(prompt) :], one.ids)
    bare = continuations(model, prompts, codes, 6, feedback=False, temperature=0)
    whole = torch.cat([prompts[1], bare[1].ids])
    none = torch.full((1, len(whole)), -1)
    logits = model(whole[None], uncertainty_codes=none, use_cache=False).logits[0, 7:-1]
    assert torch.equal(logits.argmax(-1), bare[1].ids)
    share = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1) / np.log(37)
    torch.testing.assert_close(bare[1].shares, share, atol=1e-4, rtol=1e-4)


def test_without_a_signal_both_write_the_same_and_hedge_alike(tokenizer):
    model, feedback = make_fed_gpt2()
    texts = random_texts(*[20] * 6)
    set_table(feedback, torch.zeros(1, 16))
    codes = own_codes(model, texts, Signal())
    found = hedging(model, tokenizer, texts, codes, tokens=40, window=4, seed=3)
    assert found.fed == found.bare == found.shuffled
    assert found.fed.hedges > 0
    assert 0 < found.fed.tokens <= 240
    assert (found.change.value, found.change.low, found.change.high) == (0, 0, 0)
    assert "does not beat both controls" in found.verdict
    assert found == hedging(model, tokenizer, texts, codes, tokens=40, window=4, seed=3)
    set_table(feedback, 3 * torch.randn(64, 16, generator=torch.Generator().manual_seed(0)))
    other = hedging(model, tokenizer, texts, codes, tokens=40, window=4, seed=3)
    assert other.fed != other.bare
    assert other.bare == found.bare
    assert other.shuffled not in (other.fed, other.bare)
    with pytest.raises(InputError, match="expected 1 to 7"):
        hedging(model, tokenizer, texts, codes, tokens=8, window=8)
    with pytest.raises(InputError, match="has learned an embedding of 64"):
        hedging(model, tokenizer, texts, codes, tokens=60)


def directions(count):
    """Orthonormal vectors that the final norm only lengthens, having mean 0."""
    drawn = torch.randn(16, count, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    basis = torch.linalg.qr(torch.cat([torch.ones(16, 1, dtype=torch.double), drawn], 1)).Q
    return basis[:, 1:].T.float()


@torch.no_grad()
def test_a_model_that_hedges_when_it_is_told_to_is_found_out(tokenizer):
    """Half of the words leave open what comes next. A high code calls for "maybe"."""
    model, feedback = make_fed_gpt2(tied=False)
    silence_blocks(model)
    call, *rest = directions(8)
    words, head = model.transformer.wte.weight, model.lm_head.weight
    words.zero_()
    head.zero_()
    head[PIECES.index("Ġmaybe")] = 2 * call
    for number in range(24, VOCABULARY):
        words[number] = 0.5 * rest[number % 7]
        head[number] = 1.5 * rest[number % 5]
    table = torch.where(torch.arange(LEVELS)[:, None] > 0.9 * LEVELS, call, -call)
    set_table(feedback, table)
    texts = random_texts(*[8] * 24)
    codes = own_codes(model, texts, Signal())
    found = hedging(model, tokenizer, texts, codes, tokens=40, window=1)
    assert found.fed.after_high > 2 * found.fed.after_low
    assert found.bare.hedges > 0
    assert abs(found.bare.difference.value) < 0.1 * found.fed.difference.value
    assert found.change.above_zero
    assert found.shuffled.hedges > 0
    assert abs(found.shuffled.difference.value) < 0.1 * found.fed.difference.value
    assert found.change_against_shuffled.above_zero
    assert found.verdict.startswith("Its signal makes it hedge more after high entropy")


@torch.no_grad()
def test_a_model_that_collects_itself_when_it_is_told_to_is_found_out():
    """Tokens 1 to 12 follow one another; after any other the model knows nothing.

    The high code that this makes leaves the next prediction clear, and low ones blur it.
    """
    model, feedback = make_fed_gpt2(tied=False)
    silence_blocks(model)
    blur, *follows = directions(13)
    words, head = model.transformer.wte.weight, model.lm_head.weight
    words.zero_()
    head.zero_()
    for number, direction in enumerate(follows):
        words[1 + number] = 4 * direction
        head[1 + (number + 1) % 12] = direction
    high = torch.arange(LEVELS)[:, None] > 0.9 * LEVELS
    table = torch.where(high, 0 * blur, 3 * blur)
    set_table(feedback, table)
    texts = [1 + (torch.arange(24) + begun) % 12 for begun in range(12)]
    codes = own_codes(model, texts, Signal())
    found = mistakes(model, texts, codes, Signal(), seed=1)
    assert found.loss_against_zero.below_zero
    assert found.loss_against_shuffled.below_zero
    assert found.verdict.startswith("With its signal a mistake costs it less")
    # The prediction that has just read the wrong token cannot know, the one after it does.
    own, _, shuffled = found.signals
    assert own.loss[0] == pytest.approx(shuffled.loss[0], abs=0.2)
    assert own.loss[1] < shuffled.loss[1] - 0.2
    # Where the high code blurs, the mistake costs more.
    set_table(feedback, torch.where(high, 3 * blur, 0 * blur))
    codes = own_codes(model, texts, Signal())
    turned = mistakes(model, texts, codes, Signal(), seed=1)
    assert turned.loss_against_zero.low > 0
    assert "does not beat both controls" in turned.verdict


def test_the_loss_after_a_mistake_is_that_of_the_tokens_after_it():
    """Tokens 0 to 5, of which 2 is wrong: its own loss, at 1, is no matter."""
    intact = Replay(torch.zeros(5).double(), torch.zeros(6))
    wrong = Replay(
        torch.tensor([0.0, 9.0, 1.0, 2.0, 4.0]).double(),
        torch.tensor([0.0, 0.0, 0.5, 0.25, 0.125, 1.0]),
    )
    found = excess([wrong], [intact], [2], 3)
    # Predictions at 2, 3 and 4, of tokens 3, 4 and 5.
    assert found.tolist() == [[[0.5, 0.25, 0.125]], [[1.0, 2.0, 4.0]]]
    rng = np.random.default_rng(0)
    text = torch.arange(6)
    for _ in range(20):
        other = plant_mistake(text, 3, np.array([2, 3, 4]), rng)
        assert (other != text).nonzero().tolist() == [[3]]
        assert int(other[3]) in (2, 4)


@torch.no_grad()
def test_mistakes_with_each_signal():
    model, feedback = make_fed_gpt2()
    set_table(feedback, 2 * torch.randn(64, 16, generator=torch.Generator().manual_seed(0)))
    texts = random_texts(20, 14, 9, 20, 11)
    codes = own_codes(model, texts, Signal())
    found = mistakes(model, texts, codes, Signal(), steps=8, draws=2, special={0}, seed=1)
    # One text is too short.
    assert (found.texts, found.draws) == (4, 2)
    own, zero, shuffled = found.signals
    for one in found.signals:
        assert one.summed_loss.value == pytest.approx(sum(one.loss))
        assert one.mean_entropy.value == pytest.approx(sum(one.entropy) / 8)
    assert found.loss_against_zero.value == pytest.approx(sum(own.loss) - sum(zero.loss))
    assert found.loss_against_shuffled.value == pytest.approx(sum(own.loss) - sum(shuffled.loss))
    assert found.entropy_against_zero.value == pytest.approx(
        own.mean_entropy.value - zero.mean_entropy.value
    )
    assert len({own.loss, zero.loss, shuffled.loss}) == 3
    set_table(feedback, torch.zeros(1, 16))
    same = mistakes(model, texts, codes, Signal(), draws=2, seed=1)
    assert same.loss_against_zero.value == same.loss_against_shuffled.high == 0
    assert "does not beat both controls" in same.verdict
    # It reads on after the mistake: by hand, of the one text that is as long as it must be.
    text = random_texts(10)
    only = mistakes(model, text, own_codes(model, text, Signal()), Signal(), draws=1, seed=4)
    rng = np.random.default_rng(4)
    place = int(rng.integers(1, 2))
    wrong = plant_mistake(text[0], place, np.arange(37), rng)
    none = torch.full((1, 10), -1)
    losses = [
        torch.nn.functional.cross_entropy(
            model(row[None], uncertainty_codes=none, use_cache=False).logits[0, 1:9],
            row[2:],
            reduction="none",
        )
        for row in (wrong, text[0])
    ]
    torch.testing.assert_close(
        torch.tensor(only.signals[1].loss), losses[0] - losses[1], atol=1e-4, rtol=1e-4
    )


def test_recovery_is_the_first_step_back():
    from prismlm.instruments.uncertainty_feedback.mistakes import _result

    found = np.zeros((3, 2, 2, 4))
    # Two texts; means 2, 0.05, 1, 0.
    found[0, 1] = [[3, 0.1, 2, 0], [1, 0.0, 0, 0]]
    found[1, 1] = 1
    result = _result(found, 1, 0, 30)
    assert [one.recovered_after for one in result.signals] == [2, None, 1]
    assert result.loss_against_zero.value == pytest.approx(3.05 - 4)


def test_texts_that_hold_no_mistake_are_refused():
    model, _ = make_fed_gpt2()
    texts = random_texts(5, 9)
    with pytest.raises(InputError, match="no text has 10 tokens"):
        mistakes(model, texts, own_codes(model, texts, Signal()), Signal())
