"""A lens gets names, and keeps everything else."""

import json
import shutil

import numpy as np
import pytest

import prismlm
from prismlm.errors import InputError, PrismError
from prismlm.lens import layout
from prismlm.lens.labels.map import map_lens
from prismlm.lens.labels.write import label_lens
from tests.helpers.file_limit import limit_files, limit_lifted_after
from tests.helpers.lens_meta import change_meta

FILLED = ("description", "category", "role", "tags", "label_score")


@pytest.fixture(scope="module")
def labelled(tiny_model, tmp_path_factory):
    directory = shutil.copytree(tiny_model, tmp_path_factory.mktemp("labelled") / "model")
    lm = prismlm.load(directory)
    before = {p.name: p.read_bytes() for p in lm.lens.path.iterdir()}
    return directory, before, lm.lens.prototypes, label_lens(lm.lens, lm.model)


def test_columns_that_were_empty_are_filled_and_the_others_stay(labelled):
    directory, before, old, found = labelled
    lens = prismlm.load(directory).lens
    table = lens.prototypes
    for name in old.column_names:
        if name in FILLED:
            assert old[name].null_count == old.num_rows
            assert table[name].null_count < table.num_rows
        elif name not in ("name", "label_source"):
            assert table[name].equals(old[name]), name
    assert table["label_source"].to_pylist().count("embedded") == found["named"]
    changed = {p.name for p in lens.path.iterdir() if before.get(p.name) != p.read_bytes()}
    assert changed == {layout.PROTOTYPES_FILE, layout.META_FILE}
    layout.check_files(lens.path, lens.meta)


def test_the_names_tell_more_than_shuffled_ones(labelled):
    directory, _, _, found = labelled
    assert found["fuzzing"]["mean"] > found["fuzzing"]["shuffled"] + 0.05
    assert found["fuzzing"]["low"] > 0
    assert prismlm.load(directory).lens.meta.labels == json.loads(json.dumps(found))


@pytest.mark.parametrize(
    ("what", "write"),
    [
        ("the names", lambda lm: label_lens(lm.lens, lm.model, overwrite=True)),
        ("the map", lambda lm: map_lens(lm.lens, lm.head)),
    ],
)
def test_a_full_disk_is_told_and_leaves_the_lens_as_it_was(labelled, what, write, monkeypatch):
    # Where prototypes lie takes longest, and is not what is written here.
    monkeypatch.setattr("prismlm.lens.labels.map.laid_out", lambda z: np.zeros((len(z), 2), "f4"))
    lm = prismlm.load(labelled[0])
    before = {p.name: p.read_bytes() for p in lm.lens.path.iterdir()}
    with limit_lifted_after():
        limit_files(500)
        with pytest.raises(PrismError, match=f"{what} in .* could not be written"):
            write(lm)
    assert {p.name: p.read_bytes() for p in lm.lens.path.iterdir()} == before


def test_labels_are_replaced_only_if_asked(labelled):
    directory = labelled[0]
    lm = prismlm.load(directory)
    with pytest.raises(InputError, match=r"labelled already, by embedded.*--overwrite"):
        label_lens(lm.lens, lm.model)
    names = lm.lens.names
    assert any("→" in name for name in names)
    assert label_lens(lm.lens, lm.model, overwrite=True) == labelled[3]
    assert prismlm.load(directory).lens.names == names


def test_without_a_corpus_it_is_said_what_is_missing(labelled, tmp_path):
    directory = shutil.copytree(labelled[0], tmp_path / "model")
    lm = prismlm.load(directory)
    change_meta(lm.lens.path, corpus_path=str(tmp_path / "nowhere"))
    lm = prismlm.load(directory)
    with pytest.raises(InputError, match=r"nowhere.*names are made of its text"):
        label_lens(lm.lens, lm.model, overwrite=True)
