"""Does a model hedge more after a prediction of high entropy, and does its signal make it?"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prismlm.instruments.uncertainty_feedback.continuation import Continuation, continuations
from prismlm.instruments.uncertainty_feedback.options import Reading
from prismlm.instruments.uncertainty_feedback.signal import Codes, feedback_of, no_codes, permuted
from prismlm.instruments.uncertainty_feedback.verdict_words import in_points, of_texts
from prismlm.ops.uncertainty_feedback import NO_CODE, quantise
from prismlm.statistics import Interval, bootstrap

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT = 16
SIGNALS = {
    "own": "Writing on",
    "none": "Writing without",
    "shuffled": "Writing with other codes",
}
"""What is fed, with the title of the writing."""


@dataclass(frozen=True)
class HedgingRun:
    """What was written with one signal.

    Attributes:
        tokens: written, up to each text's end.
        hedges: hedging words that begin in them.
        steps: predictions that k tokens follow; a quarter are high and a quarter low.
        after_high: share of the k tokens after a high-entropy step that begin a hedging word;
            None where entropies do not differ.
        after_low: after a low-entropy step.
        difference: after_high − after_low, resampled over texts.
    """

    tokens: int
    hedges: int
    steps: int
    after_high: float | None
    after_low: float | None
    difference: Interval | None


@dataclass(frozen=True)
class Hedging:
    """Hedging words after high and low entropy, with the own signal and with both controls.

    Attributes:
        texts: prompts.
        window: k.
        temperature: of sampling.
        fed: with the own signal.
        bare: with none.
        shuffled: with codes of the own run, permuted over all texts and steps.
        change: of the difference, own − none; None where one has none.
        change_against_shuffled: own − shuffled, likewise.
    """

    texts: int
    window: int
    temperature: float
    fed: HedgingRun
    bare: HedgingRun
    shuffled: HedgingRun
    change: Interval | None
    change_against_shuffled: Interval | None

    @property
    def verdict(self) -> str:
        """What it says, in a sentence."""
        rest = of_texts(self.texts)
        words = self.fed.hedges + self.bare.hedges + self.shuffled.hedges
        if not words:
            return f"Says nothing: no hedging word was written {rest}."
        none, shuffled = self.change, self.change_against_shuffled
        if none is None or shuffled is None:
            return f"Says nothing: entropies do not differ from step to step {rest}."
        figures = (
            f"{in_points(none)} of the tokens against no signal, {in_points(shuffled)} against "
            f"shuffled codes {rest}, {words} hedging words in all"
        )
        if none.above_zero and shuffled.above_zero:
            return (
                f"Its signal makes it hedge more after high entropy than after low, by {figures}."
            )
        if none.value > 0 and shuffled.value > 0:
            return (
                "With its own signal it hedged more after high entropy than with either control, "
                f"but that may be chance: {figures}."
            )
        return (
            f"Hedging more after high entropy with its own signal does not beat both controls: "
            f"{figures}."
        )


def hedging(reading: Reading) -> Hedging:
    """Let a model go on from the starts of texts and count hedging words by the entropy before.

    The prompt of a text is its first 16 tokens, or its first half where it is shorter. A step is a
    prediction; it is high in entropy in the top quarter of its run's steps, and low in the bottom
    one. Its code is fed with the token drawn from it, so the k tokens after that one count. Words
    after the end of a text do not.

    Shuffled codes are those of the first run, of prompts and of what was written, permuted over
    all of its positions: a vector stands everywhere that one stood, and says nothing of its step.

    Source: PRISMA, "Behavioral test"; both controls are ours.

    Raises:
        InputError: as :func:`continuations`.
    """
    model, tokenizer, texts, codes, options, progress = reading
    seed = options.seed
    prompts = prompts_of(texts)
    own = tuple(row[: len(prompt)] for row, prompt in zip(codes, prompts, strict=True))
    nothing = tuple(torch.full((options.tokens - 1,), NO_CODE) for _ in prompts)
    fed_codes: dict[str, tuple[Codes, Codes | None]] = {
        "own": (own, None),
        "none": (no_codes(prompts), nothing),
    }
    columns: list[Float[np.ndarray, "texts 4"]] = []
    runs: list[HedgingRun] = []
    for signal, title in SIGNALS.items():
        read, after = fed_codes[signal]
        written = continuations(
            model,
            prompts,
            read,
            options.tokens,
            written_codes=after,
            temperature=options.temperature,
            seed=seed,
            progress=progress,
            title=title,
        )
        if signal == "own":
            levels = feedback_of(model).embedding.levels
            fed_codes["shuffled"] = _shuffled(own, written, levels, seed + 1)
        kept = [_until_end(one, tokenizer.eos_token_id) for one in written]
        starts = [
            np.array(hedge_starts(tokenizer, prompt.tolist(), ids.tolist()), dtype=bool)
            for prompt, (ids, _) in zip(prompts, kept, strict=True)
        ]
        column, steps = hedges_after([shares for _, shares in kept], starts, options.window)
        columns.append(column)
        runs.append(_run(column, starts, steps, seed))
    none, against_shuffled = (_change(columns, runs, control, seed) for control in (1, 2))
    fed, bare, shuffled = runs
    how = (options.window, options.temperature)
    return Hedging(len(texts), *how, fed, bare, shuffled, none, against_shuffled)


def prompts_of(texts: Sequence[Tensor]) -> list[Tensor]:
    """Return what is gone on from: the first 16 tokens of each, or the first half of less."""
    return [text[: min(PROMPT, max(1, len(text) // 2))] for text in texts]


def _shuffled(
    own: Codes, written: Sequence[Continuation], levels: int, seed: int
) -> tuple[Codes, Codes]:
    """Return the codes of prompts and those of what was written, permuted over all positions."""
    pairs = list(zip(own, written, strict=True))
    whole = tuple(torch.cat([row, quantise(one.shares[:-1], levels)]) for row, one in pairs)
    parts = list(zip(permuted(whole, seed), map(len, own), strict=True))
    return tuple(row[:n] for row, n in parts), tuple(row[n:] for row, n in parts)


def _change(
    columns: Sequence[np.ndarray], runs: Sequence[HedgingRun], control: int, seed: int
) -> Interval | None:
    """Return the difference of the first run less that of a control, paired by text."""
    if runs[0].difference is None or runs[control].difference is None:
        return None
    both = np.concatenate([columns[0], columns[control]], 1)
    return bootstrap(both[:, ::2], both[:, 1::2], (1, -1, -1, 1), seed=seed)


def hedges_after(
    shares: Sequence[Float[np.ndarray, " S"]],
    starts: Sequence[Bool[np.ndarray, " S"]],
    window: int,
) -> tuple[Float[np.ndarray, "texts 4"], int]:
    """Count hedging words in the tokens t + 1 … t + k after high and low steps t.

    Returns:
        For each text the words after high steps, tokens after them, and both for low; and how many
        steps there are. Nothing is counted where entropies do not differ.
    """
    # A step counts that has k tokens after its own.
    eligible = [own[: max(0, len(own) - window)] for own in shares]
    pool = np.concatenate(eligible) if eligible else np.zeros(0)
    found = np.zeros((len(shares), 4))
    if not len(pool):
        return found, 0
    low, high = np.quantile(pool, [0.25, 0.75])
    if low == high:
        return found, len(pool)
    for text, (own, begun) in enumerate(zip(eligible, starts, strict=True)):
        total = np.concatenate([[0], np.cumsum(begun)])
        after = total[1 + window :][: len(own)] - total[1 : 1 + len(own)]
        for column, chosen in ((0, own >= high), (2, own <= low)):
            found[text, column] = after[chosen].sum()
            found[text, column + 1] = chosen.sum() * window
    return found, len(pool)


def _run(
    column: Float[np.ndarray, "texts 4"], starts: Sequence[np.ndarray], steps: int, seed: int
) -> HedgingRun:
    written, hedges = sum(map(len, starts)), int(sum(map(np.sum, starts)))
    total = column.sum(0)
    if not (total[1] and total[3]):
        return HedgingRun(written, hedges, steps, None, None, None)
    difference = bootstrap(column[:, ::2], column[:, 1::2], (1, -1), seed=seed)
    high, low = float(total[0] / total[1]), float(total[2] / total[3])
    return HedgingRun(written, hedges, steps, high, low, difference)


def _until_end(found: Continuation, end: object) -> tuple[np.ndarray, np.ndarray]:
    ids, shares = found.ids.numpy(), found.shares.double().numpy()
    ends = np.flatnonzero(ids == end)
    length = int(ends[0]) if len(ends) else len(ids)
    return ids[:length], shares[:length]


HEDGES = (
    "maybe", "perhaps", "possibly", "probably", "presumably", "supposedly", "apparently",
    "seemingly", "likely", "unlikely", "possible", "probable", "might", "may", "could", "seem",
    "seems", "seemed", "appear", "appears", "appeared", "uncertain", "unclear", "unsure",
    "roughly", "approximately",
)  # fmt: skip
"""Written by us from what grammars list as epistemic adverbs, adjectives, modals and verbs.

They are single words, kept although some have other uses ("May"): what is compared is how often
they follow one kind of step and another, and other uses follow both.
"""


def hedge_starts(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], added: Sequence[int]
) -> list[bool]:
    """Say of each added token whether a hedging word begins in it.

    A word that began in the prompt does not count. Words are whole words, in any case.
    """
    ids = [*prompt, *added]
    # Where the text of each prefix ends; a part of a character may come and go at its end.
    lengths = [len(_decoded(tokenizer, ids[: end + 1])) for end in range(len(ids))]
    ends = list(accumulate(lengths, max))
    pattern = re.compile(rf"\b(?:{'|'.join(map(re.escape, HEDGES))})\b", re.IGNORECASE)
    found = [False] * len(ids)
    for match in pattern.finditer(_decoded(tokenizer, ids)):
        token = bisect_right(ends, match.start())
        if token < len(ids):
            found[token] = True
    return found[len(prompt) :]


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(
        tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )
