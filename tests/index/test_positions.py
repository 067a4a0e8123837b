"""How likely the next token was: from a product in bfloat16 as from one in float32."""

import pytest
import torch
from torch import nn

from prismlm.index import positions


class Decoder(nn.Module):
    """An output embedding alone, which is what likelihoods ask of a model."""

    def __init__(self, vocabulary, width, *, bias):
        super().__init__()
        self.head = nn.Linear(width, vocabulary, bias=bias)

    def get_output_embeddings(self):
        return self.head


@pytest.mark.parametrize("vocabulary", [5, 700])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scale", [1.0, 12.0])
def test_a_product_in_bfloat16_gives_nearly_the_same(monkeypatch, vocabulary, bias, scale):
    torch.manual_seed(vocabulary + bias)
    model = Decoder(vocabulary, 32, bias=bias)
    z = scale * torch.randn(400, 32)
    tokens = torch.randint(vocabulary, (400,))
    tokens[:200] = model.head(z).argmax(1)[:200]
    expected = model.head(z).softmax(-1).gather(1, tokens[:, None])[:, 0]
    monkeypatch.setattr(positions, "has_fast_product", lambda: True)
    with torch.no_grad():
        low = positions.screening_weight(model)
        found = [positions.probabilities(model, z, tokens, given) for given in (None, low)]
    torch.testing.assert_close(found[0], expected)
    torch.testing.assert_close(found[1], expected, atol=6e-3, rtol=0)
    assert (found[1] - expected).abs().mean() < 5e-4
    # Rounding alone would be off by more, so that it is the ones formed again that are tested.
    rounded = model.head(z).bfloat16().float().softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert (rounded - expected).abs().mean() > (found[1] - expected).abs().mean()


def test_no_positions(monkeypatch):
    monkeypatch.setattr(positions, "has_fast_product", lambda: True)
    model = Decoder(9, 4, bias=False)
    empty, low = torch.empty(0, dtype=torch.long), positions.screening_weight(model)
    assert positions.probabilities(model, torch.empty(0, 4), empty, low).shape == (0,)
