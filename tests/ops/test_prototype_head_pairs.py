"""Products of chosen pairs."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from prismlm.ops.prototype_head.fast import pair_products


def test_by_hand():
    left = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    right = torch.tensor([[10.0, 1.0], [0.0, -1.0]])
    starts, columns = torch.tensor([0, 2, 2, 3]), torch.tensor([1, 0, 0])
    assert pair_products(starts, columns, left, right).tolist() == [-2.0, 12.0, 56.0]


@given(
    n=st.integers(1, 8),
    m=st.integers(1, 8),
    width=st.integers(1, 70),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    data=st.data(),
)
def test_equals_the_matrix_and_each_alone(n, m, width, dtype, data):
    of_row = st.lists(st.integers(0, m - 1), max_size=3, unique=True)
    listed = data.draw(st.lists(of_row, min_size=n, max_size=n))
    counts = torch.tensor([len(row) for row in listed])
    starts = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
    total = int(starts[-1])
    columns = torch.tensor([column for row in listed for column in row], dtype=torch.long)
    generator = torch.Generator().manual_seed(width)
    left, right = (torch.randn(s, width, generator=generator, dtype=dtype) for s in (n, m))
    found = pair_products(starts, columns, left, right)
    rows = torch.repeat_interleave(counts)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {}
    torch.testing.assert_close(found, (left @ right.T)[rows, columns], **tolerance)
    for pair in range(total):
        one = pair_products(
            torch.tensor([0, 1]), columns[pair, None], left[rows[pair], None], right
        )
        assert torch.equal(one[0], found[pair])
