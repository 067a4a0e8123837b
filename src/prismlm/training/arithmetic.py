"""What a training run takes on paper, for a machine that is not at hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prismlm.models.presets import build_config, build_model
from prismlm.models.seam import output_embedding
from prismlm.training.recipe import Recipe

# Weights, gradients and AdamW's two moments, each in float32.
BYTES_PER_PARAMETER = 16
# Per token, layer and element of the width: what GPT-2 keeps for its backward pass, counted from
# its saved tensors; a Llama keeps three quarters of that. Attention scores are never stored.
ACTIVATION_BYTES = {"bf16": 60, "float32": 112}
# Per token and entry of the vocabulary: logits, log-softmax and their gradients.
LOGIT_BYTES = 12
BF16_COPY_BYTES = 2


@dataclass(frozen=True)
class Gpu:
    """A GPU and how much of it training uses.

    Attributes:
        name: its name.
        flops: dense multiply-adds a second, counted as two each, by precision.
        utilisation: the share of them that training of this kind is assumed to reach.
    """

    name: str
    flops: dict[str, float]
    utilisation: float


H100 = Gpu("H100", {"bf16": 989e12, "float32": 67e12}, utilisation=0.3)


@dataclass(frozen=True)
class Size:
    """A model and its head, counted without their weights.

    Attributes:
        parameters: of the decoder, tied matrices once.
        multiplied: those of its parameters that every token is multiplied with.
        head_parameters: of the head.
        width: d.
        layers: L.
        vocabulary: V.
        has_attention: whether the decoder's layers attend.
        shares_rows: whether documents may share its training rows, as far as its family says.
    """

    parameters: int
    multiplied: int
    head_parameters: int
    width: int
    layers: int
    vocabulary: int
    has_attention: bool
    shares_rows: bool


def size_of(recipe: Recipe, vocab_size: int) -> Size:
    """Count the model of a recipe on the meta device."""
    config: Any = build_config(dict(recipe.model), vocab_size, 0)
    with torch.device("meta"):
        model: Any = build_model(config)
    weight = output_embedding(model).weight
    assert isinstance(weight, torch.Tensor)
    # Position and untied input embeddings are looked up.
    looked_up = {
        id(module.weight): module.weight.numel()
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module.weight is not weight
    }
    parameters = sum(p.numel() for p in model.parameters())
    has_attention = getattr(config, "num_attention_heads", None) is not None
    return Size(
        parameters=parameters,
        multiplied=parameters - sum(looked_up.values()),
        head_parameters=recipe.head.prototypes * weight.shape[1] + 1 if recipe.head.enabled else 0,
        width=weight.shape[1],
        layers=int(getattr(config, "num_hidden_layers", 1)),
        vocabulary=weight.shape[0],
        has_attention=has_attention,
        shares_rows=has_attention or getattr(model, "keeps_documents_apart", False),
    )


def flops_per_token(size: Size, recipe: Recipe) -> float:
    """Return the floating point operations of training on one token.

        6 N + 12 L T d + s (2 K d + 6 (k + 2) d + [4 V d])

    for N multiplied parameters; attention over rows of T tokens, not halved for causality; and on
    the share s of positions that the head is trained on: the cosines to all K prototypes, forward
    only; the (k + 2) prototypes per token that the reconstruction and the two nearest-neighbour
    losses touch, forward and backward; the logits of prototypes alone, if a loss needs them.
    """
    head, losses = recipe.head, recipe.losses
    attention = 12 * size.layers * recipe.data.length * size.width if size.has_attention else 0
    routing = 2 * head.prototypes * size.width
    touched = 6 * (head.prototypes_per_token + 2) * size.width
    alone = 4 * size.vocabulary * size.width
    if not (losses.prototype_only_ce or losses.prototype_only_kl):
        alone = 0
    share = head.position_share if head.enabled else 0.0
    return 6.0 * size.multiplied + attention + share * (routing + touched + alone)


def training_bytes(size: Size, recipe: Recipe, precision: str) -> int:
    """Return the memory of a training step of a decoder with attention.

        16 P + [2 P in bf16] + B T (a L d + 12 V),   a = 60 in bf16, 112 in float32

    for P parameters with the head's: weights, gradients and AdamW; bf16 copies of the weights;
    the activations that the backward pass reads; logits. B is the rows of a micro-batch.
    Recurrent decoders keep up to three times the activations.
    """
    parameters = size.parameters + size.head_parameters
    tokens = recipe.batch_size * recipe.data.length
    activations = ACTIVATION_BYTES[precision] * size.layers * size.width
    copies = BF16_COPY_BYTES * parameters if precision == "bf16" else 0
    per_token = activations + LOGIT_BYTES * size.vocabulary
    return BYTES_PER_PARAMETER * parameters + copies + tokens * per_token


def free_memory(device: str) -> int | None:
    """Return the bytes free on a device here, or None if it does not say."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kilobytes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kilobytes[0]) * 1024 if kilobytes else None
