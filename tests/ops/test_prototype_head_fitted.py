"""Matching pursuit and fitted weights: by hand and against the naive forms."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from prismlm.ops import tiles
from prismlm.ops.prototype_head import fit_weights, fitted, naive, nearest, pursue


def problem(seed, states=6, prototypes=14, width=5, k=6, shift=0.0):
    """Return states, unit prototypes and distinct indices; a shift makes all vectors similar."""
    generator = torch.Generator().manual_seed(seed)
    z, p = (
        torch.randn(rows, width, generator=generator, dtype=torch.float64) + shift
        for rows in (states, prototypes)
    )
    order = torch.rand(states, prototypes, generator=generator).argsort(1)
    return z, F.normalize(p, dim=1), order[:, :k]


def test_by_hand():
    """One prototype: (u·z) / (1 + λ); a second of the opposite direction has no weight."""
    z = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    unit = torch.tensor([[1.0, 0.0], [0.0, -1.0], [0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    indices = torch.tensor([[0, 1], [2, 0], [0, 3]])
    # Equal prototypes share the weight: 2 w (1 + λ/2) = u·z.
    expected = [[3 / 1.001, 0.0], [4 / 1.001, 3 / 1.001], [3 / 2.001, 3 / 2.001]]
    weights = fit_weights(z.expand(3, 2), unit, indices)
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))


def assert_as_naive(z, unit, indices):
    """Weights, by SciPy, and their gradients."""
    results = []
    for form in (naive.fit_weights, fit_weights):
        inputs = [value.clone().requires_grad_() for value in (z, unit)]
        weights = form(*inputs, indices)
        (weights * torch.linspace(-1, 2, weights.numel()).view_as(weights)).sum().backward()
        results.append([weights.detach(), *(value.grad for value in inputs)])
    torch.testing.assert_close(*results, rtol=1e-7, atol=1e-9)
    assert all(value.abs().max() > 0 for value in results[0])


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    shift=st.sampled_from([0.0, 0.5, 3.0, -3.0]),
    k=st.integers(1, 12),
    in_cache=st.booleans(),
)
def test_weights_and_gradients_equal_the_naive_form(seed, shift, k, in_cache):
    """On a CPU, and in the rounds of a GPU, which suffice for k ≤ d."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "in_cache", lambda like: in_cache)
        assert_as_naive(*problem(seed, prototypes=14, k=k if in_cache else min(k, 5), shift=shift))


def test_sign_changes_that_cycle():
    """With k > d, exchanging all wrong signs at once does not end for some states."""
    assert_as_naive(*problem(11, states=400, prototypes=30, width=8, k=20, shift=0.3))


def test_float32_is_close_and_tiles_change_nothing(monkeypatch):
    monkeypatch.setattr(fitted, "STATES", 16)
    z, unit, indices = problem(7, states=3 * fitted.STATES + 1, prototypes=60, width=24, k=16)
    exact = fit_weights(z, unit, indices)
    single = fit_weights(z.float(), unit.float(), indices)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), exact, atol=1e-4, rtol=1e-3)
    alone = torch.cat(
        [fit_weights(state[None], unit, row[None]) for state, row in zip(z, indices, strict=True)]
    )
    torch.testing.assert_close(alone, exact)


def chosen_of(z, prototypes, k):
    first = nearest(z, prototypes, min(k, fitted.PICKS), 1.0).indices
    return pursue(z, prototypes, k, first).indices


def test_pursuit_by_hand(monkeypatch):
    """The nearest to (3, 4, 0) leaves (3, 0, 0), to which the second nearest is orthogonal."""
    monkeypatch.setattr(fitted, "PICKS", 1)
    z = torch.tensor([[3.0, 4.0, 0.0]])
    prototypes = torch.tensor([[0.0, 7.0, 0.0], [0.5, 0.0, 0.0], [0.0, 2.0, 2.0]])
    assert chosen_of(z, prototypes, 2).tolist() == [[0, 1]]
    result = pursue(z, prototypes, 2, torch.tensor([[0]]))
    torch.testing.assert_close(result.cosines, torch.tensor([[4 / 5, 3 / 5]]))
    # w / ‖p‖ with w = 4 / 1.001, 3 / 1.001.
    torch.testing.assert_close(result.activations, torch.tensor([[4 / 7.007, 6 / 1.001]]))


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.sampled_from([1, 2, 3, 9, 16]), st.sampled_from([1, 4, 8, 10]))
def test_pursuit_equals_the_naive_form(seed, picks, k):
    z, unit, _ = problem(seed, states=2, prototypes=10, width=6)
    prototypes = unit * torch.linspace(0.2, 3, 10, dtype=unit.dtype)[:, None]
    with pytest.MonkeyPatch.context() as patch:
        for module in (fitted, naive):
            patch.setattr(module, "PICKS", picks)
        assert chosen_of(z, prototypes, k).tolist() == naive.pursue(z, prototypes, k)


def test_pursuit_does_not_depend_on_tiles_and_has_no_duplicates(monkeypatch):
    z, unit, _ = problem(17, states=41, prototypes=50, width=6)
    expected = [chosen_of(state[None], unit, 40)[0].tolist() for state in z]
    monkeypatch.setattr(fitted, "STATES", 7)
    assert chosen_of(z, unit, 40).tolist() == expected
    monkeypatch.setattr(tiles, "in_cache", lambda like: False)
    assert chosen_of(z, unit, 40).tolist() == expected
    assert all(len(set(row)) == 40 for row in expected)
    # Also for a state with no error left, and for a zero state.
    states = torch.stack([unit[3], torch.zeros(6, dtype=unit.dtype)])
    assert all(len(set(row)) == 50 for row in chosen_of(states, unit, 50).tolist())


def test_gradients_of_a_pursuit_are_those_of_its_weights():
    """α = w / ‖p‖, differentiated by autograd through the naive weights."""
    z, unit, _ = problem(23, states=3, prototypes=30, width=9)
    lengths = torch.linspace(0.2, 3, 30, dtype=unit.dtype)[:, None]
    results = []
    for naively in (False, True):
        inputs = [value.clone().requires_grad_() for value in (z, unit * lengths)]
        first = nearest(*inputs, 4, 1.0).indices
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fitted, "PICKS", 4)
            indices, _, activations = pursue(*inputs, 11, first)
        if naively:
            norms = inputs[1].norm(dim=1, keepdim=True)
            weights = naive.fit_weights(inputs[0], inputs[1] / norms, indices)
            activations = weights / norms.squeeze(1)[indices]
        (activations * torch.linspace(-1, 2, 33).view(3, 11)).sum().backward()
        results.append([activations.detach(), *(value.grad for value in inputs)])
    torch.testing.assert_close(*results)
    assert all(value.abs().max() > 0 for value in results[0])


def test_a_low_precision_product_chooses_nearly_the_same(monkeypatch):
    z, unit, _ = problem(31, states=50, prototypes=300, width=24)
    z, bank = z.float(), (unit * torch.linspace(0.2, 3, 300)[:, None]).float()
    # A state that is a prototype, with little error after it, and a zero state.
    z[7], z[8] = bank[3], 0
    monkeypatch.setattr(fitted, "PICKS", 4)
    first = nearest(z, bank, 4, 1.0).indices
    exact = pursue(z, bank, 18, first)
    monkeypatch.setattr(fitted.fast, "score_dtype", lambda *_: torch.bfloat16)
    low = pursue(z, bank, 18, first)
    assert all(len(set(row)) == 18 for row in low.indices.tolist())
    others = [i for i in range(50) if i not in (7, 8)]
    same = low.indices[others].sort(1).values == exact.indices[others].sort(1).values
    assert same.float().mean() > 0.9
    errors = [
        (z - torch.einsum("nk,nkd->nd", r.activations, bank[r.indices])).norm(dim=1)[others].mean()
        for r in (low, exact)
    ]
    assert errors[0] < 1.01 * errors[1]
