from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers import forked

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def prism() -> Run:
    """Run a command that must succeed, in a process that has imported everything."""

    def run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
        result = forked.run(*arguments, **options)
        assert result.returncode == 0, result.stderr
        return result

    return run


@pytest.fixture(scope="session")
def document(prism: Run) -> Callable[..., Any]:
    """Run a command that must succeed, and return the JSON document that it prints."""

    def run(*arguments: object) -> Any:
        return json.loads(prism(*arguments, "--json").stdout)

    return run


@pytest.fixture(scope="session")
def refused() -> Callable[..., str]:
    """Run a command that must exit with 2 and a message at the end of stderr; return that."""

    def run(*arguments: object, **options: Any) -> str:
        result = forked.run(*arguments, **options)
        assert result.returncode == 2, result.stderr
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
        message = re.search(r"^error: .*", result.stderr, re.DOTALL | re.MULTILINE)
        assert message is not None, result.stderr
        return message[0]

    return run
