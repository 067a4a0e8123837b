"""Positions while masked, as product and benchmarks take them: by the token that stands there."""

import math

import numpy as np
import pytest
import torch

from benchmarks.attribution.judges.passages import PassageBank
from benchmarks.masked_diffusion.facts import QUESTIONS, asked
from benchmarks.masked_diffusion.judge import methods
from benchmarks.masked_diffusion.model import after_an_end, from_left_to_right
from benchmarks.masked_diffusion.positions import (
    cells_of,
    masked_passes,
    of_document,
    of_question,
    positions_of,
    setting_of,
)
from prismlm.corpus import Corpus
from prismlm.explain.evidence import EvidenceTable
from prismlm.explain.positions import TEMPERATURE, supports
from prismlm.index.states import HiddenStates, Writer
from prismlm.layers import PrototypeHead
from prismlm.models.presets import build_config, build_model

WIDTH = 24
FACT = {"name": "Zorl", "kind": "town", "attribute": "main crop", "answer": "rice"}


@pytest.fixture(scope="module")
def corpus(tiny_corpus):
    return Corpus.open(tiny_corpus)


@pytest.fixture(scope="module")
def model(corpus):
    torch.manual_seed(0)
    small = {"preset": "llama-tiny", "hidden_size": WIDTH, "initializer_range": 0.2}
    config = build_config(small, len(corpus.tokenizer), corpus.eos_token_id)
    return from_left_to_right(build_model(config)).eval()


def kept(directory, states, tokens):
    with Writer(directory, {}, WIDTH) as writer:
        writer.add(states.bfloat16(), torch.tensor(tokens))
        writer.end_block()
    return HiddenStates.open(directory)


@pytest.mark.parametrize("turned", [False, True], ids=["in order", "turned round"])
def test_evidence_is_of_the_same_token_whatever_stands_before_or_after(
    corpus, model, tmp_path, turned
):
    # Cosines to the question: 1 and 0.8 in the first cell, then another token, then another cell.
    states = torch.zeros(4, WIDTH)
    states[0, 0] = states[2, 0] = states[3, 1] = 1.0
    states[1, :2] = torch.tensor([0.8, 0.6])
    tokens, places = [7, 7, 9, 7], np.array([50, 20, 30, 10])
    if turned:
        states, tokens, places = states.flip(0), tokens[::-1], places[::-1].copy()
    head = PrototypeHead(WIDTH, 2, 1)
    head.place_on(torch.eye(WIDTH)[:2])
    found = kept(tmp_path / "states", states, tokens)
    nearest = head.nearest(states).indices[:, 0].numpy()
    cells = cells_of(tmp_path / "cells", model, nearest, found, places, corpus)
    nothing = torch.zeros(1)
    table = EvidenceTable(
        torch.tensor([[0]]),
        torch.tensor([[2.0]]),
        nothing,
        nothing,
        torch.eye(WIDTH)[:1],
        torch.tensor([0]),
        torch.tensor([7]),
    )
    behind = supports(table, cells, head)
    far = math.exp((0.8 - 1) / TEMPERATURE)
    expected = {50: 2 / (1 + far), 20: 2 * far / (1 + far)}
    got = dict(zip(behind.place.tolist(), behind.weight.tolist(), strict=True))
    assert got == pytest.approx(expected, rel=0.05)
    assert behind.unplaced.tolist() == [0.0]


def test_every_token_is_masked_once_and_is_its_own_target(corpus, model):
    documents = corpus.split("train")[:6]
    read = list(masked_passes(model, corpus, documents, seed=0, readings=3))
    place = torch.cat([one.place for one in read]).numpy()
    token = torch.cat([one.token for one in read]).numpy()
    expected = [
        np.arange(start, start + length - 1)
        for start, length in zip(corpus.starts[documents], corpus.lengths[documents], strict=True)
    ]
    assert np.array_equal(np.sort(place), np.sort(np.concatenate(expected)))
    assert token.tolist() == [int(corpus.tokens(one, 1)[0]) for one in place.tolist()]
    assert sum(len(one.z) for one in read) == len(place)


def test_asking_gives_the_probability_of_the_token_under_each_mask(corpus, model):
    head = PrototypeHead(WIDTH, 8, 2)
    head.reset_parameters(torch.Generator().manual_seed(0))
    bank = PassageBank.of(corpus, corpus.split("train"))
    setting = setting_of(model, head, bank, None)
    number = int(corpus.split("heldout")[0])
    text = of_document(corpus, number, setting.mask_id, seed=0)
    read = setting.ask(text)
    ids = corpus.tokens(int(corpus.starts[number]), len(text)).astype(np.int64)
    assert sorted(one.place for one in text) == list(range(len(ids)))
    for row in (0, len(text) // 2, len(text) - 1):
        one = text[row]
        masked = [n for n, token in enumerate(one.ids) if token == setting.mask_id]
        assert one.place in masked
        assert 1 < len(masked) < len(ids)
        assert read.targets[row] == one.target == ids[one.place]
        with torch.no_grad():
            masks = after_an_end(model, torch.from_numpy(one.ids)[None])
            logits = model(input_ids=masks).logits[0, one.place]
        likely = logits.softmax(-1)[one.target].item()
        assert read.probability[row] == pytest.approx(likely, rel=1e-4)


def test_parts_sum_to_the_logit_of_the_masked_token(corpus, model):
    head = PrototypeHead(WIDTH, 16, 4)
    head.reset_parameters(torch.Generator().manual_seed(2))
    bank = PassageBank.of(corpus, corpus.split("train"))
    setting = setting_of(model, head, bank, None)
    text = of_document(corpus, int(corpus.split("heldout")[0]), setting.mask_id, seed=0)
    alike = [one for one in text if one.ids is text[0].ids]
    split = setting.split(alike)
    with torch.no_grad():
        masks = after_an_end(model, torch.from_numpy(text[0].ids)[None])
        logits = model(input_ids=masks).logits[0]
    for one in alike:
        own = logits[one.place, one.target].item()
        assert split.parts.logit[one.place].item() == pytest.approx(own, abs=1e-5)
        assert split.parts.contributions[one.place].abs().sum() > 1e-3


def test_every_masked_token_is_asked_about_by_itself(corpus, model, tmp_path):
    head = PrototypeHead(WIDTH, 8, 2)
    head.reset_parameters(torch.Generator().manual_seed(0))
    read = list(masked_passes(model, corpus, corpus.split("train")[:6], seed=0, readings=3))
    z, token, place = (
        torch.cat([getattr(one, name) for one in read]) for name in ("z", "token", "place")
    )
    states, places = kept(tmp_path / "states", z, token.tolist()), place.numpy()
    bank = PassageBank.of(corpus, corpus.split("train"))
    positions = positions_of(head, states, places, bank)
    setting = setting_of(model, head, bank, positions)
    cells = cells_of(tmp_path / "cells", model, positions.cell, states, places, corpus)
    by_position = methods(setting, setting, cells, 0)["evidence by position"]
    text = of_document(corpus, int(corpus.split("train")[0]), setting.mask_id, seed=0)
    scores = by_position(text)
    assert scores.shape == (len(text), len(bank))
    assert (scores.max(1) > 0).sum() > 6
    np.testing.assert_allclose(by_position(text[::-1])[::-1], scores, rtol=1e-4, atol=1e-6)


def test_a_question_has_its_text_on_the_side_that_it_is_named_after(corpus, model):
    found = {kind: asked(corpus, FACT, wording) for kind, wording in QUESTIONS.items()}
    for kind, question in found.items():
        text = corpus.tokenizer.decode(question.ids.tolist())
        assert FACT["name"] in text, kind
        assert FACT["attribute"] in text, kind
        answer = corpus.tokenizer.decode(question.ids[question.answer].tolist())
        assert answer == " rice"
    assert found["text on the left"].answer.stop == len(found["text on the left"].ids)
    assert found["text on the right"].answer.start == 0
    both = found["text on both sides"]
    assert 0 < both.answer.start < both.answer.stop < len(both.ids)
    hidden = of_question(both, model.mask_id, hidden=True)
    assert all((one.ids == model.mask_id).all() for one in hidden)
