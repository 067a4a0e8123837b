import math

import pytest
import torch
import torch.nn.functional as F

from benchmarks.prototype_head.dense_prototype_head import DensePrototypeHead
from prismlm.layers import PrototypeHead


def dense_head(width=6, vocab=11, count=9, **settings):
    head = DensePrototypeHead(width, vocab, count, **settings).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in (head.prototypes, head.signatures):
            weight.normal_(generator=generator)
    return head


def by_hand(k):
    """z = (3, 4), norm 5; cosines 0.6, 0.96, −0.8 and 0.8; τ = 2 gives 1.2, 1.92, 0 and 1.6."""
    head = DensePrototypeHead(2, 3, 4, prototypes_per_token=k, scale=2.0).double()
    with torch.no_grad():
        head.log_scale.fill_(math.log(2.0))
        head.prototypes.copy_(torch.tensor([[2.0, 0.0], [4.0, 3.0], [0.0, -7.0], [0.0, 0.5]]))
        mixing = [[1.0, 10.0, 100.0, 0.0], [0.0, 1.0, 5.0, -1.0], [2.0, 0.0, 1.0, 3.0]]
        head.signatures.copy_(torch.tensor(mixing).T)
    return head(torch.tensor([[3.0, 4.0]], dtype=torch.float64))


def test_all_activations_by_hand():
    expected = torch.tensor([[1.2 + 19.2, 1.92 - 1.6, 2.4 + 4.8]], dtype=torch.float64)
    torch.testing.assert_close(by_hand(None), expected)


def test_the_two_largest_by_hand():
    """The first prototype, active but third, is left out."""
    expected = torch.tensor([[19.2, 1.92 - 1.6, 4.8]], dtype=torch.float64)
    torch.testing.assert_close(by_hand(2), expected)


@pytest.mark.parametrize("k", [None, 1, 4])
def test_with_m_of_w_and_p_it_is_the_prototype_head_before_w(k):
    """W ẑ = (W P) α, the identity that the source states; gradients of z and P agree too."""
    generator = torch.Generator().manual_seed(1)
    weight, prototypes, z = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((50, 6), (20, 6), (3, 7, 6))
    )
    sparse = PrototypeHead(6, 20, 20 if k is None else k, scale=1.7).double()
    dense = DensePrototypeHead(6, 50, 20, prototypes_per_token=k, scale=1.7).double()
    with torch.no_grad():
        sparse.prototypes.copy_(prototypes)
    dense.place(prototypes, weight)
    states = [z.clone().requires_grad_() for _ in range(2)]
    rebuilt = sparse(states[0]).reconstruction.unflatten(0, z.shape[:-1])
    ours, theirs = F.linear(rebuilt, weight), dense(states[1])
    torch.testing.assert_close(theirs, ours)
    for logits in (ours, theirs):
        logits.square().sum().backward()
    torch.testing.assert_close(states[1].grad, states[0].grad)
    torch.testing.assert_close(dense.log_scale.grad, sparse.log_scale.grad)
    # W is shared by all columns of M, so the whole gradient of P needs the path through M = W P.
    through_m = dense.prototypes.grad + dense.signatures.grad @ weight
    torch.testing.assert_close(through_m, sparse.prototypes.grad)


@pytest.mark.parametrize("k", [None, 3])
def test_gradients(k):
    head = dense_head(prototypes_per_token=k)
    z = torch.randn(4, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    names = [name for name, _ in head.named_parameters()]

    def run(z, *parameters):
        named = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(head, named, (z,))

    inputs = [z.requires_grad_(), *(p.detach().clone().requires_grad_() for p in head.parameters())]
    assert torch.autograd.gradcheck(run, inputs)


def test_a_state_of_zero_has_no_evidence():
    for k in (None, 2):
        head = dense_head(prototypes_per_token=k)
        z = torch.zeros(1, 6, dtype=torch.float64, requires_grad=True)
        logits = head(z)
        logits.sum().backward()
        assert not logits.any()
        assert z.grad.isfinite().all()
