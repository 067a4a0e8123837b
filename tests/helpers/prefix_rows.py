"""Random inputs of the prefix mean, and its recurrence in float64."""

import torch

from prismlm.ops.prototype_mixer import PrefixState


def gates(b, t, r, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(2, b, t, r, generator=generator, dtype=torch.float64)
    write, read = (2 * scores).softmax(-1).to(dtype)
    return write, read


def inputs(b, t, r, d, seed=0, dtype=torch.float32, low=0.001, high=0.9999):
    generator = torch.Generator().manual_seed(seed + 1)
    write, read = gates(b, t, r, seed, dtype)
    values = torch.randn(b, t, d, generator=generator, dtype=dtype)
    # Spread as half-lives are: as many channels between 1 and 10 tokens as between 10 and 100.
    place = torch.rand(r, generator=generator, dtype=torch.float64)
    lives = torch.log(torch.tensor([-1 / torch.log(torch.tensor(x)) for x in (low, high)]).double())
    decay = torch.exp(-1 / torch.exp(lives[0] + place * (lives[1] - lives[0])))
    return write, read, values, decay.clamp(low, high).to(dtype)


def by_token(decay, t, seed=0):
    """Decays of every position, drawn from all channels': the slowest beside the fastest."""
    generator = torch.Generator().manual_seed(seed + 3)
    return decay[torch.randint(len(decay), (2, t, len(decay)), generator=generator)]


def state_of(b, r, d, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed + 2)
    mass = torch.rand(b, r, generator=generator, dtype=dtype) + 0.1
    sums = torch.randn(b, r, d, generator=generator, dtype=dtype) * mass[..., None]
    return PrefixState(sums, mass)


def recurrence(write, read, values, decay, state=None):
    """S ← β(S + w v), M ← β(M + w) in float64, one position at a time."""
    w, q, v, beta = (x.double() for x in (write, read, values, decay.expand(write.shape)))
    sums = w.new_zeros(w.shape[0], w.shape[2], v.shape[2])
    mass = w.new_zeros(w.shape[0], w.shape[2])
    if state is not None:
        sums, mass = state.sums.double(), state.mass.double()
    out = []
    for i in range(w.shape[1]):
        share = torch.where(mass < 1e-30, torch.zeros_like(mass), q[:, i] / mass.clamp_min(1e-300))
        out.append((share[..., None] * sums).sum(1))
        sums = beta[:, i, :, None] * (sums + w[:, i, :, None] * v[:, i, None])
        mass = beta[:, i] * (mass + w[:, i])
    return torch.stack(out, 1), PrefixState(sums, mass)


def relative_error(actual, expected):
    """Return the largest ‖error‖ / ‖expected‖ over positions."""
    error = (actual.double() - expected).norm(dim=-1)
    norm = expected.norm(dim=-1)
    return (error / norm.clamp_min(1e-20))[norm > 0].max().item()
