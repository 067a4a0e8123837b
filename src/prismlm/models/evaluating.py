"""A model in evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run the block without dropout and gradients; every module has its own mode again after it.

    ``model.train(mode)`` would give one mode to all, also to what somebody has frozen. cuDNN's
    attention is left out: it plans anew for each length of text, which takes longer than it saves.
    """
    modes = [(module, module.training) for module in model.modules()]
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    model.eval()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        for module, mode in modes:
            module.training = mode
