"""The prefix mean: by hand, against the double sum, and in long rows against the recurrence."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prismlm.ops import tiles
from prismlm.ops.prototype_mixer import PrefixState, chunked, naive
from tests.helpers.prefix_rows import by_token, inputs, recurrence, relative_error, state_of

FORMS = [naive, chunked]


@pytest.mark.parametrize("form", FORMS)
def test_hand_computed(form):
    write = torch.tensor([[[1.0, 0.0], [0.5, 0.5], [0.25, 0.75]]])
    read = torch.tensor([[[1.0, 1.0], [1.0, 1.0], [0.5, 0.5]]])
    values = torch.tensor([[[2.0], [6.0], [-4.0]]])
    decay = torch.tensor([0.5, 0.25])
    out, state = form.prefix_mean(write, read, values, decay)
    # Position 1: channel 0 holds 2, channel 1 nothing. Position 2: channel 0 holds
    # (0.25·1·2 + 0.5·0.5·6) / (0.25 + 0.25) = 4, channel 1 holds 6.
    assert out.tolist() == [[[0.0], [2.0], [5.0]]]
    # Sums 0.5·(2 + 0.25·(-4)) and 0.25·(0.75 + 0.75·(-4)); mass 0.5·(0.5 + 0.25), 0.25·0.875.
    torch.testing.assert_close(state.sums, torch.tensor([[[0.5], [-0.5625]]]))
    torch.testing.assert_close(state.mass, torch.tensor([[0.375, 0.21875]]))
    plain, _ = form.prefix_mean(write, read, values, decay, normalise=False)
    # 0.5 · 2 in channel 0 at position 1; 0.5·2 + 0.5·0.75 at position 2.
    assert plain.tolist() == [[[0.0], [1.0], [1.375]]]


@pytest.mark.parametrize("form", FORMS)
def test_decays_by_token_by_hand(form):
    ones = torch.ones(1, 3, 1)
    values = torch.tensor([[[2.0], [6.0], [-4.0]]])
    decay = torch.tensor([[[0.5], [0.25], [0.125]]])
    out, state = form.prefix_mean(ones, ones, values, decay, normalise=False)
    # 0.5·2; 0.25·(1 + 6), the decay of a position acting on what it writes too.
    assert out.tolist() == [[[0.0], [1.0], [1.75]]]
    assert state.sums.item() == 0.125 * (1.75 - 4)
    # 0.5, 0.25·1.5, 0.125·1.375.
    assert state.mass.item() == 0.171875


@pytest.mark.parametrize("form", FORMS)
def test_groups_are_separate_prefix_means(form):
    """Channels 0 and 1 carry values 0 to 2, channels 2 and 3 values 3 to 5, and so on."""
    write, read, values, decay = inputs(2, 20, 6, 9)
    state = state_of(2, 6, 3)
    out, end = form.prefix_mean(write, read, values, decay, state, groups=3)
    for g in range(3):
        r, d = slice(2 * g, 2 * g + 2), slice(3 * g, 3 * g + 3)
        group_state = PrefixState(state.sums[:, r], state.mass[:, r])
        expected, after = naive.prefix_mean(
            write[..., r], read[..., r], values[..., d], decay[r], group_state
        )
        results = out[..., d], end.sums[:, r], end.mass[:, r]
        torch.testing.assert_close(results, (expected, *after), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_padding_is_ignored_and_sequences_of_a_row_do_not_see_each_other(form):
    """A row with padding in four places, and three sequences, equals each of them alone."""
    *tensors, decay = inputs(1, 9, 3, 2)
    state = state_of(1, 3, 2)
    mask = torch.ones(1, 13, dtype=torch.bool)
    mask[0, [0, 3, 8, 12]] = False
    row = [torch.full((1, 13, x.shape[2]), torch.nan) for x in tensors]
    for wide, x in zip(row, tensors, strict=True):
        wide[mask] = x[0]
    starts = torch.zeros_like(mask)
    starts[0, [5, 9]] = True
    out, end = form.prefix_mean(*row, decay, state, mask=mask, starts=starts)
    parts = []
    for first, last, before in ((0, 3, state), (3, 6, None), (6, 9, None)):
        part, after = form.prefix_mean(*(x[:, first:last] for x in tensors), decay, before)
        parts.append(part[0])
    torch.testing.assert_close(out[mask], torch.cat(parts))
    assert not out[~mask].any()
    torch.testing.assert_close(end, after)
    nothing = torch.zeros_like(mask)
    torch.testing.assert_close(form.prefix_mean(*row, decay, end, mask=nothing)[1], end)


def results_of(form, arguments, state, options):
    """Return outputs, the last state, and the gradients of inputs and state."""
    leaves = [x.detach().clone().requires_grad_() for x in arguments]
    state = None if state is None else PrefixState(*(x.clone().requires_grad_() for x in state))
    out, end = form(*leaves, state, **options)
    generator = torch.Generator().manual_seed(7)
    loss = sum(
        (x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum()
        for x in (out, end.sums, end.mass)
    )
    leaves += state or ()
    loss = loss + sum(x.sum() for x in leaves) * 0  # in case all is padding
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return out.detach(), end, gradients


@given(
    b=st.integers(1, 2),
    t=st.integers(1, 45),
    r=st.integers(1, 5),
    d=st.integers(1, 4),
    groups=st.integers(1, 3),
    token=st.booleans(),
    low=st.sampled_from([0.001, 0.5, 0.99]),
    flags=st.sampled_from(["none", "mask", "starts", "both"]),
    with_state=st.booleans(),
    normalise=st.booleans(),
    tile=st.sampled_from([32, chunked.TILE]),
    seed=st.integers(0, 1000),
)
def test_chunked_equals_the_double_sum(
    b, t, r, d, groups, token, low, flags, with_state, normalise, tile, seed
):
    """Outputs, states and the gradient of every input, in float64; r and d are per group.

    A small tile makes two segments of more than 32 positions.
    """
    *tensors, decay = inputs(b, t, groups * r, groups * d, seed, torch.float64, low=low)
    arguments = (*tensors, by_token(decay, t, seed)[:b] if token else decay)
    generator = torch.Generator().manual_seed(seed)
    options = {"groups": groups, "normalise": normalise}
    if flags in ("mask", "both"):
        options["mask"] = torch.rand(b, t, generator=generator) < 0.7
    if flags in ("starts", "both"):
        options["starts"] = torch.rand(b, t, generator=generator) < 0.1
    state = state_of(b, groups * r, d, seed, torch.float64) if with_state else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "TILE", tile)
        slow, fast = (results_of(f.prefix_mean, arguments, state, options) for f in FORMS)
    torch.testing.assert_close(fast[:2], slow[:2], rtol=1e-9, atol=1e-12)
    for index, (a, e) in enumerate(zip(fast[2], slow[2], strict=True)):
        scale = e.abs().max().clamp_min(1)
        torch.testing.assert_close(a / scale, e / scale, rtol=1e-8, atol=1e-10, msg=str(index))


@pytest.mark.parametrize("in_cache", [True, False])
@pytest.mark.parametrize("length", [300, 1300])
@pytest.mark.parametrize("token", [False, True])
def test_rows_of_several_segments_have_the_gradients_of_the_recurrence(
    length, token, in_cache, monkeypatch
):
    """1,300 positions are two segments in the cache of a CPU, and one on a GPU."""
    monkeypatch.setattr(tiles, "in_cache", lambda like: in_cache)
    arguments = inputs(2, length, 3, 2, 5, torch.float64, low=0.3)
    if token:
        arguments = (*arguments[:3], by_token(arguments[3], length))
    state = state_of(2, 3, 2, 5, torch.float64)
    slow, fast = (
        results_of(form, arguments, state, {}) for form in (recurrence, chunked.prefix_mean)
    )
    torch.testing.assert_close(fast[:2], slow[:2], rtol=1e-9, atol=1e-11)
    for a, e in zip(fast[2], slow[2], strict=True):
        torch.testing.assert_close(a, e, rtol=1e-8, atol=1e-9 * e.abs().max().item())


@pytest.mark.parametrize("beta", [0.001, 0.3, 0.95, 0.999, 0.9999, None])
def test_float32_against_the_float64_recurrence(beta):
    """From forgetting at once to remembering for ten thousand positions; None for by token."""
    write, read, values, _ = inputs(2, 3000, 5, 3, 13)
    decay = torch.full((5,), beta or 0.0)
    if beta is None:
        decay = by_token(torch.tensor([0.001, 0.3, 0.95, 0.999, 0.9999]), 3000)
        decay[:, 1000:2000] = 0.9999  # long memory in between
    leaves = [x.requires_grad_() for x in (write, read, values, decay)]
    expected, end = recurrence(*leaves)
    out, state = chunked.prefix_mean(*leaves)
    assert relative_error(out.detach(), expected.detach()) < 1e-5
    torch.testing.assert_close(state.mass.double(), end.mass, rtol=1e-5, atol=0)
    sums = state.sums.detach(), end.sums.detach()
    assert relative_error(*sums) < 1e-4  # sums of both signs cancel
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    fast = torch.autograd.grad(out, leaves, gradient)
    slow = torch.autograd.grad(expected, leaves, gradient.double())
    for a, e in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-5 * e.abs().max().item())


@given(
    t=st.integers(2, 600),
    cuts=st.lists(st.floats(0, 1), min_size=1, max_size=5),
    seed=st.integers(0, 100),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    token=st.booleans(),
)
def test_any_split_through_the_state_gives_the_same(t, cuts, seed, dtype, token):
    write, read, values, decay = inputs(2, t, 4, 3, seed, dtype)
    decay = by_token(decay, t, seed) if token else decay
    whole, end = chunked.prefix_mean(write, read, values, decay)
    at = sorted({0, t, *(round(cut * t) for cut in cuts)})
    state, parts = None, []
    for first, last in pairwise(at):
        piece = [x[:, first:last] for x in (write, read, values)]
        own = decay[:, first:last] if token else decay
        part, state = chunked.prefix_mean(*piece, own, state)
        parts.append(part)
    tolerance = {"rtol": 1e-4, "atol": 2e-5} if dtype == torch.float32 else {}
    torch.testing.assert_close(torch.cat(parts, 1), whole, **tolerance)
    torch.testing.assert_close(state, end, **tolerance)


@pytest.mark.parametrize("silence", [8, 30, 160])
def test_a_forgotten_channel_is_empty(silence):
    """After 30 positions without writes 0.001^n is below 1e-30, and after 160 also 0.5^n."""
    t = silence + 3
    write = torch.zeros(1, t, 2)
    write[:, 0] = 0.5
    read, values = torch.full((1, t, 2), 0.5), torch.ones(1, t, 1)
    decay = torch.tensor([0.001, 0.5])
    leaves = [x.requires_grad_() for x in (write, read, values, decay)]
    out, state = chunked.prefix_mean(*leaves)
    expected, _ = naive.prefix_mean(*leaves)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    masses = {8: [1, 1], 30: [0, 1], 160: [0, 0]}[silence]
    assert out[0, -2, 0].item() == pytest.approx(0.5 * sum(masses))
    gradients = torch.autograd.grad(out.sum() + state.sums.sum(), leaves)
    assert all(torch.isfinite(g).all() for g in gradients)


def test_half_precision_is_computed_in_float32():
    write, read, values, decay = inputs(1, 70, 4, 3)
    low = [x.bfloat16() for x in (write, read, values)]
    with torch.autocast("cpu", torch.bfloat16):
        out, state = chunked.prefix_mean(*low, decay)
    expected, end = chunked.prefix_mean(*(x.float() for x in low), decay)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected.bfloat16())
    assert torch.equal(state.sums, end.sums)


@pytest.mark.parametrize("length", [256, 4096])
def test_saved_memory_is_far_below_a_state_per_position(length):
    """Including gates and values, which are half of it."""
    r, d, sizes = 32, 128, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    arguments = [x.requires_grad_() for x in inputs(2, length, r, d)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        _result = chunked.prefix_mean(*arguments)
    assert sum(sizes.values()) < 0.1 * 4 * 2 * length * r * d


DECAYS = [0.001, 0.1, 0.9, 0.99, 0.999, 0.9999]
NAMES = ("write", "read", "values", "decay")


def gradients(form, arguments):
    """Return d(out · g) of every input, for one g."""
    leaves = [x.clone().requires_grad_() for x in arguments]
    out, _ = form(*leaves)
    generator = torch.Generator().manual_seed(7)
    g = torch.randn(out.shape, generator=generator)
    return torch.autograd.grad((out * g.to(out.dtype)).sum(), leaves)


def softmax_rows(length, seed):
    """Gates from scores of unit variance, of six channels with :data:`DECAYS`."""
    generator = torch.Generator().manual_seed(seed)
    write, read = torch.randn(2, 1, length, len(DECAYS), generator=generator).softmax(-1)
    return write, read, torch.randn(1, length, 4, generator=generator), torch.tensor(DECAYS)


@pytest.mark.parametrize("length", [33, 700, 2048, pytest.param(65536, marks=pytest.mark.slow)])
def test_gradients_are_accurate_for_small_and_large_decays(length):
    """With a small β a query reads only the position before it, and gradients nearly cancel."""
    draws = []
    for seed in range(6 if length < 1000 else 1):
        arguments = softmax_rows(length, seed)
        fast = gradients(chunked.prefix_mean, arguments)
        slow = gradients(recurrence, [x.double() for x in arguments])
        draws.append([(a.double() - e, e) for a, e in zip(fast, slow, strict=True)])
    for name, *pairs in zip(NAMES, *draws, strict=True):
        # Over draws and positions: the gradient of β is one sum, which may be near 0 by chance.
        error, norm = (torch.stack(x).flatten(0, -2).norm(dim=0) for x in zip(*pairs, strict=True))
        assert (error / norm).max().item() < 4e-6, name


@pytest.mark.parametrize("length", [2048, pytest.param(65536, marks=pytest.mark.slow)])
def test_gradients_over_long_rows(length):
    """Relative errors: per channel for β, else over the row."""
    *tensors, _ = inputs(1, length, len(DECAYS), 4, 12)
    arguments = (*tensors, torch.tensor(DECAYS))
    fast = gradients(chunked.prefix_mean, arguments)
    slow = gradients(recurrence, [x.double() for x in arguments])
    for name, a, e in zip(NAMES, fast, slow, strict=True):
        error, norm = (x if name == "decay" else x.norm(dim=(0, 1)) for x in (a.double() - e, e))
        assert (error.abs() / norm.abs()).max().item() < 1e-5, name
