"""The convolution over rows that hold padding and several sequences, against each token alone."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from prismlm.layers.causal_convolution import CausalConvolution


@given(
    length=st.integers(1, 20),
    width=st.integers(1, 5),
    padded=st.booleans(),
    packed=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_token_is_mixed_with_the_last_ones_of_its_sequence(length, width, padded, packed, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, length, 3, generator=generator, dtype=torch.float64)
    history = torch.randn(2, width - 1, 3, generator=generator, dtype=torch.float64)
    mask = torch.rand(2, length, generator=generator) < 0.6
    starts = torch.rand(2, length, generator=generator) < 0.2
    x[~mask] = x[~mask] if not padded else torch.nan
    layer = CausalConvolution(3, width).double()
    flags = {"mask": mask} if padded else {}
    flags |= {"starts": starts} if packed else {}
    out, kept = layer(x, history=history, **flags)
    for b in range(2):
        # A start on padding is one of the token behind it.
        number = [0] * (width - 1) + (starts[b].cumsum(0) * packed).tolist()
        places = [i for i in range(length) if mask[b, i] or not padded]
        values = [*history[b], *(x[b, i] for i in places)]
        number = [*number[: width - 1], *(number[width - 1 + i] for i in places)]
        for at, place in enumerate(places):
            own = at + width - 1
            expected = sum(
                layer.weight[delta] * values[own - delta]
                for delta in range(width)
                if number[own - delta] == number[own]
            )
            torch.testing.assert_close(out[b, place], expected)
        last = int(starts[b].sum()) if packed else 0
        ends = range(len(values) - width + 1, len(values))
        expected = [values[i] if number[i] == last else torch.zeros(3).double() for i in ends]
        torch.testing.assert_close(list(kept[b]), expected)


def test_padding_by_hand():
    layer = CausalConvolution(1, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0], [10.0]]))
    x = torch.tensor([[[9.0], [1.0], [9.0], [2.0], [9.0]]])
    mask = torch.tensor([[False, True, False, True, False]])
    out, kept = layer(x, mask=mask)
    assert out[mask].flatten().tolist() == [1.0, 12.0]
    assert kept.flatten().tolist() == [2.0]
