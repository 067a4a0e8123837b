"""A head as a dictionary of SAELens: exact against the head."""

from __future__ import annotations

import pytest
import torch
from sae_lens import SAE

from prismlm.layers import PrototypeHead
from prismlm.models.sae_lens import PrototypeSAE


def a_head(weights):
    head = PrototypeHead(12, 40, 5, scale=1.7, weights=weights)
    head.reset_parameters(torch.Generator().manual_seed(0))
    return head


@pytest.mark.parametrize("weights", ["cosine", "fitted"])
def test_features_and_reconstruction_are_the_heads_after_a_round_trip(weights, tmp_path):
    head, z = a_head(weights), torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(1))
    made = PrototypeSAE.from_head(head, model_name="gpt2", hook_name="unembed.hook_in")
    made.save_model(tmp_path)
    dictionary = SAE.load_from_disk(tmp_path)
    features, output = dictionary.encode(z), head(z)
    indices, activations = output.routing.indices, output.routing.activations.detach()
    expected = torch.zeros(14, 40).scatter(1, indices, activations)
    torch.testing.assert_close(features.flatten(0, 1), expected)
    assert int((features > 0).sum(-1).max()) <= 5
    torch.testing.assert_close(dictionary(z).flatten(0, 1), output.reconstruction)
    assert dictionary.cfg.metadata.hook_name == "unembed.hook_in"


@pytest.mark.filterwarnings("ignore:Setting use_error_term:DeprecationWarning")
def test_the_error_term_is_the_residual_and_norms_are_not_folded():
    dictionary, z = PrototypeSAE.from_head(a_head("fitted")), torch.randn(6, 12)
    _, cache = dictionary.run_with_cache(z)
    assert cache["hook_sae_acts_post"].shape == (6, 40)
    dictionary.use_error_term = True
    torch.testing.assert_close(dictionary(z), z)
    with pytest.raises(NotImplementedError):
        dictionary.fold_W_dec_norm()
