"""Losses with other codes, after a planted mistake, hedging words, and the report of all checks."""

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from prismlm.errors import InputError
from prismlm.probes.uncertainty_feedback import (
    InspectOptions,
    Sample,
    checks,
    inspect_uncertainty_feedback,
)
from prismlm.probes.uncertainty_feedback.signal import own_codes, permute_codes
from prismlm.statistics import Interval
from tests.helpers import small_models as fed
from tests.helpers.small_models import V, attach_drawn, build

TEXTS = fed.random_texts(12, 7, 12, 9, 12)


def effects(table):
    return [finding["effect"] for finding in table.findings]


def drawn(rows, scale=1.0):
    return scale * torch.randn(rows, 16, generator=torch.Generator().manual_seed(0))


def losses_of(model, text, codes):
    """Return the loss of each token with these codes."""
    logits = model(text[None], uncertainty_codes=codes[None], use_cache=False).logits[0]
    return torch.nn.functional.cross_entropy(logits[:-1], text[1:], reduction="none")


@torch.no_grad()
def test_ablation_is_the_loss_with_other_codes():
    model, feedback = fed.make_fed_gpt2()
    fed.set_table(feedback, drawn(fed.LEVELS, 3))
    codes = own_codes(model, TEXTS, 2)
    table = checks.ablation(fed.inputs_of(model, TEXTS, codes, permutations=3, seed=5))
    tokens = sum(map(len, TEXTS)) - len(TEXTS)
    assert (table["tokens"], table["texts"]) == (tokens, len(TEXTS))

    def loss(codes):
        pairs = zip(TEXTS, codes, strict=True)
        return sum(float(losses_of(model, *pair).sum()) for pair in pairs) / tokens

    each = (-1, fed.LEVELS // 2)
    zero, neutral = ([torch.full_like(own, code) for own in codes] for code in each)
    for row in neutral:
        row[0] = -1
    own, *others = table.rows
    for row, given in zip(table.rows, (codes, zero, neutral), strict=False):
        assert row["loss"] == pytest.approx(loss(given), rel=1e-5)
    change = others[2]["change"]
    draws = [loss(permute_codes(codes, seed)) - own["loss"] for seed in (5, 6, 7)]
    assert change.value == pytest.approx(sum(draws) / 3, abs=1e-4)
    assert change.low < change.value < change.high
    # The control is the change without any vector, which a model may merely expect.
    (finding,) = table.findings
    assert (finding["value"], finding["control"]) == (change, others[0]["change"].value)


@torch.no_grad()
def test_ablation_of_a_model_that_uses_its_codes():
    """Blocks that add nothing, so that the next token is the one that the code's vector names."""
    model, feedback = fed.make_fed_gpt2()
    fed.silence_blocks(model)
    model.transformer.wte.weight.normal_(generator=torch.Generator().manual_seed(0))
    vectors = 30 * torch.randn(fed.LEVELS, 16, generator=torch.Generator().manual_seed(1))
    fed.set_table(feedback, vectors)
    named = (model.transformer.ln_f(vectors) @ model.transformer.wte.weight.T).argmax(-1)
    codes = fed.random_codes([20] * 8, seed=2)
    texts = [torch.cat([torch.tensor([1]), named[row[:-1]]]) for row in codes]
    table = checks.ablation(fed.inputs_of(model, texts, codes))
    assert all(row["change"].above_zero for row in table.rows[1:])
    assert effects(table) == ["above 0"]


def test_ablation_of_a_table_of_equal_rows_or_zeros_and_of_equal_codes():
    model, feedback = fed.make_fed_gpt2()
    nothing = Interval(0, 0, 0)
    for table, without in ((drawn(1), False), (torch.zeros(1, 16), True)):
        fed.set_table(feedback, table)
        _, zero, *others = checks.ablation(fed.inputs_of(model, TEXTS)).rows
        assert [row["change"] for row in others] == [nothing] * 2
        assert (zero["change"] == nothing) == without
    assert effects(checks.ablation(fed.inputs_of(model, TEXTS, passes=1))) == ["undefined"]


@torch.no_grad()
def test_mistakes_of_a_model_that_uses_its_codes():
    """Tokens 1 to 12 follow one another; after any other the model knows nothing.

    The high code that this makes leaves the next prediction clear, and low ones blur it.
    """
    model, feedback = fed.make_fed_gpt2(tied=False)
    fed.silence_blocks(model)
    blur, *follows = fed.directions(13)
    words, head = model.transformer.wte.weight, model.lm_head.weight
    words.zero_()
    head.zero_()
    for number, direction in enumerate(follows):
        words[1 + number] = 4 * direction
        head[1 + (number + 1) % 12] = direction
    high = torch.arange(fed.LEVELS)[:, None] > 0.9 * fed.LEVELS
    fed.set_table(feedback, torch.where(high, 0 * blur, 3 * blur))
    texts = [1 + (torch.arange(24) + start) % 12 for start in range(12)]
    table = checks.mistakes(fed.inputs_of(model, texts, seed=1))
    assert effects(table) == ["below 0"] * 2
    # The prediction that has just read the wrong token cannot know, the one after it does.
    own, _, shuffled = (row["loss"] for row in table.rows)
    assert own[0] == pytest.approx(shuffled[0], abs=0.2)
    assert own[1] < shuffled[1] - 0.2


@torch.no_grad()
def test_the_model_reads_on_after_a_mistake():
    model, feedback = fed.make_fed_gpt2()
    fed.set_table(feedback, drawn(64, 2))
    # Of the minimum length, and one that is too short.
    text, short = fed.random_texts(10, 9)
    table = checks.mistakes(fed.inputs_of(model, [text, short], mistakes=1, seed=4))
    assert (table["texts"], table["draws"]) == (1, 1)
    rng = np.random.default_rng(4)
    position, wrong = int(rng.integers(1, 2)), text.clone()
    wrong[position] = int(rng.choice(np.setdiff1d(np.arange(37), text[position])))
    planted, intact = (losses_of(model, row, torch.full((10,), -1))[1:] for row in (wrong, text))
    actual = torch.tensor(table.rows[1]["loss"])
    torch.testing.assert_close(actual, planted - intact, atol=1e-4, rtol=1e-4)
    fed.set_table(feedback, torch.zeros(1, 16))
    same = checks.mistakes(fed.inputs_of(model, fed.random_texts(20, 14), mistakes=2, seed=1))
    assert effects(same) == ["may be chance"] * 2


def test_mistakes_by_hand():
    losses = np.zeros((3, 2, 4))
    losses[0] = [[3, 0.1, 2, 0], [1, 0.0, 0, 0]]
    losses[1] = 1
    table = checks.mistakes_table(losses, InspectOptions(), 30)
    differences = [row["own_loss_less"] for row in table.rows[1:]]
    assert differences[0].value == pytest.approx(3.05 - 4)
    assert [finding["value"] for finding in table.findings] == differences
    # Codes that are all the same are no negative finding.
    assert effects(checks.mistakes_table(losses, InspectOptions(), 1)) == ["undefined"] * 2


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


def test_words_after_high_and_low_steps_by_hand():
    # Steps 0 to 3 have two tokens after their own. After step 0 are tokens 1 and 2: one word; after
    # step 1, 2 and 3: one. Quartiles of (0.9, 0.1, 0.5, 0.5) are 0.4 and 0.6.
    entropies = [np.array([0.9, 0.1, 0.5, 0.5, 0.0, 1.0]), np.array([0.95, 0.95, 0.95])]
    starts = [np.array([0, 0, 1, 0, 1, 1], dtype=bool), np.array([1, 0, 1], dtype=bool)]
    assert checks.hedges_after(entropies[:1], starts[:1], 2).tolist() == [[1, 2, 1, 2]]
    # Of five steps the quartiles are 0.5 and 0.9: two steps each are as low or lower, as high.
    # Low: steps 1 to 3, with one, one and two words after them.
    assert checks.hedges_after(entropies, starts, 2).tolist() == [[1, 2, 4, 6], [1, 2, 0, 0]]
    assert not checks.hedges_after([np.full(4, 0.5)], [np.ones(4, dtype=bool)], 2).any()


def test_hedging_without_a_signal_is_alike(tokenizer):
    model, feedback = fed.make_fed_gpt2()
    texts = fed.random_texts(*[20] * 6)
    fed.set_table(feedback, torch.zeros(1, 16))
    codes = own_codes(model, texts, 2)
    settings = {"codes": codes, "tokenizer": tokenizer, "tokens": 40, "steps": 4, "seed": 3}
    table = checks.hedging(fed.inputs_of(model, texts, **settings))
    own, *controls = table.rows
    assert own["hedges"] > 0
    for row in controls:
        assert all(row[name] == own[name] for name in own if name != "signal")
        less = row["own_less"]
        assert (less.value, less.low, less.high) == pytest.approx((0, 0, 0), abs=1e-15)
    assert effects(table) == ["may be chance"] * 2


@torch.no_grad()
def test_hedging_of_a_model_that_uses_its_codes(tokenizer):
    """Half of the words leave open what comes next. A high code calls for "maybe"."""
    model, feedback = fed.make_fed_gpt2(tied=False)
    fed.silence_blocks(model)
    call, *rest = fed.directions(8)
    words, head = model.transformer.wte.weight, model.lm_head.weight
    words.zero_()
    head.zero_()
    head[PIECES.index("Ġmaybe")] = 2 * call
    for number in range(24, fed.VOCABULARY):
        words[number] = 0.5 * rest[number % 7]
        head[number] = 1.5 * rest[number % 5]
    high = torch.arange(fed.LEVELS)[:, None] > 0.9 * fed.LEVELS
    fed.set_table(feedback, torch.where(high, call, -call))
    texts = fed.random_texts(*[8] * 24)
    table = checks.hedging(fed.inputs_of(model, texts, tokenizer=tokenizer, tokens=40, steps=1))
    own, *controls = table.rows
    assert own["after_high"] > 2 * own["after_low"]
    for row in controls:
        assert row["hedges"] > 0
        assert abs(row["difference"].value) < 0.1 * own["difference"].value
        assert row["own_less"].above_zero
    assert effects(table) == ["above 0"] * 2


@pytest.mark.parametrize(
    ("signals", "words", "expected"),
    [
        # Words after high and low steps of each text, of 8 tokens each: own, none and shuffled.
        # None where entropies do not differ, so that there are no high and no low steps.
        ([(0, 4), (0, 0), (0, 4)], 4, ["below 0", "may be chance"]),
        ([(4, 0), (0, 0), None], 4, ["above 0", "undefined"]),
        ([(0, 0), (0, 0), (0, 0)], 0, ["undefined", "undefined"]),
    ],
)
def test_each_control_has_its_finding(signals, words, expected):
    runs = {}
    for name, after in zip(("own", "none", "shuffled"), signals, strict=True):
        row = [0] * 4 if after is None else [after[0], 8, after[1], 8]
        runs[name] = checks.Counts(np.array([row] * 9, dtype=float), 9 * words)
    assert effects(checks.hedging_table(runs, InspectOptions())) == expected


def test_hedging_words_are_whole_words_and_begin_in_a_token(tokenizer):
    def starts(prompt, added):
        ids = ([PIECES.index(piece) for piece in row] for row in (prompt, added))
        return checks.hedge_starts(tokenizer, *ids)

    added = ["Ġper", "haps", "Ġis", "Ġmight", "y", "Ġmight", ".", "Ġlikely"]
    # "mighty" is another word; "perhaps" begins in its first token, at a space or not.
    expected = [True, False, False, False, False, True, False, True]
    assert starts(["It"], added) == expected
    assert starts(["It", "."], ["Per", "haps"]) == [True, False]
    # Begun in the prompt.
    assert starts(["It", "Ġper"], ["haps", "Ġmaybe"]) == [False, True]
    assert starts(["It"], []) == []


@torch.no_grad()
def test_continuations_are_those_that_the_model_generates_with_the_codes(monkeypatch):
    monkeypatch.setattr(checks, "draw_tokens", lambda logits, draws: logits.argmax(-1))
    model, feedback = fed.make_fed_gpt2()
    prompts, steps = fed.random_texts(5, 8, 5), 6
    own = own_codes(model, prompts, 2)
    inputs = fed.inputs_of(model, prompts, own, tokens=steps)
    feedback.passes = 2
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for prompt, actual in zip(prompts, checks.continuations(inputs, prompts, own), strict=True):
        generated = model.generate(prompt[None], max_new_tokens=steps, **settings)
        assert torch.equal(generated[0, len(prompt) :], actual.ids)
    # Each generated token has the code of its text and step.
    lengths = [len(prompt) + steps - 1 for prompt in prompts]
    nothing = tuple(torch.full((length,), -1) for length in lengths)
    for codes in (fed.random_codes(lengths), nothing):
        results = checks.continuations(inputs, prompts, codes)
        for prompt, row, actual in zip(prompts, codes, results, strict=True):
            ids = torch.cat([prompt, actual.ids[:-1]])[None]
            output = model(ids, uncertainty_codes=row[None], use_cache=False)
            logits = output.logits[0, -steps:]
            assert torch.equal(logits.argmax(-1), actual.ids)
            entropies = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1) / np.log(37)
            torch.testing.assert_close(actual.entropies, entropies, atol=1e-4, rtol=1e-4)


WORDS = fed.make_tokenizer(eos_token="w0")
FAST = InspectOptions(permutations=2, tokens=10, mistakes=1)


def inspect(model, *lengths, asked=(), options=FAST, vocabulary=fed.VOCABULARY):
    sample = Sample("some", tuple(fed.random_texts(*lengths, vocabulary=vocabulary)))
    return inspect_uncertainty_feedback(model, WORDS, sample, asked, options=options)


def test_a_report_has_every_check_or_its_reason():
    result = inspect(fed.make_fed_protot()[0], *[20] * 8)
    assert set(result.left_out) == {"attention"}
    assert "no attention heads" in result.left_out["attention"]
    assert set(result.tables) == {"ablation", "hedging", "mistakes", "probe"}
    value = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert [one["finding"].split(":")[0] for one in value["findings"]] == [
        "ablation", "hedging", "hedging", "mistakes", "mistakes", "probe",
    ]  # fmt: skip


LEFT_OUT = {"mamba": {"attention"}, "rwkv": {"attention", "hedging"}}


@pytest.mark.parametrize("name", ["mamba", "rwkv", "signal-noise"])
def test_every_family_is_read_for_what_it_has(name):
    model = build(name).requires_grad_(False)
    attach_drawn(model, 64)
    options = InspectOptions(1, permutations=1, tokens=4, steps=2, mistakes=1)
    result = inspect(model, *[14] * 8, options=options, vocabulary=V)
    assert set(result.left_out) == LEFT_OUT.get(name, set())
    assert len(result["probe"].rows) == 3
    assert result["mistakes"]["texts"] == 8
    if "attention" in result.tables:
        assert len(result["attention"].rows) == 2
    if "hedging" in result.left_out:
        assert "returns no cache" in result.left_out["hedging"]


def test_texts_that_do_not_do_and_a_model_that_is_not_finite_are_named():
    model, _ = fed.make_fed_gpt2()
    with pytest.raises(InputError, match=r"ablation needs at least 4 texts .* some has 3"):
        inspect(model, 20, 20, 20, asked=["ablation"])
    result = inspect(model, 20, 20, 20, 20, 6)
    assert set(result.tables) == {"ablation", "hedging", "mistakes"}
    assert "needs at least 8 texts of at least 10 tokens" in result.left_out["attention"]
    model.transformer.ln_f.weight.data[0] = torch.nan
    with pytest.raises(InputError, match=r"not finite|NaN"):
        inspect(model, *[20] * 8, asked=["probe"])
