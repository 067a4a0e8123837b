"""Uncertainty feedback for any Hugging Face decoder (PRISMA).

    x_t ← x_t + E[c_t],   c_t = ⌊(levels − 1) H(softmax ℓ_{t−1}) / ln V⌋

The model's class is mixed with ``_WithUncertainty``, whose ``forward`` determines the codes of a
call, runs the model with them, and stores the code of the next token in the cache. Two hooks add
E[c] to the input embeddings. The table E is saved in ``uncertainty_feedback.safetensors``.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int64
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from prismlm import fingerprints
from prismlm.errors import FormatError, InputError, check_whole
from prismlm.files import atomic_file, check_json, json_text
from prismlm.layers.uncertainty_feedback import ROWS, UncertaintyEmbedding
from prismlm.models.seam import CACHES, decoder_and_embeddings, sees_ahead
from prismlm.models.watch import Hook, unwatched, watch
from prismlm.ops.uncertainty_feedback import NO_CODE, entropy_codes, neutral_code

UNCERTAINTY_FILE, FORMAT_VERSION = "uncertainty_feedback.safetensors", 1
META = {"levels": int, "passes": int, "model": str}
# Codes of a call, as an argument and in the output: int64 [B, T], −1 for none.
CODES = "uncertainty_codes"
TABLE = "prismlm_uncertainty"
ATTACHED = "_prismlm_feedback"
# States of RWKV and Reformer: tensors, which cannot carry the next token's code.
STATES_WITHOUT_CODES = ("state", "past_buckets_states")
# Settings with tokens for images and the like.
PLACEHOLDERS = tuple(
    f"{kind}_token_{ending}" for kind in ("image", "video", "audio") for ending in ("id", "index")
)
# Assisted generation and prompt lookup remove tokens from the cache; a prompt in chunks, or none in
# a cache, has other codes.
REFUSED = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "prefill_chunk_size")
# Arguments that the passes for codes omit.
NOT_IN_FIRST_PASS = ("labels", "logits_to_keep", "output_hidden_states", "output_attentions")


class _CarriedCode(NamedTuple):
    following: Int64[Tensor, "B 1"]  # the code of the next position
    length: int | None  # of the cache; None if unknown


class _CarriesCodes:
    """Mixed into a cache's class: applies changes of its rows to the codes too."""

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

    def _change(self, method: str, argument: Any, change: Callable[[Tensor], Tensor]) -> None:
        getattr(super(), method)(argument)
        if (carried := self.prismlm_codes) is not None:
            self.prismlm_codes = carried._replace(following=change(carried.following))


@functools.lru_cache
def _carrying(kind: type) -> type:
    return type(kind.__name__, (_CarriesCodes, kind), {"__module__": kind.__module__})


def _cache_in(values: Any) -> Any:
    """Return the cache in the arguments or the output of a call, or None."""
    return next((values[name] for name in CACHES if values.get(name) is not None), None)


def _length_of(cache: Any) -> int | None:
    """Return the length of a cache, or None if it is not known at no cost."""
    if not torch.compiler.is_compiling():
        with suppress(ValueError):  # caches of recurrent layers only have no length
            length = cache.get_seq_length()
            return length if isinstance(length, int) else None
    return None


def _has_seen(cache: Any) -> bool:
    with suppress(ValueError):
        return cache.get_seq_length() > 0
    return bool(cache.has_previous_state())


def codes_fed_back(
    codes: Int64[Tensor, "B T"], predicted: Int64[Tensor, "B T"]
) -> Int64[Tensor, "B T"]:
    """Give each token the code predicted at the position before; keep first codes and NO_CODE."""
    fed = codes.clone()
    fed[:, 1:] = torch.where(codes[:, 1:] == NO_CODE, NO_CODE, predicted[:, :-1])
    return fed


@dataclass(eq=False)
class _PassState:
    codes: Int64[Tensor, "B T"] | None = None  # to add; None outside a pass
    pending: bool = False  # the next call of the embeddings is for the decoder's input
    added: bool = False  # whether the codes were added


class _Threads(threading.local):
    """One state per thread: an object, since compiled graphs cannot write to threading.local."""

    def __init__(self) -> None:
        self.state = _PassState()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Threads, ()  # threading.local cannot be copied


class UncertaintyFeedback:
    """Adds to the input at position t a vector for the entropy of the prediction at t − 1.

    The first token of a row and padding have no code. E is a submodule of the model,
    ``prismlm_uncertainty``, and so part of its parameters and state dict. Nothing else in the model
    changes, and :meth:`detach` removes it.

    The first new token has the code in the cache. Further new tokens have the neutral code with
    ``passes`` = 1; otherwise ``passes`` − 1 passes without gradient predict their codes, each of
    which makes about one more position equal to decoding token by token. With one pass, training
    reaches only a single vector of the table. Codes follow the rows of a cache in beam search,
    selection and repetition. The argument ``uncertainty_codes`` of a call, int64 [B, T], replays
    codes (−1: none); the output has the codes used under the same name. Threads may call one model
    at once.

    Source: PRISMA, whose pseudo-code loses the signal in cached decoding.

    Attributes:
        rearrange: function of the codes of a call, for controls, applied while the model trains.
    """

    def __init__(
        self, model: PreTrainedModel, embedding: UncertaintyEmbedding, *, passes: int = 2
    ) -> None:
        self.model = model
        self.levels = embedding.levels
        self.passes = check_whole("the number of passes", passes, 1)
        self.rearrange: Callable[[Tensor], Tensor] | None = None
        inner, inputs = decoder_and_embeddings(model)
        if uncertainty_of(model) is not None:
            raise InputError(
                f"this {type(model).__name__} has uncertainty feedback already: detach() it first."
            )
        # Looked up once, since it takes longer than a decoding step of a small model.
        arguments = inspect.signature(model.forward).parameters
        self._names = tuple(name for name in arguments if name != "self")
        self._prefix = "decoder_" if model.config.is_encoder_decoder else ""
        tokens = {getattr(model.config, name, None) for name in PLACEHOLDERS}
        self._placeholders = tuple(token for token in tokens if token is not None)
        self._threads = _Threads()
        # Not models.watch: these act in all threads until detach().
        self._handles = [
            inner.register_forward_pre_hook(self._enter, with_kwargs=True),
            inputs.register_forward_hook(self._embedded),
        ]
        setattr(model, TABLE, embedding.train(model.training))
        setattr(model, ATTACHED, self)
        model.__class__ = _mixed(type(model))

    @property
    def embedding(self) -> Any:
        """The table, an UncertaintyEmbedding, or PEFT's wrapper (``modules_to_save``)."""
        return getattr(self.model, TABLE)

    def detach(self) -> None:
        """Remove table and hooks, if they are still there."""
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
        """Call ``forward``, the model's own, with codes."""
        # Raises Python's errors for duplicate and surplus arguments.
        kwargs = dict(**dict(zip(self._names[: len(args)], args, strict=True)), **kwargs)
        replayed = kwargs.pop(CODES, None)
        (ids, text, coded), cache = self._read(kwargs), _cache_in(kwargs)
        if replayed is not None:
            codes = self._checked(replayed, ids)
        else:
            codes = torch.full_like(ids, neutral_code(self.levels))
            codes[:, :1] = self._start(ids, cache)
            codes.masked_fill_(~coded, NO_CODE)
            for _ in range(self.passes - 1 if codes.shape[1] > 1 else 0):
                codes = codes_fed_back(codes, self._predicted(forward, codes, kwargs))
            if self.model.training and self.rearrange is not None:
                codes = self.rearrange(codes)
        output = self._fed(forward, codes, kwargs)
        output[CODES] = codes
        # Some models do not return the cache that they were given.
        if (cache := _cache_in(output) or cache) is not None:
            self._carry(text, cache, output.logits, kwargs.get("logits_to_keep"))
        return output

    def _read(
        self, kwargs: dict[str, Any]
    ) -> tuple[Int64[Tensor, "B T"], Bool[Tensor, "B T"], Bool[Tensor, "B T"]]:
        """Return the decoder's new tokens, which are text, and which of them can have a code.

        Padding and placeholders for images and the like are no text. Neither they, nor the token
        after them, nor the first token of a sequence within a row have a code.
        """
        model: Any = self.model
        ids = kwargs.get(f"{self._prefix}input_ids")
        mask = kwargs.get(f"{self._prefix}attention_mask")
        if ids is None and self._prefix and kwargs.get("labels") is not None:
            ids = model.prepare_decoder_input_ids_from_labels(labels=kwargs["labels"])
        if not isinstance(ids, Tensor) or ids.ndim != 2 or not ids.numel():
            raise InputError(
                f"uncertainty feedback expects {self._prefix}input_ids, token ids [B, T] and at "
                "least one, not embeddings alone."
            )
        for name in STATES_WITHOUT_CODES:
            if kwargs.get(name) is not None:
                raise InputError(
                    f"{name} cannot carry the code of the next token: with uncertainty feedback a "
                    f"{type(model).__name__} reads whole texts only."
                )
        text = torch.ones_like(ids, dtype=torch.bool)
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] < ids.shape[1]:
                raise InputError(
                    "uncertainty feedback needs an attention mask over tokens, [B, T], which a "
                    "static cache lacks: leave cache_implementation out."
                )
            text = mask[:, -ids.shape[1] :].bool()
        for token in self._placeholders:
            text = text & (ids != token)
        coded, positions = text.clone(), kwargs.get("position_ids")
        coded[:, 1:] &= text[:, :-1]
        if isinstance(positions, Tensor) and positions.shape[1:] == ids.shape[1:]:
            coded[:, 1:] &= positions[:, 1:] == positions[:, :-1] + 1
        return ids, text, coded

    def _checked(self, codes: Tensor, ids: Int64[Tensor, "B T"]) -> Int64[Tensor, "B T"]:
        """Return replayed codes, checked, on the device of the call."""
        fits = codes.shape == ids.shape and not codes.is_floating_point()
        if not fits or int(codes.min()) < NO_CODE or int(codes.max()) >= self.levels:
            raise InputError(
                f"{CODES} are {codes.dtype} {list(codes.shape)}: expected whole numbers "
                f"{list(ids.shape)}, one for each token, from {NO_CODE} (none) to "
                f"{self.levels - 1}."
            )
        return codes.to(ids.device, torch.int64)

    def _start(self, ids: Int64[Tensor, "B T"], cache: Any) -> int | Int64[Tensor, "B 1"]:
        """Return the code of the first new token."""
        if (carried := getattr(cache, "prismlm_codes", None)) is None:
            return neutral_code(self.levels) if cache is not None and _has_seen(cache) else NO_CODE
        for name, before, now in (
            ("rows", len(carried.following), len(ids)),
            ("positions", carried.length, _length_of(cache)),
        ):
            if before is not None and now is not None and before != now:
                raise InputError(
                    f"the cache carries codes of {before} {name}, and this call has {now}: do not "
                    "crop it or use it without this feedback, and select its rows by its methods "
                    "(batch_select_indices, batch_repeat_interleave, reorder_cache)."
                )
        return carried.following

    @torch.no_grad()
    def _predicted(
        self, forward: Callable[..., Any], codes: Int64[Tensor, "B T"], kwargs: dict[str, Any]
    ) -> Int64[Tensor, "B T"]:
        """Return the codes of the predictions at the new positions, by a pass with ``codes``."""
        kwargs = {name: value for name, value in kwargs.items() if name not in NOT_IN_FIRST_PASS}
        # This pass must not change the cache.
        kwargs |= {name: copy.deepcopy(kwargs[name]) for name in CACHES if name in kwargs}
        kwargs |= {"use_cache": _cache_in(kwargs) is not None, "return_dict": True}
        with unwatched():
            logits: Tensor = self._fed(forward, codes, kwargs).logits
        return entropy_codes(logits, self.levels)

    def _fed(
        self, forward: Callable[..., Any], codes: Int64[Tensor, "B T"], kwargs: dict[str, Any]
    ) -> Any:
        state = self._threads.state
        state.codes, state.pending, state.added = codes, False, False
        try:
            output = forward(**kwargs)
        finally:
            state.codes, state.pending = None, False
        if not state.added:
            raise InputError(
                f"nothing was added to the input of this {type(self.model).__name__}: its decoder "
                "neither called its input embeddings nor received inputs_embeds."
            )
        return output

    def _carry(self, text: Tensor, cache: Any, logits: Tensor, keep: Any) -> None:
        """Store the code of the next token in the cache."""
        last = text.shape[1] - 1
        if isinstance(keep, Tensor) and keep[-1:].tolist() not in ([last], [-1]):
            raise InputError(
                "the code of the next token needs the logits of the last position: put it last in "
                "logits_to_keep, or set use_cache=False."
            )
        following = entropy_codes(logits[:, -1:], self.levels)
        following = torch.where(text[:, -1:], following, NO_CODE)
        if not isinstance(cache, _CarriesCodes):
            cache.__class__ = _carrying(type(cache))
        cache.prismlm_codes = _CarriedCode(following, _length_of(cache))

    def _enter(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._threads.state.codes is None:
            return None
        embeds = kwargs.get("inputs_embeds")
        if embeds is None:
            self._threads.state.pending = True
            return None
        return args, kwargs | {"inputs_embeds": embeds + self._vectors(embeds)}

    def _embedded(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor | None:
        if not self._threads.state.pending:
            return None
        self._threads.state.pending = False
        return output + self._vectors(output)

    def _vectors(self, inputs: Tensor) -> Tensor:
        codes = self._threads.state.codes
        assert codes is not None
        self._threads.state.added = True
        return self.embedding(codes).to(inputs)


class _WithUncertainty:
    """Mixed into the class of a model while uncertainty feedback is attached."""

    _kind: type[Any]

    def _prepare_generation_config(self, *args: Any, **kwargs: Any) -> Any:
        parent: Any = super()
        config, rest = parent._prepare_generation_config(*args, **kwargs)
        refused = [name for name in REFUSED if getattr(config, name, None)]
        if config.use_cache is False or refused:
            raise InputError(
                f"{', '.join(refused) or 'use_cache=False'} is not possible with uncertainty "
                "feedback, since it would change the codes. Leave it out."
            )
        return config, rest

    def _assisted_decoding(self, *_args: Any, **_kwargs: Any) -> Any:
        raise InputError("assisted generation is not possible with uncertainty feedback.")

    def init_continuous_batching(self, *_args: Any, **_kwargs: Any) -> Any:
        raise InputError(
            "continuous batching is not possible with uncertainty feedback: its cache carries no "
            "codes. Use generate(), with padding on the left."
        )

    generate_batch = continuous_batching_context_manager = init_continuous_batching

    def save_pretrained(
        self,
        save_directory: Path | str,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        """Save the model without the table, and the table in a separate file.

        vLLM and others accept only tensors of the architecture. In a directory ``checkpoint-N`` the
        weights include the table, since ``Trainer`` resumes only from them.
        """
        model: Any = self
        tensors = dict(model.state_dict() if state_dict is None else state_dict)
        table = {name: tensors[name] for name in tensors if name.startswith(f"{TABLE}.")}
        if not Path(save_directory).name.startswith(PREFIX_CHECKPOINT_DIR):
            tensors = {name: value for name, value in tensors.items() if name not in table}
        parent: Any = super()
        parent.save_pretrained(save_directory, is_main_process, tensors, **kwargs)
        if is_main_process and table:
            save_uncertainty(save_directory, getattr(self, ATTACHED), state_dict)


@functools.lru_cache
def _mixed(kind: type[Any]) -> type[Any]:
    # With the original signature, which Trainer and generate inspect.
    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, ATTACHED).run(functools.partial(kind.forward, self), args, kwargs)

    members = {"__module__": kind.__module__, "_kind": kind, "forward": forward}
    return type(kind.__name__, (_WithUncertainty, kind), members)


def _check_model(model: object) -> None:
    """Raise InputError unless ``model`` is a Hugging Face model that predicts next tokens."""
    if not isinstance(model, PreTrainedModel) or not model.can_generate() or sees_ahead(model):
        raise InputError(
            f"a {type(model).__name__} predicts no next token: expected a Hugging Face causal "
            "language model or encoder-decoder, not wrapped. A decoder of a family of encoders is "
            "loaded with is_decoder=True."
        )


def uncertainty_of(model: nn.Module) -> UncertaintyFeedback | None:
    """Return the feedback attached to a model, or None."""
    return getattr(model, ATTACHED, None)


def attach_uncertainty(
    model: PreTrainedModel,
    levels: int = 65536,
    *,
    rows: int | None = ROWS,
    deviation: float | None = 0.0,
    passes: int = 2,
) -> UncertaintyFeedback:
    """Attach uncertainty feedback with a new table, in the dtype and on the device of a model.

    The table is the submodule ``prismlm_uncertainty``: it is trained, moved, wrapped and saved with
    the model. By default it is zero, so that the model is unchanged at first.

    The source uses ``rows=None, deviation=None, passes=1``, with two pitfalls: rounding changes the
    vector of one of 65,536 independent rows by 130 %, and with one pass training changes only the
    neutral row.

    Args:
        model: a Hugging Face decoder, or encoder-decoder.
        levels: the number of codes, at least 2.
        rows: the number of rows of the table, which is interpolated; None for one per code.
        deviation: initial standard deviation; None for the model's initializer_range.
        passes: see :class:`UncertaintyFeedback`.

    Raises:
        InputError: the model does not predict next tokens or declare its parts, or a number is out
            of range.
    """
    _check_model(model)
    _, inputs = decoder_and_embeddings(model)
    text: Any = model.config.get_text_config(decoder=True)
    spread = getattr(text, "initializer_range", 0.02) if deviation is None else deviation
    embedding = UncertaintyEmbedding(inputs.weight.shape[1], levels, rows=rows, deviation=spread)
    embedding.to(next(inputs.parameters()))
    return UncertaintyFeedback(model, embedding, passes=passes)


def has_uncertainty(directory: Path | str) -> bool:
    """Return whether a directory has a table of codes."""
    return (Path(directory) / UNCERTAINTY_FILE).is_file()


def save_uncertainty(
    directory: Path | str, feedback: UncertaintyFeedback, tensors: dict[str, Tensor] | None = None
) -> None:
    """Write the table beside the checkpoint of its model, as ``save_pretrained`` does.

    ``tensors`` are the whole input embeddings and table of a sharded model.
    """
    state = feedback.model.state_dict() if tensors is None else tensors
    _, inputs = decoder_and_embeddings(feedback.model)
    path_of_inputs = next(n for n, m in feedback.model.named_modules() if m is inputs)
    meta = {
        "format_version": FORMAT_VERSION,
        "levels": feedback.levels,
        "passes": feedback.passes,
        "model": fingerprints.of_tensor(state[f"{path_of_inputs}.weight"]),
    }
    saved = {"embedding": state[f"{TABLE}.weight"], "seen": state[f"{TABLE}.seen"]}
    saved = {name: tensor.detach().cpu().contiguous() for name, tensor in saved.items()}
    # One entry: safetensors writes several in random order.
    with atomic_file(Path(directory) / UNCERTAINTY_FILE) as temporary:
        save_file(saved, str(temporary), metadata={"uncertainty_feedback": json_text(meta)})


def load_uncertainty(directory: Path | str, model: PreTrainedModel) -> UncertaintyFeedback:
    """Attach a saved table to the model that it was trained with, in the saved dtype.

    Raises:
        FormatError: the file is missing, damaged, of another version, or of another model.
        InputError: the model has no decoder, or has feedback already.
    """
    _check_model(model)
    path = Path(directory) / UNCERTAINTY_FILE
    if not path.is_file():
        raise FormatError(
            f"{path.parent} has no {path.name}: attach a new table by attach_uncertainty()."
        )
    try:
        with safe_open(str(path), framework="pt") as file:
            meta = json.loads((file.metadata() or {})["uncertainty_feedback"])
            table, seen = file.get_tensor("embedding"), file.get_tensor("seen")
        check_json(meta, META, str(path))
        if meta["format_version"] != FORMAT_VERSION or not bool(table.isfinite().all()):
            raise ValueError(f"expected format version {FORMAT_VERSION} and a finite table")
        embedding = UncertaintyEmbedding(table.shape[1], meta["levels"], rows=len(table))
        embedding.load_state_dict({"weight": table, "seen": seen})
    except (SafetensorError, OSError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise FormatError(
            f"{path} cannot be read: {error!r}. Restore the file, or train again."
        ) from error
    weight = decoder_and_embeddings(model)[1].weight
    if meta["model"] != fingerprints.of_tensor(weight) or table.shape[1] != weight.shape[1]:
        raise FormatError(
            f"{path} was trained with other input embeddings than the model's, {weight.dtype} "
            f"{list(weight.shape)}. Restore the original weights, loaded with dtype={table.dtype}, "
            "or train the table again."
        )
    return UncertaintyFeedback(model, embedding.to(weight), passes=meta["passes"])


@contextmanager
def recording_codes(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the codes of this thread's calls in the block, each [B, T]; [] without feedback."""
    codes: list[Tensor] = []

    def after(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        codes.append(output[CODES])

    with watch([] if uncertainty_of(model) is None else [Hook(model, after=after)]):
        yield codes


def replay(ids: Tensor, codes: Tensor | list[Tensor] | None) -> dict[str, Tensor]:
    """Return the arguments of a call on ``ids`` [B, T] with recorded codes, if there are any.

    A list is that of :func:`recording_codes` while a text was generated. Only ids with codes are
    included: the last token of a generation has never been an input.
    """
    if isinstance(codes, list):
        # Without a cache every pass reads all tokens, and feeds them codes of its own.
        once = codes and all(code.shape[1] == 1 for code in codes[1:])
        codes = torch.cat(codes, 1) if once else None
    if codes is None:
        return {"input_ids": ids}
    return {"input_ids": ids[:, : codes.shape[1]], CODES: codes[:, : ids.shape[1]]}
