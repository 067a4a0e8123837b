import torch
from hypothesis import given
from hypothesis import strategies as st

from prismlm.ops.compaction import Compaction


def test_hand_computed():
    mask = torch.tensor([[False, True, False, True], [True, True, True, False]])
    places = Compaction.of(mask)
    assert places.lengths.tolist() == [2, 3]
    assert places.order.tolist() == [[1, 3, 0, 2], [0, 1, 2, 3]]
    assert places.mask.tolist() == [[True, True, False, False], [True, True, True, False]]
    starts = torch.tensor([[True, False, False, True], [False, False, True, True]])
    # In row 1 the start on padding has no token left: it stands behind the last one.
    moved = [[True, True, False, False], [False, False, True, True]]
    assert places.compact_starts(starts).tolist() == moved
    tensor = torch.arange(8.0).reshape(2, 4, 1)
    assert places.compact(tensor)[..., 0].tolist() == [[1, 3, 0, 2], [4, 5, 6, 7]]


@given(b=st.integers(1, 4), t=st.integers(1, 20), seed=st.integers(0, 100))
def test_back_and_forth_keeps_tokens_and_clears_padding(b, t, seed):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(b, t, generator=generator) < 0.5
    tensor = torch.randn(b, t, 3, generator=generator)
    places = Compaction.of(mask)
    assert torch.equal(places.restore(places.compact(tensor)), tensor * mask[..., None])
    assert torch.equal(places.restore(places.compact(mask)), mask)
