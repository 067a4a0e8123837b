"""What channels or heads did along a text, and the sequences that activate each most."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from prismlm.corpus.words import WordedText, worded
from prismlm.errors import InputError, check_choice, check_finite, check_whole
from prismlm.models.attention import head_writes
from prismlm.models.decoders.mixers import chosen_layers, gates_of
from prismlm.models.evaluating import evaluating
from prismlm.models.seam import run_decoder
from prismlm.models.watch import Hook, watch
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prismlm.corpus.store import Corpus
    from prismlm.corpus.windows import WindowBatch

Kind = Literal["write", "read", "values", "heads"]
"""Gates of channels; ‖v_h‖ of value heads; what attention heads write into the residual stream."""


@dataclass(frozen=True)
class TopToken:
    """A token of a sequence, by corpus position, with its activation."""

    position: int
    token_id: int
    gate: float


@dataclass(frozen=True)
class TopSequence:
    """One of the sequences that activate a unit most.

    Attributes:
        total: Σ_j a_j, of a channel Σ_j write_jk.
        start: corpus position of its first token.
        length: tokens.
        document: the number of its document.
        tokens: those of the largest activation, the largest first.
    """

    total: float
    start: int
    length: int
    document: int
    tokens: tuple[TopToken, ...]


@dataclass(frozen=True, eq=False)
class Activations:
    """Activations of R units of each layer at the N tokens of S sequences; on the CPU.

    Attributes:
        tokens: their ids; those of a sequence follow each other.
        starts, lengths, documents: corpus position, tokens and document of each sequence.
        values: by kind and layer.
    """

    tokens: Int64[Tensor, " N"]
    starts: Int64[Tensor, " S"]
    lengths: Int64[Tensor, " S"]
    documents: Int64[Tensor, " S"]
    values: dict[tuple[Kind, int], Float[Tensor, "N R"]]

    def top_sequences(
        self, kind: Kind, layer: int, *, kept: int = 10, tokens: int = 10
    ) -> list[tuple[TopSequence, ...]]:
        """Return the ``kept`` sequences of the largest Σ_j a_j of each unit of a layer, best first.

        Each has the ``tokens`` of the largest activation. Source: ProtoT, §5.1.
        """
        check_whole("the number of sequences kept", kept, 1)
        check_whole("the number of tokens kept of a sequence", tokens, 1)
        values = self.values[kind, layer]
        firsts = self.lengths.cumsum(0) - self.lengths
        sums = np.add.reduceat(values.numpy(), firsts.numpy(), dtype=np.float64)
        rows = torch.stack([self.starts, self.lengths, self.documents, firsts], 1).tolist()

        def sequence(number: int, unit: int) -> TopSequence:
            start, length, document, first = rows[number]
            own, ids = values[first : first + length, unit], self.tokens[first : first + length]
            # A stable sort: among equals the earlier token comes first.
            gates, places = own.sort(descending=True, stable=True)
            columns = (each[:tokens].tolist() for each in (places + start, ids[places], gates))
            top = tuple(TopToken(*token) for token in zip(*columns, strict=True))
            return TopSequence(float(sums[number, unit]), start, length, document, top)

        best = (-sums).argsort(0, kind="stable")[:kept].T.tolist()
        return [tuple(sequence(number, unit) for number in own) for unit, own in enumerate(best)]


def read_activations(
    model: PreTrainedModel,
    batches: Iterable[WindowBatch],
    kinds: Sequence[Kind],
    layers: Iterable[int] | None = None,
    *,
    total: int | None = None,
    progress: Reporter = SILENT,
) -> Activations:
    """Return activations at the tokens that windows own; ``total`` of them are expected.

    ``kinds`` are one kind or both gates; a layer that is named twice is read once. Memory: 4·N·R
    bytes for each kind and layer, whatever the vocabulary.
    """
    read = _reader(model, kinds)
    wanted = None if layers is None else tuple(dict.fromkeys(layers))
    columns: list[tuple[Tensor, ...]] = []
    values: dict[tuple[Kind, int], list[Tensor]] = {}
    with progress.task("Reading activations", total) as task:
        for batch in batches:
            with evaluating(model):
                by_kind = read(batch.input_ids, batch.attention_mask)
            rows = batch.owned.any(1)
            firsts = batch.owned.int().argmax(1)[:, None]
            each = (batch.positions.gather(1, firsts)[:, 0], batch.owned.sum(1), batch.document)
            columns.append((batch.input_ids[batch.owned], *(column[rows] for column in each)))
            for kind, of_layers in zip(kinds, by_kind, strict=True):
                for layer in chosen_layers(len(of_layers), wanted):
                    activations = of_layers[layer]
                    own = activations[batch.owned.to(activations.device)].float().cpu()
                    check_finite("activations", own)
                    values.setdefault((kind, layer), []).append(own)
            task.advance(int(batch.owned.sum()))
    tokens, starts, lengths, documents = (torch.cat(one) for one in zip(*columns, strict=True))
    text = (tokens, starts, lengths, documents)
    # Each is freed as it is put together, so that they are not held twice.
    return Activations(*text, {key: torch.cat(values.pop(key)) for key in list(values)})


def _reader(
    model: PreTrainedModel, kinds: Sequence[Kind]
) -> Callable[[Tensor, Tensor], list[tuple[Tensor, ...]]]:
    """Return what reads the activations of each kind and layer from one forward pass."""
    if tuple(kinds) == ("values",):
        return lambda ids, mask: [value_norms(model, ids, mask)]
    if tuple(kinds) == ("heads",):
        return lambda ids, mask: [head_writes(model, ids, mask.bool())]
    for kind in kinds:
        check_choice("the kind of activations", kind, ("write", "read", "values", "heads"))

    def gates(ids: Tensor, mask: Tensor) -> list[tuple[Tensor, ...]]:
        found = gates_of(model, ids, mask)
        return [tuple(getattr(evidence, kind) for evidence in found) for kind in kinds]

    return gates


@torch.no_grad()
def value_norms(
    model: nn.Module, input_ids: Int64[Tensor, "B T"], mask: Tensor | None = None
) -> tuple[Float[Tensor, "B T H"], ...]:
    """Return ‖v_h‖ of each layer's value heads before attention mixes positions; float32.

    Heads that share keys and values count once (ProtoT, A.8).
    """
    widths: dict[nn.Module, int] = {}
    for name, module in model.named_modules():
        projection, width = getattr(module, "v_proj", None), getattr(module, "head_dim", None)
        if name.endswith("self_attn") and isinstance(projection, nn.Module) and width:
            widths[projection] = int(width)
    if not widths:
        kind = getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__
        raise InputError(
            f"a model of type {kind!r} has no value projections self_attn.v_proj: value norms are "
            "read from models built as LLaMA is."
        )
    norms: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        norms[module] = output.detach().float().unflatten(-1, (-1, widths[module])).norm(dim=-1)

    with watch(Hook(module, after=note) for module in widths):
        run_decoder(model, input_ids, mask)
    return tuple(norms[module] for module in widths)


class PassageOrigin(NamedTuple):
    """The document of a passage; None is what the corpus does not know."""

    doc_id: str
    title: str | None
    source: str | None
    domain: str | None
    license: str | None
    url: str | None


@dataclass(frozen=True)
class Passage:
    """A sequence of a corpus, ``start`` there and ``offset`` in its document, with its text."""

    start: int
    offset: int
    document: PassageOrigin
    text: WordedText


def read_passages(corpus: Corpus, sequences: Iterable[TopSequence]) -> dict[int, Passage]:
    """Return each sequence's passage by its start; each document is read once."""
    wanted: dict[int, set[tuple[int, int]]] = {}
    for sequence in sequences:
        wanted.setdefault(sequence.document, set()).add((sequence.start, sequence.length))
    passages: dict[int, Passage] = {}
    for number in sorted(wanted):
        (row,) = corpus.documents.take(np.array([number])).to_pylist()
        text, spans = corpus.text(number), corpus.spans(number)
        document = PassageOrigin(*(row[name] for name in PassageOrigin._fields))
        for start, length in sorted(wanted[number]):
            offset = start - row["start"]
            words = worded(text, spans[offset : offset + length])
            passages[start] = Passage(start, offset, document, words)
    return passages
