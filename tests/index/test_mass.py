"""Counting uses by source, domain and licence, up to the cap of groups and beyond it."""

import pytest
import torch

from prismlm import fingerprints
from prismlm.index.layout import MASS_FILE, summed_share, write_table
from prismlm.index.mass import LARGEST_GROUPS, OTHER, MassCounter

ALL = (OTHER, OTHER, OTHER)


def by_hash(keys):
    return sorted(keys, key=lambda key: fingerprints.of_json(list(key)))


def counted(keys, limit, order=None):
    """Two positions of each group g = 0, 1 … use prototypes 0 and 1 with activation g + ½, 2."""
    counter = MassCounter(3, limit)
    for number in order or range(len(keys)):
        indices = torch.tensor([[0, 2], [1, 2]])
        activations = torch.tensor([[number + 0.5, 0.0], [2.0, -1.0]])
        counter.add(keys, torch.full((2,), number), indices, activations)
    return counter


def rows(counter):
    """Return {(prototype, source, domain, licence): (tokens, activation_sum)}."""
    table = counter.table().to_pylist()
    return {
        (row["prototype"], row["source"], row["domain"], row["license"]): (
            row["tokens"],
            row["activation_sum"],
        )
        for row in table
    }


def test_at_the_cap_every_group_has_its_rows():
    keys = [("a", "law", "CC0"), ("b", "law", "CC0"), ("c", "law", None)]
    assert rows(counted(keys, limit=3)) == {
        (0, "a", "law", "CC0"): (1, 0.5),
        (1, "a", "law", "CC0"): (1, 2.0),
        (0, "b", "law", "CC0"): (1, 1.5),
        (1, "b", "law", "CC0"): (1, 2.0),
        (0, "c", "law", None): (1, 2.5),
        (1, "c", "law", None): (1, 2.0),
    }


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_beyond_the_cap_the_largest_hashes_are_summed_with_their_domain(order):
    keys = by_hash([(name, "law", "CC0") for name in "abcd"])
    # Groups 2 and 3 come last: activations ½ + 2 and ½ + 3 of prototype 0, 2 + 2 of prototype 1.
    assert rows(counted(keys, 2, order)) == {
        (0, *keys[0]): (1, 0.5),
        (1, *keys[0]): (1, 2.0),
        (0, *keys[1]): (1, 1.5),
        (1, *keys[1]): (1, 2.0),
        (0, OTHER, "law", "CC0"): (2, 6.0),
        (1, OTHER, "law", "CC0"): (2, 4.0),
    }


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_where_domains_are_too_many_too_even_they_are_summed(order):
    keys = by_hash([("a", "law", None), ("b", "art", None), ("c", "sea", None), ("d", "ice", None)])
    parents = by_hash([(OTHER, *key[1:]) for key in keys[1:]])
    number = {(OTHER, *key[1:]): place for place, key in enumerate(keys)}
    first, *others = parents
    # With a cap of one: one source, one domain's rest, and all that is left.
    assert rows(counted(keys, 1, order)) == {
        (0, *keys[0]): (1, 0.5),
        (1, *keys[0]): (1, 2.0),
        (0, *first): (1, number[first] + 0.5),
        (1, *first): (1, 2.0),
        (0, *ALL): (2, sum(number[key] + 0.5 for key in others)),
        (1, *ALL): (2, 4.0),
    }


@pytest.mark.parametrize("beyond", [0, 1, 60])
def test_the_cap_is_2048_and_no_use_is_lost(beyond):
    keys = by_hash([(f"s{n}", "law", "CC0") for n in range(LARGEST_GROUPS + beyond)])
    counter = counted(keys, LARGEST_GROUPS)
    assert LARGEST_GROUPS == MassCounter(3).limit == 2048
    assert len(counter.rows) == 2048 + (beyond > 0)
    assert counter.usage().tolist() == [2048 + beyond, 2048 + beyond, 0]
    if beyond:
        # Σ (g + ½) over g = 2048 … 2048 + beyond − 1, and 2 for each.
        expected = beyond * (2048 + (beyond - 1) / 2 + 0.5)
        found = rows(counter)
        assert found[0, OTHER, "law", "CC0"] == (beyond, expected)
        assert found[1, OTHER, "law", "CC0"] == (beyond, 2.0 * beyond)
    halves = counted(keys, LARGEST_GROUPS, range(0, len(keys), 2))
    halves.merge(counted(keys, LARGEST_GROUPS, range(1, len(keys), 2)).rows)
    assert halves.table().equals(counter.table())


def test_a_lens_says_how_much_was_summed(tmp_path):
    keys = by_hash([(name, "law", "CC0") for name in "abcd"])
    # Four groups of equal use, and one without a source.
    for limit, share in ((4, 0.0), (3, 0.25), (2, 0.5)):
        write_table(counted(keys, limit).table(), tmp_path / MASS_FILE)
        assert summed_share(tmp_path) == share
    write_table(counted([(None, "law", "CC0")], 3).table(), tmp_path / MASS_FILE)
    assert summed_share(tmp_path) == 0
