"""Suppression: marks, judges, ways and the fit by hand, and a whole run on a tiny model."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import prismlm
from prismlm.errors import InputError
from prismlm.interventions import suppression as sup
from prismlm.interventions.steering_effects import corpus_of
from prismlm.lens.opened_model import TooLongError
from prismlm.models.seam import Text, read_texts
from prismlm.statistics import Interval

TEXT = "The patient was given a dose of the drug, and the court"
OPTIONS = sup.SuppressOptions(phrases=("the",), samples=40, tokens=8, heldout=800, temperature=1.0)


@pytest.fixture(scope="module")
def corpus(lm):
    return corpus_of(lm, None)[0]


@pytest.fixture(scope="module")
def texts(corpus):
    return [corpus.text(number)[:200] for number in corpus.split("train")[:16].tolist()]


@pytest.fixture(scope="module")
def keep(lm, corpus):
    return sup.held_out(lm, corpus, 1600, 0)


@pytest.fixture(scope="module")
def examples(corpus):
    """As many as it takes for prototypes to mark the most frequent word of a tiny model."""
    numbers = corpus.split("train")[:60].tolist()
    return sup.split_examples([corpus.text(number)[:600] for number in numbers], 0)


def test_examples_are_divided(texts):
    split = sup.split_examples(texts, 3)
    assert [len(part) for part in split] == [8, 4, 4]
    assert sorted(split.find + split.choose + split.report) == sorted(texts)
    with pytest.raises(InputError, match="there are 7 examples"):
        sup.split_examples(texts[:7], 0)


def test_a_phrase_is_found_in_any_case_and_spacing():
    judge = sup.phrase_judge(("copper lantern",))
    assert judge.shows("It is COPPER\n lantern.")
    assert not judge.shows("copper, lantern")
    assert "“copper lantern”" in judge.description


def test_a_topic_is_told_by_log_odds():
    """“tumour” 40 of 80 words against 0 of 80: l = ln((41 / 83) / (1 / 83)) with three words known.

    Texts that choose the threshold have the means l / 2 and −l / 2, and “the” counts as nothing.
    """
    topic, other = ["tumour the"] * 10, ["bread the"] * 10
    judge = sup.word_judge([*topic] * 4, [*other] * 8, ["the tumour", "a tumour"])
    assert "is above 0.00 (right for 100%" in judge.description
    assert judge.shows("Tumour and bread tumour")
    assert not judge.shows("the bread")
    nearer = sup.word_judge([*topic] * 4, [*other] * 8, ["tumour the the the"])
    assert f"is above {np.log(41) * (1 / 4 - 1 / 2) / 2:.2f} (" in nearer.description
    assert sup.words_of("Don't, 12 Ärzte") == ["don", "t", "ärzte"]


def test_marked_tokens_by_hand():
    """Token 1 only in the examples, 2 everywhere, 3 too seldom, 4 only in what is kept."""
    examples = torch.tensor([1] * 300 + [2] * 600 + [3] * 2)
    keep = torch.tensor([2] * 900 + [4] * 300)
    assert sup.marked_tokens(examples, keep, 6) == [1]
    assert sup.marked_tokens(keep, keep, 6) == []


def test_the_tokens_of_a_phrase(lm):
    text = sup.encoded(lm, "He saw the end. THE  END")
    marks = sup.phrase_marks(lm, text, ("the end",))
    spelled = [i for i, mark in zip(text.ids[text.start :], marks, strict=True) if mark]
    assert "".join(lm.words(spelled).casefold().split()) == "theendtheend"
    assert not sup.phrase_marks(lm, text, ("the ends",)).any()


def test_read_states_are_those_of_each_text_alone(lm, texts):
    """Also of one that differs in its last token alone, of which a part is predicted."""
    several = [sup.encoded(lm, text) for text in texts[:3]]
    several.append(Text([*several[0].ids[:-1], 5], 3))
    both = read_texts(lm.model, several)
    for number, (ids, start) in enumerate(several):
        rows = (both.text == number).nonzero()[:, 0]
        assert both.targets[rows].tolist() == ids[start:]
        alone = read_texts(lm.model, [Text(ids, start)])
        torch.testing.assert_close(both.z[rows], alone.z, rtol=1e-4, atol=1e-4)


def test_losses_under_a_way(lm):
    """A bias lowers logits of its tokens, scales act as a controller does."""
    text = read_texts(lm.model, [sup.encoded(lm, TEXT)])
    logits = text.z @ lm.model.get_output_embeddings().weight.T
    tokens = text.targets.unique()[:2].tolist()
    logits[:, tokens] -= 3.0
    expected = torch.nn.functional.cross_entropy(logits, text.targets, reduction="sum")
    actual = sup.summed_losses(lm, text, sup.Way(tokens=tuple(tokens), bias=3.0), 1)
    np.testing.assert_allclose(actual, [expected.item()], rtol=1e-5)
    scales = tuple((i, 0.0) for i in range(lm.head.num_prototypes))
    with lm.edit(prismlm.Controller(scales)):
        edited = sup.summed_losses(lm, text, sup.Way(), 1)
    assert edited != sup.summed_losses(lm, text, sup.Way(), 1)
    np.testing.assert_allclose(sup.summed_losses(lm, text, sup.Way(scales), 1), edited)


def test_samples_of_a_batch_are_those_of_each_prompt(lm, texts, keep):
    work = sup.Suppressing(lm, sup.Examples(texts, texts[:3], texts), keep, OPTIONS)
    work.options = replace(OPTIONS, temperature=0.0, samples=12)
    _, written = work.behaviour(sup.Way())
    assert written[:3] == written[3:]
    for text, own in zip(texts[:3], written, strict=False):
        prompt = torch.tensor([sup.prompt_of(lm, text)])
        assert own == lm.words(lm.write(prompt, 8, 0.0, 0)[0, prompt.shape[1] :])
    with sup.using(lm, sup.Way(tokens=tuple(range(1, lm.model.config.vocab_size)), bias=1e4)):
        assert lm.model(torch.tensor([[5, 6]])).logits.argmax(-1).eq(0).all()


EACH = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
NONE = EACH.replace(
    "{{ m.role", "{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ m.role"
)


@pytest.mark.parametrize(
    ("template", "system", "expected"),
    [
        (EACH, (), "system: Hush.\nuser: Why?"),
        (NONE, (), "user: Hush.\n\nWhy?"),
        (EACH, ("Be kind.",), "system: Hush.\n\nBe kind.\nuser: Why?"),
    ],
)
def test_words_of_a_chat_are_where_its_template_takes_them(
    lm, monkeypatch, template, system, expected
):
    monkeypatch.setattr(lm.tokenizer, "chat_template", template)
    chat = [{"role": "system", "content": content} for content in system]
    chat += [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    assert lm.words(sup.prompt_of(lm, chat, "Hush.")).strip() == expected


def test_prompts_and_texts_fit_the_context(lm, keep, monkeypatch):
    monkeypatch.setattr(lm.model.config, "max_position_embeddings", 60)
    assert len(sup.encoded(lm, TEXT * 3).ids) == 30
    parts, options = sup.Examples([TEXT] * 3, [TEXT], []), replace(OPTIONS, tokens=45)
    work = sup.Suppressing(lm, parts, keep, options)
    with pytest.raises(TooLongError, match=r"asks has 1\d tokens, and 45 .* reads 60: shorten"):
        work.behaviour(sup.Way())


def test_random_prototypes_are_as_active(lm, keep):
    z = read_texts(lm.model, keep[:4]).z
    scales = ((3, 0.0), (11, 0.5), (40, 0.9))
    random = sup.like_random(lm, z, scales, 0)
    assert sorted(s for _, s in random) == [0.0, 0.5, 0.9]
    assert not {i for i, _ in random} & {3, 11, 40}
    usage = sup.activations_of(lm, z, torch.arange(lm.head.num_prototypes)).mean(0)
    for (i, _), (j, _) in zip(
        sorted(scales, key=lambda p: p[1]), sorted(random, key=lambda p: p[1]), strict=True
    ):
        apart = (usage - usage[i]).abs()
        assert apart[j] <= apart.sort().values[12]


def test_margins_are_those_of_a_controller_and_the_memory_of_a_fit_is_bounded(
    lm, keep, texts, monkeypatch
):
    states, kept = (read_texts(lm.model, t) for t in ([sup.encoded(lm, texts[0])], keep[:2]))
    token, rows = int(states.targets[0]), torch.arange(3)
    candidates = torch.arange(lm.head.num_prototypes)
    work = SimpleNamespace(lm=lm, states=states, rows=rows, kept=[kept], tokens=[token])
    fit = sup.ScaleFit(work, candidates)
    scales = torch.linspace(0, 1, len(candidates))
    with sup.using(lm, sup.Way(tuple(enumerate(scales.tolist())))):
        logits = lm.model.get_output_embeddings()(states.z[:3])
    # The fit sees a part of the vocabulary, so a difference of two logits is compared.
    seen = fit.logits(fit._examples, rows, scales)
    column = (fit.vocabulary == token).nonzero()[0, 0]
    torch.testing.assert_close(
        seen[:, column] - seen[:, 0],
        logits[:, token] - logits[:, fit.vocabulary[0]],
        rtol=1e-4,
        atol=1e-4,
    )
    monkeypatch.setattr("prismlm.interventions.suppression.MOST", 20)
    fit = sup.ScaleFit(work, candidates)
    sides = fit._before_marked, fit._examples, fit._keep
    assert [[len(rows) for rows in side] for side in sides] == [[3, 3], [20, 20], [20, 20]]


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr("prismlm.interventions.suppression.STEPS", 15)
    monkeypatch.setattr("prismlm.interventions.suppression.WEIGHTS", (100.0, 5.0, 0.3))
    monkeypatch.setattr("prismlm.interventions.suppression.BIASES", (4.0, 32.0))


def test_a_phrase_is_suppressed_and_reported(lm, examples, keep):
    options = replace(OPTIONS, target=0.4, max_cost=100.0)
    controller, report = sup.suppress(lm, examples, keep, options)
    limit, chosen = 0.6 * report["before"], report["chosen"]
    assert len(report["frontier"]) > 1
    assert chosen is report["frontier"][-1]
    assert report["reached"]
    assert chosen["behaviour"] <= limit
    assert all(point["behaviour"] > limit for point in report["frontier"][:-1])
    turned = [point["turned"] for point in report["frontier"]]
    assert turned == sorted(turned)
    assert controller.scales == chosen["scales"]
    assert all(0 <= s < 1 for s in controller.factors)
    assert chosen["turned"] == pytest.approx(sum(1 - s for s in controller.factors))
    names = ["before", "suppressed", "random prototypes", "prompt", "logit bias"]
    assert [outcome["name"] for outcome in report["outcomes"]] == names == list(report["ways"])
    before, suppressed, random, *_ = report["outcomes"]
    assert before["cost"].value == 0
    assert before["perplexity"] < suppressed["perplexity"]
    assert len(report["ways"]["random prototypes"].scales) == len(chosen["scales"])
    shown = list(map(sup.phrase_judge(OPTIONS.phrases).shows, suppressed["texts"]))
    assert suppressed["behaviour"].value == np.mean(shown)
    growth = 1 + random["cost"].value
    assert random["perplexity"] == pytest.approx(before["perplexity"] * growth)


def test_out_of_reach_nothing_is_chosen(lm, examples, keep, monkeypatch):
    monkeypatch.setattr("prismlm.interventions.suppression.WEIGHTS", (100.0, 1.0))
    options = replace(OPTIONS, target=1.0, max_cost=0.0, samples=16)
    controller, report = sup.suppress(lm, examples, keep, options)
    assert (controller, report["chosen"], report["outcomes"]) == (None, None, [])
    assert [point["weight"] for point in report["frontier"]] == [100.0, 1.0, None]
    options = replace(options, max_cost=sorted(point["cost"] for point in report["frontier"])[1])
    _, within = sup.suppress(lm, examples, keep, options, within_cost=True)
    assert within["chosen"]["cost"] <= options.max_cost
    assert not within["reached"]


@pytest.mark.parametrize(
    ("change", "value", "message"),
    [
        ("ERRORS", 1e9, "no prototype marks the behaviour"),
        ("SEEN", 1e9, "nothing marks the behaviour"),
        ("Suppressing.behaviour", lambda *_: (Interval(0, 0, 0), []), "does not show the beh"),
    ],
)
def test_what_cannot_be_suppressed(lm, examples, keep, monkeypatch, change, value, message):
    monkeypatch.setattr(f"prismlm.interventions.suppression.{change}", value)
    options = replace(OPTIONS, phrases=()) if change == "SEEN" else OPTIONS
    with pytest.raises(InputError, match=message):
        sup.suppress(lm, examples, keep, options)
