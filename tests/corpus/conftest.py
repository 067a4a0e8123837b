import pytest

from prismlm.corpus import build_corpus
from tests.helpers.records import RECORDS, write_jsonl


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Seventeen documents in several shards."""
    directory = tmp_path_factory.mktemp("corpus")
    path = write_jsonl(directory / "texts.jsonl", RECORDS)
    return build_corpus(path, directory / "built", vocab_size=300, parts=6, heldout_fraction=0.3)
