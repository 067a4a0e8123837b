import pytest

from tests.helpers.toy_search import settings_of


@pytest.fixture
def toy(tiny_corpus, tmp_path):
    return settings_of(tiny_corpus, tmp_path / "out")
