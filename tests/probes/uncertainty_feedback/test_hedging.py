"""Hedging words after steps of high and of low entropy."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from prismlm.errors import InputError
from prismlm.probes.uncertainty_feedback import InspectOptions, Signal
from prismlm.probes.uncertainty_feedback.hedging import (
    continuations,
    draw_tokens,
    hedge_starts,
    hedges_after,
    hedging,
    hedging_table,
)
from prismlm.probes.uncertainty_feedback.signal import no_codes, own_codes, recursion
from tests.helpers.feedback_models import (
    LEVELS,
    VOCABULARY,
    directions,
    make_fed_gpt2,
    make_fed_protot,
    random_texts,
    reading_of,
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


class Counted:
    """A reporter that notes how many units each task has, and each advance."""

    def __init__(self):
        self.total, self.advances = 0, []

    @contextmanager
    def task(self, description, total=None, unit="tokens"):
        self.total += total
        yield self

    def advance(self, amount=1):
        self.advances.append(amount)


def test_progress_counts_each_token_as_it_is_written_or_read():
    model, _ = make_fed_gpt2()
    texts, written, read = random_texts(5, 5, 3), Counted(), Counted()
    continuations(model, texts, no_codes(texts), 4, progress=written)
    assert (written.total, written.advances) == (12, [2] * 4 + [1] * 4)
    recursion(model, texts, progress=read)
    assert (read.total, read.advances) == (13, [2] * 5 + [1] * 3)


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


def test_without_a_signal_both_write_the_same_and_hedge_alike(tokenizer):
    model, feedback = make_fed_gpt2()
    texts = random_texts(*[20] * 6)
    set_table(feedback, torch.zeros(1, 16))
    codes = own_codes(model, texts, Signal())
    found = hedging(reading_of(model, texts, codes, tokenizer, tokens=40, window=4, seed=3))
    own, *controls = found.rows
    assert own["hedges"] > 0
    assert 0 < own["tokens"] <= 240
    for row in controls:
        assert all(row[name] == own[name] for name in own if name != "signal")
        less = row["own_less"]
        assert (less.value, less.low, less.high) == pytest.approx((0, 0, 0), abs=1e-15)
    assert [one["effect"] for one in found.findings] == ["may be chance"] * 2
    assert found == hedging(reading_of(model, texts, codes, tokenizer, tokens=40, window=4, seed=3))
    set_table(feedback, 3 * torch.randn(64, 16, generator=torch.Generator().manual_seed(0)))
    other = hedging(reading_of(model, texts, codes, tokenizer, tokens=40, window=4, seed=3))
    fed, bare, shuffled = ({**row, "signal": "", "own_less": None} for row in other.rows)
    assert fed != bare
    assert bare == {**controls[0], "signal": "", "own_less": None}
    assert shuffled not in (fed, bare)
    with pytest.raises(InputError, match="has learned an embedding of 64"):
        hedging(reading_of(model, texts, codes, tokenizer, tokens=60))


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
    found = hedging(reading_of(model, texts, codes, tokenizer, tokens=40, window=1))
    own, *controls = found.rows
    assert own["after_high"] > 2 * own["after_low"]
    for row in controls:
        assert row["hedges"] > 0
        assert abs(row["difference"].value) < 0.1 * own["difference"].value
        assert row["own_less"].above_zero
    assert [one["effect"] for one in found.findings] == ["above 0"] * 2


@pytest.mark.parametrize(
    ("signals", "words", "effects"),
    [
        # Words after high and low steps of each text, of 8 tokens each: own, none and shuffled.
        ([(4, 0), (0, 0), (0, 0)], 4, ["above 0", "above 0"]),
        ([(4, 0), (0, 0), (4, 0)], 4, ["above 0", "may be chance"]),
        ([(4, 0), (4, 0), (0, 0)], 4, ["may be chance", "above 0"]),
        ([(0, 4), (0, 0), (0, 0)], 4, ["below 0", "below 0"]),
        ([(0, 0), None, None], 4, ["undefined", "undefined"]),
        ([(4, 0), (0, 0), None], 4, ["above 0", "undefined"]),
        ([(0, 0), (0, 0), (0, 0)], 0, ["undefined", "undefined"]),
    ],
)
def test_each_control_has_its_finding(signals, words, effects):
    """None where entropies do not differ, so that there are no high and no low steps."""
    begun = [np.arange(20) < words] * 9
    runs = {}
    for name, after in zip(("own", "none", "shuffled"), signals, strict=True):
        row = [0] * 4 if after is None else [after[0], 8, after[1], 8]
        runs[name] = np.array([row] * 9, dtype=float), begun, 50
    found = hedging_table(runs, InspectOptions(window=8))
    assert [one["effect"] for one in found.findings] == effects
    assert found["texts"] == 9
    assert (found.rows[0]["tokens"], found.rows[0]["hedges"]) == (180, 9 * words)


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


def test_choosing_at_a_quantile():
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log().expand(4, -1)
    draws = torch.tensor([0.1, 0.21, 0.69, 0.99])
    assert draw_tokens(logits, draws, 1.0).tolist() == [0, 1, 1, 2]
    assert draw_tokens(logits, draws, 0).tolist() == [1, 1, 1, 1]
    # Colder is nearer to the likeliest: 4, 25 and 9 in 38.
    assert draw_tokens(logits, torch.tensor([0.1, 0.12, 0.76, 0.77]), 0.5).tolist() == [0, 1, 1, 2]


@torch.no_grad()
@pytest.mark.parametrize("make", [make_fed_gpt2, make_fed_protot])
def test_what_is_written_is_what_the_model_generates(make):
    model, feedback = make()
    prompts = random_texts(5, 8, 5)
    codes = own_codes(model, prompts, Signal("passes", 2))
    found = continuations(model, prompts, codes, 6, temperature=0)
    feedback.passes = 2
    for prompt, one in zip(prompts, found, strict=True):
        whole = model.generate(
            prompt[None], max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert torch.equal(whole[0, len(prompt) :], one.ids)
    nothing = tuple(torch.full((5,), -1) for _ in prompts)
    bare = continuations(model, prompts, no_codes(prompts), 6, written_codes=nothing, temperature=0)
    whole = torch.cat([prompts[1], bare[1].ids])
    none = torch.full((1, len(whole)), -1)
    logits = model(whole[None], uncertainty_codes=none, use_cache=False).logits[0, 7:-1]
    assert torch.equal(logits.argmax(-1), bare[1].ids)
    share = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1) / np.log(37)
    torch.testing.assert_close(bare[1].shares, share, atol=1e-4, rtol=1e-4)
