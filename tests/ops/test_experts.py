"""Mixtures of experts: choices and losses by hand, against plain loops and Hugging Face's loss."""

import pytest
import torch
from torch.nn import functional as F
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from prismlm.errors import InputError
from prismlm.ops.experts import (
    MLPWeights,
    choose,
    grouped_linear,
    load_balancing_loss,
    mix,
    mix_mlps,
    naive,
)


def logits_of(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def test_routes_by_hand():
    p = torch.tensor([[0.1, 0.6, 0.3], [0.25, 0.5, 0.25]])
    two = choose(p.log(), 2)
    # Of the second token's 0 and 2, alike, the lower.
    assert two.experts.tolist() == [[1, 2], [1, 0]]
    torch.testing.assert_close(two.weights, torch.tensor([[2 / 3, 1 / 3], [2 / 3, 1 / 3]]))
    one = choose(p.log(), 1)
    torch.testing.assert_close(one.weights, torch.tensor([[0.6], [0.5]]))
    assert choose(p.log().bfloat16(), 2).weights.dtype == torch.float32


@pytest.mark.parametrize(("experts", "chosen"), [(4, 1), (4, 2), (4, 4), (1, 1), (9, 3)])
def test_a_mixture_equals_a_loop_over_tokens_and_experts_with_every_gradient(experts, chosen):
    torch.manual_seed(0)
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    logits = logits_of(7, experts).requires_grad_()
    weights = torch.randn(experts, 5, 5, dtype=torch.float64, requires_grad=True)
    maps = [lambda rows, w=w: torch.tanh(rows @ w) for w in weights]
    results = []
    for ways in ((choose, mix), (naive.choose, naive.mix)):
        choice = ways[0](logits, chosen)
        mixed = ways[1](x, choice, maps)
        g = torch.linspace(-1, 1, mixed.numel(), dtype=torch.float64).view_as(mixed)
        found = torch.autograd.grad((mixed * g).sum(), [x, logits, weights])
        results.append((*choice, mixed, *found))
    for a, e in zip(*results, strict=True):
        torch.testing.assert_close(a, e)


def mlps_of(experts, *, bias, width=5, inner=8):
    generator = torch.Generator().manual_seed(4)
    shapes = [(inner, width), (width, inner)] + ([(inner,), (width,)] if bias else [])
    drawn = [
        [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(experts)]
        for shape in shapes
    ]
    return MLPWeights(*([one.requires_grad_() for one in kind] for kind in drawn))


def as_maps(weights):
    none = [None] * len(weights.up)
    biases = weights.up_bias or none, weights.down_bias or none
    return [
        lambda rows, u=u, d=d, b=b, c=c: F.linear(F.gelu(F.linear(rows, u, b)), d, c)
        for u, d, b, c in zip(weights.up, weights.down, *biases, strict=True)
    ]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("experts", "chosen"), [(4, 1), (4, 2), (1, 1), (9, 3)])
def test_the_compiled_form_equals_the_loop_with_every_gradient(experts, chosen, bias):
    torch.manual_seed(0)
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    logits, weights = logits_of(7, experts).requires_grad_(), mlps_of(experts, bias=bias)
    every = [x, logits, *(one for kind in weights for one in kind)]
    results = []
    for mixed in (
        mix_mlps(x, choose(logits, chosen), weights),
        naive.mix(x, naive.choose(logits, chosen), as_maps(weights)),
    ):
        g = torch.linspace(-1, 1, mixed.numel(), dtype=torch.float64).view_as(mixed)
        found = torch.autograd.grad((mixed * g).sum(), every, materialize_grads=True)
        results.append((mixed, *found))
    for a, e in zip(*results, strict=True):
        torch.testing.assert_close(a, e)


def test_linear_maps_of_groups_by_hand():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    weights = [torch.tensor([[1.0, 1.0]]), torch.tensor([[9.0, 9.0]]), torch.tensor([[1.0, -1.0]])]
    biases = [torch.tensor([0.5]), torch.tensor([0.5]), torch.tensor([-0.5])]
    found = grouped_linear(x, torch.tensor([2, 0, 1]), weights, biases)
    assert found.tolist() == [[3.5], [7.5], [-1.5]]
    with pytest.raises(RuntimeError):
        grouped_linear(x, torch.tensor([2, 0, 2]), weights, biases)
    for learned in (x, *weights, *biases):
        learned.requires_grad_()
    for own in (biases, []):
        torch.library.opcheck(
            torch.ops.prismlm.grouped_linear,
            (x, torch.tensor([2, 0, 1]), weights, own),
        )


def test_the_router_learns_from_what_a_single_expert_gives():
    logits = logits_of(6, 4).requires_grad_()
    x = torch.randn(6, 3, dtype=torch.float64)
    mixed = mix(x, choose(logits, 1), [lambda rows, s=s: s * rows for s in (1, 2, 3, 4)])
    assert torch.autograd.grad(mixed.sum(), logits)[0].abs().min() > 0


def test_an_expert_without_tokens_has_a_gradient_of_nought():
    weights = torch.ones(3, 2, requires_grad=True)
    logits = torch.tensor([[9.0, 0.0, -9.0]]).expand(4, 3)
    maps = [lambda rows, e=e: rows * weights[e] for e in range(3)]
    mixed = mix(torch.ones(4, 2), choose(logits, 2), maps)
    (gradient,) = torch.autograd.grad(mixed.sum(), weights)
    assert gradient[0].all()
    assert not gradient[2].any()


def test_balance_by_hand():
    """Two layers, two tokens, top 1 of 2: f = (3/4, 1/4), P = (0.65, 0.35), 2 Σ f P = 1.15."""
    layers = [
        torch.tensor([[0.9, 0.1], [0.6, 0.4]]).log(),
        torch.tensor([[0.3, 0.7], [0.8, 0.2]]).log(),
    ]
    torch.testing.assert_close(load_balancing_loss(layers, 1), torch.tensor(1.15))
    # The first tokens alone: f = (1/2, 1/2), P = (0.6, 0.4).
    mask = torch.tensor([True, False])
    torch.testing.assert_close(load_balancing_loss(layers, 1, mask), torch.tensor(1.0))
    assert load_balancing_loss(layers, 1, torch.zeros(2, dtype=torch.bool)) == 0


@pytest.mark.parametrize("chosen", [1, 2, 3])
def test_an_even_use_gives_k_and_a_collapse_more(chosen):
    even = torch.stack([torch.arange(6).roll(shift).float() for shift in range(6)])
    assert load_balancing_loss([even, even], chosen).item() == pytest.approx(chosen)
    assert load_balancing_loss([torch.zeros(5, 6)], chosen).item() == pytest.approx(chosen)
    # All of the weight on the same k of 6, shared alike: 6 · k · 1/k.
    same = torch.full((8, 6), -50.0)
    same[:, :chosen] = 0.0
    assert load_balancing_loss([same], chosen).item() == pytest.approx(6)


def test_k_is_no_lower_bound():
    """f = (3/4, 1/4) and P = (3/8, 5/8): 2 · (9/32 + 5/32)."""
    p = torch.tensor([[0.5, 0.5]] * 3 + [[0.0, 1.0]])
    assert load_balancing_loss([p.log()], 1).item() == pytest.approx(0.875)


@pytest.mark.parametrize("chosen", [1, 2, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_balance_equals_plain_sums_and_hugging_faces_with_gradients(chosen, masked):
    layers = [logits_of(10, 4, seed=s).requires_grad_() for s in range(3)]
    mask = torch.tensor([1, 1, 0, 1, 1, 0, 1, 1, 1, 0], dtype=torch.bool) if masked else None
    values = [
        load_balancing_loss(layers, chosen, mask),
        naive.load_balancing_loss(layers, chosen, mask),
        load_balancing_loss_func(tuple(layers), 4, chosen, mask),
    ]
    gradients = [torch.autograd.grad(value, layers) for value in values]
    for value, found in zip(values[1:], gradients[1:], strict=True):
        torch.testing.assert_close(value.double(), values[0], rtol=1e-5, atol=1e-6)
        for a, e in zip(found, gradients[0], strict=True):
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6)
    if mask is not None:
        for found in gradients[0]:
            assert not found[~mask].any()


def test_gradients_against_differences():
    layers = [logits_of(5, 4, seed=s).requires_grad_() for s in range(2)]
    assert torch.autograd.gradcheck(lambda *own: load_balancing_loss(own, 2), layers)


def test_wrong_input_says_what_is_wrong():
    logits = torch.zeros(3, 4)
    for chosen in (0, 5, -1):
        with pytest.raises(InputError, match=f"{chosen} experts per token of a mixture of 4"):
            choose(logits, chosen)
    with pytest.raises(InputError, match="mixture of 0 experts"):
        choose(logits[:, :0], 1)
    with pytest.raises(InputError, match="those of one layer or more"):
        load_balancing_loss([], 1)
    with pytest.raises(InputError, match=r"\[\(3, 3\), \(3, 4\)\]"):
        load_balancing_loss.__wrapped__([logits, logits[:, :3]], 1)
    with pytest.raises(InputError, match=r"the mask is \[2\]: expected \[3\]"):
        load_balancing_loss.__wrapped__([logits], 1, torch.ones(2, dtype=torch.bool))
