"""Time what a person waits for in ``prismlm explore``, with 16,384 prototypes and real text.

    python -m benchmarks.explorer.latency --also MODEL --called NAME
    python -m benchmarks.explorer.render

The model is made on the spot, in a temporary directory, and served by the command itself. Every
MODEL that is given only writes: with attribution, and beside it without.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import numpy as np

import prismlm
from benchmarks.explorer.model import SEED, described, make_model
from benchmarks.explorer.server import Client, Explorer, first_view, percentile, timed
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from benchmarks.shared.turns import ratios
from prismlm.corpus import Corpus
from prismlm.files import write_json

CLIENTS = (1, 8)
REQUESTS, FEWER, FIRST_VIEWS, OPENED = 240, 60, 40, 20
ANSWERS, GENERATED, PROMPT_TOKENS = 8, 40, 24
PAIRS = 8
CHROMIUM = "/usr/bin/chromium"
WITH_PLAIN = "benchmarks.explorer.beside_plain"


def main() -> None:
    """Measure everything and write the result."""
    parser = script_options(__doc__, RESULTS / "explorer.json")
    parser.add_argument(
        "--also",
        type=Path,
        action="append",
        default=[],
        metavar="MODEL",
        help="another that writes",
    )
    parser.add_argument("--called", action="append", default=[], help="that model, on the page")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="of texts written in two ways")
    parser.add_argument("--made", type=Path, help="a model that this script made; else it is made")
    given = parser.parse_args()
    if len(given.also) != len(given.called):
        parser.error("every --also takes a --called")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as work:
        model = given.made or make_model(Path(work))
        corpus = _corpus_of(model)
        result = {"model": described(model), "made_before": given.made is not None}
        result |= measure(model, corpus)
        made = (model, "the one above", corpus)
        named = zip(given.also, given.called, strict=True)
        also = [(path, called, _corpus_of(path)) for path, called in named]
        result["writing"] = [
            {"model": called, **writing(path, prompts_of(text, given.pairs))}
            for path, called, text in (made, *also)
        ]
    result |= {"seconds": time.perf_counter() - began, "environment": environment()}
    write_json(given.out, result)
    print(json.dumps(result, indent=2))


def _corpus_of(model: Path) -> Corpus:
    lens = prismlm.load(model).lens
    if lens is None or lens.corpus is None:
        raise SystemExit(f"{model} has no lens whose corpus is there")
    return lens.corpus


def prompts_of(corpus: Corpus, count: int) -> list[str]:
    """Return the beginnings of documents, drawn by seed."""
    drawn = np.random.default_rng(SEED).permutation(len(corpus))
    long = [int(n) for n in drawn if corpus.lengths[n] > PROMPT_TOKENS]
    return [corpus.excerpt(int(corpus.starts[n]), PROMPT_TOKENS) for n in long[:count]]


def measure(model: Path, corpus: Corpus) -> dict[str, Any]:
    """Return how long each kind of request takes, and the server's memory before and after."""
    rows: list[dict[str, Any]] = []
    with Explorer(model) as explorer:
        found: dict[str, Any] = {
            "seconds_to_start": explorer.seconds_to_start,
            "memory_before": explorer.memory(),
        }
        paths = first_view(explorer)
        client = Client(explorer)
        found["first_view"] = {
            "files": len(paths),
            "bytes": sum(len(client.get(path)) for path in paths),
        }
        rows += _row(explorer, "first_page", [paths] * FIRST_VIEWS)
        rows.append(opened_in_browser(explorer))
        for what, visits in _visits(explorer, corpus):
            rows += _row(explorer, what, [[path] for path in visits()])
        found["memory_after"] = explorer.memory()
    return found | {"rows": rows}


def _row(explorer: Explorer, what: str, visits: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Return a row for each number of clients; the very first visit is told by itself."""
    first, _ = timed(explorer, visits[:1], 1)
    rows: list[dict[str, Any]] = []
    for clients in CLIENTS:
        # One loop is so short that the load of this minute is what was there meanwhile.
        seconds, processor = timed(explorer, visits, clients)
        rows.append(
            {
                "what": what,
                "clients": clients,
                **_percentiles(seconds),
                "first_ms": 1000 * first[0],
                "processor_ms": 1000 * processor,
            }
        )
        print(rows[-1], flush=True)
    return rows


def _percentiles(seconds: Sequence[float]) -> dict[str, Any]:
    return {
        "requests": len(seconds),
        "p50_ms": 1000 * percentile(seconds, 0.5),
        "p99_ms": 1000 * percentile(seconds, 0.99),
        "load": os.getloadavg()[0],
    }


def opened_in_browser(explorer: Explorer) -> dict[str, Any]:
    """Time from a navigation to a prompt that can be written in, each with an empty cache."""
    from playwright.sync_api import sync_playwright

    seconds: list[float] = []
    before = explorer.processor_seconds()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for _ in range(OPENED):
            context = browser.new_context()
            page = context.new_page()
            began = time.perf_counter()
            page.goto(explorer.address, wait_until="commit")
            page.wait_for_selector("textarea.x-prompt:enabled")
            seconds.append(time.perf_counter() - began)
            context.close()
        browser.close()
    row = {"what": "browser", "clients": 1, **_percentiles(seconds), "first_ms": 1000 * seconds[0]}
    print(row, flush=True)
    return row | {"processor_ms": 1000 * (explorer.processor_seconds() - before) / len(seconds)}


def _visits(explorer: Explorer, corpus: Corpus) -> list[tuple[str, Callable[[], Sequence[str]]]]:
    """Return the paths of each kind of request; those of answers are there once they are."""
    draw = np.random.default_rng(SEED)
    answered: list[tuple[str, int]] = []

    def steps() -> Sequence[str]:
        answered.extend(_answers(explorer, prompts_of(corpus, ANSWERS)))
        some = draw.choice(len(answered), min(REQUESTS, len(answered)), replace=False)
        return [f"/api/answers/{key}/steps/{n}" for key, n in (answered[i] for i in some)]

    def against() -> Sequence[str]:
        return [f"{path}/against" for path in steps()[:FEWER]]

    prototypes = json.loads(Client(explorer).get("/api/model"))["prototypes"]
    cards = [f"/api/prototypes/{n}" for n in draw.integers(prototypes, size=REQUESTS)]
    places = draw.integers(corpus.num_tokens, size=REQUESTS)
    numbers = np.searchsorted(corpus.starts, places, side="right") - 1
    opened = [
        f"/api/documents?id={quote(corpus.doc_ids[number])}&at={place}"
        for number, place in zip(numbers.tolist(), places.tolist(), strict=True)
    ]
    return [
        ("search", lambda: [f"/api/prototypes?{urlencode({'query': q})}" for q in queries(corpus)]),
        ("card", lambda: cards),
        ("step", steps),
        ("against", against),
        ("document", lambda: opened),
        ("map", lambda: ["/api/map"] * REQUESTS),
    ]


def queries(corpus: Corpus) -> list[str]:
    """Return one or two neighbouring words of the corpus each, drawn by seed."""
    draw = np.random.default_rng(SEED)
    found: list[str] = []
    while len(found) < REQUESTS:
        words = re.findall(r"\w+", corpus.text(int(draw.integers(len(corpus)))))
        if len(words) > 1:
            first = int(draw.integers(len(words) - 1))
            found.append(" ".join(words[first : first + 1 + len(found) % 2]))
    return found


def _answers(explorer: Explorer, prompts: Sequence[str]) -> list[tuple[str, int]]:
    """Return the key and every step of an answer to each prompt."""
    found: list[tuple[str, int]] = []
    for prompt in prompts:
        body = {"text": prompt, "generate": GENERATED}
        *_, (_, name, data) = Client(explorer).events("/api/ask", body)
        if name != "done":
            raise SystemExit(f"an answer ended with {name}: {data}")
        found += [(data["id"], n) for n in range(len(data["trace"]["steps"]))]
    return found


def writing(model: Path, prompts: Sequence[str]) -> dict[str, Any]:
    """Time writing with attribution and without, in turns, in one process, one client."""
    attributed: list[float] = []
    plain: list[float] = []
    whole: list[float] = []
    with Explorer(model, WITH_PLAIN) as explorer:
        client = Client(explorer)
        for turn, prompt in enumerate((prompts[0], *prompts)):
            body = {"text": prompt, "generate": GENERATED}
            ways = [
                lambda body=body: _attributed(client, body),
                lambda body=body: _plain(client, body),
            ]
            each = [way() for way in (ways if turn % 2 else ways[::-1])]
            asked, alone = each if turn % 2 else each[::-1]
            # The first of all is a warm-up.
            if turn:
                attributed.append(asked[0])
                plain.append(alone[0])
                whole.append(asked[1] / alone[1])
                print(asked, alone, flush=True)
        about = json.loads(client.get("/api/model"))
    return {
        "parameters": about["parameters"],
        "prototypes": about["prototypes"],
        "pairs": len(plain),
        "tokens": GENERATED,
        "plain_tokens_per_second": 1 / statistics.median(plain),
        "tokens_per_second": 1 / statistics.median(attributed),
        **ratios(attributed, plain),
        "whole": ratios(whole, [1.0] * len(whole)),
        "load": os.getloadavg()[0],
    }


def _attributed(client: Client, body: dict[str, Any]) -> tuple[float, float]:
    """Return seconds a token from the first written one to the last, and of all to the end."""
    began = time.perf_counter()
    times, ended = [], began
    for ended, name, data in client.events("/api/ask", body):
        if name == "step" and data["from"] == "generated":
            times.append(ended)
    return _pace(times), ended - began


def _plain(client: Client, body: dict[str, Any]) -> tuple[float, float]:
    began = time.perf_counter()
    times = client.post("/api/plain", body)["times"]
    return _pace(times), time.perf_counter() - began


def _pace(times: Sequence[float]) -> float:
    if len(times) < 2:
        raise SystemExit("an answer ended after its first token: nothing to time")
    return (times[-1] - times[0]) / (len(times) - 1)


if __name__ == "__main__":
    main()
