"""The reading of a text, one step per prediction, and the shares of the training text behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from prismlm.corpus.encode import around_text
from prismlm.errors import InputError, check_choice, check_whole
from prismlm.explain.against import OppositionAttribution
from prismlm.explain.attribution import Attribution, attribute
from prismlm.explain.evidence import EvidenceTable
from prismlm.explain.rows import Rows, frame, write_rows
from prismlm.explain.shares import METHODS, DocumentShare, Method, Passage, Sources
from prismlm.explain.steps import Step
from prismlm.explain.summary import doubts, in_words
from prismlm.explain.support import Support
from prismlm.explain.verbatim import Quote, quotes
from prismlm.files import json_text
from prismlm.lens.lens import Lens
from prismlm.lens.where import Where
from prismlm.outputs import write_text

if TYPE_CHECKING:
    import pandas

    from prismlm.explain.attention_maps import AttentionMap
    from prismlm.lens.opened_model import OpenedModel

SHOWN = 10
AGAINST_SHOWN = 5


@dataclass(frozen=True, repr=False)
class Trace:
    """Every prediction along a text, split into prototypes, with the training text behind them.

    ``trace[t]`` is the step after token t, ``trace[2:5]`` a trace of those steps. Shares need a
    lens; without one, :meth:`sources` says how to build it.

    Shares, passages, support and verbatim spans are of the answer: of what was generated, since
    the model did not write the prompt, or of all of a text that was only read. ``trace[:]`` is of
    all steps, as every slice is.

    Attributes:
        model: the model's name or directory.
        read_steps: gives ``steps``.
        table: the evidence behind the steps.
        lens: the lens the shares are taken from, if there is one.
        rounding: the largest |sum of parts − model's logit| / max(1, |logit|) of the whole text;
            float32 models stay under 1e-3, half-precision ones under 2e-2.
        attention: what the heads that were asked for look at, a row for each step; or None.
        lm: the model itself, which :meth:`against` reads text with.
        first: the first step of the answer.
        settings: what the model's own settings of generation would have changed, in words.
        question: what was asked: the text, or a chat's last message of the user.
    """

    model: str
    read_steps: Callable[[], tuple[Step, ...]] = field(compare=False, repr=False)
    table: EvidenceTable = field(repr=False)
    lens: Lens | None = field(default=None, repr=False)
    rounding: float = 0.0
    attention: tuple[AttentionMap, ...] | None = field(default=None, compare=False, repr=False)
    lm: OpenedModel | None = field(default=None, compare=False, repr=False)
    first: int = 0
    settings: str = ""
    question: str = ""
    _found: dict[Method, Attribution] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """One per prediction, put together when they are first looked at: shares need none."""
        return self.read_steps()

    def __repr__(self) -> str:
        lens = "no lens" if self.lens is None else f"lens {self.lens.name}"
        return f"<Trace of {len(self)} predictions of {self.model}, {lens}>"

    def __len__(self) -> int:
        return len(self.table.indices)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    @property
    def written(self) -> int:
        """How many of the answer's tokens the model wrote: all, or 0 of a text that it read."""
        answer = self.steps[self.first :]
        return len(answer) if answer and answer[0].target_from == "generated" else 0

    @overload
    def __getitem__(self, key: int) -> Step: ...

    @overload
    def __getitem__(self, key: slice) -> Trace: ...

    def __getitem__(self, key: int | slice) -> Step | Trace:
        """Return one step, or a trace of some of them."""
        if isinstance(key, slice):
            return replace(
                self,
                read_steps=lambda: self.steps[key],
                table=self.table[key],
                attention=self.attention and tuple(one[key] for one in self.attention),
                first=0,
            )
        return self.steps[key]

    def attribution(self, method: Method = "evidence") -> Attribution:
        """Return what the answer relies on; it is found once for each method.

        Raises:
            InputError: there is no lens, or no such method.
        """
        check_choice("the method", method, METHODS)
        if method not in self._found:
            table = self.table[self.first :] if self.first else self.table
            self._found[method] = attribute(table, self._lens(), method)
        return self._found[method]

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
    ) -> Rows[DocumentShare]:
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
        """Return the passages that speak most against the answer: another token came next there.

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
    def _opposition(self) -> OppositionAttribution:
        lens = self._lens()
        if self.lm is None:
            raise InputError("a trace without its model cannot read text again.")
        return OppositionAttribution(self.table[self.first :], self.lm, lens)

    def places(
        self, limit: int, *, method: Method = "evidence", where: Where | None = None
    ) -> Sequence[DocumentShare]:
        """Return what stands behind the answer: passages, or documents by ``source``."""
        if method == "evidence":
            return self.passages(limit, where=where)
        return self.documents(limit, method=method, where=where)

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
        shares, found = self.sources(self.lens.telling), self.documents(1)
        document = found[0] if found else None
        return in_words(subject, shares, document, self.support, self.lens.meta.documents)

    @property
    def answer_ids(self) -> list[int]:
        """The tokens of the answer, special ones among them; of a text that was read, all of it."""
        return self._tokens[0][self.first + bool(self.first or self.written) :]

    @property
    def _tokens(self) -> tuple[list[int], list[str]]:
        """The ids of all tokens, those that were written among them, and how they are shown."""
        steps = self.steps
        ids, shown = [step.token_id for step in steps], [step.pieces[0].shown for step in steps]
        if steps and steps[-1].target_from == "generated":
            ids.append(steps[-1].target_id)
            shown.append(steps[-1].pieces[1].shown)
        return ids, shown

    @property
    def answer(self) -> str:
        """The words of the answer, special tokens left out; of a text that was read, all of it."""
        return "" if self.lm is None else self.lm.words(self.answer_ids)

    @property
    def softcap(self) -> float | None:
        """The cap c of a model whose own logits are c tanh(l / c), as Gemma's: steps have l."""
        return None if self.lm is None else self.lm.logit_map.softcap

    @property
    def notes(self) -> list[str]:
        """What must be known to read the figures: doubts about model or head, settings left out."""
        return [*doubts(self.table), *([self.settings] if self.settings else [])]

    def verbatim(self, limit: int = SHOWN) -> Rows[Quote]:
        """Return the longest spans of the answer that stand in the corpus word for word.

        A span says where its words stand, not that the model has them from there.

        Raises:
            InputError: there is no lens, or it has no suffix array.
        """
        lens = self._lens()
        if lens.suffixes is None:
            raise InputError(
                f"the lens {lens.name} has no suffix array, so no words can be looked up. Install "
                "prismlm[verbatim] and build it again with `prismlm index`."
            )
        ids, shown = self._tokens
        begins = around_text(self.lm.tokenizer)[0] if self.lm is not None else []
        # What stands before the first token that was written is not of the answer.
        first = self.first + 1 if self.written else len(begins) * (ids[: len(begins)] == begins)
        limit = check_whole("the number of spans", limit)
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
        if lens is not None:
            value["documents"] = [one.to_dict() for one in self.documents(documents, **how)]
        if lens is not None and method == "evidence" and not where:
            value["summary"] = self.summary
        if self.notes:
            value["notes"] = self.notes
        if self.softcap is not None:
            value["softcap"] = self.softcap
        if self.support is not None:
            value["support"] = self.support.to_dict()
        if lens is not None and method == "evidence":
            value["passages"] = [one.to_dict() for one in self.passages(documents, where=where)]
        if check_whole("the number of passages against", against):
            value["against"] = [one.to_dict() for one in self.against(against, where=where)]
        if lens is not None and lens.suffixes is not None:
            value["verbatim"] = [one.to_dict() for one in self.verbatim(documents)]
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
            against: passages shown that speak against the predictions.
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
        if self.lens is None:
            raise InputError(
                f"{self.model} has no lens, so there is no training text to point to. "
                "Build one with `prismlm index MODEL --corpus DIR`."
            )
        return self.lens


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
