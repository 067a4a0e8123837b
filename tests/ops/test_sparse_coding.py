"""ISTA steps: by hand, against the naive form, and as descent on the LASSO."""

import pytest
import torch

from prismlm.errors import InputError
from prismlm.ops.sparse_coding import largest_step, naive, sparse_code

INF, NAN = float("inf"), float("nan")


def drawn(atoms, width=4, rows=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(2, rows, width, dtype=torch.float64, generator=generator)
    dictionary = torch.randn(width, atoms, dtype=torch.float64, generator=generator) / width**0.5
    return z, dictionary


def test_hand_computed():
    # D a = (2, 1), z − D a = (1, −1), Dᵀ of that (1, −1, 1 · 1 + 2 · −1 = −1).
    dictionary = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 2.0]])
    code, z = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([[3.0, 0.0]])
    stepped = sparse_code(z, dictionary, step=0.5, threshold=0.2, steps=1, start=code)
    torch.testing.assert_close(stepped, torch.tensor([[2.4, 0.4, 0.0]]))
    # From 0: 0.5 · (Dᵀ z − 0.2) = 0.5 · (2.8, −0.2, 2.8).
    first = sparse_code(z, dictionary, step=0.5, threshold=0.2, steps=1)
    torch.testing.assert_close(first, torch.tensor([[1.4, 0.0, 1.4]]))
    # D a = (2.8, 2.8), rest (0.2, −2.8), Dᵀ rest (0.2, −2.8, −5.4).
    second = sparse_code(z, dictionary, step=0.5, threshold=0.2, steps=2)
    torch.testing.assert_close(second, torch.tensor([[1.4, 0.0, 0.0]]))


def test_the_complete_step_as_crate_prints_it():
    z, dictionary = drawn(4)
    found = sparse_code(z, dictionary, step=0.1, threshold=0.3, steps=1, start=z)
    rows = torch.stack(
        [
            torch.relu(p + 0.1 * dictionary.T @ (p - dictionary @ p) - 0.1 * 0.3)
            for p in z.flatten(0, 1)
        ]
    )
    torch.testing.assert_close(found, rows.view_as(z))


@pytest.mark.parametrize("atoms", [3, 4, 9])
@pytest.mark.parametrize("started", [False, True])
def test_it_equals_one_atom_at_a_time_with_every_gradient(atoms, started):
    z, dictionary = drawn(atoms)
    start = torch.rand(2, 5, atoms, dtype=torch.float64) if started else None
    leaves = [t.requires_grad_() for t in (z, dictionary, start) if t is not None]
    settings = {"step": 0.2, "threshold": 0.15, "steps": 3, "start": start}
    fast = sparse_code(z, dictionary, **settings)
    slow = naive.sparse_code(z, dictionary, **settings)
    assert 0 < (fast == 0).double().mean() < 1
    torch.testing.assert_close(fast, slow)
    g = torch.randn_like(fast)
    torch.testing.assert_close(*(torch.autograd.grad((a * g).sum(), leaves) for a in (fast, slow)))


def test_gradients_against_differences():
    z, dictionary = drawn(6, rows=2)
    code = torch.rand(2, 2, 6, dtype=torch.float64, requires_grad=True)
    z.requires_grad_(), dictionary.requires_grad_()

    def steps(z, dictionary, start=None):
        return sparse_code(z, dictionary, step=0.2, threshold=0.15, steps=3, start=start)

    assert torch.autograd.gradcheck(steps, (z, dictionary, code))
    assert torch.autograd.gradcheck(steps, (z, dictionary))


def test_small_steps_descend_on_the_lasso_and_large_ones_do_not():
    z, dictionary = drawn(16, width=8, rows=50)
    step = largest_step(dictionary)
    assert step == pytest.approx(float(torch.linalg.svdvals(dictionary)[0]) ** -2)
    assert largest_step(dictionary.T.float()) == pytest.approx(step, rel=1e-5)

    def course(step):
        """Return ½‖z − D a‖² + θ Σ a before each of 25 steps."""
        code, values = torch.zeros(2, 50, 16, dtype=torch.float64), []
        for _ in range(25):
            error = z - code @ dictionary.T
            values.append(error.square().sum(-1) / 2 + 0.1 * code.sum(-1))
            code = sparse_code(z, dictionary, step=step, threshold=0.1, steps=1, start=code)
        return torch.stack(values)

    small = course(step)
    assert (small[1:] <= small[:-1] + 1e-12).all()
    assert (small[-1] < small[0]).all()
    assert small[-1].mean() < 0.6 * small[0].mean()
    assert (course(3 * step).diff(dim=0) > 0).any()


def test_scaling_the_dictionary_scales_step_and_threshold():
    z, dictionary = drawn(9)
    scaled = sparse_code(z, 1.5 * dictionary, step=0.1, threshold=0.3, steps=3)
    same = sparse_code(z, dictionary, step=0.1 * 1.5**2, threshold=0.3 / 1.5, steps=3)
    torch.testing.assert_close(1.5 * scaled @ dictionary.T, same @ dictionary.T)


def test_a_larger_threshold_makes_sparser_codes():
    z, dictionary = drawn(16, width=8, rows=50)
    shares = [
        float((sparse_code(z, dictionary, step=0.1, threshold=t, steps=20) > 0).double().mean())
        for t in (0.0, 0.3, 1.0)
    ]
    assert shares[0] > shares[1] > shares[2] > 0
    code = sparse_code(z, dictionary, step=0.1, threshold=100.0, steps=20)
    assert not code.any()


def test_wrong_input():
    z, dictionary = drawn(6)
    good = {"step": 0.1, "threshold": 0.1, "steps": 1}
    for changes, words in (
        *(({"step": s}, f"step size of sparse coding is {s}") for s in (0.0, -0.5, INF, NAN)),
        ({"threshold": -0.1}, r"θ of sparse coding is -0\.1"),
        ({"steps": 0}, "in 0 steps"),
    ):
        with pytest.raises(InputError, match=words):
            sparse_code(z, dictionary, **good | changes)
    with pytest.raises(InputError, match=r"expected \[\.\.\., d\] and \[d, m\]"):
        sparse_code.__wrapped__(z[..., :3], dictionary, **good)
    with pytest.raises(InputError, match=r"the code is \[2, 5, 4\]: expected \[2, 5, 6\]"):
        sparse_code.__wrapped__(z, dictionary, **good, start=z)
    assert sparse_code(z, dictionary, **good | {"threshold": 0.0}).any()
