"""How strong an edit may be before a text repeats itself.

    R(s) = r(text under strength s) − r(text without the edit)
    r    = share of a text's 3-grams of tokens that occurred before in it

The strength taken is the largest of eight steps up to ``MOST``, or to −1 for a group that is taken
out, that has R(s) ≤ ``REPEATED``.
Repetition grows with the strength, so three texts are written to find it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from prismlm.corpus.chat import Messages
from prismlm.errors import InputError
from prismlm.interventions.plan import plan_for
from prismlm.interventions.scope import applied
from prismlm.interventions.values import Clamp, Group
from prismlm.lens.opened_model import OpenedModel

REPEATED = 0.1
NGRAM = 3
STEPS = 8
# Evidence lies some 15 nats below the top: at 0.8 of that hardly any text is left.
MOST = 0.8


def repetition(tokens: Sequence[int]) -> float:
    """Return the share of the 3-grams of a text that occurred before in it; 0 without any."""
    grams = [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def strongest(
    lm: OpenedModel,
    prompt: str | Messages,
    edit: Clamp | Group,
    *,
    generate: int = 20,
    temperature: float = 0.0,
    seed: int = 0,
    enough: Callable[[Tensor], bool] | None = None,
) -> Clamp | Group:
    """Return an edit with the largest strength at which what is written hardly repeats itself.

    The lowest step is taken where each of them repeats.

    Args:
        lm: the model.
        prompt: what is written on from.
        edit: whose strength is looked for; the sign of a group's stays.
        generate: tokens of each text.
        temperature, seed, enough: as for :func:`prismlm.interventions.steering.steer`.
    """
    if generate == 0:
        raise InputError(
            "the strength is found by writing, and no tokens are to be written: give a strength."
        )
    plan_for(lm, [edit])
    ids = lm.encode(prompt, generate)

    def repeated() -> float:
        text = lm.write(ids, generate, temperature, seed, enough=enough)
        return repetition(text[0, ids.shape[1] :].tolist())

    plain, low, high = repeated(), 1, STEPS + 1
    while high - low > 1:
        middle = (low + high) // 2
        with applied(lm.model, plan_for(lm, [_at(edit, middle / STEPS)])):
            within = repeated() - plain <= REPEATED
        low, high = (middle, high) if within else (low, middle)
    return _at(edit, low / STEPS)


def _at(edit: Clamp | Group, share: float) -> Clamp | Group:
    if isinstance(edit, Clamp):
        return replace(edit, fraction=MOST * share)
    return replace(edit, strength=-share if edit.strength < 0 else MOST * share)
