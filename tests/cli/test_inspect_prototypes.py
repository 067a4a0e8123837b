"""prismlm inspect prototypes, against the tables of the lens."""

import json

import prismlm


def test_a_list_and_a_card(prism, refused, tiny_model):
    lens = prismlm.load(tiny_model).lens
    asked = ["inspect", "prototypes", tiny_model, "--limit", "500"]
    listed = json.loads(prism(*asked, "--all", "--json").stdout)
    assert listed["total"] == lens.num_prototypes
    few = int((lens.cell_sizes < 10).sum())
    usual = json.loads(prism(*asked, "--json").stdout)
    assert usual["total"] == lens.num_prototypes - few
    assert usual["items"] == [one for one in listed["items"] if one["positions"] >= 10]
    assert ("fewer than 10 places are not listed: --all" in prism(*asked).stdout) == (few > 0)
    sizes = [one["positions"] for one in listed["items"]]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == lens.meta.cells["rows"]
    first = listed["items"][0]["id"]
    card = json.loads(prism("inspect", "prototypes", tiny_model, first, "--json").stdout)
    rows = lens.rows_of(first)
    assert card["contexts"] == lens.index.to_pylist()[rows][:12]
    assert card["tokens"][0][0] == lens.prototypes["top_tokens"][first][0].as_py()
    shown = prism("inspect", "prototypes", tiny_model, first).stdout
    assert card["name"] in shown
    assert f"[{card['contexts'][0]['token'].strip()}]" in shown
    assert "expected" in refused("inspect", "prototypes", tiny_model, lens.num_prototypes)
    message = refused("inspect", "prototypes", tiny_model, "--category", "Morphologie")
    assert "no prototype" in message
    assert "prismlm label" in message
