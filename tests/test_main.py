"""Ctrl-C ends the command line in one way, wherever it comes."""

import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from prismlm.__main__ import main
from prismlm.cli.app import ErrorsAsMessages, app


class Left:
    def __del__(self):
        raise KeyboardInterrupt


def stopped_at_once():
    raise KeyboardInterrupt


def ignored_by_a_finaliser():
    Left()
    time.sleep(30)


@pytest.mark.parametrize("run", [stopped_at_once, ignored_by_a_finaliser])
def test_ctrl_c_is_answered_outside_of_commands_and_where_python_ignores_it(
    monkeypatch, capsys, run
):
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setitem(sys.modules, "prismlm.cli.app", SimpleNamespace(main=run))
    began = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        main()
    assert time.monotonic() - began < 2
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_ctrl_c_while_arguments_are_read_says_so(monkeypatch):
    def stop(self, ctx, args):
        raise KeyboardInterrupt

    monkeypatch.setattr(ErrorsAsMessages, "parse_args", stop)
    result = CliRunner().invoke(app, ["corpus", "info", "x"])
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


# What libraries say of their settings as they are loaded, after the command line has begun.
SAID = """
import sys
from prismlm.__main__ import main
sys.argv = ["prismlm", "--version"]
try:
    main()
except SystemExit:
    # Of all PyTorch the library that the first is a setting of; the whole takes seconds.
    import ctypes
    from importlib.util import find_spec
    from pathlib import Path
    (torch,) = find_spec("torch").submodule_search_locations
    ctypes.CDLL(str(next(Path(torch, "lib").glob("libgomp*"))))
    import pyarrow
    print(pyarrow.default_memory_pool().backend_name)
"""
# One command after the other, each followed by what its own process would have exited with.
EACH = r"""
import sys
from prismlm.__main__ import main
for words in sys.argv[1:]:
    sys.argv = ["prismlm", *words.split("\n")]
    code = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    for stream in (sys.stdout, sys.stderr):
        print("exit", code, file=stream, flush=True)
"""
SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS", "ARROW_DEFAULT_MEMORY_POOL")


def run(code, **environment):
    inherited = {key: value for key, value in os.environ.items() if key not in SETTINGS}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=inherited | environment, capture_output=True, text=True, check=True
    )


@pytest.mark.skipif(sys.platform != "linux", reason="PyTorch has another OpenMP there")
@pytest.mark.parametrize(
    ("own", "spins", "pool"),
    [
        ({}, "3000", "system"),
        ({"GOMP_SPINCOUNT": "77", "ARROW_DEFAULT_MEMORY_POOL": "mimalloc"}, "77", "mimalloc"),
    ],
)
def test_libraries_are_told_how_to_wait_and_where_to_take_memory(own, spins, pool):
    said = run(SAID, OMP_DISPLAY_ENV="VERBOSE", **own)
    assert f"GOMP_SPINCOUNT = '{spins}'" in said.stderr
    assert said.stdout.split()[-1] == pool


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "cp1252"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
)
def test_what_a_stream_cannot_write_ends_no_command(environment, tmp_path, tiny_corpus):
    """The name of a licence on stdout, and an id in an error on stderr."""
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text('{"id": "x", "text": "The heart pumps.", "license": "→ 東"}\n', "utf-8")
    bad.write_text('{"id": "→ 東", "text": "→"}\n' * 2, "utf-8")
    tokenizer = ["--tokenizer", tiny_corpus / "tokenizer", "--out"]
    commands = (
        ["corpus", "build", good, "--license-column", "license", *tokenizer, tmp_path / "good"],
        ["corpus", "info", tmp_path / "good"],
        ["corpus", "build", bad, *tokenizer, tmp_path / "bad"],
    )
    # All in one process that is started with that encoding.
    done = subprocess.run(
        [sys.executable, "-c", EACH, *("\n".join(map(str, words)) for words in commands)],
        capture_output=True,
        env={**os.environ, **environment, "COLUMNS": "100"},
        check=True,
    )
    assert b"Traceback" not in done.stderr
    out, errors = (re.split(rb"exit (\w+)\n", text) for text in (done.stdout, done.stderr))
    assert out[1::2] == errors[1::2] == [b"0", b"0", b"2"], done.stderr
    for printed in (out[2], errors[4]):
        assert b"?" in printed or "PYTHONIOENCODING" not in environment


@pytest.mark.parametrize(
    ("extra", "arguments"),
    [
        ("map", ("map", "nowhere")),
        (
            "label",
            ("label", "nowhere", "--endpoint", "http://127.0.0.1:9", "--endpoint-model", "m"),
        ),
        ("lora", ("attach", "nowhere", "--corpus", "nowhere", "--out", "out", "--lora")),
    ],
)
def test_an_extra_that_is_missing_is_named_before_anything_is_opened(
    monkeypatch, tmp_path, extra, arguments
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("prismlm.cli.options.find_spec", lambda name: None)
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2
    assert f"pip install 'prismlm[{extra}]'" in result.stderr
    assert list(tmp_path.iterdir()) == []
