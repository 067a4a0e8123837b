"""A model in evaluation mode for a while: everything is as it was after it."""

import torch

from prismlm.models.watch import evaluating


def test_modes_gradients_and_attention_are_as_before():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(), torch.nn.Dropout())
    model[1].eval()
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        with evaluating(model):
            assert not any(module.training for module in model.modules())
            assert not model(torch.ones(1, 2)).requires_grad
            assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert [module.training for module in model.modules()] == [True, True, False, True]
        assert model(torch.ones(1, 2)).requires_grad
        assert torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
