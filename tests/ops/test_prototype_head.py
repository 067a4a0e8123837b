"""Routing and the losses: by hand, and against the naive forms with every gradient."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from prismlm.ops import prototype_head as ops
from prismlm.ops.prototype_head import fast, naive
from prismlm.ops.prototype_head.fast import SPARE, column_best, largest, pair_products

FORMS = [naive, fast]
# Cosines by hand: rows (0.6, 0.8, -0.6) and (0, -1, 0).
Z = torch.tensor([[3.0, 4.0], [0.0, -2.0]])
PROTOTYPES = torch.tensor([[2.0, 0.0], [0.0, 5.0], [-1.0, 0.0]])


def inputs(n, k, d, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(n, d, generator=generator, dtype=dtype)
    prototypes = torch.randn(k, d, generator=generator, dtype=dtype)
    return z.requires_grad_(), prototypes.requires_grad_()


@pytest.mark.parametrize("form", FORMS)
def test_hand_computed(form):
    routing = form.route(Z, PROTOTYPES, 2, 2.0)
    assert routing.indices[0].tolist() == [1, 0]
    # A tie may come in any order.
    assert sorted(routing.indices[1].tolist()) == [0, 2]
    torch.testing.assert_close(routing.cosines, torch.tensor([[0.8, 0.6], [0.0, 0.0]]))
    torch.testing.assert_close(routing.activations, torch.tensor([[1.6, 1.2], [0.0, 0.0]]))
    torch.testing.assert_close(routing.nearest_prototype_cosine, torch.tensor([0.8, 0.0]))
    assert routing.nearest_point.tolist() == [0, 0, 1]
    torch.testing.assert_close(routing.nearest_point_cosine, torch.tensor([0.6, 0.8, 0.0]))
    reconstruction = form.reconstruct(routing, PROTOTYPES)
    torch.testing.assert_close(reconstruction, torch.tensor([[2.4, 8.0], [0.0, 0.0]]))


def test_losses_hand_computed():
    routing = ops.route(Z, PROTOTYPES, 2, 2.0)
    reconstruction = ops.reconstruct(routing, PROTOTYPES)
    assert ops.prototype_pull(routing).item() == pytest.approx(-(0.6 + 0.8 + 0.0) / 3)
    assert ops.point_pull(routing).item() == pytest.approx(-0.4)
    # r = (0.6, -4) and (0, -2): squared norms 16.36 and 4.
    assert ops.residual(Z, reconstruction, reduction="sum").item() == pytest.approx(10.18)
    assert ops.residual(Z, reconstruction).item() == pytest.approx(5.09)
    only_second = torch.tensor([False, True])
    assert ops.residual(Z, reconstruction, only_second, "sum").item() == pytest.approx(4.0)
    assert ops.point_pull(routing, only_second).item() == pytest.approx(0.0)
    # Squared cosines of the three pairs: 0, 1, 0; each counts twice among six ordered pairs.
    assert ops.diversity(PROTOTYPES).item() == pytest.approx(1 / 3)


def outputs_and_gradients(form, z, prototypes, k, mask=None):
    scale = torch.tensor(1.7, dtype=z.dtype, requires_grad=True)
    # Clones have the strides of their originals.
    z, prototypes = (x.detach().clone().requires_grad_() for x in (z, prototypes))
    routing = form.route(z, prototypes, k, scale, mask)
    rebuilt = form.reconstruct(routing, prototypes)
    weights = torch.linspace(0.5, 1.5, k, dtype=z.dtype)
    loss = ((routing.activations + routing.cosines.square()) * weights).sum()
    loss = loss + ops.residual(z, rebuilt, mask) + ops.prototype_pull(routing)
    loss = loss + ops.point_pull(routing, mask)
    (loss + (naive if form is naive else ops).diversity(prototypes)).backward()
    return routing, rebuilt, (z.grad, prototypes.grad, scale.grad)


@given(
    n=st.integers(1, 40),
    count=st.integers(1, 48),
    d=st.integers(2, 9),
    seed=st.integers(0, 10_000),
    tile=st.sampled_from([1, 64, fast.TILE_ELEMENTS]),
    transposed=st.booleans(),
    data=st.data(),
)
def test_fast_equals_naive(n, count, d, seed, tile, transposed, data):
    """Outputs and every gradient, in float64, where no two cosines are within the rounding."""
    k = data.draw(st.integers(1, count))
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    given = inputs(n, count, d, seed, torch.float64)
    given = [x.T.contiguous().T for x in given] if transposed else given
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast, "TILE_ELEMENTS", tile)
        slow, quick = (outputs_and_gradients(form, *given, k, mask) for form in FORMS)
    torch.testing.assert_close(quick, slow, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("score", [torch.float32, torch.bfloat16, torch.float16])
def test_a_low_precision_product_selects_and_float32_ranks(monkeypatch, score, dtype):
    monkeypatch.setattr(fast, "score_dtype", lambda *_: score)
    z, prototypes = (x.detach().to(dtype).float() for x in inputs(300, 1200, 48))
    routing, rebuilt, grads = outputs_and_gradients(fast, z, prototypes, 16)
    slow, slow_rebuilt, slow_grads = outputs_and_gradients(naive, z, prototypes, 16)
    assert (routing.indices == slow.indices).float().mean() > 0.999
    assert routing.cosines.dtype == torch.float32
    torch.testing.assert_close(routing.cosines, slow.cosines, atol=2e-6, rtol=0)
    # The nearest state has the largest score; its cosine is float32's.
    expected = F.cosine_similarity(z[routing.nearest_point], prototypes)
    torch.testing.assert_close(routing.nearest_point_cosine, expected, atol=2e-6, rtol=0)
    bound = 56 * torch.finfo(torch.float32).eps
    bound += 1.5 * torch.finfo(score).eps if score != torch.float32 else 0.0
    assert (routing.nearest_point_cosine >= slow.nearest_point_cosine - bound).all()
    torch.testing.assert_close(rebuilt, slow_rebuilt, atol=2e-2, rtol=1e-2)
    if score == torch.float32:
        torch.testing.assert_close(rebuilt, slow_rebuilt)
        torch.testing.assert_close(grads, slow_grads, atol=1e-4, rtol=1e-3)


@given(
    n=st.integers(1, 40),
    count=st.integers(1, 200),
    data=st.data(),
    levels=st.sampled_from([3, 1000]),
)
def test_selection_equals_sorting(n, count, data, levels):
    """Of any width and group size, with many equal values or few."""
    k = data.draw(st.integers(1, count))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    scores = torch.randint(levels, (n, count), generator=generator).float()
    values, columns = largest(scores, k)
    assert torch.equal(values, scores.sort(dim=1, descending=True).values[:, :k])
    assert torch.equal(scores.gather(1, columns), values)
    assert all(len(set(row)) == k for row in columns.tolist())
    best, row = column_best(scores)
    assert torch.equal(best, scores.amax(0))
    assert torch.equal(scores.gather(0, row[None])[0], best)


def test_autocast_changes_nothing():
    z, prototypes = inputs(64, 100, 48)
    expected = fast.route(z, prototypes, 4, 1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = fast.route(z, prototypes, 4, 1.0)
    assert torch.equal(actual.cosines, expected.cosines)
    assert torch.equal(actual.nearest_point_cosine, expected.nearest_point_cosine)


@pytest.mark.parametrize("form", FORMS)
def test_zero_rows_have_cosine_zero_and_no_gradient(form):
    z = torch.tensor([[0.0, 0.0], [1.0, 0.0]], requires_grad=True)
    prototypes = torch.tensor([[0.0, 0.0], [1.0, 1.0]], requires_grad=True)
    routing = form.route(z, prototypes, 2, 1.0)
    assert routing.cosines[0].tolist() == [0.0, 0.0]
    (routing.cosines.sum() + routing.nearest_point_cosine.sum()).backward()
    assert z.grad[0].tolist() == [0.0, 0.0]
    assert prototypes.grad[0].tolist() == [0.0, 0.0]
    assert torch.isfinite(z.grad).all()
    assert torch.isfinite(prototypes.grad).all()


@given(count=st.integers(1, 20), width=st.integers(1, 12), seed=st.integers(0, 1000))
def test_diversity_equals_pairs_and_keeps_the_welch_bound(count, width, seed):
    _, prototypes = inputs(1, count, width, seed, dtype=torch.float64)
    actual = ops.diversity(prototypes)
    torch.testing.assert_close(actual, naive.diversity(prototypes))
    if count > width:
        assert actual.item() >= (count - width) / (width * (count - 1)) - 1e-12


def test_no_matrix_of_states_by_prototypes(monkeypatch):
    """Peak memory of forward and backward stays far under the N×K matrix."""
    n, count = 8192, 2048
    z, prototypes = inputs(n, count, 16)
    monkeypatch.setattr(fast, "TILE_ELEMENTS", 2**20)
    with torch.profiler.profile(profile_memory=True) as profile:
        routing = fast.route(z, prototypes, 4, 1.0)
        (routing.cosines.sum() + routing.nearest_point_cosine.sum()).backward()
    peak = max(event.self_cpu_memory_usage for event in profile.events())
    assert peak <= 2 * 4 * max(fast.TILE_ELEMENTS, n * (4 + SPARE))
    assert peak < 4 * n * count / 4


@given(
    n=st.integers(0, 20),
    count=st.integers(1, 40),
    width=st.integers(1, 20),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_nearest_equals_routing_of_states(n, count, width, dtype, seed, data):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(n, width, generator=generator).to(dtype)
    prototypes = torch.randn(count, width, generator=generator).to(dtype)
    k = data.draw(st.integers(1, count))
    nearest = ops.nearest(z, prototypes, k, 1.7)
    expected = naive.route(z, prototypes, k, 1.7)
    assert all(len(set(row)) == k for row in nearest.indices.tolist())
    torch.testing.assert_close(nearest.cosines, expected.cosines, atol=1e-6, rtol=0)
    torch.testing.assert_close(nearest.activations, expected.activations, atol=2e-6, rtol=0)


def test_products_of_pairs_by_hand():
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
def test_products_of_pairs_equal_the_matrix_and_each_alone(n, m, width, dtype, data):
    of_row = st.lists(st.integers(0, m - 1), max_size=3, unique=True)
    listed = data.draw(st.lists(of_row, min_size=n, max_size=n))
    counts = torch.tensor([len(row) for row in listed])
    starts = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
    total = int(starts[-1])
    columns = torch.tensor([column for row in listed for column in row], dtype=torch.long)
    generator = torch.Generator().manual_seed(width)
    left, right = (torch.randn(s, width, generator=generator, dtype=dtype) for s in (n, m))
    products = pair_products(starts, columns, left, right)
    rows = torch.repeat_interleave(counts)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {}
    torch.testing.assert_close(products, (left @ right.T)[rows, columns], **tolerance)
    for pair in range(total):
        one = pair_products(
            torch.tensor([0, 1]), columns[pair, None], left[rows[pair], None], right
        )
        assert torch.equal(one[0], products[pair])
