"""Routing screened by a bf16 product, where that is taken for every shape it can."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prismlm.ops import prototype_head as ops
from prismlm.ops.prototype_head import naive, screened, tiled
from prismlm.ops.prototype_head import windows as windows_module

DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture(autouse=True, scope="module")
def screening():
    """Screen whatever the shape and the CPU; give the outcomes of the scans."""
    outcomes = []
    scan = screened.scan

    def recorded(*arguments):
        outcomes.append(scan(*arguments))
        return outcomes[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(screened, "supports", lambda z, *_: z.dtype in DTYPES)
        patch.setattr(screened, "scan", recorded)
        yield outcomes


def inputs(n, count, width, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    z, prototypes = (torch.randn(size, width, generator=generator) for size in (n, count))
    return z.to(dtype), prototypes.to(dtype)


def check_equals_naive(z, prototypes, k, mask=None):
    actual = tiled.route(z, prototypes, k, 1.0, mask)
    expected = naive.route(z, prototypes, k, 1.0, mask)
    assert actual.cosines.dtype == torch.float32
    assert torch.equal(actual.indices, expected.indices)
    assert torch.equal(actual.nearest_point, expected.nearest_point)
    torch.testing.assert_close(actual.cosines, expected.cosines, atol=1e-6, rtol=0)
    torch.testing.assert_close(
        actual.nearest_point_cosine, expected.nearest_point_cosine, atol=1e-6, rtol=0
    )


@given(
    n=st.integers(1, 40),
    base=st.integers(64, 150),
    repeats=st.integers(1, 3),
    width=st.integers(1, 40),
    k=st.integers(1, 12),
    noise=st.sampled_from([0.0, 1e-2, 0.3, 10.0]),
    seed=st.integers(0, 10_000),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    data=st.data(),
)
def test_equals_naive(n, base, repeats, width, k, noise, seed, dtypes, data):
    """With equal prototypes, equal and zero states, and states and prototypes close together."""
    z, prototypes = inputs(n, base, width, seed, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(width, generator=generator)
    z = (centre + noise * z).to(dtypes[0])
    prototypes = (centre + noise * prototypes).to(dtypes[1]).repeat(repeats, 1)
    for row in data.draw(st.lists(st.integers(0, n - 1), max_size=3)):
        z[row] = 0
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    check_equals_naive(z, prototypes, k, mask)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile_elements", [1, 2**20])
def test_rounding_to_bf16_hides_nothing(monkeypatch, screening, dtype, tile_elements):
    """Random vectors in few dimensions: hundreds of cosines within the rounding of the k-th."""
    monkeypatch.setattr(screened, "CROWDED", 100)
    monkeypatch.setattr(tiled, "TILE_ELEMENTS", tile_elements)
    z, prototypes = inputs(300, 700, 8, dtype=dtype)
    check_equals_naive(z, prototypes, 5)
    assert screening[-1] is not None


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bound_holds_for_the_worst_rounding(dtype):
    """Every element just short of where it would be rounded away from zero."""
    signs = inputs(40, 200, 64)
    z, prototypes = (x.sign().float() * (1 + 2.0**-8 - 2.0**-20) for x in signs)
    z[:, ::2] *= 0.3
    vectors = [screened.vectors(x.to(dtype)) for x in (z, prototypes)]
    exact = torch.nn.functional.cosine_similarity(
        vectors[0].full[:, None].double(), vectors[1].full[None].double(), dim=-1
    )
    tile = next(screened._tiles(*vectors, 4, 2**20))
    scores = tile.scores[:, :200].double()
    error = screened.error_of(*vectors)
    assert ((scores - exact).abs() <= error + screened.ROUNDING * scores.abs()).all()
    # It is a bound of this size that is needed: half of it does not hold for float32.
    loose = (scores - exact).abs() <= (error + screened.ROUNDING * scores.abs()) / 4
    assert not loose.all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_crowded_states_get_a_full_product(screening, dtype):
    """Sixty copies of one prototype: states near it have more best ones than are listed."""
    z, prototypes = inputs(100, 300, 32, dtype=dtype)
    prototypes[50:110] = prototypes[50]
    z[7:20] = (prototypes[50].float() + 0.1 * z[7:20].float()).to(dtype)
    z[3] = 0
    pair = screened.vectors_of(z, prototypes)
    watcher = screened._NearestStates(screened.error_of(*pair), 300, None)
    found = screened.screen(*pair, 4, 2**20, watcher.take)
    assert found.doubtful[[3, *range(7, 20)]].all()
    assert not found.doubtful.all()
    check_equals_naive(z, prototypes, 4)
    assert screening[-1] is not None


@pytest.mark.parametrize("close", ["states", "prototypes"])
def test_many_near_ties_are_left_to_the_float32_product(screening, close):
    z, prototypes = inputs(100, 300, 32)
    vectors = z if close == "states" else prototypes
    vectors[:] = (vectors[0].float() + 1e-3 * vectors.float()).bfloat16()
    check_equals_naive(z, prototypes, 4)
    assert screening[-1] is None


@pytest.mark.parametrize(("exponent", "screens"), [(-40, False), (-20, True), (20, True)])
def test_norms_at_the_ends_of_float32_are_not_screened(screening, exponent, screens):
    z, prototypes = inputs(50, 200, 24)
    z, prototypes = (x * 2.0**exponent for x in (z, prototypes))
    check_equals_naive(z, prototypes, 4)
    assert (screening[-1] is not None) == screens


def test_overflowing_states_are_not_screened():
    z, prototypes = inputs(50, 200, 24)
    z[1] = 3e38
    vectors = [screened.vectors(x) for x in (z, prototypes)]
    assert [screened.in_range(x) for x in vectors] == [False, True]


def test_a_mask_without_states():
    z, prototypes = inputs(50, 200, 24)
    routing = tiled.route(z, prototypes, 4, 1.0, torch.zeros(50, dtype=torch.bool))
    assert routing.nearest_point.tolist() == [-1] * 200
    assert routing.nearest_point_cosine.tolist() == [-1.0] * 200


def test_equal_states_go_to_the_lower_index():
    z, prototypes = inputs(40, 200, 24)
    z = z.repeat(2, 1)
    check_equals_naive(z, prototypes, 4)
    mask = torch.arange(80) >= 20
    check_equals_naive(z, prototypes, 4, mask)


def test_near_ties_among_states_are_settled_in_float64(screening):
    """Reordered, a state is as near to a constant prototype; float32 sums tell them apart."""
    z, prototypes = inputs(60, 200, 301)
    prototypes[::50] = 213 / 128
    base = z[0].abs()
    for row in range(60):
        z[row] = base[torch.randperm(301, generator=torch.Generator().manual_seed(row))]
    check_equals_naive(z, prototypes, 4)
    assert screening[-1] is not None
    assert tiled.route(z, prototypes, 4, 1.0).nearest_point[::50].tolist() == [0] * 4


def test_gradients_equal_those_of_float32():
    z, prototypes = inputs(60, 200, 24)
    gradients = []
    for dtype in (torch.bfloat16, torch.float32):
        states, bank = (x.detach().to(dtype).requires_grad_() for x in (z, prototypes))
        routing = tiled.route(states, bank, 4, 1.0)
        rebuilt = ops.reconstruct(routing, bank)
        (routing.nearest_point_cosine.sum() + rebuilt.square().sum()).backward()
        gradients.append((states.grad.float(), bank.grad.float()))
    for low, full in zip(*gradients, strict=True):
        torch.testing.assert_close(low, full, rtol=1e-2, atol=1e-2)


def test_inputs_need_not_be_contiguous():
    z, prototypes = inputs(60, 200, 24)
    expected = tiled.route(z, prototypes, 4, 1.0)
    actual = tiled.route(z.T.contiguous().T, prototypes.T.contiguous().T, 4, 1.0)
    assert torch.equal(actual.indices, expected.indices)
    assert torch.equal(actual.cosines, expected.cosines)


def test_no_matrix_of_states_by_prototypes(monkeypatch, screening):
    n, count = 8192, 2048
    z, prototypes = inputs(n, count, 16)
    monkeypatch.setattr(tiled, "TILE_THREADS", 1)
    with torch.profiler.profile(profile_memory=True) as profile:
        tiled.route(z, prototypes, 4, 1.0)
    assert screening[-1] is not None
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest <= 2 * n * count / 4


def test_no_position_that_is_owned_finds_nothing():
    z, prototypes, owned = windows(3)
    found = ops.scan_windows(z, prototypes, 4, torch.zeros_like(owned))
    assert found.indices.shape == (0, 4)
    assert not len(found.window)


def test_fp16_is_not_screened():
    z, prototypes = inputs(40, 200, 24, dtype=torch.float16)
    check_equals_naive(z * 1.003, prototypes, 4)


def windows(seed, dtype=torch.float32):
    z, prototypes = inputs(6 * 40, 300, 24, seed, dtype)
    owned = torch.rand(6, 40, generator=torch.Generator().manual_seed(seed)) > 0.3
    return z.view(6, 40, 24), prototypes, owned


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile_elements", [300 * 32, 2**20])
@pytest.mark.parametrize("most_pairs", [0, 2**17])
def test_windows_equal_those_of_a_float32_product(monkeypatch, dtype, tile_elements, most_pairs):
    """Also where so many pairs wait after the last tile that they are summed at once."""
    monkeypatch.setattr(tiled, "TILE_ELEMENTS", tile_elements)
    monkeypatch.setattr(windows_module, "MOST_PAIRS", most_pairs)
    z, prototypes, owned = windows(3, dtype)
    threshold = torch.linspace(-1.0, 0.7, 300)
    calls = []
    with monkeypatch.context() as patch:
        patch.setattr(screened, "vectors_of", lambda *_: calls.append(1))
        expected = ops.scan_windows(z, prototypes, 4, owned, threshold)
    assert calls == [1]
    actual = ops.scan_windows(z, prototypes, 4, owned, threshold)
    assert torch.equal(actual.indices, expected.indices)
    torch.testing.assert_close(actual.cosines, expected.cosines, atol=1e-6, rtol=0)
    found, wanted = (
        dict(
            zip(
                zip(s.window.tolist(), s.offset.tolist(), s.prototype.tolist(), strict=True),
                s.cosine.tolist(),
                strict=True,
            )
        )
        for s in (actual, expected)
    )
    assert found == pytest.approx(wanted, abs=1e-6)
    assert len(found) == len(actual.cosine) > 300


def test_a_threshold_changes_no_bit_of_what_reaches_it(monkeypatch):
    """Else shards of an index, which have seen other text before, would differ in last bits."""
    taken = []
    scan = windows_module._scan_screened

    def recorded(*arguments):
        taken.append(scan(*arguments))
        return taken[-1]

    monkeypatch.setattr(windows_module, "_scan_screened", recorded)
    z, prototypes, owned = windows(4)
    everything = ops.scan_windows(z, prototypes, 4, owned)
    some = ops.scan_windows(z, prototypes, 4, owned, torch.full((300,), 0.45))
    assert [found is not None for found in taken] == [True, True]
    assert torch.equal(some.indices, everything.indices)
    assert torch.equal(some.cosines, everything.cosines)
    kept = everything.cosine >= 0.45
    assert 100 < kept.sum() < len(kept) / 2
    for before, after in zip(everything[2:], some[2:], strict=True):
        assert torch.equal(before[kept], after)


def test_equal_positions_of_a_window_give_the_first():
    z, prototypes, _ = windows(5)
    z[:, 7] = z[:, 30] = z[:, 21]
    owned = torch.ones(6, 40, dtype=torch.bool)
    owned[3, 7] = False
    found = ops.scan_windows(z, prototypes, 4, owned)
    offsets = [found.offset[found.window == window].tolist() for window in range(6)]
    assert all(7 in of and 21 not in of and 30 not in of for of in offsets[:3])
    assert 21 in offsets[3]
    assert 30 not in offsets[3]


def test_products_in_bf16_have_few_numbers_of_rows(monkeypatch):
    """What is compiled for each number of rows is kept, a megabyte each."""
    sizes = set()
    product = torch.mm

    def counted(left, right, *, out=None):
        if left.dtype == torch.bfloat16:
            sizes.add(len(left))
        return product(left, right, out=out)

    monkeypatch.setattr(screened.torch, "mm", counted)
    for n in range(1, 140, 9):
        check_equals_naive(*inputs(n, 200, 24), 4)
    assert sizes == {64, 128, 192}
