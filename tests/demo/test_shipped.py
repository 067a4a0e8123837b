"""What ships for the demo's model belongs to the texts that ship."""

import json
import zipfile
from importlib.resources import files
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from prismlm.corpus.layout import is_held_out
from prismlm.corpus.pieces import BROKEN
from prismlm.demo.fetched import LENS, SHIPPED
from prismlm.demo.texts import pairs_path, plain_texts
from prismlm.lens import layout
from prismlm.models.sidecar import META_FILE

FOLDER = files("prismlm.demo").joinpath("shipped")
HELDOUT_FRACTION = 0.05


@pytest.fixture(scope="module")
def members():
    """The files of the archive, by name."""
    with zipfile.ZipFile(str(FOLDER.joinpath(SHIPPED))) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def table_of(members, name):
    return pq.read_table(BytesIO(members[f"{LENS}/{name}"]))


def test_the_lens_has_the_texts_that_are_not_held_out_in_their_order(members, tmp_path):
    plain = plain_texts(tmp_path / "plain.parquet")
    rows = [row for path in (pairs_path(), plain) for row in pq.read_table(path).to_pylist()]
    read = [row for row in rows if not is_held_out(row["id"], HELDOUT_FRACTION, row["split"])]
    lens = table_of(members, layout.CELL_DOCUMENTS_FILE)
    assert lens["doc_id"].to_pylist() == [row["id"] for row in read]
    for name in ("source", "domain", "license", "title", "url"):
        assert lens[name].to_pylist() == [row[name] for row in read]


def test_every_context_is_in_the_document_that_it_names(members):
    lens = table_of(members, layout.CELL_DOCUMENTS_FILE)
    index = table_of(members, layout.INDEX_FILE)
    position = index["position"].to_numpy()
    document = np.searchsorted(lens["start"].to_numpy(), position, side="right") - 1
    starts, lengths = (lens[name].to_numpy()[document] for name in ("start", "length"))
    assert (position < starts + lengths).all()
    assert index["doc_id"].to_pylist() == lens["doc_id"].take(document).to_pylist()


def test_a_reader_named_what_is_active_often_enough(members):
    prototypes = table_of(members, layout.PROTOTYPES_FILE)
    named = [name for name in prototypes["name"].to_pylist() if name]
    assert len(named) > 0.6 * prototypes.num_rows
    assert not any(BROKEN in name or "\n" in name for name in named)
    assert all(any(sign.isalpha() for sign in name) for name in named)


def test_what_ships_is_small():
    assert sum(file.stat().st_size for file in Path(str(FOLDER)).iterdir()) < 20_000_000


def test_model_and_lens_are_of_one_making(members):
    made = json.loads(members[META_FILE])["provenance"]["attached"]
    lens = json.loads(members[f"{LENS}/{layout.META_FILE}"])
    assert made["read"]["fingerprint"] == lens["corpus"]
    assert lens["documents"] == table_of(members, layout.CELL_DOCUMENTS_FILE).num_rows
    assert lens["map"]["method"] == "umap"
    # Unseen text was read for support; half of it comes nearer than this, not all and not none.
    assert lens["support"]["predictions"] > 1_000
    assert 0.3 < lens["support"]["nearest"][50] < 0.9
    # As the head chooses them every prototype is in use: among the nearest alone many never are.
    usage = table_of(members, layout.PROTOTYPES_FILE)["usage"].to_numpy()
    assert len(usage) == made["fit.prototypes"]
    assert usage.min() > 1e-4
    assert 0.8 < usage.sum() / made["fit.prototypes_per_token"] <= 1
