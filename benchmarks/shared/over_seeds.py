"""Whether a figure is smaller than another over seeds: a paired t interval, corrected for lines."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from scipy import stats

LEVEL = 0.05
HOW = (
    "An answer is bold where Student's 95 % interval of the paired differences, over seeds and "
    "corrected by Bonferroni for the lines of its section that have more than one seed, leaves "
    "out 0. The same sign in all of three seeds is no answer: noise gives it once in four times."
)
"""What a page says of the answers, once."""
Figures = dict[int, float]


class Claim(NamedTuple):
    """That one figure is smaller than another.

    Attributes:
        words: what is smaller than what.
        ours: the figure by seed.
        others: the other's by seed.
    """

    words: str
    ours: Figures
    others: Figures

    @property
    def differences(self) -> list[float]:
        """Ours less the other, of the seeds that both have."""
        return [self.ours[s] - self.others[s] for s in sorted(set(self.ours) & set(self.others))]


class Answer(NamedTuple):
    """What seeds say of a claim.

    Attributes:
        line: for the page.
        sign: of a difference whose interval leaves out 0: −1 if the claim holds; else 0.
    """

    line: str
    sign: int


def answers(claims: Sequence[Claim]) -> list[Answer]:
    """Return an answer to each claim of one section, corrected for how many can be tested."""
    tested = sum(len(claim.differences) > 1 for claim in claims)
    return [_answer(claim, max(1, tested)) for claim in claims]


def lines_of(claims: Sequence[Claim]) -> list[str]:
    """Return the lines of one section; see :func:`answers`."""
    return [answer.line for answer in answers(claims)]


def _answer(claim: Claim, tested: int) -> Answer:
    differences = claim.differences
    count = len(differences)
    if not count:
        return Answer(f"- {claim.words}: not measured with a seed in common.", 0)
    shown = ", ".join(f"{difference:+.4f}" for difference in differences)
    if count == 1:
        return Answer(f"- {claim.words}: not shown (difference {shown}, 1 seed).", 0)
    low, high = interval(differences, LEVEL / tested)
    alike = len({math.copysign(1, d) for d in differences if d}) == 1 and all(differences)
    where = "in every seed" if alike else f"over {count} seeds"
    sign = -1 if high < 0 else 1 if low > 0 else 0
    if sign:
        words = f"**{'yes' if sign < 0 else 'no: the opposite'}, {where}**"
    elif alike:
        side = "so" if differences[0] < 0 else "the opposite"
        words = f"{side} in all {count} seeds, not significant"
    else:
        words = "not shown"
    corrected = f", corrected for {tested} lines" if tested > 1 else ""
    return Answer(
        f"- {claim.words}: {words} (difference by seed {shown}; mean "
        f"{statistics.fmean(differences):+.4f}, 95 % interval{corrected} {low:+.4f} to "
        f"{high:+.4f}).",
        sign,
    )


def interval(differences: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """Return Student's interval of a mean that misses it with probability ``level``.

    Args:
        differences: at least two, one a seed.
        level: of both sides together.
    """
    count = len(differences)
    t = float(stats.t.isf(level / 2, count - 1))
    half = t * statistics.stdev(differences) / math.sqrt(count)
    mean = statistics.fmean(differences)
    return mean - half, mean + half


def spread(values: Iterable[float], form: str = ".3g") -> str:
    """Return the mean with the least and the most, or a dash for none."""
    found = list(values)
    if not found:
        return "–"
    middle, least, most = (format(f(found), form) for f in (statistics.fmean, min, max))
    return middle if len(found) == 1 else f"{middle} ({least} to {most})"
