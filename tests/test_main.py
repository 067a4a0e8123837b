"""The entry point: Ctrl-C, the environment of libraries, encodings, and missing extras."""

import os
import re
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from prismlm.__main__ import main, set_environment
from prismlm.cli.app import app
from tests.helpers import forked


def test_ctrl_c_outside_of_commands_is_reported(monkeypatch, capsys):
    stop = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setitem(sys.modules, "prismlm.cli.app", SimpleNamespace(main=stop))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.skipif(sys.platform != "linux", reason="PyTorch has another OpenMP there")
def test_a_user_s_environment_takes_precedence(monkeypatch):
    default = {"GOMP_SPINCOUNT": "3000", "ARROW_DEFAULT_MEMORY_POOL": "system"}
    users = {"GOMP_SPINCOUNT": "77", "ARROW_DEFAULT_MEMORY_POOL": "mimalloc"}
    for own, expected in (({}, default), (users, users)):
        monkeypatch.setattr(os, "environ", dict(own))
        set_environment()
        assert os.environ == expected


# Runs commands in turn, with streams as PYTHONIOENCODING=cp1252 opens them; prints each exit code.
RUN_ALL = r"""
import io, sys
from prismlm.__main__ import main
sys.stdout, sys.stderr = (io.TextIOWrapper(open(n, "wb"), encoding="cp1252") for n in (1, 2))
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
    process = forked.start(*("\n".join(map(str, words)) for words in commands), code=RUN_ALL)
    process.wait(120)
    streams = (process.path(stream).read_bytes() for stream in ("stdout", "stderr"))
    out, errors = (re.split(rb"exit (\w+)\n", text) for text in streams)
    assert out[1::2] == errors[1::2] == [b"0", b"0", b"2"], errors
    assert not any(b"Traceback" in text for text in errors)
    for printed in (out[2], errors[4]):
        assert b"?" in printed


@pytest.mark.parametrize(
    ("extra", "arguments"),
    [
        ("label", "label nowhere --endpoint http://127.0.0.1:9 --endpoint-model m"),
        ("lora", "attach nowhere --corpus nowhere --out out --lora"),
    ],
)
def test_a_missing_extra_is_named_before_files_are_opened(monkeypatch, tmp_path, extra, arguments):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("prismlm.cli.options.find_spec", lambda name: None)
    result = CliRunner().invoke(app, arguments.split())
    assert result.exit_code == 2
    assert f"pip install 'prismlm[{extra}]'" in result.stderr
    assert list(tmp_path.iterdir()) == []
