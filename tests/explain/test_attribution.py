"""What predictions rely on: by hand on six positions, against loops over all; support; in words."""

import math
from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import prismlm
from prismlm.errors import InputError
from prismlm.explain import attribution
from prismlm.explain.attribution import (
    CONCENTRATION,
    MIN_WEIGHT,
    SAME_TOKEN,
    SPAN,
    STRAY,
    TEMPERATURE,
    ContextPrior,
    Coverage,
    Passage,
    Share,
    Sources,
    attribute,
    carriers_of,
    joined,
    spread,
    token_information,
)
from prismlm.explain.trace import summarise
from prismlm.lens import cells as cells_module
from prismlm.lens.cells import UNKNOWN, Keys
from tests.explain.conftest import shares_of
from tests.helpers.hand_lens import attributed, hand_lens, predictions
from tests.helpers.token_corpus import excerpt

TEXTS = ["The cell is the smallest unit", "Once upon a time there was a"]
TOKENS, TELLING = np.array([7, 5, 7, 9]), np.array([4.0, 1.0, 4.0, 3.0])


@pytest.fixture(scope="module")
def lens(tmp_path_factory):
    return hand_lens(tmp_path_factory.mktemp("lens"))


@pytest.fixture
def table():
    """One prediction of token 5 at (1, 0), by prototypes 0 and 1; the third speaks against it."""
    columns = [[0, 1, 2]], [[2.0, 1.0, -4.0]], [1.0], [-1.0], [[1.0, 0.0]], [3], [5]
    return predictions(*map(torch.tensor, columns))


def test_shares_by_hand(lens, table):
    # Positions 10 and 150 lie at the state itself, 20 and 60 at 8 degrees from it; 30 has another
    # next token, and the prototype of 5 speaks against.
    far = np.exp((np.cos(np.deg2rad(8)) - 1) / TEMPERATURE)
    near = 3 / (2 + 2 * far) / 4  # evidence 3 of 4, the residual's 1 is unattributed
    found = attributed(table, lens)
    assert found.places.place.tolist() == [10, 20, 60, 150]
    np.testing.assert_allclose(
        found.places.value / found.total, [near, near * far, near * far, near], rtol=2e-2
    )
    by_domain = found.sources("domain")
    expected = {"law": near * (1 + 2 * far), "(unknown)": near}
    assert shares_of(by_domain) == pytest.approx(expected, rel=2e-2)
    assert by_domain.unattributed == pytest.approx(1 / 4)
    # Of 99 and 300 positions: the last token of a document predicts nothing.
    rates = {item.key: item.base_rate for item in by_domain.items}
    assert rates == pytest.approx({"law": 99 / 399, "(unknown)": 300 / 399})
    # A quarter of the evidence has no domain.
    expected = 99 / 399 * 3 / 4
    assert by_domain.items[0].lift == pytest.approx(by_domain.items[0].share / expected)


def test_heavy_is_what_weighs_most_by_itself(table, monkeypatch, tmp_path):
    lens = hand_lens(tmp_path)
    # One of each range is read: 10, at 8 degrees, stands for two; 5, at 4 degrees, for itself. It
    # is in the cell of prototype 2, which 10 is too far from to rely on.
    monkeypatch.setattr(cells_module, "MOST_OF_A_RANGE", 1)
    monkeypatch.setattr(attribution, "HEAVIEST", 1)
    angles = np.deg2rad([0, -45, -20])
    lens.head.place_on(torch.from_numpy(np.stack([np.cos(angles), np.sin(angles)], 1)))
    state = torch.tensor([[np.cos(np.deg2rad(-8)), np.sin(np.deg2rad(-8))]], dtype=torch.float32)
    prototypes, evidence = torch.tensor([[0, 2]]), torch.tensor([[2.0, 1.0]])
    none = torch.zeros(1)
    asked = predictions(prototypes, evidence, none, none, state, table.tokens, table.targets)
    found = attributed(asked, lens)
    assert found.places.place.tolist() == [5, 10]
    assert found.places.value[1] > found.places.value[0]
    assert found.rest == 0


def test_passages_by_hand(lens, table):
    found = attributed(table, lens)
    first, second, third = found.passages()
    # 10 and 20 are one passage, 60 is further than 24 tokens from 20; marked is the next token.
    assert (first.doc_id, first.position, first.length) == ("a", 11, 11)
    assert (second.doc_id, second.position, second.title) == ("b", 151, "B")
    assert (third.doc_id, third.position, third.length) == ("a", 61, 1)
    assert first.share + third.share == pytest.approx(found.document_share("a"))
    assert found.document_share("c") == 0
    assert first.cosine == pytest.approx(1, abs=0.01)
    assert first.text is None  # the corpus is not at hand
    assert [p.doc_id for p in found.passages(where={"license": "CC0"})] == ["a", "a"]
    assert [d.doc_id for d in found.documents()] == ["a", "b"]
    assert found.documents()[0].position == 11
    # Without a scale, or predictions, there is no support.
    assert found.support() is attributed(table[:0], lens).support() is None


def by_contexts(indices, activations):
    """Return predictions of which the measure of PRISM, A_t, knows the activations alone."""
    count, indices = len(indices), torch.tensor(indices)
    evidence, residual = torch.full(indices.shape, -9.0), torch.full((count,), 7.0)
    states, tokens = torch.full((count, 2), 0.5**0.5), torch.zeros(count, dtype=torch.int64)
    others = states, tokens, tokens, torch.tensor(activations)
    return predictions(indices, evidence, residual, torch.zeros(count), *others)


def test_the_measure_of_the_source_by_hand(lens):
    # a: 0.6/2 + 0.2, b: 0.6/2, of 0.8; neither evidence nor the residual plays a part.
    found = attributed(by_contexts([[0, 1]], [[0.6, 0.2]]), lens, "source")
    documents = found.documents()
    of_documents = [(one.doc_id, one.position, one.share) for one in documents]
    assert of_documents == [("a", 10, pytest.approx(5 / 8)), ("b", 120, pytest.approx(3 / 8))]
    assert shares_of(found.sources("document")) == pytest.approx({"a": 5 / 8, "b": 3 / 8})
    shares = found.sources("source")
    assert shares.unattributed == 0
    assert {item.base_rate for item in shares.items} == {None}
    assert shares.to_dict()["method"] == "source"
    # Nothing is in use.
    found = attributed(by_contexts([[0, 1]], [[0.0, -1.0]]), lens, "source")
    assert (found.sources("source").items, found.sources("source").unattributed) == ((), 1.0)
    assert found.documents() == []


def test_a_filter_by_hand(lens):
    evidence = by_contexts([[0, 1], [2, 0]], [[0.6, 0.2], [0.4, 0.0]])
    found = attributed(evidence, lens, "source")
    shares = found.sources("domain", {"license": "CC0"})
    # Of prototype 0 the half in law is CC0, and all of prototype 1; prototype 2 has no text.
    assert shares_of(shares) == {"law": pytest.approx(0.5 / 1.2)}
    assert shares.elsewhere == pytest.approx(0.3 / 1.2)
    assert shares.unattributed == pytest.approx(0.4 / 1.2)
    assert shares.to_dict()["where"] == {"license": ["CC0"]}
    none = found.sources("domain", {"source": "s1", "license": "(unknown)"})
    assert none.items == ()
    assert none.elsewhere == pytest.approx(0.8 / 1.2)
    assert [d.doc_id for d in found.documents(where={"source": "s2"})] == ["b"]


def test_what_is_not_there_is_named(lens, table):
    for given, words in (
        ({"by": "domains"}, "Did you mean 'domain'"),
        ({"where": {"sourc": "s1"}}, "Did you mean 'source'"),
        ({"where": {"source": "s3"}}, r"source=s3.*s1, s2"),
    ):
        with pytest.raises(InputError, match=words):
            attributed(table, lens).sources(**given)
    with pytest.raises(InputError, match="Did you mean 'source'"):
        attributed(table, lens, "sources")


# -- against loops over every position of the corpus


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


def test_text_of_the_corpus_is_found_where_it_stands_and_noise_nowhere(lm):
    corpus = lm.lens.corpus
    start = int(corpus.starts[corpus.split("train")[3]])
    trace = lm.explain(excerpt(corpus, start, 24))
    noise = lm.explain("qzx vvk 9!~ jjw {{ %% kqz ]] xx zzq 0x7 ~~ qj")
    assert (trace.support.level, noise.support.level) == ("strong", "none")
    assert trace.support.score > noise.support.score
    assert noise.summary == noise.support.sentence
    assert "no document of this corpus holds what the answer tells" in noise.summary
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


# -- support, and the summary in words


# Each token counts once: 4 of the sevens, 1 of the five, 3 of the nine, 8 in all.
ALL, HALF = [(0, 3), (1, 3), (3, 3)], [(0, 2)]


@pytest.mark.parametrize(
    ("pairs", "about", "expected"),
    [
        ([*ALL, (2, 3), *HALF], None, ("strong", 1)),
        # Two documents share them: the one with the sevens and the five has 5 of 8.
        ([(0, 3), (2, 3), (1, 3), (3, 1)], None, ("weak", 5 / 8)),
        ([(0, 0), (0, 0), (2, 0)], None, ("weak", 4 / 8)),
        ([(1, 3), (1, 2)], None, ("none", 1 / 8)),
        ([], None, ("none", 0)),
        # Documents that name nothing of a question count one level less.
        (ALL, {3}, ("strong", 1)),
        (ALL, set(), ("weak", 1)),
        (HALF, set(), ("none", 1 / 2)),
        # One that names it and holds half is as good as one that holds all and does not.
        (ALL + HALF, {2}, ("weak", 1)),
        # Of two that hold half, one that names it is enough.
        ([*HALF, (0, 1)], {1}, ("weak", 1 / 2)),
        ([(1, 3)], set(), ("none", 1 / 8)),
    ],
)
def test_levels_by_hand(pairs, about, expected):
    carried = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    asked = None if about is None else about.__contains__
    level, score, _ = Coverage(TOKENS, TELLING, carried).support(asked)
    assert (level, score) == (expected[0], pytest.approx(expected[1]))
    # An answer of common words is neither strong nor none.
    assert Coverage(TOKENS, TELLING / 100, carried).support(asked).level == "weak"


def test_a_document_carries_the_information_of_its_tokens_and_its_passages_parts_of_it(lm):
    corpus = lm.lens.corpus
    trace = lm.explain(excerpt(corpus, int(corpus.starts[3]), 24))
    told, cells = trace.attribution().coverage, lm.lens.cells
    weights = dict(zip(told.tokens.tolist(), told.weights.tolist(), strict=True))
    tokens = defaultdict(set)
    for prediction, document, _ in told.carried.tolist():
        tokens[cells.facts(document)["doc_id"]].add(int(told.tokens[prediction]))
    documents = {one.doc_id: one.carried for one in trace.documents(50)}
    for name, part in documents.items():
        expected = sum(weights[token] for token in tokens[name]) / sum(weights.values())
        assert part == pytest.approx(expected, abs=1e-12)
    assert max(documents.values()) == pytest.approx(trace.support.score)
    parts = [one.carried for one in trace.passages(50)]
    assert max(parts) > 0
    assert all(one.carried <= documents.get(one.doc_id, 1) + 1e-12 for one in trace.passages(50))
    # Of a single token a document carries all or nothing, which tells nothing.
    assert {one.carried for one in trace[5:6].documents(5)} == {None}


def test_a_generated_answer_is_asked_about_without_its_prompt(lm, monkeypatch):
    # So small a model may end its text at once.
    monkeypatch.setattr(lm.model.generation_config, "eos_token_id", None)
    trace = lm.explain("The cell is", generate=5)
    answer = trace[len(trace) - 5 :]
    assert trace.written == answer.written == 5
    assert trace.support == answer.support
    for by in ("domain", "document"):
        assert trace.sources(by).items == answer.sources(by).items
    assert trace.passages(50) == answer.passages(50)
    assert trace.against(5) == answer.against(5)
    assert trace.verbatim() == answer.verbatim()
    assert trace.answer == lm.generate("The cell is", tokens=5).removeprefix("The cell is")
    assert "the answer" in trace.summary.lower() or trace.support.level == "none"
    assert trace[:0].summary is None


def test_a_token_counts_by_what_it_tells():
    found = token_information(np.exp([-2.0, -5.0, -7.0]), 10**6)
    assert found == pytest.approx([MIN_WEIGHT, MIN_WEIGHT, MIN_WEIGHT + 4])
    # What never comes next counts as half a position: in a small corpus that says little.
    telling = np.log(2e4) - 5
    assert token_information(np.zeros(1), 10**4)[0] == pytest.approx(MIN_WEIGHT + telling**2)
    assert token_information(np.zeros(1), 50) == pytest.approx([MIN_WEIGHT])


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        # Shares of the evidence and of the corpus.
        ({"law": (0.8, 0.1), "finance": (0.2, 0.9)}, ["mostly", "“law”: 80%"]),
        (
            {"finance": (0.75, 0.68), "law": (0.15, 0.058), "art": (0.1, 0.262)},
            ["more than usual", "“law”: 15%"],
        ),
        ({"finance": (0.75, 0.68), "law": (0.25, 0.32)}, ["no domain much more"]),
        # Less than half of all evidence, though most of what was traced.
        ({"law": (0.31, 0.1)}, ["Of what could be traced, the answer draws mostly", "“law”: 31%"]),
        ({UNKNOWN: (0.4, None), "art": (0.1, None)}, ["text of unknown domain: 40%"]),
        ({"law": (0.6, 1.0)}, ["60%", "this corpus."]),
        ({"law": (0.01, 0.5)}, ["Almost none"]),
    ],
)
def test_what_leads_is_named(parts, named):
    traced = sum(share for share, _ in parts.values())
    items = tuple(Share(key, *rates, traced) for key, rates in parts.items())
    shares = Sources("domain", items, 1 - traced)
    for document, leading in ((None, ""), (Passage("a/1", 0.1, *[None] * 5, 0), "“a/1”, with 10%")):
        text = summarise("the answer", shares, document, None)
        assert all(part in text for part in named)
        assert leading in text or "Almost none" in named


def test_a_head_that_does_not_fit_and_states_that_are_zero_are_said(small_model):
    lm = prismlm.load(small_model)
    assert lm.explain("The cell is").notes == []
    with torch.no_grad():
        lm.head.prototypes.mul_(50)
        wrong = lm.explain("The cell is")
        lm.model.model.norm.weight.zero_()
    zero = lm.explain("The cell is")
    no_fit = "The prototype head does not fit this model: the median"
    states = f"The hidden states of {len(zero)} of {len(zero)} predictions are zero"
    for trace, said in ((wrong, no_fit), (zero, states)):
        assert said in trace.notes[0]
        assert trace.to_dict()["notes"] == trace.notes
        assert said in trace.to_html()
    assert zero.support is None
    assert "support" not in zero.to_dict()
