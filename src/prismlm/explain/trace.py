"""The reading of a text, one step per prediction, and the shares of the training text behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, overload

import pyarrow as pa
import pyarrow.parquet as pq

from prismlm.errors import InputError
from prismlm.explain.attribution import EvidenceTable, document_shares, source_shares
from prismlm.explain.shares import DocumentShare, Method, Sources
from prismlm.files import atomic_file
from prismlm.index.lens import Lens
from prismlm.index.where import Where

if TYPE_CHECKING:
    from prismlm.explain.attention_maps import AttentionMap
    from prismlm.explain.chain import PrototypeChain

T = TypeVar("T")
TargetFrom = Literal["text", "generated", "argmax"]
DOCUMENTS_SHOWN = 10


class PrototypeUse(NamedTuple):
    """One prototype's part in one prediction.

    Attributes:
        id: its number.
        activation: α > 0.
        cosine: to the hidden state.
        contribution: scale · α (W p)[target], in logits.
        evidence: contribution minus its mean over the vocabulary.
        name: from the lens, or None without one.
        category: likewise.
    """

    id: int
    activation: float
    cosine: float
    contribution: float
    evidence: float
    name: str | None = None
    category: str | None = None


@dataclass(frozen=True)
class Step:
    """The prediction made after reading one token.

    Attributes:
        position: of the token read, from 0.
        token, token_id: the token read.
        target, target_id: the token whose logit is split.
        target_from: the next token of the text, a generated token, or the model's top token.
        logit: the sum of contributions, residual and bias.
        model_logit: the model's own, before any soft-cap; the two agree to 1e-3·max(1, |logit|).
        probability: the model's, of the target.
        bias, residual: their parts of the logit.
        residual_evidence: the residual's part minus its mean over the vocabulary.
        explained_share: Σ e_i / (Σ e_i + e_residual + e_bias) for the target.
        prototypes: those in use, by contribution, largest first.
        uncertainty: what was fed back to this position, the entropy of the prediction before it as
            a share of the largest possible, for models with uncertainty feedback; None at the
            first token.
        uncertainty_code: the code that was fed back, from 0 to one less than the model's levels.
        chains: for models of prototype mixers, which channels and earlier tokens the leading
            prototypes' activations came through; computed when they are looked at.
    """

    position: int
    token: str
    token_id: int
    target: str
    target_id: int
    target_from: TargetFrom
    logit: float
    model_logit: float
    probability: float
    bias: float
    residual: float
    residual_evidence: float
    explained_share: float
    prototypes: tuple[PrototypeUse, ...]
    uncertainty: float | None = None
    # The same in the model's own unit, which the levels give: in no table and no JSON.
    uncertainty_code: int | None = field(default=None, compare=False, repr=False)
    # A function of the rest, and not free: neither == nor repr() computes it.
    chains: Sequence[PrototypeChain] | None = field(default=None, compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of ``prismlm explain --json``; chains only where there are any."""
        value = self._figures() | {"prototypes": [use._asdict() for use in self.prototypes]}
        if self.chains is not None:
            value["chains"] = [chain.to_dict() for chain in self.chains]
        return value

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row of a table for each prototype in use, the step's own figures repeated."""
        own = {name: value for name, value in self._figures().items() if name != "prototypes"}
        for use in self.prototypes:
            yield own | {f"prototype_{k}": v for k, v in use._asdict().items()}

    def _figures(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(self) if item.compare}


class Deferred(Sequence[T], Generic[T]):
    """A sequence of known length that is built when it is first looked at."""

    def __init__(self, length: int, build: Callable[[], tuple[T, ...]]) -> None:
        self._length = length
        self._build = build

    @cached_property
    def _built(self) -> tuple[T, ...]:
        return self._build()

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...

    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        return self._built[index]

    def __eq__(self, other: object) -> bool:
        return self._built == (other._built if isinstance(other, Deferred) else other)

    def __hash__(self) -> int:
        return hash(self._built)

    def __repr__(self) -> str:
        return repr(self._built)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self._built,)


class Steps(Deferred[Step]):
    """Steps that are put into objects and words when they are first looked at.

    Shares do not need them, and beside the model's own work they are not free.
    """


@dataclass(frozen=True)
class Trace:
    """Every prediction along a text, split into prototypes, with the training text behind them.

    ``trace[t]`` is the step after token t, ``trace[2:5]`` a trace of those steps. Shares need a
    lens; without one, :meth:`sources` says how to build it.

    Attributes:
        model: the model's name or directory.
        steps: one per prediction.
        table: the evidence behind the steps.
        lens: the lens the shares are taken from, if there is one.
        rounding: the largest |sum of parts − model's logit| / max(1, |logit|) of the whole text;
            float32 models stay under 1e-3, half-precision ones under 2e-2.
        attention: what the heads that were asked for look at, a row for each step; or None.
    """

    model: str
    steps: Sequence[Step]
    table: EvidenceTable = field(repr=False)
    lens: Lens | None = field(default=None, repr=False)
    rounding: float = 0.0
    attention: tuple[AttentionMap, ...] | None = field(default=None, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    @overload
    def __getitem__(self, key: int) -> Step: ...

    @overload
    def __getitem__(self, key: slice) -> Trace: ...

    def __getitem__(self, key: int | slice) -> Step | Trace:
        """Return one step, or a trace of some of them."""
        if isinstance(key, slice):
            maps = self.attention
            return Trace(
                self.model,
                self.steps[key],
                self.table[key],
                self.lens,
                self.rounding,
                None if maps is None else tuple(one[key] for one in maps),
            )
        return self.steps[key]

    def sources(
        self, by: str = "source", *, method: Method = "evidence", where: Where | None = None
    ) -> Sources:
        """Return the share of each source, domain, license or document over all steps.

        Args:
            by: the column.
            method: ``evidence``, or ``source`` for PRISM's A_t = Σ α μ_S; see docs/attribution.md.
            where: only text that matches, such as ``{"license": "CC0"}``; the rest is
                ``elsewhere``.

        Raises:
            InputError: there is no lens, or an argument names what is not there.
        """
        return source_shares(self.table, self._lens(), by, method=method, where=where)

    def documents(
        self,
        limit: int = DOCUMENTS_SHOWN,
        *,
        method: Method = "evidence",
        where: Where | None = None,
    ) -> list[DocumentShare]:
        """Return the documents with the largest shares over all steps.

        Raises:
            InputError: there is no lens, or an argument names what is not there.
        """
        return document_shares(self.table, self._lens(), limit, method=method, where=where)

    def to_dict(
        self,
        by: str = "source",
        documents: int = DOCUMENTS_SHOWN,
        *,
        method: Method = "evidence",
        where: Where | None = None,
    ) -> dict[str, Any]:
        """Return the whole reading as ``prismlm explain --json`` prints it.

        ``attention`` is in it only where heads were asked for.
        """
        shares, found = None, []
        if self.lens is not None:
            shares = self.sources(by, method=method, where=where).to_dict()
            listed = self.documents(documents, method=method, where=where)
            found = [document.to_dict() for document in listed]
        value = {
            "model": self.model,
            "lens": None if self.lens is None else str(self.lens.path),
            "positions": [step.to_dict() for step in self.steps],
            "sources": shares,
            "documents": found,
        }
        if self.attention is not None:
            value["attention"] = [one.to_dict() for one in self.attention]
        return value

    def to_parquet(self, path: Path | str) -> None:
        """Write one row per step and prototype in use, steps' own figures repeated."""
        write_parquet([self], path)

    def to_html(self, path: Path | str | None = None) -> str:
        """Return a self-contained page, and write it if a path is given."""
        text = _pages().page([self])
        if path is not None:
            with atomic_file(path) as temporary:
                temporary.write_text(text, encoding="utf-8")
        return text

    def _repr_html_(self) -> str:
        return _pages().fragment(self)

    def _lens(self) -> Lens:
        if self.lens is None:
            raise InputError(
                f"{self.model} has no lens, so there is no training text to point to. "
                "Build one with `prismlm index MODEL --corpus DIR`."
            )
        return self.lens


def _pages() -> Any:
    # The one import against the order of packages: a trace shows itself.
    from prismlm.pages import trace

    return trace


def write_parquet(traces: Sequence[Trace], path: Path | str) -> None:
    """Write one row per step and prototype in use; several traces get a column ``text``, from 0."""
    rows = [
        ({"text": number} if len(traces) > 1 else {}) | row
        for number, trace in enumerate(traces)
        for step in trace
        for row in step.rows()
    ]
    with atomic_file(path) as temporary:
        pq.write_table(pa.Table.from_pylist(rows), temporary)
