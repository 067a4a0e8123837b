"""Activations of channels or heads: along one text, and the sequences with the largest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from prismlm.corpus.pieces import TokenWords, encode, token_words
from prismlm.corpus.store import Corpus
from prismlm.corpus.windows import Sequences
from prismlm.errors import InputError, check_finite
from prismlm.layers import PrototypeMixer
from prismlm.models.attention import head_writes
from prismlm.models.decoders.protot import (
    check_channel,
    chosen_layers,
    gates_of,
    half_life,
    mixers_of,
)
from prismlm.models.device import check_sequence
from prismlm.models.seam import run_decoder
from prismlm.models.watch import Hook, evaluating, watch
from prismlm.ops.prototype_mixer.chunked import EMPTY_BELOW
from prismlm.probes.results import Row
from prismlm.progress import SILENT, Reporter

Kind = Literal["write", "read", "values", "heads"]
"""Gates of channels; ‖v_h‖ of value heads; what attention heads write into the residual stream."""


@dataclass(frozen=True, eq=False)
class Activations:
    """Activations of R units of each layer at the N tokens of S sequences; on the CPU."""

    tokens: Int64[Tensor, " N"]
    starts: Int64[Tensor, " S"]  # corpus positions
    lengths: Int64[Tensor, " S"]
    documents: Int64[Tensor, " S"]
    values: dict[tuple[Kind, int], Float[Tensor, "N R"]]

    def top_sequences(
        self, kind: Kind, layer: int, *, count: int = 10, tokens: int = 10
    ) -> list[list[Row]]:
        """Return the sequences with the largest Σ_j a_j for each unit of a layer, best first.

        Each has its ``total`` Σ_j a_j, its ``position``, ``length`` and ``document``, and the
        ``tokens`` with the largest activations: ``position``, ``token_id`` and ``gate``.
        Source: ProtoT, §5.1.
        """
        values = self.values[kind, layer]
        offsets = self.lengths.cumsum(0) - self.lengths
        totals = np.add.reduceat(values.numpy(), offsets.numpy(), dtype=np.float64)
        columns = torch.stack([self.starts, self.lengths, self.documents, offsets], 1).tolist()

        def sequence(number: int, unit: int) -> Row:
            start, length, document, offset = columns[number]
            gates, order = values[offset : offset + length, unit].sort(descending=True, stable=True)
            ids = self.tokens[offset : offset + length][order]
            top = zip((order + start).tolist(), ids.tolist(), gates.tolist(), strict=True)
            names = ("position", "token_id", "gate")
            return {
                "total": float(totals[number, unit]),
                "position": start,
                "length": length,
                "document": document,
                "tokens": [dict(zip(names, token, strict=True)) for token in top][:tokens],
            }

        best = (-totals).argsort(0, kind="stable")[:count].T.tolist()
        return [[sequence(number, unit) for number in row] for unit, row in enumerate(best)]


def read_activations(
    model: PreTrainedModel,
    sequences: Sequences,
    kinds: Sequence[Kind],
    layers: Iterable[int] | None = None,
    progress: Reporter = SILENT,
) -> Activations:
    """Return activations at the tokens of sequences.

    ``kinds`` are one kind or both gates. Memory: 4·N·R bytes for each kind and layer, whatever the
    vocabulary.
    """
    layers = None if layers is None else tuple(dict.fromkeys(layers))
    columns: list[tuple[Tensor, ...]] = []
    values: dict[tuple[Kind, int], list[Tensor]] = {}
    with progress.task("Reading activations", sequences.tokens) as task:
        for batch in sequences.batches():
            ids, mask = batch.input_ids, batch.attention_mask
            with evaluating(model):
                if "values" in kinds:
                    by_kind = [value_norms(model, ids, mask)]
                elif "heads" in kinds:
                    by_kind = [head_writes(model, ids, mask.bool())]
                else:
                    gates = gates_of(model, ids, mask)
                    by_kind = [tuple(getattr(layer, kind) for layer in gates) for kind in kinds]
            rows = batch.owned.any(1)
            first = batch.owned.int().argmax(1)[:, None]
            places = (batch.positions.gather(1, first)[:, 0], batch.owned.sum(1), batch.document)
            columns.append((batch.input_ids[batch.owned], *(c[rows] for c in places)))
            for kind, by_layer in zip(kinds, by_kind, strict=True):
                for layer in chosen_layers(len(by_layer), layers):
                    activations = by_layer[layer]
                    owned = activations[batch.owned.to(activations.device)].float().cpu()
                    check_finite("activations", owned)
                    values.setdefault((kind, layer), []).append(owned)
            task.advance(int(batch.owned.sum()))
    tokens, starts, lengths, documents = (torch.cat(c) for c in zip(*columns, strict=True))
    # Parts are freed as they are concatenated, so that there are never two copies of all.
    joined = {key: torch.cat(values.pop(key)) for key in list(values)}
    return Activations(tokens, starts, lengths, documents, joined)


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
            f"a model of type {kind!r} has no value projections self_attn.v_proj: value norms need "
            "a model with LLaMA's layers."
        )
    norms: dict[nn.Module, Tensor] = {}

    def record(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        norms[module] = output.detach().float().unflatten(-1, (-1, widths[module])).norm(dim=-1)

    with watch(Hook(module, after=record) for module in widths):
        run_decoder(model, input_ids, mask)
    return tuple(norms[module] for module in widths)


class Passage(NamedTuple):
    """A passage of a corpus, ``start`` there and ``offset`` in its document, with its text.

    ``document`` has ``doc_id``, ``title``, ``source``, ``domain``, ``license`` and ``url``; None is
    unknown.
    """

    start: int
    offset: int
    document: Row
    text: TokenWords


def read_passages(
    corpus: Corpus, spans: Iterable[tuple[int, int, int]]
) -> dict[tuple[int, int, int], Passage]:
    """Return the passage of each (document, start, length); each document is read once."""
    passages: dict[tuple[int, int, int], Passage] = {}
    for number, group in groupby(sorted(set(spans)), key=lambda span: span[0]):
        (document,) = corpus.documents.take(np.array([number])).to_pylist()
        text, characters = corpus.text(number), corpus.spans(number)
        for span in group:
            _, start, length = span
            offset = start - document["start"]
            words = token_words(text, characters[offset : offset + length])
            passages[span] = Passage(start, offset, document, words)
    return passages


@dataclass(frozen=True, eq=False)
class LayerCurves:
    """Gates and memory of one layer over T positions and R channels; on the CPU."""

    layer: int
    write: Float[Tensor, "T R"]
    read: Float[Tensor, "T R"]
    mass: Float[Tensor, "T R"]  # M_ik = Σ_{j<i} β_k^(i−j) write_jk; float64
    decay: Float[Tensor, " R"] | Float[Tensor, "T R"]  # β_k, or β_jk if it depends on the token

    @property
    def half_life(self) -> Float[Tensor, " R"]:
        """−ln 2 / ln β_k in positions, float64; with decays by token from the mean ln β."""
        if self.decay.ndim == 1:
            return half_life(self.decay)
        return half_life(self.decay.double().log().mean(0).exp())

    def memory(self, channel: int) -> Float[Tensor, "T T"]:
        """Return the weight of position j in what position i finds in a channel, float64.

            weight_ij = β_k^(i−j) write_jk / M_ik  for j < i, otherwise 0

        With decays by token, β_k^(i−j) is β_jk ⋯ β_(i−1)k. Rows sum to 1, or to 0 for an empty
        channel (M below 1e-30). With a convolution on the values, j's value also holds some of the
        values before it.
        """
        check_channel(self.write.shape[1], self.layer, channel)
        mass = self.mass[:, channel, None]
        # Differences of Σ ln β are the logarithms of what remains.
        logs = self.decay[..., channel].double().log().expand(len(self.write))
        before = logs.cumsum(0) - logs
        past = torch.ones_like(mass @ mass.T, dtype=torch.bool).tril(-1) & (mass >= EMPTY_BELOW)
        remaining = (before[:, None] - before).masked_fill(~past, -torch.inf).exp()
        return torch.where(past, remaining * self.write[:, channel].double() / mass, 0.0)


@dataclass(frozen=True)
class TextCurves:
    """A text as words and tokens, with the curves of the chosen layers."""

    text: TokenWords
    token_ids: tuple[int, ...]
    curves: tuple[LayerCurves, ...]


def discounted_mass(
    write: Float[Tensor, "T R"], decay: Float[Tensor, " R"] | Float[Tensor, "T R"]
) -> Float[Tensor, "T R"]:
    """Return M_i = β_(i−1) ⊙ (M_{i−1} + write_{i−1}), M_0 = 0, in float64."""
    beta = decay.double().expand(write.shape)
    mass = torch.zeros(write.shape, dtype=torch.float64)
    for i in range(1, len(write)):
        mass[i] = beta[i - 1] * (mass[i - 1] + write[i - 1])
    return mass


def read_channels(
    model: PreTrainedModel, input_ids: Int64[Tensor, " T"], layers: Iterable[int] | None = None
) -> tuple[LayerCurves, ...]:
    """Return gates and memory of one sequence (ProtoT, §5.1 and Fig. 3), interventions included."""
    mixers = mixers_of(model)
    layers = chosen_layers(len(mixers), layers)
    check_sequence(input_ids)
    decays: dict[nn.Module, Tensor] = {}  # [R], or [B, T, R] if they depend on the token

    def record(mixer: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        assert isinstance(mixer, PrototypeMixer)
        decays[mixer] = mixer.decay_of(args[0]).detach()

    with watch(Hook(mixer, before=record) for mixer in mixers):
        gates = gates_of(model, input_ids[None])
    curves: list[LayerCurves] = []
    for layer in layers:
        write, read = (gate[0].float().cpu() for gate in gates[layer])
        decay = decays[mixers[layer]].cpu()
        decay = decay if decay.ndim == 1 else decay[0]
        curves.append(LayerCurves(layer, write, read, discounted_mass(write, decay), decay))
    return tuple(curves)


def read_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    layers: Iterable[int] | None = None,
) -> TextCurves:
    """Return :func:`read_channels` of a text, with its words and tokens."""
    ids, spans = encode(tokenizer, text)
    curves = read_channels(model, torch.tensor(ids, device=model.device), layers)
    return TextCurves(token_words(text, spans), tuple(ids), curves)
