"""Do the ten tokens of a prototype say what is predicted where it is used?

Of predictions of the lens's own text, the prototype with the most evidence for the model's most
likely token is asked: is that token among its ten? The control asks another prototype's ten.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import prismlm
from prismlm.corpus import Corpus
from prismlm.lens.signatures import SEEN, signatures_of, tokens_seen
from prismlm.models.seam import capture
from prismlm.models.sidecar import weight_of

WINDOWS, WINDOW, SKIPPED = 16, 256, 56


@torch.no_grad()
def told_by_tokens(lm: prismlm.PrismLM, corpus: Corpus, seed: int) -> dict[str, Any]:
    """Return, for tokens that tell a prototype and those it raises most, how often they have it."""
    weight, prototypes = weight_of(lm.model).detach().float(), lm.head.prototypes.detach().float()
    telling = signatures_of(lm.model, lm.head, corpus).ids
    count = telling.shape[1]
    largest = [(part @ weight.T).topk(count).indices for part in prototypes.split(256)]
    kinds = {"telling": telling, "largest": torch.cat(largest)}
    top, used = _predictions(lm, corpus, weight, prototypes)
    other = torch.randperm(len(prototypes), generator=torch.Generator().manual_seed(seed))
    rare = torch.from_numpy(tokens_seen(corpus, len(weight)) < SEEN)
    return {"predictions": len(top)} | {
        name: {
            "has": _share(ids[used] == top[:, None]),
            "another_has": _share(ids[other[used]] == top[:, None]),
            "rare": rare[ids].float().mean().item(),
            "different_first": len(ids[:, 0].unique()),
        }
        for name, ids in kinds.items()
    }


def _share(hits: Tensor) -> float:
    return hits.any(1).float().mean().item()


def _predictions(
    lm: prismlm.PrismLM, corpus: Corpus, weight: Tensor, prototypes: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the most likely token of predictions, and the prototype with most evidence for it."""
    top: list[Tensor] = []
    used: list[Tensor] = []
    step = (corpus.num_tokens - WINDOW) // WINDOWS
    for number in range(WINDOWS):
        ids = torch.from_numpy(corpus.read_tokens(number * step, WINDOW).astype("int64"))
        with capture(lm.model, logits=False) as caught:
            lm.model(input_ids=ids[None], use_cache=False)
        z = caught.z[0, SKIPPED:].float()
        found, best = lm.head.nearest(z), (z @ weight.T).argmax(1)
        logits = (weight[best][:, None] @ prototypes[found.indices].transpose(1, 2))[:, 0]
        evidence = found.activations * logits
        top.append(best)
        used.append(found.indices.gather(1, evidence.argmax(1, keepdim=True))[:, 0])
    return torch.cat(top), torch.cat(used)
