"""Activations of channels or heads, forward pass by forward pass, over a corpus."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from prismlm.corpus.blocks import BlockPlan, block_passes, read_block, split_counts
from prismlm.errors import InputError, suggest
from prismlm.layers import MixerEvidence
from prismlm.lens.routing.mixers import mixers_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prismlm.corpus.store import Corpus, Split
    from prismlm.corpus.windows import WindowBatch

Kind = Literal["write", "read", "values"]
KINDS = ("write", "read", "values")
SPLITS = ("train", "heldout", "all")


@dataclass(frozen=True)
class Sequences:
    """Which sequences of a corpus are read: its documents, cut every ``length`` tokens.

    Blocks of documents are read in an order that lies evenly over the corpus, so that the first
    ``max_tokens`` do too. Memory is set by one block.

    Attributes:
        corpus: the text.
        split: which documents.
        length: the most tokens of a sequence; the last of a document may be shorter.
        max_tokens: after which to stop, or None for all.

    Raises:
        InputError: an unknown split, or a length or a number of tokens below 1.
    """

    corpus: Corpus
    split: Split = "heldout"
    length: int = 256
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise InputError(
                f"there is no split {self.split!r}: expected {', '.join(SPLITS)}."
                f"{suggest(self.split, list(SPLITS))}"
            )
        if self.length < 1:
            raise InputError(f"sequences of {self.length} tokens: expected at least 1.")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InputError(f"max_tokens is {self.max_tokens}: expected at least 1, or None.")

    @property
    def tokens(self) -> int:
        """How many tokens are read; what the last batch goes beyond ``max_tokens`` not counted."""
        there = split_counts(self.corpus, self.split)[1]
        return there if self.max_tokens is None else min(there, self.max_tokens)

    def batches(self) -> Iterator[WindowBatch]:
        """Yield the sequences in batches, each a function of its block alone.

        Raises:
            InputError: the split has no documents.
            FormatError: the corpus is damaged.
        """
        plan, read = BlockPlan.of(self.corpus.num_tokens), 0
        for slot in range(plan.count):
            block = read_block(
                self.corpus, plan, plan.block(slot), self.split, self.length, self.length
            )
            for batch, _ in block_passes(block, self.corpus, self.corpus.eos_token_id):
                if self.max_tokens is not None and read >= self.max_tokens:
                    return
                yield batch
                read += int(batch.owned.sum())
        if not read:
            raise InputError(f"the corpus {self.corpus.name} has no documents in {self.split!r}.")


class Pass(NamedTuple):
    """Activations of one batch, on the CPU, padding left out: N positions.

    Attributes:
        tokens: the token of each position.
        layers: activations of each layer, float32.
    """

    tokens: Int64[Tensor, " N"]
    layers: tuple[Float[Tensor, "N P"], ...]


@torch.no_grad()
def routing_of(
    model: nn.Module, input_ids: Int64[Tensor, "B T"], mask: Tensor | None = None
) -> tuple[MixerEvidence, ...]:
    """Return the gates of each layer from one forward pass, which forms no logits.

    Raises:
        InputError: the model has no prototype mixer.
    """
    mixers_of(model)
    output = decoder_of(model)(
        input_ids=input_ids,
        attention_mask=None if mask is None else mask.long(),
        use_cache=False,
        output_routing=True,
    )
    return output.routing


@torch.no_grad()
def value_norms(
    model: nn.Module, input_ids: Int64[Tensor, "B T"], mask: Tensor | None = None
) -> tuple[Float[Tensor, "B T H"], ...]:
    """Return ‖v_h‖ of each layer's value heads, before attention mixes positions; float32.

    Heads that share keys and values count once. Only this thread's pass counts.

    Source: ProtoT, A.8: "attention heads value norms".

    Raises:
        InputError: the model has no layer with ``self_attn.v_proj``, as LLaMA's have.
    """
    projections = _value_projections(model)
    found: dict[nn.Module, Tensor] = {}
    thread = threading.get_ident()

    def note(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if threading.get_ident() == thread:
            heads = output.detach().float().unflatten(-1, (-1, projections[module]))
            found[module] = heads.norm(dim=-1)

    handles = [module.register_forward_hook(note) for module in projections]
    try:
        decoder_of(model)(
            input_ids=input_ids,
            attention_mask=None if mask is None else mask.long(),
            use_cache=False,
        )
    finally:
        for handle in handles:
            handle.remove()
    return tuple(found[module] for module in projections)


def activations(model: PreTrainedModel, batch: WindowBatch, kind: Kind = "write") -> Pass:
    """Return a batch's write gates, read gates or value norms.

    Raises:
        InputError: an unknown kind, or one that the model does not have.
    """
    ids, mask = batch.input_ids.to(model.device), batch.attention_mask.to(model.device)
    if kind == "values":
        layers = value_norms(model, ids, mask)
    elif kind in KINDS:
        layers = tuple(getattr(evidence, kind) for evidence in routing_of(model, ids, mask))
    else:
        raise InputError(
            f"there are no activations {kind!r}: expected {', '.join(KINDS)}."
            f"{suggest(kind, list(KINDS))}"
        )
    owned = batch.owned.to(model.device)
    return Pass(batch.input_ids[batch.owned], tuple(a[owned].float().cpu() for a in layers))


def decoder_of(model: nn.Module) -> nn.Module:
    """Return the part of a language model that comes before its output embedding."""
    return getattr(model, "base_model", model)


def _value_projections(model: nn.Module) -> dict[nn.Module, int]:
    """Return each layer's value projection with the width of a head."""
    found: dict[nn.Module, int] = {}
    for name, module in model.named_modules():
        projection, width = getattr(module, "v_proj", None), getattr(module, "head_dim", None)
        if name.endswith("self_attn") and isinstance(projection, nn.Module) and width:
            found[projection] = int(width)
    if not found:
        kind = getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__
        raise InputError(
            f"a model of type {kind!r} has no value projections self_attn.v_proj: value norms are "
            "read from models built as LLaMA is."
        )
    return found
