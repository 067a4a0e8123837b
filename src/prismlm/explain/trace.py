"""The steps of a text, one per prediction, and the shares of the training text behind them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import numpy as np
import torch

from prismlm.corpus.encode import around_text
from prismlm.corpus.pieces import Piece, decode_token, pieces_of
from prismlm.errors import InputError, check_whole
from prismlm.explain.against import opposing_passages
from prismlm.explain.attribution import (
    MIN_INFORMATION,
    STRONG,
    Attribution,
    Carriers,
    Method,
    Passage,
    Share,
    Sources,
    Support,
    attribute,
    carriers_of,
)
from prismlm.explain.chain import DirectPath, PrototypeChain, chains
from prismlm.explain.prediction import Predictions, PrototypeUse, fed_back
from prismlm.explain.rows import Rows, frame, write_rows
from prismlm.explain.subject import Subject
from prismlm.explain.verbatim import Quote, quotes
from prismlm.files import json_text
from prismlm.lens.cells import UNKNOWN, Where
from prismlm.lens.lens import Lens, sentences
from prismlm.lens.opened_model import OpenedModel
from prismlm.outputs import write_text

if TYPE_CHECKING:
    import pandas

SHOWN = 10
AGAINST_SHOWN = 5
PROTOTYPES_CHAINED = 3
# A summary says "mostly" of a domain with more than half of the attributed evidence. How often such
# a domain is the text's own is in docs/results/domains.md.
HALF = 0.5
# With less of the evidence attributed, the summary names no source.
MIN_ATTRIBUTED = 0.05
# A domain with a smaller lift is as frequent as usual.
MIN_LIFT = 1.25
# A smaller share is "less than 1%".
MIN_PERCENT = 0.005
TargetFrom = Literal["text", "generated", "argmax"]


@dataclass(frozen=True)
class Step:
    """The prediction made after reading one token."""

    position: int  # of the token read, from 0
    # The token read; U+FFFD if it holds only some bytes of a character.
    token: str
    token_id: int
    # The token whose logit is split; likewise.
    target: str
    target_id: int
    # The next token of the text, a generated token, or the model's top token.
    target_from: TargetFrom
    logit: float  # the sum of contributions, residual and bias
    # The model's own, before any soft-cap; the two agree to 1e-3·max(1, |logit|).
    model_logit: float
    probability: float  # the model's, of the target
    # Their parts of the logit, and these minus their means over the vocabulary.
    bias: float
    residual: float
    residual_evidence: float
    bias_evidence: float
    explained_share: float  # Σ e_i / (Σ e_i + e_residual + e_bias) for the target
    prototypes: tuple[PrototypeUse, ...]  # those in use, by contribution, largest first
    # With uncertainty feedback, the entropy of the prediction before, as a share of the largest
    # possible, which was fed back to this position; None at the first token.
    uncertainty: float | None = None
    # The same as a code. Fields that are not compared are in no table and no JSON.
    uncertainty_code: int | None = field(default=None, compare=False, repr=False)
    # Token and target for display, with whole characters.
    pieces: tuple[Piece, Piece] = field(default=(Piece(""), Piece("")), compare=False, repr=False)
    read_chains: Callable[[], tuple[PrototypeChain, ...]] | None = field(
        default=None, compare=False, repr=False
    )

    @cached_property
    def chains(self) -> tuple[PrototypeChain, ...] | None:
        """Channels and tokens behind the leading prototypes; None without prototype mixers."""
        return None if self.read_chains is None else self.read_chains()

    def figures(self) -> dict[str, Any]:
        """Return the entry of ``prismlm explain --json``, without chains."""
        value = {item.name: getattr(self, item.name) for item in fields(self) if item.compare}
        return value | {"prototypes": [use._asdict() for use in self.prototypes]}

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of ``prismlm explain --json``; chains only if there are any."""
        chains = self.chains
        chained = {} if chains is None else {"chains": [asdict(chain) for chain in chains]}
        return self.figures() | chained


def steps_of(trace: Trace) -> tuple[Step, ...]:
    """Return the steps of one text."""
    split, ids, lm, path = trace.predictions, trace.ids, trace.lm, trace.path
    parts, scores, uses = split.parts, split.scores, list(_uses(split, lm.lens))
    # Whole columns at once: reading single elements of tensors takes longer than the mathematics.
    columns = (
        *(parts.logit, scores.logits, scores.log_probabilities.exp(), parts.bias),
        *(parts.residual, parts.residual_evidence, parts.bias_evidence, parts.explained_share),
    )
    figures = zip(*(column.tolist() for column in columns), uses, strict=True)
    decode = cache(lambda token: decode_token(lm.tokenizer, token))
    targets = split.targets.tolist()
    pieces = trace.pieces
    labels = [piece.label for piece in pieces]
    codes = None if split.codes is None else split.codes[0]
    fed = fed_back(lm.model, codes) or [None] * len(uses)

    def target_from(position: int) -> TargetFrom:
        if position + 1 >= len(ids):
            return "argmax"
        return "text" if position + 1 < trace.prompt_length else "generated"

    return tuple(
        Step(
            t,
            decode(ids[t]),
            ids[t],
            decode(targets[t]),
            targets[t],
            target_from(t),
            *row,
            uncertainty=code and code[0],
            uncertainty_code=code and code[1],
            pieces=(pieces[t], pieces[t + 1]),
            read_chains=path and partial(chains, path, t, uses[t][:PROTOTYPES_CHAINED], labels),
        )
        for t, (row, code) in enumerate(zip(figures, fed, strict=True))
    )


def _uses(split: Predictions, lens: Lens | None) -> Iterator[tuple[PrototypeUse, ...]]:
    """Yield the prototypes in use at each position, by contribution, largest first."""
    routing, parts = split.routing, split.parts
    # Prototypes not in use come last.
    keys = parts.contributions.masked_fill(routing.activations <= 0, -torch.inf)
    order = keys.argsort(dim=1, descending=True, stable=True)
    figures = (routing.activations, routing.cosines, parts.contributions, parts.evidence)
    columns = (column.gather(1, order).tolist() for column in (routing.indices, *figures))
    counts = (routing.activations > 0).sum(1).tolist()
    labels = (None, None) if lens is None else (lens.names, lens.categories)
    for count, (indices, *rows) in zip(counts, zip(*columns, strict=True), strict=True):
        used = indices[:count]
        names, categories = ([column and column[i] for i in used] for column in labels)
        # map() stops at the shortest column: figures of prototypes not in use are cut off.
        yield tuple(map(PrototypeUse, used, *rows, names, categories))


class Citation(NamedTuple):
    """A document that carries nearly all of the information of a sentence of an answer."""

    start: int  # in characters of ``trace.answer``
    end: int
    share: float  # of the sentence's information
    document: dict[str, Any]  # doc_id, source, domain, license, title and url


@dataclass(frozen=True, repr=False, eq=False)
class Trace:
    """Every prediction along a text, split into prototypes, with the training text behind them.

    ``trace[t]`` is the step after token t, ``trace[2:5]`` a trace of those steps. Shares need a
    lens; without one, :meth:`sources` says how to build it.

    Shares, passages, support and verbatim spans cover the answer: the generated tokens, since the
    model did not write the prompt, or all of a text that was only read. A slice covers all of its
    steps, so ``trace[:]`` covers the prompt too.
    """

    lm: OpenedModel  # the model, with its lens
    predictions: Predictions  # of the full text, split
    ids: list[int]  # the tokens of the full text, including generated ones
    prompt_length: int  # the number of prompt tokens
    rows: range  # which predictions the steps of this trace are
    first: int = 0  # the first step of the answer
    # The parts of the text's hidden states, for models with prototype mixers.
    path: DirectPath | None = None
    settings: str = ""  # a note on generation settings that were not applied
    question: str = ""  # the text, or a chat's last message of the user
    asked: str = ""  # all that the user of a chat says
    parent: Trace | None = None  # the trace of the full text, if this is a slice
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

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """One per prediction, computed on first use: shares need none."""
        if self.parent is not None:
            return tuple(self.parent.steps[row] for row in self.rows)
        return steps_of(self)

    def __repr__(self) -> str:
        lens = "no lens" if self.lens is None else f"lens {self.lens.name}"
        return f"<Trace of {len(self)} predictions of {self.model}, {lens}>"

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    @property
    def written(self) -> int:
        """How many of the answer's tokens were generated: all, or 0 of a text that was read."""
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
            return replace(self, rows=self.rows[key], first=0, parent=self.parent or self)
        return self.steps[key]

    def carriers(self, method: Method = "evidence") -> Carriers:
        """Return the positions that carry each prediction of the answer, in its text."""
        full = self.parent or self
        if method not in full._carriers:
            full._carriers[method] = carriers_of(self.predictions, self._lens(), method)
        return full._carriers[method].select(self.rows[self.first :])

    def attribution(self, method: Method = "evidence") -> Attribution:
        """Return what the answer relies on, computed once for each method."""
        if method not in self._attributions:
            attribution = attribute(self.carriers(method), self._lens(), method)
            self._attributions[method] = attribution
        return self._attributions[method]

    def sources(
        self, by: str = "source", *, method: Method = "evidence", where: Where | None = None
    ) -> Sources:
        """Return the share of each source, domain, license or document in the answer.

        Args:
            by: the column.
            method: ``evidence``, or ``source`` for PRISM's A_t = Σ α μ_S; see docs/attribution.md.
            where: only matching text, such as ``{"license": "CC0"}``; other text is ``elsewhere``.

        Raises:
            InputError: there is no lens, or a column or value does not exist.
        """
        return self.attribution(method).sources(by, where)

    def documents(
        self, limit: int = SHOWN, *, method: Method = "evidence", where: Where | None = None
    ) -> Rows[Passage]:
        """Return the documents with the largest shares in the answer; see :meth:`sources`."""
        limit = check_whole("the number of documents", limit)
        return Rows(self.attribution(method).documents(limit, where))

    def passages(self, limit: int = SHOWN, *, where: Where | None = None) -> Rows[Passage]:
        """Return the passages of the corpus with the largest shares in the answer."""
        limit = check_whole("the number of passages", limit)
        return Rows(self.attribution().passages(limit, where))

    def against(self, limit: int = AGAINST_SHOWN, *, where: Where | None = None) -> Rows[Passage]:
        """Return the passages that oppose the answer most: another token came next there.

        Of the positions near a state where y did not come next, each weighs

            p_n(y) exp((cos(z, z_n) − 1) / T)

        with p_n(y) the model's probability of y there. Shares are of the weight of all candidates,
        and never netted with those of :meth:`passages`. The marked token is what came next,
        ``predicted`` is y.
        """
        limit, lens = check_whole("the number of passages", limit), self._lens()
        predictions = self.predictions[list(self.rows[self.first :])]
        return Rows(opposing_passages(predictions, self.lm, lens, limit, where))

    @cached_property
    def support(self) -> Support | None:
        """How well the corpus supports the answer; None without a lens, or a scale in it."""
        return None if self.lens is None else self.attribution().support(self._about)

    @cached_property
    def subject(self) -> Subject | None:
        """What the user of a chat asks about; None if nothing tells."""
        return (Subject(self.asked, self._lens()) or None) if self.asked else None

    @property
    def _about(self) -> Callable[[int], float] | None:
        return self.subject.in_text if self.subject else None

    @property
    def summary(self) -> str | None:
        """What the answer relies on, in words; None without a lens."""
        if self.lens is None or not len(self):
            return None
        text = "the text" if len(self) > 1 else "the prediction"
        subject = "the answer" if self.first or self.written else text
        shares, leading = self.sources(self.lens.default_group_by), self.documents(1)
        return summarise(subject, shares, leading[0] if leading else None, self.support)

    @property
    def answer_ids(self) -> list[int]:
        """The tokens of the answer, special ones included; all of a text that was read."""
        return self._ids[self.first + bool(self.first or self.written) :]

    @property
    def _ids(self) -> list[int]:
        """The tokens that were read, and the last one if it was generated."""
        ids = [self.ids[row] for row in self.rows]
        last = self.rows[-1] + 1 if self.rows else 0
        return ids + self.ids[last : last + 1] if last >= self.prompt_length else ids

    @property
    def answer(self) -> str:
        """The answer without special tokens; all of a text that was read."""
        return self.lm.words(self.answer_ids)

    def citations(self) -> list[Citation]:
        """Return the documents to cite in an answer, sentence by sentence, the best first in each.

        A document is cited if it strongly supports the sentence by itself and, in a chat, names
        something of the question. Sentences of common words alone cite nothing, nor do answers of
        unknown support.
        """
        if self.support is None:
            return []
        ids, words, cited = self.answer_ids, self.lm.words, list[Citation]()
        about = self._about
        # No prediction has the first token of a text that was only read as its target.
        shift = self.first - (0 if self.first or self.written else 1)
        for start, end in sentences(self.answer):
            # The tokens up to a character are the fewest that spell it.
            begin, stop = (
                bisect_left(range(len(ids)), place, key=lambda count: len(words(ids[:count])))
                for place in (start + 1, end)
            )
            begin, stop = max(self.first, begin - 1 + shift), stop + shift
            coverage = self[begin:stop].attribution().coverage if stop > begin else None
            if coverage is None:
                continue
            documents, shares, information = coverage.by_document()
            for i in np.argsort(-shares, kind="stable"):
                strong = information >= MIN_INFORMATION and shares[i] >= STRONG
                if strong and (about is None or about(int(documents[i]))):
                    facts = self._lens().cells.facts(int(documents[i]))
                    cited.append(Citation(start, end, float(shares[i]), facts))
        return cited

    @cached_property
    def pieces(self) -> list[Piece]:
        """All tokens of the full text, and the target after them, for display."""
        # At most one target follows the text.
        after = self.predictions.targets[len(self.ids) - 1 :].tolist()
        return pieces_of(self.lm.tokenizer, self.ids + after)

    @property
    def softcap(self) -> float | None:
        """The cap c of a model whose own logits are c tanh(l / c), as Gemma's: steps have l."""
        return self.lm.logit_map.softcap

    @property
    def warnings(self) -> list[str]:
        """Signs that the model or its head do not work."""
        return self.predictions[list(self.rows)].warnings()

    @property
    def notes(self) -> list[str]:
        """What to know before reading the figures: :attr:`warnings`, and settings not applied."""
        return [*self.warnings, *([self.settings] if self.settings else [])]

    def verbatim(self, limit: int = SHOWN) -> Rows[Quote]:
        """Return the longest spans of the answer that occur in the corpus word for word.

        A span says where its words occur, not that the model took them from there.
        """
        lens, limit = self._lens(), check_whole("the number of spans", limit)
        if lens.suffixes is None:
            why = f"the lens {lens.name} cannot find text word for word: {lens.unsearchable}."
            raise InputError(why)
        ids, first = self._ids, self.rows.start
        pieces = (self.parent or self).pieces[first : first + len(ids)]
        prefix = around_text(self.lm.tokenizer)[0]
        # The token read before the first generated one is not part of the answer.
        first = self.first + 1 if self.written else len(prefix) * (ids[: len(prefix)] == prefix)
        return Rows(quotes(ids, [piece.shown for piece in pieces], first, lens, limit))

    def to_dict(
        self,
        by: str = "source",
        documents: int = SHOWN,
        *,
        method: Method = "evidence",
        where: Where | None = None,
        against: int = 0,
    ) -> dict[str, Any]:
        """Return the document that ``prismlm explain --json`` prints."""
        value: dict[str, Any] = {
            "model": self.model,
            "lens": self.lens and self.lens.address,
            "positions": [step.to_dict() for step in self.steps],
        }
        value |= {"notes": self.notes} if self.notes else {}
        value |= {} if self.softcap is None else {"softcap": self.softcap}
        value |= {} if self.support is None else {"support": self.support._asdict()}
        value |= self.texts_behind(by, documents, method=method, where=where)
        if against:
            value["against"] = [one.to_dict() for one in self.against(against, where=where)]
        return value

    def texts_behind(
        self, by: str, limit: int, *, method: Method = "evidence", where: Where | None = None
    ) -> dict[str, Any]:
        """Return the part of :meth:`to_dict` that a lens is needed for."""
        if self.lens is None:
            return {"sources": None, "documents": []}
        documents = self.documents(limit, method=method, where=where)
        value: dict[str, Any] = {
            "sources": self.sources(by, method=method, where=where).to_dict(),
            "documents": [document.to_dict() for document in documents],
        }
        if method == "evidence":
            passages = self.passages(limit, where=where)
            value["passages"] = [passage.to_dict() for passage in passages]
            value |= {} if where else {"summary": self.summary}
        if self.lens.suffixes is not None:
            value["verbatim"] = [quote.to_dict() for quote in self.verbatim(limit)]
        return value

    def to_parquet(self, path: Path | str) -> None:
        """Write one row per step and prototype in use, the steps' figures repeated."""
        write_parquet([self], path)

    def to_pandas(self) -> pandas.DataFrame:
        """Return what :meth:`to_parquet` writes as a data frame."""
        return frame(table_rows([self]))

    def to_json(self, path: Path | str) -> None:
        """Write :meth:`to_dict` as ``prismlm explain --json`` prints it."""
        write_text(path, json_text(self.to_dict(), indent=2) + "\n")

    def to_html(self, path: Path | str | None = None, *, against: int = 0) -> str:
        """Return a page, with passages ``against`` it, and write it to ``path``, if any."""
        # The one import against the order of packages.
        from prismlm.pages.trace import page

        text = page([self], against=against)
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
    write_rows(table_rows(traces, 0 if len(traces) > 1 else None), path)


def table_rows(traces: Iterable[Trace], first: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield one row per step and prototype in use, the step's own figures repeated.

    If ``first`` is given, a column ``text`` numbers the traces from there.
    """
    for number, trace in enumerate(traces, first or 0):
        text = {} if first is None else {"text": number}
        for step in trace:
            figures = step.figures()
            for use in figures.pop("prototypes"):
                yield text | figures | {f"prototype_{name}": x for name, x in use.items()}


def summarise(
    subject: str, shares: Sources, document: Passage | None, support: Support | None
) -> str:
    """Return what some predictions draw on, in at most two sentences with one figure each.

    The domain named has the largest p log(p / q), with its part p of what is attributed and its
    share q of the corpus: a large part of a large domain has little information. Figures are shares
    of all evidence, as in tables. ``subject`` is such as "the answer", ``shares`` are by domain, or
    by source if all documents have one domain, and ``document`` has the largest share.
    """
    if support is not None and support.level == "none":
        return support.sentence
    attributed = 1 - shares.unattributed
    if not shares.items or attributed < MIN_ATTRIBUTED:
        return f"Almost none of the evidence for {subject} could be traced to this corpus."

    def information(share: Share) -> float:
        p = share.share / attributed
        return p * math.log(p / share.base_rate) if share.base_rate else p

    leading = max(shares.items, key=information)
    if leading.base_rate is not None and leading.base_rate > 1 - 1e-9:
        text = f"{percent(attributed)} of the evidence for {subject} was traced to this corpus."
    elif leading.lift and leading.lift < MIN_LIFT:
        text = f"{subject} draws on no {shares.by} much more than the corpus holds of it."
    else:
        known = f"the {shares.by} “{leading.key}”"
        name = known if leading.key != UNKNOWN else f"text of unknown {shares.by}"
        mostly = leading is shares.items[0] and leading.share > HALF * attributed
        # Where it does not hold of all evidence, the sentence is about what is attributed.
        less = leading.share <= (HALF if mostly else leading.base_rate or 0.0)
        text = f"of what could be traced, {subject}" if less else subject
        text += f" draws {'mostly' if mostly else 'more than usual'} on {name}: "
        text += f"{percent(leading.share)} of its evidence."
    if document is not None:
        title = " ".join((document.title or document.doc_id).split())
        share = percent(document.share)
        text += f" The document that contributes most is “{title}”, with {share}."
    return text[0].upper() + text[1:]


def percent(share: float) -> str:
    """Return a share in whole per cent, for a sentence."""
    return f"{share:.0%}" if share >= MIN_PERCENT else "less than 1%"
