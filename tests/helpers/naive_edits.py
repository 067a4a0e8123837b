"""What an edit does to a state, prototype by prototype."""

import torch


def edit_naive(z, prototypes, before, after):
    """Return z with every activation replaced: the residual r = z − Σ α p is kept, ẑ is rebuilt."""
    edited = []
    for state, old, new in zip(z, before, after, strict=True):
        residual = state - torch.stack([a * p for a, p in zip(old, prototypes, strict=True)]).sum(0)
        mixture = torch.stack([a * p for a, p in zip(new, prototypes, strict=True)]).sum(0)
        edited.append(residual + mixture)
    return torch.stack(edited)
