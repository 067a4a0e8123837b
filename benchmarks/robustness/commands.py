"""Commands to kill: small inputs for each, and the command as a process of its own."""

from __future__ import annotations

import gc
import os
import pkgutil
import shutil
import signal
import sys
import time
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pyarrow.parquet as pq
import transformers.models.llama.modeling_llama  # noqa: F401 - or every child would
import yaml

import prismlm.cli.app
from prismlm.corpus import sample_path

COMMANDS = ("corpus", "train", "index", "attach", "audit")
DOCUMENTS, CHARACTERS, AUDITED = 100, 1000, 12
POLL_SECONDS = 0.002
ENDED_SECONDS = 600.0
MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


class Place:
    """The inputs of all commands, and a directory for what they write."""

    def __init__(self, work: Path) -> None:
        self.work, self.made = work, work / "made"
        self.texts, self.audited = work / "texts.parquet", work / "audited.parquet"
        self.corpus, self.recipe = work / "corpus", work / "recipe.yaml"
        self.model, self.plain, self.lens = work / "model", work / "plain", work / "lens"

    def prepare(self) -> None:
        """Write texts, a corpus, a model with a lens, and a plain one."""
        table = pq.read_table(sample_path())
        rows = table.take(list(range(0, len(table), max(1, len(table) // DOCUMENTS)))).to_pylist()
        for row in rows:
            row["text"] = row["text"][:CHARACTERS]
        whole = type(table).from_pylist(rows, schema=table.schema)
        pq.write_table(whole, self.texts)
        pq.write_table(whole.slice(0, AUDITED), self.audited)
        recipe = {
            "corpus": str(self.corpus),
            "out": str(self.model),
            "model": MODEL,
            "head": {"prototypes": 64, "prototypes_per_token": 4, "initialise_at_step": 5},
            "data": {"length": 64},
            "optimizer": {"learning_rate": 3e-3, "head_learning_rate": 3e-3},
            "steps": 30,
            "batch_size": 8,
            "precision": "float32",
            "device": "cpu",
            "evaluation": {"every": 15, "tokens": 500, "final_tokens": 1000},
            "checkpoint": {"every": 3},
            "logging": {"every": 5, "tensorboard": False},
        }
        self.recipe.write_text(yaml.safe_dump(recipe))
        build = ["corpus", "build", str(self.texts), "--vocab-size", "1024"]
        self._do([*build, "--out", str(self.corpus)])
        self._do(["train", str(self.recipe)])
        plain = ["--set", f"out={self.plain}", "--set", "head.enabled=false"]
        self._do(["train", str(self.recipe), *plain])
        index = ["index", str(self.model), "--corpus", str(self.corpus), "--lens", str(self.lens)]
        self._do(index)

    def _do(self, words: list[str]) -> None:
        child = Child(words, self.work)
        if child.wait(ENDED_SECONDS) != 0:
            raise SystemExit(f"prismlm {' '.join(words)} failed:\n{child.said()}")

    def words(self, command: str) -> list[str]:
        """Return the words of a command that writes below ``made``, and that goes on."""
        out = self.made / "out"
        tables = [
            word
            for ending in ("parquet", "jsonl", "csv", "html")
            for word in (f"--{ending}", str(out / f"audit.{ending}"))
        ]
        given: dict[str, list[str]] = {
            "corpus": [
                *["corpus", "build", str(self.texts), "--out", str(out), "--overwrite"],
                *["--vocab-size", "2048", "--shard-tokens", "20000"],
            ],
            "train": ["train", str(self.recipe), "--set", f"out={out}", "--resume"],
            "index": [
                *["index", str(self.model), "--corpus", str(self.corpus), "--lens", str(out)],
                *["--window", "64", "--overwrite"],
            ],
            "attach": [
                *["attach", str(self.plain), "--corpus", str(self.corpus), "--out", str(out)],
                *["--prototypes", "64", "--prototypes-per-token", "4", "--window", "64"],
                *["--epochs", "1"],
            ],
            "audit": [
                *["audit", str(self.model), str(self.audited), "--lens", str(self.lens)],
                *[*tables, "--overwrite"],
            ],
        }
        return given[command]

    def begin(self, command: str, *, replace: Path | None = None) -> None:
        """Empty ``made``; put there what is to be replaced."""
        shutil.rmtree(self.made, ignore_errors=True)
        self.made.mkdir()
        if replace is not None:
            shutil.copytree(replace, self.made / "out")
        elif command == "audit":
            (self.made / "out").mkdir()


class Child:
    """The command in a process group of its own, forked from this process, which imported it."""

    def __init__(self, words: list[str], work: Path) -> None:
        self._stderr = work / "stderr.txt"
        self._stderr.write_bytes(b"")
        self.pid = os.fork()
        if not self.pid:
            _run(words, self._stderr)
        # By both, so that it has its group whoever is first.
        with suppress(PermissionError, ProcessLookupError):
            os.setpgid(self.pid, self.pid)
        self.code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative after a signal, or None as long as it runs."""
        if self.code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if ended else None
        return self.code

    def wait(self, seconds: float) -> int | None:
        """Return the exit code, or None if it has not ended after so many seconds."""
        until = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        return self.code

    def send(self, number: signal.Signals) -> None:
        """Send a signal to its process group."""
        os.killpg(self.pid, number)

    def said(self) -> str:
        """Return what it wrote to stderr so far."""
        return self._stderr.read_text(errors="replace")


def _run(words: list[str], stderr: Path) -> None:
    """Be the command, to the end of this process."""
    os.setpgid(0, 0)
    for number, path in ((0, os.devnull), (1, os.devnull), (2, str(stderr))):
        os.dup2(os.open(path, os.O_RDWR), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["prismlm", *words]
    code = 1
    try:
        prismlm.cli.app.main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def import_all() -> None:
    """Import what commands import when they run, once for all children."""
    for module in pkgutil.walk_packages(prismlm.__path__, "prismlm."):
        if module.name != "prismlm.__main__":
            with suppress(ModuleNotFoundError):
                import_module(module.name)
    # What is kept is never looked through again by a child.
    gc.collect()
    gc.freeze()
