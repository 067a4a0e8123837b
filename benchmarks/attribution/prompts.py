"""Are passages of the question's subject? The demo's questions, judged by a reader: prompts.json.

    python -m benchmarks.attribution.prompts collect MODEL
    python -m benchmarks.attribution.prompts sheet MODEL --sheet sheet.txt
    python -m benchmarks.attribution.prompts judge --sheet sheet.txt

MODEL is the demo's. ``collect`` takes the five passages behind each answer, and for each a place of
the corpus drawn by chance where the same token comes next; what was judged before stays judged.
``sheet`` writes those not yet judged, both kinds mixed, without saying which is which; a reader
writes y or n at the start of each line, and ``judge`` takes that in.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

import prismlm
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.corpus.chat import asked
from prismlm.demo.prompts import ANSWERED, QUESTIONS, TEMPERATURE
from prismlm.explain.shares import DocumentShare
from prismlm.files import read_json, write_json
from prismlm.index.cells import Cells
from prismlm.index.lens import Lens

PASSAGES = 5
# Licences, by how they begin, whose text may be quoted.
QUOTABLE = ("CC0", "CC-BY", "public-domain", "text public-domain")
Key = tuple[str, str, int]


def main() -> None:
    """Collect, write a sheet, or take its judgements."""
    parser = script_options(__doc__, RESULTS / "prompts.json")
    parser.add_argument("part", choices=["collect", "sheet", "judge"])
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--sheet", type=Path, default=Path("sheet.txt"))
    given = parser.parse_args()
    before = read_json(given.out) if given.out.is_file() else {"prompts": []}
    if given.part == "collect":
        write_json(given.out, collect(_opened(given, parser), _judgements(before)))
        print(f"wrote {given.out}")
    elif given.part == "sheet":
        given.sheet.write_text(sheet(before, _opened(given, parser)), encoding="utf-8")
        print(f"wrote {given.sheet}")
    else:
        write_json(given.out, judged(before, given.sheet.read_text(encoding="utf-8")))
        print(f"wrote {given.out}")


def _opened(given: argparse.Namespace, parser: argparse.ArgumentParser) -> prismlm.PrismLM:
    if given.model is None:
        parser.error(f"{given.part} needs MODEL")
    return prismlm.load(given.model)


def collect(lm: prismlm.PrismLM, judgements: dict[Key, bool]) -> dict[str, Any]:
    """Return every prompt with its passages, and as many places drawn by chance."""
    lens = lm.lens
    assert lens is not None
    assert lens.cells is not None, "the lens has no cells"
    found: list[dict[str, Any]] = []
    for seed, (domain, prompt) in enumerate(QUESTIONS.items()):
        trace = lm.explain(asked(prompt), generate=ANSWERED, temperature=TEMPERATURE, seed=seed)
        passages = trace.passages(PASSAGES)
        generator = np.random.default_rng(seed)
        by_chance = [_drawn(lens, lens.cells, p.position, generator) for p in passages]
        found.append(
            {
                "domain": domain,
                "prompt": prompt,
                "answer": "".join(step.target for step in trace.steps[trace.first :]),
                "support": None if trace.support is None else trace.support.level,
                "passages": [_entry(prompt, one, judgements) for one in passages],
                "by_chance": [_entry(prompt, one, judgements) for one in by_chance],
            }
        )
    return {
        "environment": environment(),
        "model": {"parameters": sum(p.numel() for p in lm.model.parameters())},
        "prompts": found,
    }


def _drawn(
    lens: Lens, cells: Cells, position: int, generator: np.random.Generator
) -> DocumentShare:
    """Return a place drawn by chance where the same token comes next as at a position."""
    assert lens.corpus is not None, "the corpus is not at hand"
    token = int(lens.corpus.read_tokens(position, 1)[0])
    keys, starts = map(np.asarray, cells.keys_and_starts)
    of_token = np.flatnonzero(keys % cells.meta.vocabulary == token)
    sizes = np.diff(np.append(starts, len(cells)))[of_token]
    number = int(generator.integers(sizes.sum()))
    chosen = int(np.searchsorted(np.cumsum(sizes), number, side="right"))
    row = int(starts[of_token[chosen]]) + number - int(sizes[:chosen].sum())
    place = int(cells.positions(row, 1)[0]) + 1
    facts = cells.facts(int(cells.document_of(np.array([place]))[0]))
    return DocumentShare(share=0.0, position=place, read=lambda: lens.sentence(place), **facts)


def _entry(prompt: str, one: DocumentShare, judgements: dict[Key, bool]) -> dict[str, Any]:
    free = (one.license or "").startswith(QUOTABLE)
    return {
        "doc_id": one.doc_id,
        "position": one.position,
        "source": one.source,
        "domain": one.domain,
        "license": one.license,
        "sentence": None if one.around is None or not free else _shown(one.around),
        "share": one.share,
        "of_subject": judgements.get((prompt, one.doc_id, one.position)),
    }


def _shown(around: tuple[str, str, str]) -> str:
    before, token, after = around
    return " ".join(f"{before}[{token}]{after}".split())


def _entries(result: dict[str, Any]) -> dict[Key, list[dict[str, Any]]]:
    """Return all entries by prompt, document and position."""
    found: dict[Key, list[dict[str, Any]]] = {}
    for row in result["prompts"]:
        for one in (*row["passages"], *row["by_chance"]):
            key = (row["prompt"], one["doc_id"], one["position"])
            found.setdefault(key, []).append(one)
    return found


def _judgements(result: dict[str, Any]) -> dict[Key, bool]:
    return {
        key: entries[0]["of_subject"]
        for key, entries in _entries(result).items()
        if entries[0]["of_subject"] is not None
    }


def number_of(key: Key) -> str:
    """Return what a sheet calls an entry: it orders the sheet and tells nothing of the kind."""
    return hashlib.sha256("\0".join(map(str, key)).encode()).hexdigest()[:8]


def sheet(result: dict[str, Any], lm: prismlm.PrismLM) -> str:
    """Return the entries that are not judged, those of a prompt in an order of no meaning."""
    assert lm.lens is not None
    lines: list[str] = []
    for row in result["prompts"]:
        lines += ["", f"# {row['prompt']} … {' '.join(row['answer'].split())}"]
        keys = set(_entries({"prompts": [row]})) - _judgements(result).keys()
        for key in sorted(keys, key=number_of):
            around = lm.lens.sentence(key[2])
            assert around is not None, "the corpus is not at hand"
            lines.append(f"? {number_of(key)} {_shown(around)}")
    return "\n".join(lines) + "\n"


def judged(result: dict[str, Any], text: str) -> dict[str, Any]:
    """Return the result with what a reader wrote on a sheet."""
    entries = {number_of(key): found for key, found in _entries(result).items()}
    for line in text.splitlines():
        verdict, _, rest = line.partition(" ")
        if verdict in ("y", "n"):
            for one in entries[rest.split()[0]]:
                one["of_subject"] = verdict == "y"
    return result


if __name__ == "__main__":
    main()
