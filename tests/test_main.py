"""Ctrl-C ends the command line in one way, wherever it comes."""

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
