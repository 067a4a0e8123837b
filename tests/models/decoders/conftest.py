import logging

import pytest

from prismlm.models.decoders import own_decoder as language_model


@pytest.fixture
def capture_warnings(monkeypatch):
    """Return what tells which warnings the decoders gave; each is given once a process."""
    type(language_model.logger).warning_once.cache_clear()
    found = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())
    language_model.logger.addHandler(handler)
    monkeypatch.setattr(language_model.logger, "disabled", False)
    yield lambda: list(found)
    language_model.logger.removeHandler(handler)
