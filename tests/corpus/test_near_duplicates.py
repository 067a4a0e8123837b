"""Documents that say nearly the same, counted as they come."""

import random

import numpy as np
import pytest

from prismlm.corpus import build_corpus
from prismlm.corpus.near_duplicates import RUN, NearDuplicates, keys_of


def _counted(*documents):
    found = NearDuplicates()
    found.add(documents)
    return found.count


def _runs(tokens):
    padded = [*tokens, *[None] * (RUN - 1)]
    return {tuple(padded[i : i + RUN]) for i in range(len(tokens))}


def _changed(tokens, places):
    other = list(tokens)
    for place in places:
        other[place] += 10_000
    return other


def test_hand_made_pairs():
    text = list(range(1000))
    assert _counted(text, list(text)) == 1
    # One token in a thousand stands in 8 of 1,000 runs: s = 992 / 1008.
    assert _counted(text, _changed(text, [500])) == 1
    # Every tenth token leaves 2 of 10 runs: s = 200 / 1800.
    assert _counted(text, _changed(text, range(9, 1000, 10))) == 0
    assert _counted(text, list(range(5000, 6000))) == 0
    assert _counted(text, text[::-1]) == 0
    assert _counted([7], [7], [8], []) == 1


def test_batches_do_not_matter():
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 50, rng.integers(1, 60)).tolist() for _ in range(40)]
    texts += [list(text) for text in texts[:15]]
    random.Random(0).shuffle(texts)
    one, many = NearDuplicates(), NearDuplicates()
    one.add(texts)
    for text in texts:
        many.add([text])
    assert one.count == many.count >= 15


@pytest.mark.parametrize("changes", [0, 3, 6, 12, 30])
def test_pairs_are_counted_with_the_probability_that_is_promised(changes):
    rng = np.random.default_rng(changes)
    pairs, hits, shares = 200, 0, []
    for _ in range(pairs):
        text = rng.integers(0, 9000, 600).tolist()
        other = _changed(text, rng.choice(590, changes, replace=False))
        first, second = keys_of([text, other])
        hits += bool((first == second).any())
        both, either = _runs(text) & _runs(other), _runs(text) | _runs(other)
        shares.append(len(both) / len(either))
    expected = np.mean([1 - (1 - share**12) ** 8 for share in shares])
    # Four standard deviations of a share of 200.
    assert abs(hits / pairs - expected) <= 4 * np.sqrt(0.25 / pairs) * (changes > 0)


def test_a_corpus_says_how_many_it_holds(tmp_path):
    texts = [f"{word} " * 40 + "and so on." for word in ("alpha", "beta", "gamma")]
    source = tmp_path / "texts"
    source.mkdir()
    for number, text in enumerate([*texts, texts[0], texts[1] + " The end."]):
        (source / f"{number}.txt").write_text(text)
    corpus = build_corpus(source, tmp_path / "corpus", vocab_size=300)
    assert corpus.meta["near_duplicates"] == {"documents": 2, "likeness": 0.82}
