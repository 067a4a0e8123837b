"""The codes of a call: those that it begins with, that are given, fed back, or occur."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from prismlm.errors import InputError
from prismlm.models.uncertainty_feedback.call import Call
from prismlm.ops.uncertainty_feedback import NO_CODE

CODES = "uncertainty_codes"


def first_pass_codes(
    call: Call, start: Int64[Tensor, "B 1"], neutral: int, none: int
) -> Int64[Tensor, "B T"]:
    """Return ``start`` for the first new token, the neutral code for others, none for some.

    None for padding, images, the first token of a sequence, and one with no text before it in its
    row of this call; the first new token has what was before it in ``start``.
    """
    if call.ids.shape[1] == 1:
        return start if call.plain else start.masked_fill(~call.text, none)
    codes = torch.full_like(call.ids, neutral)
    codes[:, 1:].masked_fill_(~call.text[:, :-1], none)
    codes[:, :1] = start
    without = ~call.text if call.starts is None else ~call.text | call.starts
    return codes.masked_fill_(without, none)


def codes_fed_back(
    codes: Int64[Tensor, "B T"],
    predicted: Int64[Tensor, "B T"],
    settled: Bool[Tensor, "B T"] | None,
    none: int,
) -> Int64[Tensor, "B T"]:
    """Return codes in which every token has that of the prediction before it, where there is one.

    Args:
        codes: those of the pass before.
        predicted: the code of the prediction made at each position.
        settled: which codes stay because an earlier call had them; None for none. A row's first
            one stays anyhow.
        none: the code for none, which stays too.
    """
    found = codes.clone()
    stays = codes == none if settled is None else settled | (codes == none)
    found[:, 1:] = torch.where(stays[:, 1:], codes[:, 1:], predicted[:, :-1])
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


def codes_that_occur(codes: Int64[Tensor, "B T"], levels: int) -> Tensor:
    """Return bool [levels], which codes there are; in one graph, as indexing by a mask is not."""
    places = torch.where(codes == NO_CODE, levels, codes).flatten()
    found = torch.zeros(levels + 1, dtype=torch.bool, device=codes.device)
    return found.index_fill_(0, places, True)[:levels]
