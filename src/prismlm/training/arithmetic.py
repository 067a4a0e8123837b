"""What a training run takes on paper, for a machine that is not at hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from prismlm.models.decoders.signal_noise_config import SignalNoiseConfig
from prismlm.models.presets import build_config, build_model
from prismlm.models.seam import output_embedding
from prismlm.models.uncertainty_feedback.place import decoder_and_embeddings, width_of
from prismlm.training.recipe import Recipe

# Weights, gradients and AdamW's two moments, each in float32.
BYTES_PER_PARAMETER = 16
# Per token, layer and element of the width: what GPT-2 keeps for its backward pass, counted from
# its saved tensors; a Llama keeps three quarters of that. Attention scores are never stored.
ACTIVATION_BYTES = {"bf16": 60, "float32": 112}
# Per token and entry of the vocabulary: logits, log-softmax and their gradients.
LOGIT_BYTES = 12
BF16_COPY_BYTES = 2
# Of a number in products of matrices.
NUMBER_BYTES = {"bf16": 2, "float32": 4}
# The GPU that stands for those not at hand: its dense multiply-adds a second, counted as two each,
# by precision, and the share of them that training of this kind is assumed to reach.
GPU = "H100"
GPU_FLOPS = {"bf16": 989e12, "float32": 67e12}
UTILISATION = 0.3


@dataclass(frozen=True)
class Size:
    """A model and its head, counted without their weights.

    Attributes:
        parameters: of the decoder, tied matrices once.
        multiplied: entries of its matrices that a token is multiplied with, as often as it is.
        head_parameters: of the head.
        table_parameters: of the table of uncertainty codes.
        width: d.
        layers: L.
        vocabulary: V.
        attention_width: of all heads of a layer together, d mostly; 0 where none attends.
        shares_rows: whether documents may share its training rows, as far as its family says.
        kept_bytes: what the backward pass of all its blocks reads of one token, by precision, where
            they are of signal/noise attention.
    """

    parameters: int
    multiplied: int
    head_parameters: int
    table_parameters: int
    width: int
    layers: int
    vocabulary: int
    attention_width: int
    shares_rows: bool
    kept_bytes: dict[str, int] | None = None

    @property
    def all_parameters(self) -> int:
        """Of decoder, head and table."""
        return self.parameters + self.head_parameters + self.table_parameters


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
    heads = getattr(config, "num_attention_heads", None)
    layers = int(getattr(config, "num_hidden_layers", 1))
    attention = 0 if heads is None else weight.shape[1]
    multiplied, kept = parameters - sum(looked_up.values()), None
    if isinstance(config, SignalNoiseConfig):
        # Tied matrices are used twice, and experts are not all used.
        attention = config.expansion * config.hidden_size
        multiplied = layers * block_multiplications(config) + weight.numel()
        kept = {name: layers * block_bytes(config, size) for name, size in NUMBER_BYTES.items()}
    return Size(
        parameters=parameters,
        multiplied=multiplied,
        head_parameters=recipe.head.prototypes * weight.shape[1] + 1 if recipe.head.enabled else 0,
        table_parameters=_table_parameters(recipe, model),
        width=weight.shape[1],
        layers=layers,
        vocabulary=weight.shape[0],
        attention_width=attention,
        shares_rows=attention > 0 or getattr(model, "keeps_documents_apart", False),
        kept_bytes=kept,
    )


def block_multiplications(config: SignalNoiseConfig) -> int:
    """Return how many entries of matrices a position is multiplied with in a block.

    Attention: 2R·d², tied or not. The MLP: 2 d·m; k (2 d·m) + E·d with experts; 2S d·m in sparse
    coding, 2S d² in its complete form.
    """
    d, m = config.hidden_size, cast(int, config.intermediate_size)
    attention = 2 * config.expansion * d * d
    if config.mlp == "experts":
        return attention + config.num_experts_per_tok * 2 * d * m + config.num_local_experts * d
    if config.mlp == "sparse_coding":
        atoms = d if config.sparse_coding_form == "complete" else m
        return attention + 2 * cast(int, config.sparse_coding_steps) * d * atoms
    return attention + 2 * d * m


def block_bytes(config: SignalNoiseConfig, size: int) -> int:
    """Return what the backward pass reads of one position in a block, in bytes; no dropout.

    The stream before each of the two norms, in float32. Attention: Z; u unrotated and rotated, what
    heads give, and that merged, R·d each; a float32 cosine and sine for each dimension of a head
    and the softmax's denominator for each head. Then what the MLP keeps.

    Args:
        config: the decoder's.
        size: bytes of a number in the products of matrices.
    """
    d, inner = config.hidden_size, config.expansion * config.hidden_size
    heads = inner // config.head_size
    attention = size * (d + 4 * inner) + 4 * (2 * config.head_size + heads)
    return 2 * 4 * d + attention + _mlp_bytes(config, size)


def _mlp_bytes(config: SignalNoiseConfig, size: int) -> int:
    d, m = config.hidden_size, cast(int, config.intermediate_size)
    if config.mlp == "experts":
        # What the router reads; of each of the k experts what it reads and gives, and 2 m between;
        # of each expert its probability, twice, and its rank.
        each = 2 * d + 2 * m
        return size * (d + config.num_experts_per_tok * each) + 16 * config.num_local_experts
    if config.mlp == "sparse_coding":
        # Of each step what it codes, and a code. In the complete form the last code is the stream,
        # and the codes before it stand in float32 beside those that were multiplied.
        steps = cast(int, config.sparse_coding_steps)
        complete = config.sparse_coding_form == "complete"
        beside = 4 * d * (steps - 1) if complete and size < 4 else 0
        return steps * size * (d + (d if complete else m)) + beside
    return size * (d + 2 * m)


def _table_parameters(recipe: Recipe, model: Any) -> int:
    settings = recipe.uncertainty_feedback
    if not settings.enabled:
        return 0
    _, inputs = decoder_and_embeddings(model)
    return (settings.rows or settings.levels) * width_of(inputs)


def flops_per_token(size: Size, recipe: Recipe) -> float:
    """Return the floating point operations of training on one token.

        (6 + 2 (p − 1)) N + (12 + 4 (p − 1)) L T a + s (2 K d + 6 (k + 2) d + [4 V d])

    for N multiplied parameters; attention of width a, d mostly, over rows of T tokens, not halved
    for causality; and on the share s of positions that the head is trained on: the cosines to all
    K prototypes, forward only; the (k + 2) prototypes per token that the reconstruction and the
    two nearest-neighbour losses touch, forward and backward; the logits of prototypes alone, if a
    loss needs them. p is the passes of uncertainty feedback, all but one of them forward only; a
    row of its table is looked up, and the entropy is no product of matrices.
    """
    head, losses = recipe.head, recipe.losses
    more = recipe.uncertainty_feedback.passes - 1 if recipe.uncertainty_feedback.enabled else 0
    attention = (12 + 4 * more) * size.layers * recipe.data.length * size.attention_width
    routing = 2 * head.prototypes * size.width
    touched = 6 * (head.prototypes_per_token + 2) * size.width
    alone = 4 * size.vocabulary * size.width
    if not (losses.prototype_only_ce or losses.prototype_only_kl):
        alone = 0
    share = head.position_share if head.enabled else 0.0
    return (6.0 + 2 * more) * size.multiplied + attention + share * (routing + touched + alone)


def training_bytes(size: Size, recipe: Recipe, precision: str) -> int:
    """Return the memory of a training step of a decoder with attention.

        16 (P + U) + [2 P in bf16] + B T (a L d + 12 V),   a = 60 in bf16, 112 in float32

    for P parameters with the head's: weights, gradients and AdamW; bf16 copies of the weights;
    the activations that the backward pass reads; logits. B is the rows of a micro-batch.
    Recurrent decoders keep up to three times the activations. A decoder of signal/noise attention
    counts its own, with its R·d wide heads and the MLP that it has, in place of a L d. Masks of
    rows that documents share are left out, and so are activations computed again. U are the
    parameters of the table of uncertainty codes, which has a gradient of its whole size and is
    looked up in float32; a pass without gradient keeps nothing.
    """
    parameters = size.parameters + size.head_parameters
    tokens = recipe.batch_size * recipe.data.length
    activations = ACTIVATION_BYTES[precision] * size.layers * size.width
    if size.kept_bytes is not None:
        activations = size.kept_bytes[precision]
    copies = BF16_COPY_BYTES * parameters if precision == "bf16" else 0
    per_token = activations + LOGIT_BYTES * size.vocabulary
    held = BYTES_PER_PARAMETER * (parameters + size.table_parameters)
    return held + copies + tokens * per_token


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
