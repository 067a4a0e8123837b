"""Uncertainty feedback beside any Hugging Face decoder (PRISMA).

    x_t ← x_t + E[c_t],   c_t = ⌊(levels − 1) H(softmax ℓ_{t−1}) / ln V⌋

The model's class is mixed with ``_WithUncertainty``, whose ``forward`` finds the codes of a
call, runs the model's own with them, and leaves the code of the next token in the cache. Two hooks
add E[c] to what the decoder reads.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int64
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from prismlm import fingerprints
from prismlm.errors import FormatError, InputError, check_whole
from prismlm.layers.uncertainty_feedback import ROWS, UncertaintyEmbedding
from prismlm.models.seam import CACHES, decoder_and_embeddings, sees_ahead
from prismlm.models.uncertainty_table import UNCERTAINTY_FILE, SavedTable, read_table, write_table
from prismlm.models.watch import Hook, unwatched, watch
from prismlm.ops.uncertainty_feedback import NO_CODE, entropy_codes, neutral_code

CODES = "uncertainty_codes"
"""Codes of a call, as an argument and in the output: int64 [B, T], −1 for none."""
TABLE = "prismlm_uncertainty"
ATTACHED = "_prismlm_feedback"
# What RWKV and Reformer resume from: tensors, which cannot carry the next token's code.
STATES_WITHOUT_CODES = ("state", "past_buckets_states")
# Tokens that stand for something other than text, by their names in configurations.
PLACEHOLDERS = tuple(
    f"{kind}_token_{ending}" for kind in ("image", "video", "audio") for ending in ("id", "index")
)
# What the pass that codes are taken from is to leave out.
NOT_IN_FIRST_PASS = ("labels", "logits_to_keep", "output_hidden_states", "output_attentions")
# Assisted generation and prompt lookup take tokens back after the model saw several at once; a
# prompt that is read in chunks has other codes than one that is read at once.
REFUSED_IN_GENERATE = ("assistant_model", "prompt_lookup_num_tokens", "prefill_chunk_size")
NAME_OTHERS = 'name others, with attach_uncertainty(model, decoder="…", embeddings="…").'


class _CarriedCode(NamedTuple):
    following: Int64[Tensor, "B 1"]  # the code of the position that comes next
    levels: int
    length: int | None  # of the cache when it was added; None where it does not tell


class _CarriesCodes:
    """Mixed into a cache's class: every change of its rows is made to its codes too."""

    prismlm_codes: _CarriedCode | None = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change("reorder_cache", beam_idx, lambda code: code[beam_idx.to(code.device)])

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change("batch_select_indices", indices, lambda code: code[indices.to(code.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(
            "batch_repeat_interleave", repeats, lambda code: code.repeat_interleave(repeats, 0)
        )

    def reset(self) -> None:
        cache: Any = super()
        cache.reset()
        self.prismlm_codes = None

    def _change(self, method: str, given: Any, change: Callable[[Tensor], Tensor]) -> None:
        getattr(super(), method)(given)
        if (held := self.prismlm_codes) is not None:
            self.prismlm_codes = held._replace(following=change(held.following))


@functools.lru_cache
def _carrying(kind: type) -> type:
    return type(kind.__name__, (_CarriesCodes, kind), {"__module__": kind.__module__})


def carried_code(cache: Any) -> _CarriedCode | None:
    """Return what a cache carries, or None if that is nothing yet."""
    return getattr(cache, "prismlm_codes", None)


def _length_of(cache: Any) -> int | None:
    """Return how many positions a cache holds, or None where that is not known at no cost."""
    if torch.compiler.is_compiling():
        return None
    with suppress(ValueError):  # of recurrent layers alone, which do not count
        length = cache.get_seq_length()
        return length if isinstance(length, int) else None
    return None


def _has_seen(cache: Any) -> bool:
    with suppress(ValueError):
        return cache.get_seq_length() > 0
    return bool(cache.has_previous_state())


class _Detached(TorchFunctionMode):
    """Copies tensors that autograd made, which copy.deepcopy refuses, without their gradient."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        return memo.setdefault(id(tensor), tensor.detach().clone())


class _Call(NamedTuple):
    ids: Int64[Tensor, "B T"]  # the decoder's new tokens
    text: Bool[Tensor, "B T"]  # which are neither padding nor places of images and the like
    starts: Bool[Tensor, "B T"] | None  # which begin a sequence within their row
    cache: Any  # what was seen before, or None
    kept: Any  # ``logits_to_keep``: of which positions there are to be logits

    def first_codes(self, start: Int64[Tensor, "B 1"], neutral: int) -> Int64[Tensor, "B T"]:
        """Return ``start`` for the first new token, the neutral code for others, none for some.

        None for padding, images, the first token of a sequence, and one with no text before it in
        its row of this call; the first new token has what was before it in ``start``.
        """
        codes = torch.full_like(self.ids, neutral)
        codes[:, 1:].masked_fill_(~self.text[:, :-1], NO_CODE)
        codes[:, :1] = start
        without = ~self.text if self.starts is None else ~self.text | self.starts
        return codes.masked_fill_(without, NO_CODE)

    def checked(self, codes: Tensor, levels: int) -> Int64[Tensor, "B T"]:
        """Return codes that were given for this call, on its device."""
        whole = codes.shape == self.ids.shape and not codes.is_floating_point()
        if not whole or int(codes.min()) < NO_CODE or int(codes.max()) >= levels:
            raise InputError(
                f"{CODES} are {codes.dtype} {list(codes.shape)}: expected whole numbers "
                f"{list(self.ids.shape)}, one for each token, from {NO_CODE} (none) to "
                f"{levels - 1}."
            )
        return codes.to(self.ids.device, torch.int64)

    def last_logits(self, logits: Tensor) -> Tensor:
        """Return the logits [B, 1, V] of the last position."""
        last, rows = self.ids.shape[1] - 1, list(range(logits.shape[1]))
        if isinstance(self.kept, Tensor):
            # Not a number of positions, but which.
            rows = [row for row, at in enumerate(self.kept.tolist()) if at in (last, -1)]
        if not rows:
            raise InputError(
                f"the logits of this call have none of the last position, {last}, whose entropy is "
                "the code of the next token: have it among logits_to_keep, or set use_cache=False."
            )
        return logits[:, rows[-1:]]


def codes_fed_back(
    codes: Int64[Tensor, "B T"], predicted: Int64[Tensor, "B T"]
) -> Int64[Tensor, "B T"]:
    """Return codes in which every token has that of the prediction before it, where there is one.
    A row's first code and ``NO_CODE`` stay.
    """
    fed = codes.clone()
    fed[:, 1:] = torch.where(codes[:, 1:] == NO_CODE, NO_CODE, predicted[:, :-1])
    return fed


@dataclass(eq=False)
class _PassState:
    codes: Int64[Tensor, "B T"] | None = None  # to be added; None outside a pass
    pending: bool = False  # the embeddings called next are those of the decoder's input
    added: bool = False  # whether the codes were
    generates: bool = False  # whether ``generate`` calls the model


class _Threads(threading.local):
    """One state a thread: several may call a model at once.

    The state is an object of its own because what a compiled graph writes into threading.local
    itself is lost.
    """

    def __init__(self) -> None:
        self.state = _PassState()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model begins with nothing; threading.local itself cannot be copied.
        return _Threads, ()


class UncertaintyFeedback:
    """Adds to the input at position t a vector for the entropy of the prediction made at t − 1.

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
        self.model = model
        self.levels = embedding.levels
        self.passes = check_whole("the number of passes", passes, 1)
        self.rearrange: Callable[[Tensor], Tensor] | None = None
        named = {"decoder": decoder, "embeddings": embeddings}
        self.places = {part: name for part, name in named.items() if name is not None}
        inner, inputs = decoder_and_embeddings(model, **self.places)
        if uncertainty_of(model) is not None:
            raise InputError(
                f"this {type(model).__name__} has uncertainty feedback already: detach() it first."
            )
        # Looked up once: in every call it would take longer than the sums of a decoding step.
        names = inspect.signature(model.forward).parameters
        self._names = tuple(name for name in names if name != "self")
        self._prefix = "decoder_" if model.config.is_encoder_decoder else ""
        tokens = {getattr(model.config, name, None) for name in PLACEHOLDERS}
        self._placeholders = tuple(token for token in tokens if token is not None)
        self._threads = _Threads()
        # Not models.watch: these stand until detach(), and act for every thread.
        self._handles = [
            inner.register_forward_pre_hook(self._enter, with_kwargs=True),
            inputs.register_forward_hook(self._embedded),
        ]
        setattr(model, TABLE, embedding.train(model.training))
        setattr(model, ATTACHED, self)
        model.__class__ = _mixed(type(model))

    @property
    def embedding(self) -> Any:
        """The table, an UncertaintyEmbedding, or what PEFT put around it (``modules_to_save``)."""
        return getattr(self.model, TABLE)

    @property
    def state(self) -> _PassState:
        """What is known of this thread's pass."""
        return self._threads.state

    def detach(self) -> None:
        """Take table and hooks out; the model is what it was. A second time does nothing."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        model: Any = self.model
        model.__class__ = model._kind
        delattr(model, TABLE)
        delattr(model, ATTACHED)

    def run(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return what ``forward``, the model's own, gives with codes fed."""
        # Python's own errors for an argument that is given twice, or one too many.
        kwargs = dict(**dict(zip(self._names[: len(args)], args, strict=True)), **kwargs)
        replayed = kwargs.pop(CODES, None)
        call = self._read(kwargs)
        if replayed is not None:
            codes = call.checked(replayed, self.levels)
        else:
            codes = call.first_codes(self._start(call), neutral_code(self.levels))
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

    def _read(self, given: dict[str, Any]) -> _Call:
        """Return what a call says, its arguments given by name."""
        model: Any = self.model
        ids = given.get(f"{self._prefix}input_ids")
        mask = given.get(f"{self._prefix}attention_mask")
        if ids is None and self._prefix and given.get("labels") is not None:
            ids = model.prepare_decoder_input_ids_from_labels(labels=given["labels"])
        if not isinstance(ids, Tensor) or ids.ndim != 2 or not ids.numel():
            shape = list(ids.shape) if isinstance(ids, Tensor) else ids
            raise InputError(
                f"{self._prefix}input_ids are {shape}: expected token ids [B, T], at least one. "
                "Uncertainty feedback goes from one token to the next, and cannot tell tokens "
                "from embeddings alone: give the ids, or detach it."
            )
        for name in STATES_WITHOUT_CODES:
            if given.get(name) is not None:
                raise InputError(
                    f"{name} resumes a text, and carries no code of its next token: with "
                    f"uncertainty feedback a {type(model).__name__} reads whole texts only."
                )
        text = torch.ones_like(ids, dtype=torch.bool)
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] < ids.shape[1]:
                raise InputError(
                    "the attention mask is none over tokens, [B, T], as with a static cache: "
                    "uncertainty feedback takes no other. Leave cache_implementation out."
                )
            text = mask[:, -ids.shape[1] :].bool()
        for token in self._placeholders:
            text = text & (ids != token)
        starts, positions = None, given.get("position_ids")
        if isinstance(positions, Tensor) and positions.shape[1:] == ids.shape[1:]:
            starts = torch.zeros_like(ids, dtype=torch.bool)
            starts[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
        return _Call(ids, text, starts, _cache_in(given), given.get("logits_to_keep"))

    def _start(self, call: _Call) -> Int64[Tensor, "B 1"]:
        """Return the code of the first new token."""
        held, rows = carried_code(call.cache), len(call.ids)
        if held is None:
            seen = call.cache is not None and _has_seen(call.cache)
            return call.ids.new_full((rows, 1), neutral_code(self.levels) if seen else NO_CODE)
        expected = {"rows": len(held.following), "levels": held.levels, "positions": held.length}
        now = {"rows": rows, "levels": self.levels, "positions": _length_of(call.cache)}
        for name, number in expected.items():
            if None not in (number, now[name]) and number != now[name]:
                raise InputError(
                    f"the cache carries codes of {number} {name}, and this call has {now[name]}: "
                    "a cache goes on with the same feedback, is not cropped, and its rows are "
                    "chosen by its own methods alone (batch_select_indices, "
                    "batch_repeat_interleave, reorder_cache). Begin anew without it."
                )
        return held.following

    @torch.no_grad()
    def _predicted(
        self, forward: Callable[..., Any], codes: Int64[Tensor, "B T"], kwargs: dict[str, Any]
    ) -> Int64[Tensor, "B T"]:
        """Return the code of the prediction at each new position, given codes at all of them."""
        own = {name: value for name, value in kwargs.items() if name not in NOT_IN_FIRST_PASS}
        held = [name for name in CACHES if own.get(name) is not None]
        with _Detached():
            # A pass that only looks must leave the cache alone.
            own |= {name: copy.deepcopy(own[name]) for name in held}
        own |= {"use_cache": bool(held), "return_dict": True}
        with unwatched():
            logits: Tensor = self._fed(forward, codes, own).logits
        return entropy_codes(logits, self.levels)

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

    def _carry(self, call: _Call, output: Any) -> None:
        """Put the code of the next token to the cache of an output, if it has one."""
        # Some models write into the cache that they were given and do not return it.
        cache = _cache_in(output) or call.cache
        if cache is None:
            if self.state.generates:
                raise InputError(
                    f"{type(self.model).__name__} generates without a cache, where uncertainty "
                    f"feedback keeps codes ({' or '.join(CACHES)}): leave use_cache=False out, "
                    "and turn gradient checkpointing off."
                )
            return
        row, last = call.last_logits(output.logits), call.ids.shape[1] - 1
        following = entropy_codes(row, self.levels, first_position=last)
        following = torch.where(call.text[:, -1:], following, NO_CODE)
        if not isinstance(cache, _CarriesCodes):
            cache.__class__ = _carrying(type(cache))
        cache.prismlm_codes = _CarriedCode(following, self.levels, _length_of(cache))

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

    def _vectors(self, inputs: Tensor) -> Tensor:
        codes = self.state.codes
        assert codes is not None
        vectors = self.embedding(codes).to(inputs)
        if vectors.shape != inputs.shape:
            raise InputError(
                f"the vectors of the codes are {list(vectors.shape)}, and what comes from the "
                f"input embeddings is {list(inputs.shape)}: {NAME_OTHERS}"
            )
        self.state.added = True
        return vectors


def _cache_in(given: Any) -> Any:
    """Return the cache among the arguments or the output of a call, or None."""
    return next((given[name] for name in CACHES if given.get(name) is not None), None)


class _WithUncertainty:
    """What the class of a model is mixed with while uncertainty feedback stands in it."""

    # For transformers: assisted generation is not for a model like this.
    _is_stateful = True
    _kind: type[Any]

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        parent: Any = super()
        # By their names: a family's own generate may take other arguments, in another order.
        given = inspect.signature(parent.generate).bind(*args, **kwargs).arguments | kwargs
        settings = given.get("generation_config") or getattr(self, "generation_config", None)
        for name in REFUSED_IN_GENERATE:
            if given.get(name, getattr(settings, name, None)) is not None:
                raise InputError(
                    f"{name} is not possible with uncertainty feedback: the codes would not be "
                    "those of one token after the other. Leave it out."
                )
        state = getattr(self, ATTACHED).state
        before, state.generates = state.generates, True
        try:
            return parent.generate(*args, **kwargs)
        finally:
            state.generates = before

    def init_continuous_batching(self, *_args: Any, **_kwargs: Any) -> Any:
        raise InputError(
            "continuous batching with uncertainty feedback: it packs requests into one row, whose "
            "paged cache carries no codes. Use generate(), with padding on the left."
        )

    generate_batch = continuous_batching_context_manager = init_continuous_batching

    def save_pretrained(
        self,
        save_directory: Path | str,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        """Save the model as it is without the table, and the table beside it.

        Readers such as vLLM's take no tensor that the architecture lacks. ``Trainer`` resumes from
        the weights alone, so that those in a directory ``checkpoint-N`` have the table as well.
        """
        model: Any = self
        tensors = dict(model.state_dict() if state_dict is None else state_dict)
        table = {name: tensors[name] for name in tensors if name.startswith(f"{TABLE}.")}
        if not Path(save_directory).name.startswith(PREFIX_CHECKPOINT_DIR):
            tensors = {name: value for name, value in tensors.items() if name not in table}
        parent: Any = super()
        parent.save_pretrained(save_directory, is_main_process, tensors, **kwargs)
        if is_main_process:
            save_uncertainty(save_directory, getattr(self, ATTACHED), table)

    @classmethod
    def from_pretrained(cls, directory: Path | str, *args: Any, **kwargs: Any) -> Any:
        model = cls._kind.from_pretrained(directory, *args, **kwargs)
        load_uncertainty(directory, model)
        return model

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        # Its class is made at run time, so that pickle would not find it.
        return _remade, (self._kind,), self.__dict__


@functools.lru_cache
def _mixed(kind: type[Any]) -> type[Any]:
    # With the signature of the model's own, by which Trainer and generate go.
    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = functools.partial(kind.forward, self)
        return getattr(self, ATTACHED).run(own, args, kwargs)

    members = {"__module__": kind.__module__, "_kind": kind, "forward": forward}
    return type(kind.__name__, (_WithUncertainty, kind), members)


def _remade(kind: type[Any]) -> Any:
    made: Any = _mixed(kind)
    return made.__new__(made)


def _check_model(model: object) -> None:
    """Raise InputError for what predicts no next token, as wrappers, encoders and names."""
    if not isinstance(model, PreTrainedModel):
        raise InputError(
            f"expected a Hugging Face model (PreTrainedModel), got a {type(model).__name__}: load "
            "it first, and of a wrapped model give the one inside, its .module or .model."
        )
    if not model.can_generate() or sees_ahead(model):
        raise InputError(
            f"a {type(model).__name__} of type {model.config.model_type!r} predicts no next token, "
            "so there is no prediction whose uncertainty could be fed back: expected a causal "
            "language model or an encoder-decoder. A model that was trained as a decoder may have "
            "to be loaded with is_decoder=True."
        )


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
        InputError: what is no Hugging Face model that predicts a next token, parts of it that are
            not found, levels that are no whole number from 2 on, or a deviation below 0.
    """
    _check_model(model)
    _, inputs = decoder_and_embeddings(model, decoder=decoder, embeddings=embeddings)
    text: Any = model.config.get_text_config(decoder=True)
    spread = getattr(text, "initializer_range", 0.02) if deviation is None else deviation
    embedding = UncertaintyEmbedding(inputs.weight.shape[1], levels, rows=rows, deviation=spread)
    embedding.to(next(inputs.parameters()))
    return UncertaintyFeedback(
        model, embedding, passes=passes, decoder=decoder, embeddings=embeddings
    )


def save_uncertainty(
    directory: Path | str, feedback: UncertaintyFeedback, tensors: dict[str, Tensor] | None = None
) -> None:
    """Write the table beside the checkpoint of its model, as ``save_pretrained`` does.

    ``tensors`` are the model's, by their names in its state dict, where it has them sharded.
    """
    held = feedback.model.state_dict() if tensors is None else tensors
    _, inputs = decoder_and_embeddings(feedback.model, **feedback.places)
    saved = SavedTable(
        held[f"{TABLE}.weight"],
        held[f"{TABLE}.seen"],
        levels=feedback.levels,
        passes=feedback.passes,
        model=fingerprints.of_tensor(inputs.weight),
        places=feedback.places,
    )
    write_table(directory, saved)


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
    _check_model(model)
    if levels is not None:
        levels = check_whole("the number of levels", levels, 2)
    saved, path = read_table(directory), Path(directory) / UNCERTAINTY_FILE
    if levels not in (None, saved.levels):
        raise FormatError(
            f"{path} has {saved.levels} levels, and {levels} were expected: codes of one mean "
            "nothing to the other. Leave levels out to use the file's, or train again."
        )
    _, inputs = decoder_and_embeddings(model, **saved.places)
    table, weight = saved.embedding, inputs.weight
    if saved.model != fingerprints.of_tensor(weight) or table.shape[1] != weight.shape[1]:
        raise FormatError(
            f"{path} was trained with other input embeddings than the model's (its vectors are "
            f"{table.dtype} {list(table.shape)}, the embeddings {weight.dtype} "
            f"{list(weight.shape)}): cannot verify that the table matches this model. Put the "
            f"original weights back, loaded with dtype={table.dtype}, or train the table again."
        )
    embedding = UncertaintyEmbedding(table.shape[1], saved.levels, rows=len(table))
    with torch.no_grad():
        embedding.weight.copy_(table)
        if saved.seen is not None:
            embedding.seen.copy_(saved.seen)
    embedding.to(weight)
    return UncertaintyFeedback(model, embedding, passes=saved.passes, **saved.places)


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
