"""What a scan keeps of the candidates of each pass, and how it counts sources up to the cap."""

import pytest
import torch

from prismlm.index.layout import MASS_FILE, summed_share, write_table
from prismlm.index.scan import (
    LARGEST_GROUPS,
    OTHER,
    Scan,
    _count,
    groups_of,
    mass_table,
    own_rows,
)
from prismlm.index.sort_cells import Spool
from prismlm.ops import top_contexts
from prismlm.ops.top_contexts import Contexts

PROTOTYPES, CONTEXTS, WIDTH = 7, 5, 3
ALL = (OTHER, OTHER, OTHER)


def scan(directory):
    top = top_contexts.empty(PROTOTYPES, CONTEXTS, WIDTH)
    mass = torch.zeros(2, 1, PROTOTYPES, dtype=torch.int64)
    spool = Spool(directory / "positions", WIDTH)
    return Scan(top, mass, torch.zeros(1), torch.zeros(1, PROTOTYPES), spool)


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
def test_candidates_given_in_portions_are_ranked_as_those_given_at_once(portions, tmp_path):
    given, scanned = candidates(sum(portions)), scan(tmp_path)
    for part in zip(*(column.split(portions) for column in given), strict=True):
        scanned.admit(Contexts(*part))
    scanned.settle()
    scanned.admit(candidates(4, seed=1))  # waits where those before did, and changes none of them
    empty = top_contexts.empty(PROTOTYPES, CONTEXTS, WIDTH)
    for found, expected in zip(scanned.top, top_contexts.update(empty, given), strict=True):
        assert torch.equal(found, expected)


class Documents:
    """What counting needs of a corpus: documents of one source each, with so many tokens."""

    def __init__(self, keys, tokens):
        import numpy as np
        import pyarrow as pa

        names = ("source", "domain", "license")
        columns = [pa.array(column, pa.string()) for column in zip(*keys, strict=True)]
        self.lengths = np.array(tokens)
        self.documents = pa.table(dict(zip(names, columns, strict=True)))

    def __len__(self):
        return len(self.lengths)

    def split(self, name):
        import numpy as np

        return np.arange(len(self))


def counted(groups, documents):
    """Two positions of each document n = 0, 1 … use prototypes 0 and 1 with n + ½ and 2."""
    mass = torch.zeros(2, len(groups.keys), 3, dtype=torch.int64)
    for number in documents:
        indices = torch.tensor([[0, 2], [1, 2]])
        activations = torch.tensor([[number + 0.5, 0.0], [2.0, -1.0]])
        _count(mass, groups.of[[number, number]], indices, activations)
    return mass_table(mass, groups.keys)


def rows(table):
    """Return {(prototype, source, domain, licence): (tokens, activation_sum)}."""
    return {
        (row["prototype"], row["source"], row["domain"], row["license"]): (
            row["tokens"],
            row["activation_sum"],
        )
        for row in table.to_pylist()
    }


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_every_group_has_its_rows_in_any_order(order):
    keys = [("a", "law", "CC0"), ("b", "law", "CC0"), ("c", "law", None), ("a", "law", "CC0")]
    groups = groups_of(Documents(keys, [5, 5, 5, 5]), "all")
    assert groups.keys == [("a", "law", "CC0"), ("b", "law", "CC0"), ("c", "law", None)]
    assert rows(counted(groups, order)) == {
        (0, "a", "law", "CC0"): (2, 4.0),
        (1, "a", "law", "CC0"): (2, 4.0),
        (0, "b", "law", "CC0"): (1, 1.5),
        (1, "b", "law", "CC0"): (1, 2.0),
        (0, "c", "law", None): (1, 2.5),
        (1, "c", "law", None): (1, 2.0),
    }


def test_beyond_the_cap_those_with_least_text_are_summed_with_their_domain():
    keys = [(name, "law", "CC0") for name in "abcd"]
    assert own_rows(keys, [1, 7, 3, 7], 4) == keys
    summed = (OTHER, "law", "CC0")
    # Of equals the first by name.
    assert own_rows(keys, [1, 7, 3, 7], 2) == [summed, keys[1], summed, keys[3]]
    assert own_rows(keys, [7, 7, 7, 7], 1) == [keys[0], summed, summed, summed]


def test_where_domains_are_too_many_too_even_they_are_summed():
    keys = [("a", "law", None), ("b", "art", None), ("c", "sea", None), ("d", "sea", None)]
    # With a cap of one: one source, one domain's rest, and all that is left.
    sea = (OTHER, "sea", None)
    assert own_rows(keys, [9, 4, 3, 2], 1) == [keys[0], ALL, sea, sea]


@pytest.mark.parametrize("beyond", [0, 1, 60])
def test_the_cap_is_2048_and_no_use_is_lost(beyond):
    count = 2048 + beyond
    keys = [(f"s{n:05d}", "law", "CC0") for n in range(count)]
    groups = groups_of(Documents(keys, [9] * count), "all")
    assert len(groups.keys) == LARGEST_GROUPS + (beyond > 0) == 2048 + (beyond > 0)
    table = counted(groups, range(count))
    assert sum(table["tokens"].to_pylist()) == 2 * count
    if beyond:
        # Σ (n + ½) over n = 2048 … 2048 + beyond − 1, and 2 for each.
        found = rows(table)
        assert found[0, OTHER, "law", "CC0"] == (beyond, beyond * (2048 + beyond / 2))
        assert found[1, OTHER, "law", "CC0"] == (beyond, 2.0 * beyond)


def test_a_lens_says_how_much_was_summed(tmp_path, monkeypatch):
    from prismlm.index import scan as module

    keys = [(name, "law", "CC0") for name in "abcd"]
    # Four groups of equal use, and one without a source.
    for limit, share in ((4, 0.0), (3, 0.25), (2, 0.5)):
        monkeypatch.setattr(module.own_rows, "__defaults__", (limit,))
        groups = groups_of(Documents(keys, [9] * 4), "all")
        write_table(counted(groups, range(4)), tmp_path / MASS_FILE)
        assert summed_share(tmp_path) == share
    groups = groups_of(Documents([(None, "law", "CC0")], [9]), "all")
    write_table(counted(groups, [0]), tmp_path / MASS_FILE)
    assert summed_share(tmp_path) == 0
