"""The entropy of a model's last prediction, added to its next input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from prismlm.errors import InputError, check_whole
from prismlm.layers.uncertainty_feedback import ROWS, UncertaintyEmbedding
from prismlm.models.uncertainty_feedback.call import (
    CACHES,
    CODES,
    Call,
    CallReader,
    checked_codes,
    codes_fed_back,
    first_pass_codes,
    logits_of_last,
)
from prismlm.models.uncertainty_feedback.model_class import ATTACHED, TABLE, add_to, remove_from
from prismlm.models.uncertainty_feedback.place import (
    check_model,
    decoder_and_embeddings,
    width_of,
)
from prismlm.models.uncertainty_feedback.state import (
    State,
    Threads,
    carry,
    codes_of,
    copied,
    has_seen,
    length_of,
)
from prismlm.models.uncertainty_feedback.table_file import SavedTable, read_table, write_table
from prismlm.models.watch import Hook, unwatched, watch
from prismlm.ops.uncertainty_feedback import NO_CODE, entropy_codes, neutral_code

# What the pass that codes are taken from is to leave out.
NOT_IN_FIRST_PASS = ("labels", "logits_to_keep", "output_hidden_states", "output_attentions")
NAME_OTHERS = 'name others, with attach_uncertainty(model, decoder="…", embeddings="…").'


class UncertaintyFeedback:
    """Adds to the input at position t a vector for the entropy of the prediction made at t − 1.

        x_t ← x_t + E[c_t],   c_t = ⌊(levels − 1) H(softmax ℓ_{t−1}) / ln V⌋

    c of a row's first token and of padding is none, and adds nothing. E is a submodule of the
    model, ``prismlm_uncertainty``, and so a part of its ``parameters()`` and ``state_dict()``; the
    model's other weights and its code stay as they are, and :meth:`detach` takes all of it out.

    A call with one new token and a cache has its code from the cache. Of several new tokens the
    first has the cache's; the others have the neutral code with ``passes`` = 1, and with more the
    codes of as many less one passes without gradient, each of which makes about one more position
    what token by token would give. Trained with one pass, the table learns a single vector. Codes
    follow the rows of a cache: beams, selection, repetition. ``uncertainty_codes`` of a call, int64
    [B, T], replay codes; −1 is none. The output has those that were used, under the same name.

    Nothing is carried from one call to another but in a cache. Threads may call one model at once.

    Source: PRISMA, with the meaning that its pseudo-code loses in cached decoding.

    Attributes:
        model: what it stands in.
        levels: how many codes there are.
        passes: as given.
        places: the names that were given, of ``decoder`` and ``embeddings``.
        rearrange: what is done with the codes of a call while the model trains, replayed ones left
            alone; None for nothing. Controls put the signal out of order with it.

    Args:
        model: a Hugging Face decoder, or encoder-decoder.
        embedding: the table.
        passes: forward passes of a call with several new tokens, at least 1.
        decoder: dotted name of the decoder, for a model that does not say.
        embeddings: dotted name of its input embeddings, likewise.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        embedding: UncertaintyEmbedding,
        *,
        passes: int = 2,
        decoder: str | None = None,
        embeddings: str | None = None,
    ) -> None:
        check_model(model)
        self.model = model
        self.levels = embedding.levels
        self.passes = check_whole("the number of passes", passes, 1)
        self.rearrange: Callable[[Tensor], Tensor] | None = None
        self.places = {"decoder": decoder, "embeddings": embeddings}
        inner, inputs = decoder_and_embeddings(model, **self.places)
        if uncertainty_of(model) is not None:
            raise InputError(
                f"this {type(model).__name__} has uncertainty feedback already: detach() it first."
            )
        if embedding.weight.shape[1] != width_of(inputs):
            raise InputError(
                f"the table has vectors of {embedding.weight.shape[1]}, and the input embeddings "
                f"of {type(model).__name__} are {width_of(inputs)} wide."
            )
        self._reader = CallReader(model)
        self._threads = Threads()
        # Not models.watch: these stand until detach(), and act for every thread.
        self._handles: list[RemovableHandle] = [
            inner.register_forward_pre_hook(self._enter, with_kwargs=True),
            inputs.register_forward_hook(self._embedded),
        ]
        add_to(model, self, embedding)

    @property
    def embedding(self) -> Any:
        """The table, an UncertaintyEmbedding, or what PEFT put around it (``modules_to_save``)."""
        return getattr(self.model, TABLE)

    @property
    def state(self) -> State:
        """What is known of this thread's call."""
        return self._threads.state

    def reset_uncertainty(self) -> None:
        """Do nothing, where the source's code asks for it: a call without a cache begins anew."""

    def save(self, directory: Path | str, tensors: dict[str, Tensor] | None = None) -> None:
        """Write the table beside the checkpoint of its model.

        ``tensors`` are the model's, by their names in its state dict, where it has them sharded.
        """
        held = self.model.state_dict() if tensors is None else tensors
        table, seen = held[f"{TABLE}.weight"], held[f"{TABLE}.seen"]
        names = {part: name for part, name in self.places.items() if name is not None}
        write_table(directory, self.model, SavedTable(table, seen, self.levels, self.passes, names))

    @classmethod
    def load(
        cls, directory: Path | str, model: PreTrainedModel, *, levels: int | None = None
    ) -> UncertaintyFeedback:
        """Put a saved table into its model; see :func:`load_uncertainty`."""
        saved = read_table(directory, model, levels=levels)
        embedding = UncertaintyEmbedding(saved.table.shape[1], saved.levels, rows=len(saved.table))
        with torch.no_grad():
            embedding.weight.copy_(saved.table)
            if saved.seen is not None:
                embedding.seen.copy_(saved.seen)
        _, inputs = decoder_and_embeddings(model, **saved.names)
        beside = next(inputs.parameters())
        return cls(model, embedding.to(beside), passes=saved.passes, **saved.names)

    def detach(self) -> None:
        """Take table and hooks out; the model is what it was. A second time does nothing."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        remove_from(self.model)

    def run(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return what ``forward``, the model's own, gives with codes fed."""
        kwargs = self._reader.named(args, kwargs)
        replayed = kwargs.pop(CODES, None)
        call = self._reader.read(self.model, kwargs)
        if replayed is not None:
            codes = checked_codes(replayed, call, self.levels)
        else:
            codes = self._first_codes(call)
            for _ in range(self.passes - 1 if call.ids.shape[1] > 1 else 0):
                codes = codes_fed_back(codes, self._predicted(forward, codes, kwargs))
            if self.model.training and self.rearrange is not None:
                codes = self.rearrange(codes)
        output = self._fed(forward, codes, kwargs)
        if isinstance(output, tuple):
            raise InputError(
                "return_dict=False gives no names to what a model returns: leave it out with "
                "uncertainty feedback."
            )
        output[CODES] = codes
        self._carry(call, output)
        return output

    def _fed(
        self, forward: Callable[..., Any], codes: Int64[Tensor, "B T"], kwargs: dict[str, Any]
    ) -> Any:
        state = self.state
        state.codes, state.pending, state.added = codes, False, False
        try:
            output = forward(**kwargs)
        finally:
            state.codes, state.pending = None, False
        if not state.added:
            raise InputError(
                f"nothing was added to the input of this {type(self.model).__name__}: its decoder "
                f"neither called its input embeddings nor was given inputs_embeds. Detach this, or "
                f"{NAME_OTHERS}"
            )
        return output

    def _first_codes(self, call: Call) -> Int64[Tensor, "B T"]:
        """Return codes to begin with."""
        levels, rows = self.levels, len(call.ids)
        held = None if call.cache is None else codes_of(call.cache)
        if held is not None:
            held.check(rows, levels, length_of(call.cache))
            start = held.following
        elif call.cache is not None and has_seen(call.cache):
            start = call.ids.new_full((rows, 1), neutral_code(levels))
        else:
            start = call.ids.new_full((rows, 1), NO_CODE)
        return first_pass_codes(call, start, neutral_code(levels))

    @torch.no_grad()
    def _predicted(
        self, forward: Callable[..., Any], codes: Int64[Tensor, "B T"], kwargs: dict[str, Any]
    ) -> Int64[Tensor, "B T"]:
        """Return the code of the prediction at each new position, given codes at all of them."""
        own = {name: value for name, value in kwargs.items() if name not in NOT_IN_FIRST_PASS}
        held = [name for name in CACHES if own.get(name) is not None]
        for name in held:
            # A pass that only looks must leave the cache alone.
            own[name] = copied(own[name])
        own |= {"use_cache": bool(held), "return_dict": True}
        with unwatched():
            logits: Tensor = self._fed(forward, codes, own).logits
        return entropy_codes(logits, self.levels)

    def _carry(self, call: Call, output: Any) -> None:
        """Put the code of the next token to the cache of an output, if it has one."""
        # Some models write into the cache that they were given and do not return it.
        cache = next((output[name] for name in CACHES if output.get(name) is not None), call.cache)
        if cache is None:
            if self.state.generates:
                raise InputError(
                    f"{type(self.model).__name__} generates without a cache, where uncertainty "
                    f"feedback keeps codes ({' or '.join(CACHES)}): leave use_cache=False out, "
                    "and turn gradient checkpointing off."
                )
            return
        row, last = logits_of_last(output.logits, call), call.ids.shape[1] - 1
        if row is None:
            raise InputError(
                f"the logits of this call have none of the last position, {last}, whose entropy is "
                "the code of the next token: have it among logits_to_keep, or set use_cache=False."
            )
        following = entropy_codes(row, self.levels, first_position=last)
        carry(cache, torch.where(call.text[:, -1:], following, NO_CODE), self.levels)

    def _enter(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.state.codes is None:
            return None
        embeds = kwargs.get("inputs_embeds")
        if embeds is None:
            self.state.pending = True
            return None
        return args, kwargs | {"inputs_embeds": embeds + self._vectors(embeds)}

    def _embedded(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor | None:
        if not self.state.pending:
            return None
        self.state.pending = False
        return output + self._vectors(output)

    def _vectors(self, beside: Tensor) -> Tensor:
        codes = self.state.codes
        assert codes is not None
        vectors = self.embedding(codes).to(beside)
        if vectors.shape != beside.shape:
            raise InputError(
                f"the vectors of the codes are {list(vectors.shape)}, and what comes from the "
                f"input embeddings is {list(beside.shape)}: {NAME_OTHERS}"
            )
        self.state.added = True
        return vectors


def uncertainty_of(model: nn.Module) -> UncertaintyFeedback | None:
    """Return the feedback that stands in a model, or None."""
    return getattr(model, ATTACHED, None)


def attach_uncertainty(
    model: PreTrainedModel,
    levels: int = 65536,
    *,
    rows: int | None = ROWS,
    deviation: float | None = 0.0,
    passes: int = 2,
    decoder: str | None = None,
    embeddings: str | None = None,
) -> UncertaintyFeedback:
    """Put uncertainty feedback into a model, its new table in dtype and device of its embeddings.

    The table is the model's submodule ``prismlm_uncertainty``: it is trained, moved, wrapped and
    saved with it. By default it starts at zero, so that the model begins as it was.

    The source's own form is ``rows=None, deviation=None, passes=1``, with two traps: rounding alone
    changes the vector of one of 65,536 independent rows by 130 %, and with one pass training moves
    the neutral row alone.

    Args:
        model: a Hugging Face decoder, or encoder-decoder.
        levels: how many codes there are.
        rows: of the table, interpolated between, at most one a code; None for one a code.
        deviation: of the table at the start; None for the model's initializer_range.
        passes: see :class:`UncertaintyFeedback`.
        decoder: dotted name of the decoder, as in ``model.named_modules()``, for a model that does
            not say which of its modules that is. Saved and loaded with the table.
        embeddings: dotted name of its input embeddings, likewise.

    Raises:
        InputError: as :class:`UncertaintyFeedback`, levels that are no whole number from 2 on, or
            a deviation below 0.
    """
    check_model(model)
    _, inputs = decoder_and_embeddings(model, decoder=decoder, embeddings=embeddings)
    text: Any = model.config.get_text_config(decoder=True)
    spread = getattr(text, "initializer_range", 0.02) if deviation is None else deviation
    embedding = UncertaintyEmbedding(width_of(inputs), levels, rows=rows, deviation=spread)
    weight = next(inputs.parameters())
    return UncertaintyFeedback(
        model, embedding.to(weight), passes=passes, decoder=decoder, embeddings=embeddings
    )


def save_uncertainty(directory: Path | str, feedback: UncertaintyFeedback) -> None:
    """Write the table beside the checkpoint of its model, as ``save_pretrained`` does."""
    feedback.save(directory)


def load_uncertainty(
    directory: Path | str, model: PreTrainedModel, *, levels: int | None = None
) -> UncertaintyFeedback:
    """Put a saved table beside the model that it was trained with.

    Args:
        directory: of the checkpoint.
        model: what was loaded from it, in the dtype that it was saved in.
        levels: how many codes are expected; None for as many as there are.

    Raises:
        FormatError: the file is missing, damaged, of another version, of another number of levels,
            or of another model.
        InputError: the model has no decoder to put it beside, or feedback already.
    """
    if levels is not None:
        levels = check_whole("the number of levels", levels, 2)
    return UncertaintyFeedback.load(directory, model, levels=levels)


@contextmanager
def recording_codes(model: nn.Module) -> Iterator[list[Tensor]]:
    """Keep the codes of this thread's calls in the block, each [B, T]; none without feedback."""
    codes: list[Tensor] = []

    def called(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        codes.append(output[CODES])

    with watch([] if uncertainty_of(model) is None else [Hook(model, after=called)]):
        yield codes


def replay(ids: Tensor, codes: Tensor | list[Tensor] | None) -> dict[str, Tensor]:
    """Return the arguments of a call that reads ``ids`` [B, T] with the codes of an earlier one.

    As many of them as there are ``codes`` for: the last token of a generation was never read. All,
    and codes of their own, where none were recorded.
    """
    if isinstance(codes, list):
        codes = torch.cat(codes, 1) if codes else None
    if codes is None:
        return {"input_ids": ids}
    return {"input_ids": ids[:, : codes.shape[1]], CODES: codes[:, : ids.shape[1]]}
