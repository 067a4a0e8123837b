"""The entry point: Ctrl-C, the environment of libraries, encodings, and missing extras."""

import os
import re
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from prismlm.__main__ import main, set_environment
from prismlm.cli.app import app
from tests.helpers import forked


def test_ctrl_c_outside_of_commands_is_reported(monkeypatch, capsys):
    def stop():
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "prismlm.cli.app", SimpleNamespace(main=stop))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.skipif(sys.platform != "linux", reason="PyTorch has another OpenMP there")
@pytest.mark.parametrize(
    ("own", "spins", "pool"),
    [
        ({}, "3000", "system"),
        ({"GOMP_SPINCOUNT": "77", "ARROW_DEFAULT_MEMORY_POOL": "mimalloc"}, "77", "mimalloc"),
    ],
)
def test_a_user_s_environment_takes_precedence(monkeypatch, own, spins, pool):
    monkeypatch.setattr(os, "environ", dict(own))
    set_environment()
    assert os.environ == {"GOMP_SPINCOUNT": spins, "ARROW_DEFAULT_MEMORY_POOL": pool}


# Runs commands in turn, and prints the exit code of each.
RUN_ALL = r"""
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
# Streams as PYTHONIOENCODING=cp1252 opens them.
CP1252 = """
import io, sys
sys.stdout, sys.stderr = (io.TextIOWrapper(open(n, "wb"), encoding="cp1252") for n in (1, 2))
"""


def with_cp1252(commands):
    process = forked.start(*commands, code=CP1252 + RUN_ALL)
    process.wait(120)
    return process.path("stdout").read_bytes(), process.path("stderr").read_bytes()


def test_characters_that_a_stream_cannot_encode_end_no_command(tmp_path, tiny_corpus):
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
    streams = with_cp1252(["\n".join(map(str, words)) for words in commands])
    assert b"Traceback" not in streams[1]
    out, errors = (re.split(rb"exit (\w+)\n", text) for text in streams)
    assert out[1::2] == errors[1::2] == [b"0", b"0", b"2"], streams[1]
    for printed in (out[2], errors[4]):
        assert b"?" in printed


@pytest.mark.parametrize(
    ("extra", "arguments"),
    [
        (
            "label",
            ("label", "nowhere", "--endpoint", "http://127.0.0.1:9", "--endpoint-model", "m"),
        ),
        ("lora", ("attach", "nowhere", "--corpus", "nowhere", "--out", "out", "--lora")),
    ],
)
def test_a_missing_extra_is_named_before_files_are_opened(monkeypatch, tmp_path, extra, arguments):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("prismlm.cli.options.find_spec", lambda name: None)
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2
    assert f"pip install 'prismlm[{extra}]'" in result.stderr
    assert list(tmp_path.iterdir()) == []
