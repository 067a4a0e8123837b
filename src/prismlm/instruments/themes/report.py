"""The themes of some units beside those of random sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from prismlm.errors import InputError
from prismlm.instruments.themes.units import Unit, random_spans, read_spans
from prismlm.labels.themes import SEQUENCES, EndpointJudge, Judgement, Passage, WordJudge
from prismlm.progress import SILENT, Reporter
from prismlm.statistics import Interval, bootstrap

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus, Split

Kind = Literal["prototypes", "channels", "heads"]
Figure = Literal["disentanglement", "coverage", "themes"]
FIGURES: tuple[Figure, ...] = ("disentanglement", "coverage", "themes")
# Random passages that the judge by words takes rarity and thresholds from.
CHANCE = 400


@dataclass(frozen=True)
class ThemeReport:
    """Themes of units, and of as many units of random sequences of the same corpus.

    Attributes:
        model: its name.
        of: what the units are.
        corpus: the name of the corpus.
        split: its documents that were read.
        judge: who judged: words, or endpoint:NAME.
        names: of the units.
        documents: how many the ten sequences of each unit are of: those of one are alike anyway.
        judged: of each unit; None where an endpoint gave no answer.
        random: of ten random sequences each.
        left_out: units that were drawn and have fewer than ten sequences.
    """

    model: str
    of: Kind
    corpus: str
    split: str
    judge: str
    names: tuple[str, ...]
    documents: tuple[int, ...]
    judged: tuple[Judgement | None, ...]
    random: tuple[Judgement | None, ...]
    left_out: int

    def values(self, figure: Figure, *, random: bool = False) -> np.ndarray:
        """Return one figure of all that were judged, int64 [n]."""
        found = self.random if random else self.judged
        return np.array([getattr(one, figure) for one in found if one is not None], dtype=np.int64)

    def histogram(self, figure: Figure, *, random: bool = False) -> list[int]:
        """Return how many have each value from 1 to 10."""
        values = self.values(figure, random=random)
        return np.bincount(values, minlength=SEQUENCES + 1)[1:].tolist()

    def difference(self, figure: Figure, seed: int = 0) -> Interval:
        """Return the mean of units less that of random ones, with 95 % of a bootstrap over both."""
        # Random ones are as many, so that one draw of rows serves both; what was not judged counts
        # for nothing.
        pairs = zip(self.judged, self.random, strict=True)
        found = [[None if one is None else getattr(one, figure) for one in pair] for pair in pairs]
        values = np.array(found, dtype=np.float64)
        return bootstrap(np.nan_to_num(values), np.isfinite(values), (1, -1), seed=seed)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "model": self.model,
            "of": self.of,
            "corpus": self.corpus,
            "split": self.split,
            "judge": self.judge,
            "left_out": self.left_out,
            "figures": {figure: self._summary(figure) for figure in FIGURES},
            "units": [
                {"unit": name, "documents": of, **({} if one is None else asdict(one))}
                for name, of, one in zip(self.names, self.documents, self.judged, strict=True)
            ],
            "random": [asdict(one) for one in self.random if one is not None],
        }

    def _summary(self, figure: Figure) -> dict[str, Any]:
        one = self.difference(figure)
        return {
            "histogram": self.histogram(figure),
            "mean": _mean(self.values(figure)),
            "random_histogram": self.histogram(figure, random=True),
            "random_mean": _mean(self.values(figure, random=True)),
            "difference": one.value,
            "low": one.low,
            "high": one.high,
        }


def theme_report(
    found: tuple[Sequence[Unit], int],
    corpus: Corpus,
    *,
    split: Split,
    name: str,
    of: Kind,
    judge: WordJudge | EndpointJudge | None = None,
    seed: int = 0,
    progress: Reporter = SILENT,
) -> ThemeReport:
    """Judge units, and as many of random sequences that are as long and have as many marks.

    Args:
        found: units and how many were left out, of :mod:`prismlm.instruments.themes.units`.
        corpus, split: the documents that the units' sequences are of.
        name: of the model.
        of: what the units are.
        judge: who judges; None for words alone.
        seed: of the random sequences.
        progress: shows how far it is.

    Raises:
        InputError: there are no units, or as the judge says.
        FormatError: the corpus is damaged.
    """
    units, left_out = found
    if not units:
        raise InputError(
            f"none of the {left_out} {of} has {SEQUENCES} sequences: read more text, or a lens "
            "that holds more positions."
        )
    count = SEQUENCES * len(units)
    control = random_spans(units, corpus, split, count, seed)
    chance = [] if judge is not None else random_spans(units, corpus, split, CHANCE, seed + 1)
    spans = [span for unit in units for span in unit.spans]
    text = read_spans(corpus, [*spans, *control, *chance])
    if judge is None:
        judge = WordJudge([text[span] for span in chance])
    passages: list[list[Passage]] = [
        [text[span] for span in every[first : first + SEQUENCES]]
        for every in (spans, control)
        for first in range(0, count, SEQUENCES)
    ]
    judged = judge.judge(passages, progress)
    return ThemeReport(
        model=name,
        of=of,
        corpus=corpus.name,
        split=split,
        judge=judge.source,
        names=tuple(unit.name for unit in units),
        documents=tuple(len({span.document for span in unit.spans}) for unit in units),
        judged=tuple(judged[: len(units)]),
        random=tuple(judged[len(units) :]),
        left_out=left_out,
    )


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None
