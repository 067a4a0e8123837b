"""Starts a process for each line of JSON on stdin, imports already done; see ``forked.py``.

Importing PyTorch, transformers and prismlm takes seconds, and a hundred tests run the command. This
process imports them, and keeps the one table that transformers compiles for the first model it
loads; each child is forked from it, so no test sees another's state.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import io
import json
import os
import pkgutil
import signal
import sys
import traceback
import weakref

import transformers.models.auto.modeling_auto
import transformers.models.llama.modeling_llama  # noqa: F401
import typer.main

import prismlm.cli.app

with contextlib.suppress(ModuleNotFoundError):
    import datasets  # noqa: F401
with contextlib.suppress(ModuleNotFoundError):
    import matplotlib.backends.backend_svg  # noqa: F401
    import scipy.stats  # noqa: F401

with contextlib.suppress(ImportError):
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")


def warm() -> None:
    """Import what the commands import when they run, and let typer read the options once."""
    typer.main.get_command = functools.cache(typer.main.get_command)
    for module in pkgutil.walk_packages(prismlm.__path__, "prismlm."):
        if module.name != "prismlm.__main__":
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(module.name)
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.suppress(SystemExit),
    ):
        prismlm.cli.app.app(["generate", os.devnull, "nothing is there"])
    # What libraries left to do at the end, such as a table of what was compiled, takes a child
    # longer than most commands, and is not its to do.
    for finaliser in list(weakref.finalize._registry):  # pyright: ignore[reportAttributeAccessIssue]
        finaliser.atexit = False
    weakref.finalize._registered_with_atexit = False  # pyright: ignore[reportAttributeAccessIssue]
    atexit._clear()
    # What is kept is never looked through again, here or in a child.
    gc.collect()
    gc.freeze()


def run(request: dict) -> None:
    os.environ["COLUMNS"] = str(request["columns"])
    os.chdir(request["cwd"])
    sys.argv = [request["name"], *request["arguments"]]
    files = (request["stdin"], os.O_RDONLY), (request["stdout"], os.O_WRONLY)
    for number, (path, mode) in enumerate((*files, (request["stderr"], os.O_WRONLY))):
        os.dup2(os.open(path, mode), number)
    # Background jobs of some shells start with SIGINT ignored, and children inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 0
    try:
        exec(request["code"], {"__name__": "__main__"})
    except SystemExit as stop:
        code = stop.code or 0
        if not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    atexit._run_exitfuncs()
    # Taking down what was inherited, object by object, takes longer than most commands.
    os._exit(code)


warm()
for line in sys.stdin:
    asked = json.loads(line)
    if "ended" in asked:
        ended, status = os.waitpid(asked["ended"], os.WNOHANG)
        answer = os.waitstatus_to_exitcode(status) if ended else None
    else:
        answer = os.fork()
        if answer == 0:
            run(asked)
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
# As for a child.
os._exit(0)
