from types import SimpleNamespace

import pytest
import torch

from prismlm.explain.prediction import OutputLayer, Parts
from prismlm.models.seam import LogitMap
from prismlm.ops.prototype_head import route


def decompose(z, indices, activations, prototypes, weight, targets, *, scale=1.0, bias=None):
    bias = None if bias is None else bias / scale
    output = OutputLayer(weight, bias, weight.mean(0), LogitMap(scale), weight.dtype)
    routing = SimpleNamespace(indices=indices, activations=activations)
    return output.parts(prototypes, z, routing, targets)


def decompose_naive(z, indices, activations, prototypes, weight, targets, *, scale, bias):
    """Split the same logits through whole vocabulary vectors W p_i and W r, one state at a time."""
    rows = []
    for state, index, activation, target in zip(z, indices, activations, targets, strict=True):
        signatures = [
            scale * a * (weight @ prototypes[i]) for a, i in zip(activation, index, strict=True)
        ]
        mixture = torch.einsum("k,kd->d", activation, prototypes[index])
        rest = scale * (weight @ (state - mixture))
        offset = torch.zeros_like(rest) if bias is None else bias
        rows.append(
            [
                torch.stack([s[target] for s in signatures]),
                torch.stack([s[target] - s.mean() for s in signatures]),
                rest[target],
                rest[target] - rest.mean(),
                offset[target],
                offset[target] - offset.mean(),
            ]
        )
    return Parts(*(torch.stack(column) for column in zip(*rows, strict=True)))


@pytest.mark.parametrize("with_bias", [False, True])
def test_parts_sum_and_equal_naive(with_bias):
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(7, 12, generator=generator, dtype=torch.float64)
    prototypes = torch.randn(20, 12, generator=generator, dtype=torch.float64)
    weight = torch.randn(33, 12, generator=generator, dtype=torch.float64)
    bias = torch.randn(33, generator=generator, dtype=torch.float64) if with_bias else None
    targets = torch.randint(33, (7,), generator=generator)
    routing = route(z, prototypes, 5, 1.3)
    arguments = (z, routing.indices, routing.activations, prototypes, weight, targets)
    parts = decompose(*arguments, scale=0.7, bias=bias)
    for fast, slow in zip(parts, decompose_naive(*arguments, scale=0.7, bias=bias), strict=True):
        torch.testing.assert_close(fast, slow)
    logits = 0.7 * (z @ weight.T) + (0 if bias is None else bias)
    torch.testing.assert_close(parts.logit, logits.gather(1, targets[:, None])[:, 0])
    centred = logits - logits.mean(1, keepdim=True)
    evidence = parts.evidence.sum(1) + parts.residual_evidence + parts.bias_evidence
    torch.testing.assert_close(evidence, centred.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(parts.explained_share, parts.evidence.sum(1) / evidence)
