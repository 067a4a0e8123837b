"""Which parameters AdamW treats alike: matrices, vectors, the prototype head, feedback."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from prismlm.training.model import PrismForCausalLM


def parameter_groups(
    model: PrismForCausalLM,
    decay_names: Collection[str],
    weight_decay: float,
    head_learning_rate: float,
) -> list[dict[str, Any]]:
    """Return the groups of an optimizer; those without ``lr`` have the optimizer's own.

    Args:
        model: decoder and head.
        decay_names: parameters of the decoder that may decay, by the names they have; of these the
            matrices do.
        weight_decay: of these.
        head_learning_rate: of prototypes and scale, which do not decay.
    """
    trained = [(n, p) for n, p in model.model.named_parameters() if p.requires_grad]
    # Hugging Face's rule goes by names; decays, temperatures and gates are no matrices.
    matrices = {n for n, p in trained if p.ndim > 1}
    decayed = matrices & set(decay_names)
    groups: list[dict[str, Any]] = [
        {
            "params": [p for n, p in trained if n in decayed],
            "weight_decay": weight_decay,
        },
        {"params": [p for n, p in trained if n not in decayed], "weight_decay": 0.0},
        {
            "params": list(model.prototype_head.parameters()),
            "weight_decay": 0.0,
            "lr": head_learning_rate,
        },
    ]
    if model.uncertainty is not None:
        # Rows that no code of a step asked for are to stay where they are.
        groups.append({"params": list(model.uncertainty.parameters()), "weight_decay": 0.0})
    return groups
