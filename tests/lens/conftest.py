import pytest

from prismlm.lens.labels.contexts import Text
from prismlm.models.sidecar import weight_of


@pytest.fixture(scope="module")
def text(lm):
    return Text(lm.lens.corpus, len(weight_of(lm.model)))
