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


@given(rows=ROWS, first=st.integers(0, 60), second=st.integers(0, 60))
def test_any_stream_and_any_order_of_shards_equal_sorting_everything(rows, first, second):
    rows = unique_scores(rows)
    low, high = sorted((first, second))
    parts = rows[:low], rows[low:high], rows[high:]
    merge, update = top_contexts.merge, top_contexts.update
    stream = top_contexts.empty(PROTOTYPES, CONTEXTS)
    for part in parts:
        stream = update(stream, contexts_of(part))
    assert same(top_contexts.to_rows(stream), contexts_of(brute_force(rows)))
    for a, b, c in itertools.permutations(parts):
        assert same(merge(merge(fill(a), fill(b)), fill(c)), stream)
        assert same(merge(fill(a), merge(fill(b), fill(c))), stream)
    # A shard may come twice.
    assert same(merge(fill(rows), fill(parts[0])), stream)
