"""What a call of a model says of its rows: tokens, padding, what was seen before; and its codes."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor, nn
from transformers import PreTrainedModel

from prismlm.errors import InputError
from prismlm.ops.uncertainty_feedback import NO_CODE

CACHES = ("past_key_values", "cache_params")
# Caches that codes cannot be put beside.
OTHER_CACHES = ("state", "mems", "past_buckets_states")
# Tokens that stand for what is no text, by their names in configurations.
PLACEHOLDERS = tuple(
    f"{kind}_token_{said}" for kind in ("image", "video", "audio") for said in ("id", "index")
)
CODES = "uncertainty_codes"


@dataclass(eq=False)
class Call:
    """One call of a language model.

    Attributes:
        ids: the decoder's new tokens.
        text: which of them are text: neither padding nor places of images and the like.
        starts: which begin a sequence within their row, by position ids that do not go up by one,
            as in packed rows; None where nothing says so.
        cache: what was seen before, or None.
        kept: ``logits_to_keep``: of which positions there are to be logits.
    """

    ids: Int64[Tensor, "B T"]
    text: Bool[Tensor, "B T"]
    starts: Bool[Tensor, "B T"] | None
    cache: Any
    kept: Any


@dataclass(frozen=True)
class Forward:
    """What every call of a model has in common; looked up anew it would cost more than the sums.

    Attributes:
        model: the name of its class.
        names: of what its ``forward`` takes, in order.
        prefix: of the decoder's arguments.
        placeholders: tokens that stand for what is no text.
    """

    model: str
    names: tuple[str, ...]
    prefix: str
    placeholders: tuple[int, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Forward:
        """Look it up."""
        forward: Any = model.forward
        config = model.config
        names = tuple(name for name in inspect.signature(forward).parameters if name != "self")
        said = {getattr(config, name, None) for name in PLACEHOLDERS}
        held: set[int] = {token for token in said if token is not None}
        prefix = "decoder_" if config.is_encoder_decoder else ""
        return cls(type(model).__name__, names, prefix, tuple(held))

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments of a call by their names.

        Raises:
            TypeError: there are more than it takes, or one of them twice.
        """
        if not args:
            return kwargs
        names = self.names
        twice = set(names[: len(args)]) & set(kwargs)
        if len(args) > len(names) or twice:
            said = f"{', '.join(sorted(twice))} given twice" if twice else f"{len(args)} arguments"
            raise TypeError(f"{self.model}.forward: {said}; it takes {', '.join(names)}.")
        return dict(zip(names, args, strict=False)) | kwargs


def read_call(model: nn.Module, forward: Forward, given: dict[str, Any]) -> Call:
    """Return what a call of ``model`` says, its arguments given by name.

    Raises:
        InputError: it has no token ids, so that nobody knows which positions are which, or none
            of the shape [B, T]; or it continues from a cache that carries no codes.
    """
    prefix = forward.prefix
    ids = given.get(f"{prefix}input_ids")
    if ids is None and prefix and given.get("labels") is not None:
        shifted: Any = model
        ids = shifted.prepare_decoder_input_ids_from_labels(labels=given["labels"])
    if ids is None:
        raise InputError(
            f"this call has no {prefix}input_ids: uncertainty feedback goes from one token to the "
            "next, and cannot tell tokens from embeddings alone. Give the ids, or detach it."
        )
    if not isinstance(ids, Tensor) or ids.ndim != 2 or not ids.numel():
        held = list(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise InputError(
            f"{prefix}input_ids are {held}: expected a tensor [B, T] of at least one row and one "
            "token, such as ids[None] for a single text."
        )
    if other := next((name for name in OTHER_CACHES if given.get(name) is not None), None):
        raise InputError(
            f"this call continues from {other!r}, which carries no codes, so that its first token "
            "would have none: give the whole text at once."
        )
    cache = next((given[name] for name in CACHES if given.get(name) is not None), None)
    text = _real(ids, given.get(f"{prefix}attention_mask"), cache)
    for place in forward.placeholders:
        text = text & (ids != place)
    starts = _starts(ids, given.get("position_ids"))
    return Call(ids, text, starts, cache, given.get("logits_to_keep"))


def _starts(ids: Tensor, places: Any) -> Bool[Tensor, "B T"] | None:
    """Return which tokens begin a sequence by their position ids; the first of a row need not."""
    new = ids.shape[1]
    if not isinstance(places, Tensor) or places.ndim != 2 or places.shape[1] != new or new == 1:
        return None
    starts = torch.zeros_like(ids, dtype=torch.bool)
    starts[:, 1:] = places[:, 1:] != places[:, :-1] + 1
    return starts


def _real(ids: Tensor, mask: Any, cache: Any) -> Bool[Tensor, "B T"]:
    """Return which new tokens are no padding."""
    new = ids.shape[1]
    if isinstance(mask, dict):
        # One of each kind of layer, which agree on what is padding.
        masks: dict[str, Any] = mask
        mask = masks.get("full_attention", next(iter(masks.values()), None))
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] >= new:
        # Of all that was seen.
        return mask[:, -new:].bool()
    if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[2] == new > 1:
        # Generation with a static cache gives what each token may look at, [B, h, T, S]: any but
        # padding may look at itself. Places that are still empty stand after the new tokens.
        seen = 0 if cache is None else int(cache.get_seq_length())
        own = mask[:, 0, :, seen : seen + new].diagonal(dim1=-2, dim2=-1)
        if own.shape[1] == new:
            return (own if mask.dtype == torch.bool else own == 0).expand(ids.shape)
    return torch.ones_like(ids, dtype=torch.bool)


def logits_of_last(logits: Tensor, call: Call) -> Tensor | None:
    """Return the logits [B, 1, V] of the last position, or None if there are none of it."""
    place, at = call.ids.shape[1] - 1, -1
    if isinstance(call.kept, Tensor):
        # Not a number of positions, but which.
        found = [one for one, p in enumerate(call.kept.tolist()) if p in (place, -1)]
        at = found[-1] if found else logits.shape[1]
    if at >= logits.shape[1] or not logits.shape[1]:
        return None
    return logits if logits.shape[1] == 1 else logits[:, at : at + 1 or None]


def first_pass_codes(call: Call, start: Int64[Tensor, "B 1"], neutral: int) -> Int64[Tensor, "B T"]:
    """Return ``start`` for the first new token, the neutral code for others, none for some.

    None for padding, images, the first token of a sequence, and one with no text before it in its
    row of this call; the first new token has what was before it in ``start``.
    """
    codes = torch.full_like(call.ids, neutral)
    codes[:, 1:].masked_fill_(~call.text[:, :-1], NO_CODE)
    codes[:, :1] = start
    without = ~call.text if call.starts is None else ~call.text | call.starts
    return codes.masked_fill_(without, NO_CODE)


def codes_fed_back(
    codes: Int64[Tensor, "B T"], predicted: Int64[Tensor, "B T"]
) -> Int64[Tensor, "B T"]:
    """Return codes in which every token has that of the prediction before it, where there is one.
    A row's first code and ``NO_CODE`` stay.
    """
    found = codes.clone()
    found[:, 1:] = torch.where(codes[:, 1:] == NO_CODE, NO_CODE, predicted[:, :-1])
    return found


def checked_codes(codes: Tensor, call: Call, levels: int) -> Int64[Tensor, "B T"]:
    """Return codes that were given for a call, on its device.

    Raises:
        InputError: they are not one for each token, or not of these levels.
    """
    if codes.shape != call.ids.shape or codes.is_floating_point():
        raise InputError(
            f"{CODES} are {codes.dtype} {list(codes.shape)}: expected whole numbers "
            f"{list(call.ids.shape)}, one for each token."
        )
    if int(codes.min()) < NO_CODE or int(codes.max()) >= levels:
        raise InputError(
            f"{CODES} reach from {int(codes.min())} to {int(codes.max())}: expected "
            f"{NO_CODE} (none) to {levels - 1}."
        )
    return codes.to(call.ids.device, torch.int64)
