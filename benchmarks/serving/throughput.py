"""Tokens a second of ``prismlm serve`` with and without sources, beside ``transformers serve``.

    prismlm demo --no-serve
    python -m benchmarks.serving.throughput prismlm-demo/model
    python -m benchmarks.render serving

Both servers run at once; one of them is asked at a time, in turns, so that all meet the same noise.
Clients ask the demo's questions, each its own, and wait for an answer before they ask the next;
what a stream's first text takes is its first token's time. Writes docs/results/serving.json.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
from openai import OpenAI

from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.files import write_json

QUESTIONS = Path(__file__).parents[1] / "attach" / "demo_questions.jsonl"
CLIENTS = (1, 4, 16)
TOKENS, ANSWERS, ROUNDS = 64, 2, 3  # tokens of an answer; answers of a client in a round
STARTING = 300
KINDS: dict[str, dict[str, Any]] = {
    "with sources": {"prismlm": {}},
    "without": {"prismlm": False},
    "transformers": {},
}


def main() -> None:
    """Measure."""
    parser = script_options(__doc__, RESULTS / "serving.json")
    parser.add_argument("model", type=Path)
    args = parser.parse_args()
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()
    questions = [question for line in lines for question in json.loads(line)["questions"][:1]]
    rows: list[dict[str, Any]] = []
    with _serving(args.model, "prismlm") as ours, _serving(args.model, "transformers") as theirs:
        addresses = {"with sources": ours, "without": ours, "transformers": theirs}
        for kind, address in addresses.items():
            _round(address, args.model, kind, questions[:1], 1)
        for clients in CLIENTS:
            rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
            for number in range(ROUNDS):
                first = (len(rows) * ROUNDS + number) * clients * ANSWERS
                asked = questions[first : first + clients * ANSWERS]
                for kind, address in addresses.items():
                    rounds[kind].append(_round(address, args.model, kind, asked, clients))
            rows.append({"clients": clients, **_figures(rounds)})
            print(json.dumps(rows[-1]), flush=True)
    sizes = {"tokens": TOKENS, "rounds": ROUNDS, "answers": ANSWERS}
    write_json(args.out, sizes | {"rows": rows, "environment": environment()})


def _figures(rounds: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return each kind's figures, and the ratio of tokens a second within rounds."""
    figures: dict[str, Any] = {
        kind: {
            "tokens_a_second": median(one["tokens_a_second"] for one in of_kind),
            "first_p95": median(one["first_p95"] for one in of_kind),
        }
        for kind, of_kind in rounds.items()
    }
    for other in ("without", "transformers"):
        pairs = zip(rounds["with sources"], rounds[other], strict=True)
        ratios = [ours["tokens_a_second"] / theirs["tokens_a_second"] for ours, theirs in pairs]
        figures[f"ratio to {other}"] = [median(ratios), min(ratios), max(ratios)]
    return figures


def _round(
    address: str, model: Path, kind: str, questions: list[str], clients: int
) -> dict[str, float]:
    """Let clients ask all questions, and return how fast answers came."""
    client = OpenAI(base_url=f"{address}/v1", api_key="none", timeout=STARTING)
    name = str(model) if kind == "transformers" else model.name

    def ask(question: str) -> tuple[int, float]:
        began, first = time.perf_counter(), 0.0
        stream = client.chat.completions.create(
            model=name,
            messages=[{"role": "user", "content": question}],
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=KINDS[kind],
        )
        tokens = 0
        for chunk in stream:
            if not first and chunk.choices and chunk.choices[0].delta.content:
                first = time.perf_counter() - began
            if chunk.usage is not None:
                tokens = chunk.usage.completion_tokens
        return tokens, first

    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(ask, questions))
    seconds = time.perf_counter() - began
    return {
        "tokens_a_second": sum(tokens for tokens, _ in answers) / seconds,
        "first_p95": float(np.quantile([first for _, first in answers], 0.95)),
    }


@contextmanager
def _serving(model: Path, program: str) -> Iterator[str]:
    """Serve a model during the block, and give the address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = {
        "prismlm": [sys.executable, "-m", "prismlm", "serve", str(model), "--batch", "16"],
        "transformers": ["transformers", "serve", str(model), "--continuous-batching"],
    }[program]
    server = subprocess.Popen(
        [*command, "--port", port], env=os.environ | {"HF_HUB_OFFLINE": "1"}, start_new_session=True
    )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(STARTING):
            if server.poll() is not None:
                raise RuntimeError(f"{program} serve ended with {server.returncode}")
            try:
                with urlopen(f"{address}/health", timeout=1):
                    break
            except (URLError, TimeoutError):
                time.sleep(1)
        yield address
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


if __name__ == "__main__":
    main()
