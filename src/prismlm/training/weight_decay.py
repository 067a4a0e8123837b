"""Which parameters of a model weight decay acts on."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Literal, get_args

from torch import Tensor, nn

from prismlm.layers import PrototypeMixer

Exempt = Literal["embeddings", "prototypes", "decays"]
EXEMPT: tuple[Exempt, ...] = get_args(Exempt)


def decayed_names(model: nn.Module, exempt: Collection[Exempt] = EXEMPT) -> set[str]:
    """Return the names of the trained matrices that decay; tied ones have one name.

    Vectors never do: norms, biases, temperatures, decays and α. Nor do, if they are ``exempt``:
    ``embeddings``, a tied output embedding with them; the ``prototypes`` of mixers, which are
    embeddings of their channels; and ``decays``, the matrices behind decays by token or by state.

    Source: ProtoT, A.4: affine weights decay; embeddings, norms and biases do not.
    """
    spared = {id(p) for kind, p in _spared(model) if kind in exempt}
    return {
        name
        for name, p in model.named_parameters()
        if p.requires_grad and p.ndim > 1 and id(p) not in spared
    }


def _spared(model: nn.Module) -> Iterator[tuple[Exempt, Tensor | None]]:
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            yield "embeddings", module.weight
        elif isinstance(module, PrototypeMixer):
            yield "prototypes", module.prototypes
            yield "decays", module.decay_map
        elif isinstance(log_decay := getattr(module, "A_log", None), nn.Parameter):
            yield "decays", log_decay
