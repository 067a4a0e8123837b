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
# Tokens that stand for something other than text, by their names in configurations.
PLACEHOLDERS = tuple(
    f"{kind}_token_{ending}" for kind in ("image", "video", "audio") for ending in ("id", "index")
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


class CallReader:
    """Reads the calls of one model.

    What it looks up once would take longer in every call than the sums of a decoding step.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        forward: Any = model.forward
        config = model.config
        self.names = tuple(name for name in inspect.signature(forward).parameters if name != "self")
        self.prefix = "decoder_" if config.is_encoder_decoder else ""
        tokens = {getattr(config, name, None) for name in PLACEHOLDERS}
        self.placeholders: tuple[int, ...] = tuple(token for token in tokens if token is not None)

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments of a call by their names, in a dictionary of their own."""
        # Python's own errors for an argument that is given twice, or one too many.
        return dict(**dict(zip(self.names[: len(args)], args, strict=True)), **kwargs)

    def read(self, model: nn.Module, given: dict[str, Any]) -> Call:
        """Return what a call says, its arguments given by name."""
        prefix = self.prefix
        ids = given.get(f"{prefix}input_ids")
        if ids is None and prefix and given.get("labels") is not None:
            shifted: Any = model
            ids = shifted.prepare_decoder_input_ids_from_labels(labels=given["labels"])
        if not isinstance(ids, Tensor) or ids.ndim != 2 or not ids.numel():
            shape = list(ids.shape) if isinstance(ids, Tensor) else ids
            raise InputError(
                f"{prefix}input_ids are {shape}: expected token ids [B, T], at least one. "
                "Uncertainty feedback goes from one token to the next, and cannot tell tokens "
                "from embeddings alone: give the ids, or detach it."
            )
        cache = next((given[name] for name in CACHES if given.get(name) is not None), None)
        text = _not_padding(ids, given.get(f"{prefix}attention_mask"))
        for token in self.placeholders:
            text = text & (ids != token)
        starts = _starts(ids, given.get("position_ids"))
        return Call(ids, text, starts, cache, given.get("logits_to_keep"))


def _starts(ids: Tensor, positions: Any) -> Bool[Tensor, "B T"] | None:
    """Return which tokens begin a sequence by their position ids; the first of a row need not."""
    new = ids.shape[1]
    if not isinstance(positions, Tensor) or positions.ndim != 2 or positions.shape[1] != new:
        return None
    starts = torch.zeros_like(ids, dtype=torch.bool)
    starts[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    return starts


def _not_padding(ids: Tensor, mask: Any) -> Bool[Tensor, "B T"]:
    """Return which new tokens are no padding."""
    if mask is None:
        return torch.ones_like(ids, dtype=torch.bool)
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] < ids.shape[1]:
        raise InputError(
            "the attention mask is none over tokens, [B, T], as with a static cache: uncertainty "
            "feedback takes no other. Leave cache_implementation out."
        )
    return mask[:, -ids.shape[1] :].bool()


def logits_of_last(logits: Tensor, call: Call) -> Tensor | None:
    """Return the logits [B, 1, V] of the last position, or None if there are none of it."""
    if not isinstance(call.kept, Tensor):
        return logits[:, -1:] if logits.shape[1] else None
    # Not a number of positions, but which.
    last = call.ids.shape[1] - 1
    rows = [row for row, position in enumerate(call.kept.tolist()) if position in (last, -1)]
    return logits[:, rows[-1:]] if rows else None


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
    fed = codes.clone()
    fed[:, 1:] = torch.where(codes[:, 1:] == NO_CODE, NO_CODE, predicted[:, :-1])
    return fed


def checked_codes(codes: Tensor, call: Call, levels: int) -> Int64[Tensor, "B T"]:
    """Return codes that were given for a call, on its device."""
    whole = codes.shape == call.ids.shape and not codes.is_floating_point()
    if not whole or int(codes.min()) < NO_CODE or int(codes.max()) >= levels:
        raise InputError(
            f"{CODES} are {codes.dtype} {list(codes.shape)}: expected whole numbers "
            f"{list(call.ids.shape)}, one for each token, from {NO_CODE} (none) to {levels - 1}."
        )
    return codes.to(call.ids.device, torch.int64)
