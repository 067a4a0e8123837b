"""Evidence by position against a loop over every position of the corpus."""

import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from prismlm.explain import attribution
from prismlm.explain.attribution import (
    CONCENTRATION,
    SAME_TOKEN,
    SPAN,
    STRAY,
    TEMPERATURE,
    ContextPrior,
    attribute,
    carriers_of,
    joined,
    spread,
)
from prismlm.lens import cells as cells_module
from prismlm.lens.cells import UNKNOWN, Keys
from tests.explain.conftest import shares_of
from tests.helpers.token_corpus import excerpt

TEXTS = ["The cell is the smallest unit", "Once upon a time there was a"]


def naive(lm, table, everything):
    """Return evidence by place, and what finds none, straight from the equation."""
    cell, token, place, states, last = everything
    cells, found, unplaced, before = lm.lens.cells, {}, 0.0, []
    groups, rates = cells.keys("domain").codes, cells.base_rates("domain")
    believed = list(rates)
    of_prototypes = lm.head.prototypes.double().numpy()
    of_prototypes = of_prototypes / np.linalg.norm(of_prototypes, axis=1, keepdims=True)
    for t, target in enumerate(table.targets.tolist()):
        near, used = {}, (table.routing.indices[t].tolist(), table.evidence[t].tolist())
        speak_for = {i: e for i, e in zip(*used, strict=True) if e > 0}
        for i in speak_for:
            rows = np.flatnonzero((cell == i) & (token == target))
            cosines = states[rows] @ table.states[t].double().numpy()
            for where, cosine, x in zip(place[rows], cosines, last[rows], strict=True):
                times = SAME_TOKEN if x == table.tokens[t] else 1
                near[int(where)] = math.exp((cosine - 1) / TEMPERATURE) * times
        owner = {n: int(cells.document_of(np.array([n]))[0]) for n in near}
        aged = [(2 ** (-(t - 1 - s) / SPAN), parts) for s, parts in before]
        spread = {}
        for n, k in near.items():
            d = owner[n]
            carried = sum(age * parts[d] for age, parts in aged)
            total = sum(age * sum(parts.values()) for age, parts in aged)
            ratio = CONCENTRATION * believed[groups[d]] / rates[groups[d]]
            ratio = (ratio + carried / cells.document_rates[d]) / (CONCENTRATION + total)
            spread[n] = k * ratio
        own = of_prototypes @ table.states[t].double().numpy()
        least, relied_on = np.full_like(own, own[table.routing.indices[t].tolist()].min()), set()
        if lm.head.weights == "fitted":
            least = 0.9 * own
        for n in sorted(spread, key=spread.get, reverse=True)[:4]:
            heavy = place.tolist().index(n)
            cosines = of_prototypes @ states[heavy]
            relied_on |= {i for i in speak_for if cosines[i] >= max(least[i], 0)}
            relied_on.add(int(cell[heavy]))
        amount = sum(e for i, e in speak_for.items() if i in relied_on)
        unplaced += sum(e for i, e in speak_for.items() if i not in relied_on)
        parts = Counter()
        for n, weight in spread.items():
            found[n] = found.get(n, 0.0) + amount * weight / sum(spread.values())
            parts[owner[n]] += weight / sum(spread.values())
        before.append((t, parts))
        for g in range(len(rates)) if near else ():
            inside = sum(k for n, k in near.items() if groups[owner[n]] == g)
            believed[g] *= STRAY + (1 - STRAY) * inside / sum(near.values()) / rates[g]
        whole = sum(believed)
        believed = [
            (1 - 1 / SPAN) * p / whole + rate / SPAN
            for p, rate in zip(believed, rates, strict=True)
        ]
    return found, unplaced


@pytest.mark.parametrize(("weights", "text"), [("cosine", TEXTS[0]), ("fitted", TEXTS[1])])
def test_evidence_falls_where_the_equation_says(lm, everything, text, weights, monkeypatch):
    monkeypatch.setattr(lm.head, "weights", weights)
    monkeypatch.setattr(cells_module, "MOST_OF_A_RANGE", 10**9)
    monkeypatch.setattr(attribution, "MIN_WEIGHT_RATIO", 0.0)
    monkeypatch.setattr(attribution, "token_information", lambda rates, _: np.ones(len(rates)))
    table = lm.explain(text, generate=4).predictions
    expected, unplaced = naive(lm, table, everything)
    carriers = carriers_of(table, lm.lens)
    found = attribute(carriers, lm.lens)
    got = dict(zip(found.places.place.tolist(), found.places.value.tolist(), strict=True))
    assert got == pytest.approx(expected, rel=1e-3)
    others = table.parts.residual_evidence, table.parts.bias_evidence
    other = sum(float(one.double().clamp_min(0).sum()) for one in others)
    assert carriers.rest.sum() - other == pytest.approx(unplaced, rel=1e-6)


@pytest.mark.parametrize("filtered", [False, True])
def test_groups_are_sums_over_the_same_positions_and_shares_sum_to_one(lm, filtered):
    trace, corpus = lm.explain(TEXTS[1], generate=6), lm.lens.corpus
    license = lm.lens.cells.keys("license").names[0]
    where, found = {"license": license} if filtered else None, trace.attribution()
    for by in ("document", "source", "domain", "license"):
        names, expected = corpus.doc_ids if by == "document" else corpus.column(by), Counter()
        for place, value in zip(*map(np.ndarray.tolist, found.places[:2]), strict=True):
            number = corpus.document_at(place)
            if not filtered or corpus.column("license")[number] == license:
                expected[names[number] or UNKNOWN] += value / found.total
        sources = trace.sources(by, where=where)
        shares = shares_of(sources)
        assert shares == pytest.approx(expected)
        whole = math.fsum(shares.values()) + sources.unattributed + sources.elsewhere
        assert whole == pytest.approx(1, abs=1e-12)
        assert [*shares.values()] == sorted(shares.values(), reverse=True)
    for several in (trace.passages, trace.documents):
        total = sum(one.share for one in several(10**6, where=where))
        assert total == pytest.approx(sum(shares.values()))


def test_a_large_range_is_sampled_evenly_and_weighs_the_same(lm, monkeypatch):
    table, found = lm.explain("the court of the", generate=4).predictions, []
    for most in (10**9, 2):
        monkeypatch.setattr(cells_module, "MOST_OF_A_RANGE", most)
        found.append(spread(table, lm.lens.cells, lm.lens.head))
    every, few = (set(one.place.tolist()) for one in found)
    assert few < every
    sums = [np.bincount(f.prediction, f.weight, minlength=len(table)) + f.rest for f in found]
    np.testing.assert_allclose(*sums, rtol=1e-9)


def test_the_nearest_passage_is_where_the_text_stands(lm):
    corpus = lm.lens.corpus
    start = int(corpus.starts[corpus.split("train")[0]])
    trace = lm.explain(excerpt(corpus, start, 24))
    last = trace[len(trace) - 2 : len(trace) - 1]
    passage = max(last.passages(10**6), key=lambda passage: passage.cosine)
    assert passage.cosine > 0.999
    assert passage.position == start + 23
    assert passage.around.token == excerpt(corpus, passage.position, 1) == last[0].target
    assert passage.text in corpus.text(corpus.find(passage.doc_id))


def test_some_steps_have_what_they_have_in_their_text(lm):
    trace = lm.explain(TEXTS[1], generate=8)
    whole, some = trace[:].carriers(), trace[2:6][1:3].carriers()
    for number, row in enumerate((3, 4)):
        for name in ("place", "cosine", "weight"):
            left = getattr(some, name)[some.prediction == number]
            assert left.tolist() == getattr(whole, name)[whole.prediction == row].tolist()
    assert some.rest.tolist() == whole.rest[3:5].tolist()
    # By itself a step knows nothing of the text before.
    alone = carriers_of(trace.predictions[3:4], lm.lens)
    assert alone.weight.tolist() != some.weight[some.prediction == 0].tolist()


def test_where_domains_are_all_one_sources_stand_for_them(monkeypatch):
    for name, value in (("STRAY", 0.5), ("CONCENTRATION", 1e12), ("SPAN", 4.0)):
        monkeypatch.setattr(attribution, name, value)
    keys = {"domain": Keys(["all"], np.zeros(2, int)), "source": Keys(["a", "b"], np.arange(2))}
    rates = {"domain": np.ones(1), "source": np.array([0.25, 0.75])}
    cells = SimpleNamespace(
        keys=keys.get, base_rates=rates.get, document_rates=np.array([0.25, 0.75])
    )
    so_far = ContextPrior(cells)
    so_far.add(np.array([0]), np.ones(1), np.ones(1))
    # Of the sources: ½ + ½ · 4 and ½ times ¼ and ¾ are ⅝ and ⅜, sum 1; a quarter turns.
    assert so_far.ratios(np.arange(2)).tolist() == pytest.approx([2.125, 0.625])


@pytest.mark.parametrize("first", [1, 4, 7])
def test_parts_of_a_text_add_up_and_may_be_read_one_by_one(lm, first):
    trace, lens = lm.explain(f"{TEXTS[0]} of life and"), lm.lens
    so_far, table = ContextPrior(lens.cells), trace.predictions
    halves = slice(first), slice(first, None)
    weights = [spread(table[half], lens.cells, lens.head, so_far).weight for half in halves]
    np.testing.assert_allclose(np.concatenate(weights), trace.carriers().weight, rtol=1e-9)
    whole = trace.attribution()
    parts = joined([trace[half].attribution() for half in halves])
    assert parts.total == pytest.approx(whole.total)
    assert parts.support() == whole.support()
    np.testing.assert_array_equal(parts.places.place, whole.places.place)
    np.testing.assert_allclose(parts.places.value, whole.places.value)


def test_a_target_that_the_corpus_never_has_is_unattributed(lm, everything):
    table = lm.explain("The cell").predictions
    table.targets[:] = min(set(range(lm.lens.cells.meta.vocabulary)) - set(everything[1].tolist()))
    found = attribute(carriers_of(table[0:1], lm.lens), lm.lens).sources("domain")
    assert (found.items, found.unattributed) == ((), 1)
