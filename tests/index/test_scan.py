"""What a scan keeps of the candidates that it is given a pass at a time."""

import pytest
import torch

from prismlm.index.mass import MassCounter
from prismlm.index.scan import Scan
from prismlm.ops import top_contexts
from prismlm.ops.top_contexts import Contexts

PROTOTYPES, CONTEXTS, WIDTH = 7, 5, 3


def scan():
    top = top_contexts.empty(PROTOTYPES, CONTEXTS, WIDTH)
    return Scan(top, MassCounter(PROTOTYPES), torch.zeros(1), torch.zeros(1, PROTOTYPES))


def candidates(rows, seed=0):
    random = torch.Generator().manual_seed(seed)
    return Contexts(
        torch.randint(PROTOTYPES, (rows,), generator=random),
        torch.rand(rows, generator=random),
        torch.randperm(rows, generator=random),
        torch.randint(rows // 2, (rows,), generator=random),
        torch.rand(rows, generator=random),
        torch.rand(rows, generator=random) > 0.5,
        torch.rand(rows, WIDTH, generator=random).bfloat16(),
    )


# More than may wait, in portions of which the later are larger; and few, ranked at the end alone.
@pytest.mark.parametrize("portions", [[3, 4000, 90, 2, 1, 9000, 1, 2000], [1, 5, 20]])
def test_candidates_given_in_portions_are_ranked_as_those_given_at_once(portions):
    given, scanned = candidates(sum(portions)), scan()
    for part in zip(*(column.split(portions) for column in given), strict=True):
        scanned.admit(Contexts(*part))
    scanned.settle()
    scanned.admit(candidates(4, seed=1))  # waits where those before did, and changes none of them
    empty = top_contexts.empty(PROTOTYPES, CONTEXTS, WIDTH)
    for found, expected in zip(scanned.top, top_contexts.update(empty, given), strict=True):
        assert torch.equal(found, expected)
