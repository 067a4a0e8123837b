"""What sees what in rows of several sequences, against the numbers of the sequences."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from prismlm.ops.sequences import reach


@given(blocks=st.integers(1, 4), size=st.integers(1, 5), seed=st.integers(0, 1000))
def test_reach_is_that_of_equal_numbers(blocks, size, seed):
    generator = torch.Generator().manual_seed(seed)
    starts = (torch.rand(2, 1, blocks, size, generator=generator) < 0.3).long()
    found = reach(starts)
    for b in range(2):
        number = starts[b].flatten().cumsum(0).tolist()
        for n in range(blocks):
            own = number[n * size : (n + 1) * size]
            before = number[n * size - 1] if n else 0
            assert found.same[b, 0, n].tolist() == [[i == j for j in own] for i in own]
            assert found.seen[b, 0, n, :, 0].tolist() == [i == before for i in own]
            assert found.kept[b, 0, n, :, 0].tolist() == [i == own[-1] for i in own]
            assert found.carried[b, 0, n, 0] == (before == own[-1])
