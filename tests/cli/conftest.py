import json
import re
import shutil

import pytest

from tests.helpers import forked


@pytest.fixture(scope="session")
def prism():
    """Run a command that must succeed, in a process that has imported everything."""

    def run(*arguments, **options):
        result = forked.run(*arguments, **options)
        assert result.returncode == 0, result.stderr
        return result

    return run


@pytest.fixture(scope="session")
def document(prism):
    """Run a command that must succeed, and return the JSON document that it prints."""
    return lambda *arguments: json.loads(prism(*arguments, "--json").stdout)


@pytest.fixture(scope="session")
def refused():
    """Run a command that must exit with 2 and a message at the end of stderr; return that."""

    def run(*arguments, **options):
        result = forked.run(*arguments, **options)
        assert result.returncode == 2, result.stderr
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
        message = re.search(r"^error: .*", result.stderr, re.DOTALL | re.MULTILINE)
        assert message is not None, result.stderr
        return message[0]

    return run


@pytest.fixture
def copy(tiny_model, tmp_path):
    """A copy of the tiny model, to be changed."""
    return shutil.copytree(tiny_model, tmp_path / "copy")
