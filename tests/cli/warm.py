"""Runs the real command in a fresh process for each line of JSON on stdin, imports already done.

Importing PyTorch and transformers takes seconds, and dozens of tests run the command. This process
imports them and nothing else; each child is forked from it, so no test sees another's state.
"""

import contextlib
import json
import os
import sys

import transformers.models.auto.modeling_auto
import transformers.models.llama.modeling_llama  # noqa: F401

import prismlm.cli.app
import prismlm.corpus.store
import prismlm.lens.index_estimate
import prismlm.lens.language_model

with contextlib.suppress(ModuleNotFoundError):
    import datasets  # noqa: F401


def run(request: dict) -> None:
    os.environ["COLUMNS"] = str(request["columns"])
    sys.argv = ["prismlm", *request["arguments"]]
    files = (request["stdin"], os.O_RDONLY), (request["stdout"], os.O_WRONLY)
    for number, (path, mode) in enumerate((*files, (request["stderr"], os.O_WRONLY))):
        os.dup2(os.open(path, mode), number)
    prismlm.cli.app.main()


for line in sys.stdin:
    child = os.fork()
    if child == 0:
        run(json.loads(line))
    _, status = os.waitpid(child, 0)
    sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
    sys.stdout.flush()
