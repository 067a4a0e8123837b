"""The judge judged first: does it tell text from words shuffled or repeated, whatever the order?

A judge that does not look at the texts prefers the real one half of the time. Its share is the mean
score of both orders, so that one who follows positions alone gets exactly a half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import cycle, islice
from typing import Any

import numpy as np

from prismlm.eval.judging.continuations import Prompt
from prismlm.eval.judging.judges import Judge, Judged, Pair
from prismlm.progress import SILENT, Reporter
from prismlm.statistics import Interval

# What the interval of text against shuffled text must lie above, and the most pairs by position.
BAR, MOST_BY_POSITION = 0.75, 0.5
DEVIATIONS = 1.959963984540054
CONTROLS = ("shuffled", "elsewhere", "repeated")
# Words at the end of a prompt that are said again and again.
WORDS_REPEATED = 6


def wilson(successes: float, count: int) -> Interval:
    """Return a share with Wilson's 95 % interval; halves count as such."""
    if not count:
        return Interval(np.nan, np.nan, np.nan)
    share, square = successes / count, DEVIATIONS**2
    middle = (share + square / (2 * count)) / (1 + square / count)
    inner = share * (1 - share) / count + square / (4 * count**2)
    half = DEVIATIONS * inner**0.5 / (1 + square / count)
    return Interval(share, max(0.0, middle - half), min(1.0, middle + half))


def examination_pairs(prompts: Sequence[Prompt], seed: int = 0) -> dict[str, list[Pair]]:
    """Return what a judge is examined with, the real continuation first.

    ``shuffled`` has the same words in another order, ``elsewhere`` the continuation of another
    prompt, ``repeated`` as many words: the prompt's last six again and again. Prompts without a
    reference give none, nor do words that cannot be told from the real ones.
    """
    whole = [one for one in prompts if one.reference]
    real = [" ".join(one.reference.split()) for one in whole]
    found: dict[str, list[Pair]] = {name: [] for name in CONTROLS}
    for number, one in enumerate(whole):
        words = np.array(real[number].split(), dtype=object)
        mixed = " ".join(np.random.default_rng([seed, number]).permutation(words))
        last = one.text.split()[-WORDS_REPEATED:]
        again = " ".join(islice(cycle(last), len(words)))
        for name, other in zip(CONTROLS, (mixed, real[number - 1], again), strict=True):
            found[name] += [Pair(one.text, real[number], other)] if other != real[number] else []
    return found


def examine(
    judge: Judge, prompts: Sequence[Prompt], seed: int = 0, progress: Reporter = SILENT
) -> dict[str, Any]:
    """Return how often a judge prefers real text, how often it follows the order, and a verdict.

    Raises:
        InputError: as :meth:`prismlm.eval.judging.judges.Judge.judge`.
    """
    pairs = examination_pairs(prompts, seed)
    judged = {name: judge.judge(pairs[name], f"{name} text", progress) for name in CONTROLS}
    shares: dict[str, dict[str, Any]] = {}
    for name, found in judged.items():
        scores = [one.score for one in found if one.score is not None]
        shares[name] = {"count": len(scores), **asdict(wilson(sum(scores), len(scores)))}
    order = order_figures([one for found in judged.values() for one in found])
    reasons: list[str] = []
    for name, least, what in (
        ("shuffled", BAR, f"the same words shuffled in more than {BAR:.0%}"),
        ("repeated", 0.5, "the prompt's last words again and again more often than not"),
    ):
        low = shares[name]["low"]
        said = "nothing was judged" if np.isnan(low) else f"its 95 % interval begins at {low:.0%}"
        if not low > least:
            reasons.append(f"it must prefer real text to {what}: {said}")
    if (followed := order["by_position"]["value"]) > MOST_BY_POSITION:
        reasons.append(f"it follows the position, not the text, in {followed:.0%} of the pairs")
    return {
        "preferred": shares,
        "order": order,
        "bar": BAR,
        "most_by_position": MOST_BY_POSITION,
        "usable": not reasons,
        "reasons": reasons,
    }


def order_figures(judged: Sequence[Judged]) -> dict[str, Any]:
    """Return how often verdicts change with the order, follow it, name A, and are ties."""
    both = [one for one in judged if one.score is not None]
    said = [verdict for one in both for verdict in one]
    named = [verdict for verdict in said if verdict != "Tie"]
    return {
        "pairs": len(both),
        "failed": len(judged) - len(both),
        "changed": asdict(wilson(sum(one.changed for one in both), len(both))),
        "by_position": asdict(wilson(sum(one.by_position for one in both), len(both))),
        "first": asdict(wilson(named.count("A"), len(named))),
        "ties": said.count("Tie") / len(said) if said else np.nan,
    }
