import pytest
import torch

from prismlm.corpus.windows import Sequences
from tests.helpers.mixer_models import make_corpus, make_model

LENGTH = 12


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"), copies=2)


@pytest.fixture(scope="session")
def tokenizer(corpus):
    return corpus.tokenizer


@pytest.fixture(scope="session")
def model(corpus):
    return make_model(len(corpus.tokenizer))


@pytest.fixture(scope="session")
def sequences(corpus):
    return Sequences(corpus, "all", LENGTH)


@pytest.fixture(scope="session")
def alone(corpus, model):
    return read_alone(corpus, model, LENGTH)


def read_alone(corpus, model, longest):
    """Return every sequence by itself: start, document, ids, and gates of each layer."""
    result, routings = [], {}
    for number, (start, length) in enumerate(zip(corpus.starts, corpus.lengths, strict=True)):
        for first in range(start, start + length, longest):
            span = min(longest, start + length - first)
            ids = torch.from_numpy(corpus.read_tokens(int(first), int(span)).astype("int64"))
            # Each text is there twice.
            if (text := tuple(ids.tolist())) not in routings:
                routings[text] = model(ids[None], output_gates=True).gates
            result.append((int(first), number, ids, routings[text]))
    return result
