"""How a script is run."""


def run(module, monkeypatch, *words):
    """Return what the main function of a script does, given these words."""
    monkeypatch.setattr("sys.argv", ["script", *map(str, words)])
    return module.main()
