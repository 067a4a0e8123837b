"""Mixtures of experts: by hand, and against loops over tokens and experts."""

import pytest
import torch

from prismlm.errors import InputError
from prismlm.ops.experts import choose, mix, naive


def random_logits(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def test_choices_by_hand():
    p = torch.tensor([[0.1, 0.6, 0.3], [0.25, 0.5, 0.25]])
    two = choose(p.log(), 2)
    # Experts 0 and 2 of the second token are equal: the lower index.
    assert two.experts.tolist() == [[1, 2], [1, 0]]
    torch.testing.assert_close(two.weights, torch.tensor([[2 / 3, 1 / 3], [2 / 3, 1 / 3]]))
    one = choose(p.log(), 1)
    torch.testing.assert_close(one.weights, torch.tensor([[0.6], [0.5]]))
    assert choose(p.log().bfloat16(), 2).weights.dtype == torch.float32


@pytest.mark.parametrize(("experts", "chosen"), [(4, 1), (4, 2), (4, 4), (1, 1), (9, 3)])
def test_outputs_and_gradients_equal_a_loop_over_tokens_and_experts(experts, chosen):
    torch.manual_seed(0)
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    logits = random_logits(7, experts).requires_grad_()
    weights = torch.randn(experts, 5, 5, dtype=torch.float64, requires_grad=True)
    maps = [lambda rows, w=w: torch.tanh(rows @ w) for w in weights]
    results = []
    for form_choose, form_mix in ((choose, mix), (naive.choose, naive.mix)):
        choice = form_choose(logits, chosen)
        mixed = form_mix(x, choice, maps)
        g = torch.linspace(-1, 1, mixed.numel(), dtype=torch.float64).view_as(mixed)
        gradients = torch.autograd.grad((mixed * g).sum(), [x, logits, weights])
        results.append((*choice, mixed, *gradients))
    torch.testing.assert_close(*results)


def test_the_router_has_a_gradient_with_a_single_expert_per_token():
    logits = random_logits(6, 4).requires_grad_()
    x = torch.randn(6, 3, dtype=torch.float64)
    mixed = mix(x, choose(logits, 1), [lambda rows, s=s: s * rows for s in (1, 2, 3, 4)])
    assert torch.autograd.grad(mixed.sum(), logits)[0].abs().min() > 0


def test_an_expert_without_tokens_has_a_gradient_of_zero():
    weights = torch.ones(3, 2, requires_grad=True)
    logits = torch.tensor([[9.0, 0.0, -9.0]]).expand(4, 3)
    maps = [lambda rows, e=e: rows * weights[e] for e in range(3)]
    mixed = mix(torch.ones(4, 2), choose(logits, 2), maps)
    (gradient,) = torch.autograd.grad(mixed.sum(), weights)
    assert gradient[0].all()
    assert not gradient[2].any()


@pytest.mark.parametrize(
    ("experts", "chosen", "words"),
    [(4, k, f"{k} experts per token of a mixture of 4") for k in (0, 5, -1)]
    + [(0, 1, "mixture of 0 experts")],
)
def test_impossible_numbers_are_refused(experts, chosen, words):
    with pytest.raises(InputError, match=words):
        choose(torch.zeros(3, experts), chosen)
