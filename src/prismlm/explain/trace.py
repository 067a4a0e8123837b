"""The reading of a text, one step per prediction, and the shares of the training text behind it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from prismlm.corpus.encode import around_text
from prismlm.corpus.pieces import Piece, pieces_of
from prismlm.errors import InputError, check_choice, check_whole
from prismlm.explain.against import Opposition
from prismlm.explain.attention_maps import AttentionMap
from prismlm.explain.attribution import Attribution, Passage, Sources, attribute
from prismlm.explain.chain import ChainsOfText
from prismlm.explain.positions import METHODS, Carriers, Method, carriers_of
from prismlm.explain.prediction import Predictions
from prismlm.explain.rows import Rows, frame, write_rows
from prismlm.explain.steps import Step, steps_of
from prismlm.explain.summary import doubts, in_words
from prismlm.explain.support import LEAST_TOLD, STRONG, Support
from prismlm.explain.verbatim import Quote, quotes
from prismlm.files import json_text
from prismlm.lens.lens import Lens
from prismlm.lens.opened_model import OpenedModel
from prismlm.lens.text import sentences
from prismlm.lens.where import Where
from prismlm.outputs import write_text

if TYPE_CHECKING:
    import pandas

SHOWN = 10
AGAINST_SHOWN = 5


@dataclass(frozen=True)
class Citation:
    """A sentence of an answer, and a document that carries nearly all that it tells.

    Attributes:
        start, end: of the sentence, in characters of ``trace.answer``.
        share: s, the part of what the sentence tells that the document carries.
        document: its doc_id, source, domain, license, title and url.
    """

    start: int
    end: int
    share: float
    document: dict[str, Any]


@dataclass(frozen=True, repr=False, eq=False)
class Trace:
    """Every prediction along a text, split into prototypes, with the training text behind them.

    ``trace[t]`` is the step after token t, ``trace[2:5]`` a trace of those steps. Shares need a
    lens; without one, :meth:`sources` says how to build it.

    Shares, passages, support and verbatim spans are of the answer: of what was generated, since
    the model did not write the prompt, or of all of a text that was only read. ``trace[:]`` is of
    all steps, as every slice is.

    Attributes:
        lm: the model, with its lens.
        predictions: of the whole text, split.
        ids: the tokens of the whole text, those that were written included.
        prompt_length: how many of them were given.
        rows: which predictions the steps of this trace are.
        first: the first step of the answer.
        attention: what the heads that were asked for look at, a row for each step; or None.
        chains: of models with prototype mixers.
        settings: what the model's own settings of generation would have changed, in words.
        question: what was asked: the text, or a chat's last message of the user.
        whole: the trace of the whole text, where this is a slice.
    """

    lm: OpenedModel
    predictions: Predictions
    ids: list[int]
    prompt_length: int
    rows: range
    first: int = 0
    attention: tuple[AttentionMap, ...] | None = None
    chains: ChainsOfText | None = None
    settings: str = ""
    question: str = ""
    whole: Trace | None = None
    _carriers: dict[str, Carriers] = field(default_factory=dict, init=False)
    _attributions: dict[str, Attribution] = field(default_factory=dict, init=False)

    @property
    def model(self) -> str:
        """The model's directory."""
        return str(self.lm.path)

    @property
    def lens(self) -> Lens | None:
        """The lens the shares are taken from, if there is one."""
        return self.lm.lens

    @property
    def rounding(self) -> float:
        """The largest |sum of parts − model's logit| / max(1, |logit|) of the whole text.

        float32 models stay under 1e-3, half-precision ones under 2e-2.
        """
        return self.predictions.rounding

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """One per prediction, made when they are first looked at: shares need none."""
        if self.whole is not None:
            return tuple(self.whole.steps[row] for row in self.rows)
        given = self.predictions, self.ids, self.prompt_length
        return steps_of(*given, self.lm.tokenizer, self.lens, self.chains)

    def __repr__(self) -> str:
        lens = "no lens" if self.lens is None else f"lens {self.lens.name}"
        return f"<Trace of {len(self)} predictions of {self.model}, {lens}>"

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    @property
    def written(self) -> int:
        """How many of the answer's tokens the model wrote: all, or 0 of a text that it read."""
        answer = self.rows[self.first :]
        generated = answer and self.prompt_length <= answer[0] + 1 < len(self.ids)
        return len(answer) if generated else 0

    @overload
    def __getitem__(self, key: int) -> Step: ...

    @overload
    def __getitem__(self, key: slice) -> Trace: ...

    def __getitem__(self, key: int | slice) -> Step | Trace:
        """Return one step, or a trace of some of them."""
        if isinstance(key, slice):
            maps = self.attention and tuple(one[key] for one in self.attention)
            whole = self.whole or self
            return replace(self, rows=self.rows[key], first=0, attention=maps, whole=whole)
        return self.steps[key]

    def carriers(self, method: Method = "evidence") -> Carriers:
        """Return the positions that carry each prediction of the answer, in its text."""
        whole = self.whole or self
        check_choice("the method", method, METHODS)
        if method not in whole._carriers:
            whole._carriers[method] = carriers_of(self.predictions, self._lens(), method)
        return whole._carriers[method].of(self.rows[self.first :])

    def attribution(self, method: Method = "evidence") -> Attribution:
        """Return what the answer relies on; it is found once for each method.

        Raises:
            InputError: there is no lens, or no such method.
        """
        check_choice("the method", method, METHODS)
        if method not in self._attributions:
            found = attribute(self.carriers(method), self._lens(), method)
            self._attributions[method] = found
        return self._attributions[method]

    def sources(
        self, by: str = "source", *, method: Method = "evidence", where: Where | None = None
    ) -> Sources:
        """Return the share of each source, domain, license or document in the answer.

        Args:
            by: the column.
            method: ``evidence``, or ``source`` for PRISM's A_t = Σ α μ_S; see docs/attribution.md.
            where: only text that matches, such as ``{"license": "CC0"}``; the rest is
                ``elsewhere``.

        Raises:
            InputError: there is no lens, or an argument names what is not there.
        """
        return self.attribution(method).sources(by, where)

    def documents(
        self, limit: int = SHOWN, *, method: Method = "evidence", where: Where | None = None
    ) -> Rows[Passage]:
        """Return the documents with the largest shares in the answer, as :meth:`sources`."""
        limit = check_whole("the number of documents", limit)
        return Rows(self.attribution(method).documents(limit, where))

    def passages(self, limit: int = SHOWN, *, where: Where | None = None) -> Rows[Passage]:
        """Return the passages of the corpus with the largest shares in the answer.

        Raises:
            InputError: there is no lens, or the filter names what is not there.
        """
        limit = check_whole("the number of passages", limit)
        return Rows(self.attribution().passages(limit, where))

    def against(
        self, limit: int = AGAINST_SHOWN, *, where: Where | None = None, estimated: bool = False
    ) -> Rows[Passage]:
        """Return the passages that oppose the answer most: another token came next there.

        Of the positions near to a state where y did not come next, each weighs

            p_n(y) exp((cos(z, z_n) − 1) / T)

        with p_n(y) what the model gave to y there. It is estimated from coded states first; the
        passages shown, and some more, are then read again for it, a forward pass or some. Shares
        are of the weight of all candidates, and never netted with those of :meth:`passages`. The
        marked token is what came next, ``predicted`` is y. With ``estimated`` nothing is read
        again: these are the passages, shares and p_n(y) of the estimates, at once.

        Raises:
            InputError: there is no lens, its text is not at hand, or the filter names what is not
                there.
        """
        limit = check_whole("the number of passages", limit)
        found = self._opposition
        return Rows((found.estimated if estimated else found.passages)(limit, where))

    @cached_property
    def _opposition(self) -> Opposition:
        lens, rows = self._lens(), self.rows[self.first :]
        return Opposition(self.predictions[list(rows)], self.lm, lens)

    @cached_property
    def support(self) -> Support | None:
        """How well the corpus supports the answer; None without a lens, or a scale in it."""
        return None if self.lens is None else self.attribution().support

    @property
    def summary(self) -> str | None:
        """What the answer relies on, in words; None without a lens."""
        if self.lens is None or not len(self):
            return None
        read = "the text" if len(self) > 1 else "the prediction"
        subject = "the answer" if self.first or self.written else read
        shares, leading = self.sources(self.lens.default_group_by), self.documents(1)
        document = leading[0] if leading else None
        return in_words(subject, shares, document, self.support, self.lens.meta.documents)

    @property
    def answer_ids(self) -> list[int]:
        """The tokens of the answer, special ones among them; of a text that was read, all of it."""
        return self._ids[self.first + bool(self.first or self.written) :]

    @property
    def _ids(self) -> list[int]:
        """The tokens that were read, and the last one where it was written."""
        ids = [self.ids[row] for row in self.rows]
        last = self.rows[-1] + 1 if self.rows else 0
        return ids + self.ids[last : last + 1] if last >= self.prompt_length else ids

    @property
    def answer(self) -> str:
        """The words of the answer, special tokens left out; of a text that was read, all of it."""
        return self.lm.words(self.answer_ids)

    def citations(self) -> list[Citation]:
        """Return the documents to cite in an answer, sentence by sentence, the best first in each.

        Cited is a document that strongly supports the sentence by itself; sentences of common words
        alone cite nothing, and nothing is cited where support is not known.
        """
        if self.support is None:
            return []
        ids, words, cited = self.answer_ids, self.lm.words, list[Citation]()
        # The first token of a text that was only read is predicted by none.
        shift = self.first - (0 if self.first or self.written else 1)
        for start, end in sentences(self.answer):
            # The tokens up to a character are the fewest that spell it.
            begin, stop = (
                bisect_left(range(len(ids)), place, key=lambda count: len(words(ids[:count])))
                for place in (start + 1, end)
            )
            begin, stop = max(self.first, begin - 1 + shift), stop + shift
            told = self[begin:stop].attribution().told if stop > begin else None
            documents, shares, total = told.by_document() if told else ([], np.zeros(0), 0.0)
            for i in np.argsort(-shares, kind="stable") if total >= LEAST_TOLD else ():
                if shares[i] >= STRONG:
                    facts = self._lens().cells.facts(int(documents[i]))
                    cited.append(Citation(start, end, float(shares[i]), facts))
        return cited

    @cached_property
    def _pieces(self) -> list[Piece]:
        return pieces_of(self.lm.tokenizer, self.ids)

    @property
    def softcap(self) -> float | None:
        """The cap c of a model whose own logits are c tanh(l / c), as Gemma's: steps have l."""
        return self.lm.logit_map.softcap

    @property
    def doubts(self) -> list[str]:
        """Signs that the model or its head do not work."""
        return doubts(self.predictions[list(self.rows)])

    @property
    def notes(self) -> list[str]:
        """What must be known to read the figures: :attr:`doubts`, and settings left out."""
        return [*self.doubts, *([self.settings] if self.settings else [])]

    def verbatim(self, limit: int = SHOWN) -> Rows[Quote]:
        """Return the longest spans of the answer that occur in the corpus word for word.

        A span says where its words occur, not that the model has them from there.

        Raises:
            InputError: there is no lens, or it has no suffix array.
        """
        lens, limit = self._lens(), check_whole("the number of spans", limit)
        if lens.suffixes is None:
            raise InputError(
                f"the lens {lens.name} has no suffix array, so no words can be looked up. Install "
                "prismlm[verbatim] and build it again with `prismlm index`."
            )
        ids, whole = self._ids, self.whole or self
        own = slice(self.rows.start, self.rows.start + len(ids))
        shown = [one.shown for one in whole._pieces[own]]
        begins = around_text(self.lm.tokenizer)[0]
        # What was read before the first written token is not of the answer.
        first = self.first + 1 if self.written else len(begins) * (ids[: len(begins)] == begins)
        return Rows(quotes(ids, shown, first, lens, limit))

    def to_dict(
        self,
        by: str = "source",
        documents: int = SHOWN,
        *,
        method: Method = "evidence",
        where: Where | None = None,
        against: int = 0,
    ) -> dict[str, Any]:
        """Return the whole reading as ``prismlm explain --json`` prints it.

        ``attention`` is in it only where heads were asked for, ``against`` only where that many
        passages were.
        """
        lens, how = self.lens, {"method": method, "where": where}
        value: dict[str, Any] = {
            "model": self.model,
            "lens": None if lens is None else str(lens.path),
            "positions": [step.to_dict() for step in self.steps],
            "sources": None if lens is None else self.sources(by, **how).to_dict(),
            "documents": [],
        }
        if self.notes:
            value["notes"] = self.notes
        if self.softcap is not None:
            value["softcap"] = self.softcap
        if self.support is not None:
            value["support"] = self.support.to_dict()
        if lens is not None:
            value["documents"] = [one.to_dict() for one in self.documents(documents, **how)]
            if method == "evidence":
                passages = self.passages(documents, where=where)
                value["passages"] = [one.to_dict() for one in passages]
                value |= {} if where else {"summary": self.summary}
            if lens.suffixes is not None:
                value["verbatim"] = [one.to_dict() for one in self.verbatim(documents)]
        if check_whole("the number of passages against", against):
            value["against"] = [one.to_dict() for one in self.against(against, where=where)]
        if self.attention is not None:
            value["attention"] = [one.to_dict() for one in self.attention]
        return value

    def to_parquet(self, path: Path | str) -> None:
        """Write one row per step and prototype in use, steps' own figures repeated."""
        write_parquet([self], path)

    def to_pandas(self) -> pandas.DataFrame:
        """Return what :meth:`to_parquet` writes as a data frame."""
        return frame(row for step in self for row in step.rows())

    def to_json(self, path: Path | str) -> None:
        """Write :meth:`to_dict` as ``prismlm explain --json`` prints it."""
        write_text(path, json_text(self.to_dict(), indent=2) + "\n")

    def to_html(self, path: Path | str | None = None, *, against: int = 0) -> str:
        """Return a self-contained page, and write it if a path is given.

        Args:
            path: where to.
            against: passages shown that oppose the predictions.
        """
        # The one import against the order of packages: a trace shows itself.
        from prismlm.pages.trace import page

        text = page([self], against=check_whole("the number of passages against", against))
        if path is not None:
            write_text(path, text)
        return text

    def _repr_html_(self) -> str:
        from prismlm.pages.trace import fragment

        return fragment(self)

    def _lens(self) -> Lens:
        return self.lm.lens_for("training text to point to")


def write_parquet(traces: Sequence[Trace], path: Path | str) -> None:
    """Write one row per step and prototype in use; several traces get a column ``text``, from 0."""
    write_rows(
        (
            ({"text": number} if len(traces) > 1 else {}) | row
            for number, trace in enumerate(traces)
            for step in trace
            for row in step.rows()
        ),
        path,
    )
