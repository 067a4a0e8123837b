"""prismlm label: names a person reads, a document that a program reads, and clear refusals."""

import json
import shutil

import pytest


@pytest.fixture(scope="module")
def copy(tiny_model, tmp_path_factory):
    return shutil.copytree(tiny_model, tmp_path_factory.mktemp("label") / "model")


def test_names_are_made_shown_and_used(prism, refused, copy):
    made = prism("label", copy)
    assert made.returncode == 0, made.stderr
    assert "of 192 prototypes named" in made.stdout
    assert "with shuffled names" in made.stdout
    assert "→" in made.stdout
    assert "already" in refused("label", copy)
    again = prism("label", copy, "--overwrite", "--json")
    value = json.loads(again.stdout)
    assert value["source"] == "embedded"
    assert sum(value["categories"].values()) == value["named"]
    explained = prism("explain", copy, "Once upon a time there was a little", "--json")
    position = json.loads(explained.stdout)["positions"][-1]
    assert any("→" in one["name"] and one["category"] for one in position["prototypes"])
