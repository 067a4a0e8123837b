"""Calls of the public API with arguments of every kind, and what is wrong with how they end."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

import prismlm
from benchmarks.robustness.world import Finding, World, judged
from prismlm.corpus import Columns, Corpus, DocumentReader, HubDataset, build_corpus, read_documents


class Pool(NamedTuple):
    """Values of a parameter: the right ones must be taken, the wrong ones refused."""

    right: tuple[Any, ...]
    wrong: tuple[Any, ...]


class Other:
    """An object of a type that no parameter takes."""

    def __repr__(self) -> str:
        return "Other()"


OTHER = Other()
ODD = (OTHER, {}, {"a": 1}, [], [None], (1, 2), b"x", b"\xff", 1j, print)
NO_NUMBER = (*ODD, "1", "x", True, False, math.nan, math.inf, -math.inf)
NO_WHOLE = (*NO_NUMBER, 1.5, 1.0, np.float64(1.0), np.array([1, 2]), torch.ones(2))
NO_TEXT = (*ODD, None, True, 1, 1.5, ["a", "b"], "", "\udcff", Path("notes.txt"))
NO_PATH = (*ODD, None, True, 1, 1.5, "a\x00b")
NO_NAME = (*ODD, True, 1, 1.5, "", "x", "\udcff")


def whole(*right: int, wrong: tuple[Any, ...] = (-1,)) -> Pool:
    """Return a pool of whole numbers."""
    return Pool((*right, np.int64(right[0])), (*NO_WHOLE, None, *wrong))


def names(*right: Any, wrong: tuple[Any, ...] = ()) -> Pool:
    """Return a pool of some names."""
    none = () if None in right else (None,)
    return Pool(right, (*NO_NAME, *none, *wrong))


TEXT = Pool(("The heart is a muscle", "Iron", " a", "é🙂"), NO_TEXT)
PROTOTYPE = whole(0, 3, 47, wrong=(-1, 48, 10**30))
LIMIT = whole(1, 0, 5)
GROUPS = ("source", "domain", "license")
COLUMNS = names(*GROUPS, "document")
METHODS = names("evidence", "source")
NO_WHERE = (
    {"x": "y"}, {"domain": "no such"}, {"domain": 3}, {3: "x"}, {"domain": [3]}, {"domain": None},
    {"domain": "\udcff"}, ["domain=x"], 1, True, "domain", OTHER,
)  # fmt: skip
WHERE = Pool((None, {}, {"license": ()}), NO_WHERE)
TARGET = Pool(
    ("new.out", Path("new.out"), Path("deep") / "new.out"),
    (*NO_PATH, "none", "texts", "notes.txt/x", ""),
)
DIRECTORY = (*NO_PATH, "missing", "notes.txt", "none", "")
ROOM = Pool((1.0, 0.5, 1, np.float32(0.5)), (*NO_NUMBER, None, -0.1))
SEED = whole(0, 7, 2**40)


class Call(NamedTuple):
    """A public function: its name for users, and ``run``, with one argument for each pool.

    ``check`` says what is wrong with what it returns, or None.
    """

    name: str
    run: Callable[..., Any]
    pools: dict[str, Pool]
    check: Callable[[Any, dict[str, Any]], str | None] | None = None


def _begins(answer: Any, given: dict[str, Any]) -> str | None:
    return None if str(answer).startswith(given["text"]) else "does not begin with the text"


def _sums(trace: Any, given: dict[str, Any]) -> str | None:
    parts = [abs(step.logit - step.model_logit) for step in trace]
    return None if len(trace) and max(parts) < 1e-2 else "parts that are not the logit"


def _shares(items: Any, given: dict[str, Any]) -> str | None:
    total = sum(row.share for row in items)
    return None if -1e-6 <= total <= 1 + 1e-6 else f"shares of {total}"


def calls() -> list[Call]:
    """Return the public functions, to be called in a world's directory."""
    lm = prismlm.load("model")
    assert lm.lens is not None
    corpus = Corpus.open("corpus")
    return [
        *_opening(lm),
        *_editing(lm),
        *_feedback(lm),
        *_explaining(lm.explain("The heart is a muscle")),
        *_of_corpus(corpus),
        *_reading(),
        Call("Lens.rows_of", lm.lens.rows_of, {"prototype": PROTOTYPE}),
        Call("Lens.sentence", lm.lens.sentence, {"position": _place(corpus, 0)}),
    ]


def _explaining(trace: Any) -> list[Call]:
    one, limit = {"method": METHODS, "where": WHERE}, {"limit": LIMIT, "where": WHERE}
    page = Pool((None, *TARGET.right), tuple(v for v in TARGET.wrong if v is not None))
    entries = {"by": COLUMNS, "documents": LIMIT, **one, "against": LIMIT}
    return [
        # What no sequence takes is IndexError and TypeError in every sequence of Python.
        Call("Trace[]", lambda key: trace[key], {"key": Pool((0, -1, slice(1, 3)), ())}),
        Call("Trace.sources", trace.sources, {"by": COLUMNS, **one}),
        Call("Trace.documents", trace.documents, {"limit": LIMIT, **one}, _shares),
        Call("Trace.passages", trace.passages, limit, _shares),
        Call("Trace.against", trace.against, limit),
        Call("Trace.verbatim", trace.verbatim, {"limit": LIMIT}),
        Call("Trace.to_dict", trace.to_dict, entries),
        Call("Trace.to_html", trace.to_html, {"path": page, "against": LIMIT}),
        Call("Trace.to_json", trace.to_json, {"path": TARGET}),
        Call("Trace.to_parquet", trace.to_parquet, {"path": TARGET}),
    ]


def _place(corpus: Corpus, first: int) -> Pool:
    return whole(first, 1, wrong=(-1, corpus.num_tokens + 1, 10**30))


def _of_corpus(corpus: Corpus) -> list[Call]:
    span = {"start": _place(corpus, 0), "length": _place(corpus, 3)}
    count = len(corpus)
    index = {"index": whole(0, count - 1, wrong=(-1, count, 10**30))}
    ids = Pool((corpus.doc_ids[0],), (*NO_NAME, None, "no such"))
    return [
        Call("Corpus.open", Corpus.open, {"path": Pool(("corpus", Path("corpus")), DIRECTORY)}),
        Call("Corpus.column", corpus.column, {"name": names("doc_id", "source", "domain")}),
        Call("Corpus.find", corpus.find, {"doc_id": ids}),
        Call("Corpus.split", corpus.split, {"name": names("train", "heldout", "all")}),
        Call("Corpus.document_at", corpus.document_at, {"position": span["start"]}),
        Call("Corpus.tokens", corpus.tokens, span),
        Call("Corpus.read_tokens", corpus.read_tokens, span),
        Call("Corpus.excerpt", corpus.excerpt, span),
        Call("Corpus.text", corpus.text, index),
        Call("Corpus.spans", corpus.spans, index),
    ]


def _reading() -> list[Call]:
    def read(**given: Any) -> Any:
        return list(read_documents("rows.csv", Columns(**given)))

    def build(**given: Any) -> Any:
        return build_corpus("rows.jsonl", **given)

    paths = Pool(
        ("notes.txt", Path("rows.jsonl"), ["rows.csv", "notes.md"]),
        (*NO_PATH, "missing", "empty.txt", "latin.txt", "dangling", [None], [1], ""),
    )
    built = {
        "out": Pool(("new",), (*NO_PATH, "corpus", "notes.txt", "notes.txt/x", "none", "")),
        "tokenizer": Pool(("model", Path("model")), (*ODD, True, 1, "missing", "none")),
        "heldout_fraction": Pool((0, 0.5, 0.0), (*NO_NUMBER, None, -0.1, 1, 2)),
        "shard_tokens": whole(1, 1000, wrong=(0, -1)),
        "columns": Pool((None, Columns()), (*ODD[:6], "text", 1)),
        # With it a corpus that is there would be a right place.
        "overwrite": Pool((False,), (OTHER, "no", 1.5, None)),
    }
    column = Pool((None,), (*ODD, 1, True))
    return [
        Call("Columns", read, {"id": column, "domain": column}),
        Call("DocumentReader", lambda paths: list(DocumentReader(paths)), {"paths": paths}),
        Call("HubDataset", HubDataset.parse, {"text": Pool(("x:y",), (*ODD, None, 1))}),
        Call("build_corpus", build, built),
    ]


def _opening(lm: Any) -> list[Call]:
    count = whole(0, 2, wrong=(-1, 10**30, 100_000))
    drawn = {"temperature": ROOM, "seed": SEED}
    paths = {
        "path": Pool(("model", Path("model"), "bare"), (*DIRECTORY, "corpus")),
        "lens": Pool((None,), (*ODD, True, 1, "missing", "")),
        "device": Pool(("cpu",), (*ODD, None, True, 1, "x", "", "cuda:99")),
    }
    odd = ([1], [(0,)], [(9, 9)], [(0, -1)], [("a", 0)], [(0.5, 0)])
    heads = Pool(((), [(0, 0)]), (1, None, "x", True, OTHER, *odd))
    # Attention goes from one token to another.
    read = Pool(tuple(text for text in TEXT.right if text != " a"), NO_TEXT)
    explained = {"text": read, "generate": count, **drawn, "attention": heads}
    return [
        Call("load", prismlm.load, paths),
        Call("explain", lm.explain, explained, _sums),
        Call("generate", lm.generate, {"text": TEXT, "tokens": count, **drawn}, _begins),
        Call("encode", lm.encode, {"text": TEXT, "room": count}),
    ]


def _editing(lm: Any) -> list[Call]:
    def edit(edits: Any, only: Any = None) -> Any:
        with lm.edit(*edits, only=only):
            return lm.generate("Iron", tokens=1)

    def edited(kind: Any, **fixed: Any) -> Callable[..., Any]:
        return lambda **given: edit((kind(**given, **fixed),))

    share = Pool((0.5, 1, np.float64(0.2)), (*NO_NUMBER, None, 0, -0.5, 1.5))
    clamped = {"prototype": PROTOTYPE, "fraction": share}
    none = (*ODD[:5], b"x", 3, True, "12", [True], [1.5], [48], [-1], ["a"])
    group = {
        "strength": Pool((0, -1, 0.5), (*NO_NUMBER, None, 2)),
        "prototypes": Pool(([1, 2], {3}, frozenset([1])), none),
    }
    named = {
        "strength": Pool((0.5,), (None, "x")),
        "document": Pool((lm.lens.index["doc_id"][0].as_py(),), (*NO_NAME, 0)),
    }
    edits = {
        "edits": Pool(((), (prismlm.Ablate(1),)), ((None,), (1,), ("x",), (prismlm.Ablate,))),
        "only": Pool((None, "prototypes"), (*NO_NAME, 0)),
    }
    factor = Pool((0, 1.5, 2), (*NO_NUMBER, None, -1))
    return [
        Call("Ablate", edited(prismlm.Ablate), {"prototype": PROTOTYPE}),
        Call("Scale", edited(prismlm.Scale), {"prototype": PROTOTYPE, "factor": factor}),
        Call("Clamp", edited(prismlm.Clamp), clamped),
        Call("Group", edited(prismlm.Group), group),
        Call("Group of a document", edited(prismlm.Group), named),
        Call("edit", edit, edits),
    ]


def _feedback(lm: Any) -> list[Call]:
    def attach(**given: Any) -> None:
        prismlm.attach_uncertainty(**{"model": lm.model, **given}).detach()

    def keep(directory: Any) -> None:
        feedback = prismlm.attach_uncertainty(lm.model, 16)
        try:
            prismlm.save_uncertainty(directory, feedback)
        finally:
            feedback.detach()

    def take(**given: Any) -> None:
        keep("none")
        prismlm.load_uncertainty(model=lm.model, **given).detach()

    module = Pool((None,), (*ODD, 1, True, "x", ""))
    attached = {
        "model": Pool((lm.model,), (*ODD, None, "model", lm)),
        "levels": whole(16, 2, wrong=(1, 0, -1)),
        "rows": Pool((None, 2, 10**9), (*NO_WHOLE, 1, 0)),
        "deviation": Pool((None, 0, 0.5), (*NO_NUMBER, -1)),
        "passes": whole(1, 2, wrong=(0, -1)),
        "decoder": module,
        "embeddings": module,
    }
    taken = {
        "directory": Pool(("none", Path("none")), (*NO_PATH, "missing", "bare")),
        "levels": Pool((None, 16), (*NO_WHOLE, 15, -1)),
    }
    kept = Pool(("none", Path("none")), (*NO_PATH, "notes.txt"))
    return [
        Call("attach_uncertainty", attach, attached),
        Call("save_uncertainty", keep, {"directory": kept}),
        Call("load_uncertainty", take, taken),
    ]


class ApiCall(NamedTuple):
    """A call of a function; the arguments in ``wrong`` must be refused."""

    function: Call
    arguments: dict[str, Any]
    wrong: str | None

    def __str__(self) -> str:
        words = ", ".join(f"{name}={value!r}"[:60] for name, value in self.arguments.items())
        return f"{self.function.name}({words})"


@st.composite
def api_calls(draw: Any, known: list[Call]) -> ApiCall:
    """Draw a function and its arguments: one of them is wrong in most calls."""
    function = draw(st.sampled_from(known))
    names = [name for name, pool in function.pools.items() if pool.wrong]
    wrong = draw(st.sampled_from((None, *names)))
    arguments = {
        name: draw(st.sampled_from(pool.wrong if name == wrong else pool.right))
        for name, pool in function.pools.items()
    }
    return ApiCall(function, arguments, wrong)


def run(world: World, call: ApiCall) -> str | Finding:
    """Make a call; return "right", "error" or the finding."""
    function, arguments, wrong = call

    def work() -> str | None:
        answer = function.run(**arguments)
        if wrong:
            return f"{function.name} takes {wrong}={arguments[wrong]!r}"
        return None if function.check is None else function.check(answer, arguments)

    outcome = judged(str(call), work)
    if outcome == "error" and not wrong:
        outcome = Finding(f"{function.name} refuses right arguments", str(call))
    elif isinstance(outcome, Finding) and wrong:
        outcome = Finding(f"{function.name}({wrong}): {outcome.kind}", outcome.example)
    outputs = [str(value) for name, value in arguments.items() if name in ("path", "out")]
    changed = world.changes(outputs or (["none"] if "uncertainty" in function.name else []))
    if changed:
        return Finding("changes a file that was not named", f"{call}: {', '.join(changed[:3])}")
    return outcome
