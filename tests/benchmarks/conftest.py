import pytest


@pytest.fixture
def run(monkeypatch):
    """Return what the main function of a script does, given these words."""

    def run(module, *words):
        monkeypatch.setattr("sys.argv", ["script", *map(str, words)])
        return module.main()

    return run
