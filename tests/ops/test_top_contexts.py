import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from prismlm.ops import top_contexts

PROTOTYPES, CONTEXTS = 3, 4
ROWS = st.lists(
    st.tuples(
        st.integers(0, PROTOTYPES - 1),
        st.sampled_from([-0.5, 0.0, 0.25, 0.5, 0.75]),
        st.integers(0, 60),
    ),
    max_size=60,
)


def contexts_of(rows):
    """Candidates whose document is position // 5 and whose other columns follow from the row."""
    prototype = torch.tensor([r[0] for r in rows], dtype=torch.int64)
    cosine = torch.tensor([r[1] for r in rows], dtype=torch.float32)
    position = torch.tensor([r[2] for r in rows], dtype=torch.int64)
    columns = prototype, cosine, position, position // 5, cosine.relu(), cosine > 0.3
    return top_contexts.Contexts(*columns)


def unique_scores(rows):
    """One cosine per (prototype, position), as a scan of a corpus would give."""
    return list({(p, x): (p, c, x) for p, c, x in rows}.values())


def brute_force(rows):
    kept = []
    for prototype in range(PROTOTYPES):
        ranked = sorted((r for r in rows if r[0] == prototype), key=lambda r: (-r[1], r[2]))
        seen = set()
        for row in ranked:
            if row[2] // 5 not in seen and len(seen) < CONTEXTS:
                seen.add(row[2] // 5)
                kept.append(row)
    return kept


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def fill(rows):
    empty = top_contexts.empty(PROTOTYPES, CONTEXTS)
    return top_contexts.update(empty, contexts_of(rows))


@given(rows=ROWS, cuts=st.lists(st.integers(0, 60), max_size=3))
def test_any_stream_equals_sorting_everything(rows, cuts):
    rows = unique_scores(rows)
    top = top_contexts.empty(PROTOTYPES, CONTEXTS)
    bounds = [0, *sorted(min(c, len(rows)) for c in cuts), len(rows)]
    for start, stop in itertools.pairwise(bounds):
        top = top_contexts.update(top, contexts_of(rows[start:stop]))
    expected = contexts_of(brute_force(rows))
    assert same(top_contexts.to_rows(top), expected)


@given(rows=ROWS, first=st.integers(0, 60), second=st.integers(0, 60))
def test_merge_is_associative_and_commutative(rows, first, second):
    rows = unique_scores(rows)
    low, high = sorted((first, second))
    a, b, c = rows[:low], rows[low:high], rows[high:]
    merge = top_contexts.merge
    left = merge(merge(fill(a), fill(b)), fill(c))
    assert same(left, merge(fill(a), merge(fill(b), fill(c))))
    assert same(left, merge(merge(fill(c), fill(b)), fill(a)))
    assert same(left, fill(rows))


def test_merging_a_shard_twice_changes_nothing():
    rows = [(0, 0.5, 3), (0, 0.5, 7), (1, 0.25, 3), (0, 0.75, 4)]
    assert same(top_contexts.merge(fill(rows), fill(rows)), fill(rows))
