"""Runs command lines of prismlm, each in a process of its own, forked from one without prismlm.

Importing torch and transformers takes seconds, and a comparison runs some ninety commands twice.
This process imports them once. prismlm itself is imported by each child anew, as ``python -m
prismlm`` does, so that nothing of one command is left over for the next.

Reads a JSON object a line: ``arguments``, and the files ``stdout`` and ``stderr``. The first line
that it writes says where prismlm would be imported from, the others are exit codes.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import json
import os
import runpy
import signal
import sys
import traceback
from typing import Any

PACKAGES = (
    "accelerate",
    "jaxtyping",
    "matplotlib.backends.backend_svg",
    "matplotlib.figure",
    "pyarrow.parquet",
    "pydantic.json_schema",
    "pydantic.main",
    "rich.console",
    "rich.progress",
    "rich.table",
    "safetensors.torch",
    "scipy.stats",
    "tokenizers.trainers",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "typer.rich_utils",
    "yaml",
)
# A command that hangs is a difference to report, not a reason to wait for ever.
LONGEST_SECONDS = 900


def run(request: dict[str, Any]) -> None:
    """Become ``python -m prismlm`` with the arguments; never returns."""
    sys.argv = ["prismlm", *request["arguments"]]
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(request["stdout"], flags), 1)
    os.dup2(os.open(request["stderr"], flags), 2)
    signal.alarm(LONGEST_SECONDS)
    code = 0
    try:
        runpy.run_module("prismlm", run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    atexit._run_exitfuncs()
    os._exit(code)


def main() -> None:
    """Answer requests until stdin ends."""
    for name in PACKAGES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.suppress(ImportError):
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        # The one table that transformers compiles for the first model it loads.
        get_checkpoint_conversion_mapping("llama")
    found = importlib.util.find_spec("prismlm")
    answer: Any = None if found is None else found.origin
    print(json.dumps(answer), flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)


if __name__ == "__main__":
    main()
