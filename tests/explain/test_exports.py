"""Heads and cards for SAELens and Neuronpedia."""

from __future__ import annotations

import gzip
import json

import pytest
import torch
from sae_lens import SAE

import prismlm
from prismlm.errors import InputError
from prismlm.explain.exports import export_neuronpedia, export_sae_lens
from prismlm.models.seam import capture
from prismlm.models.sidecar import weight_of

# Columns of the tables in apps/webapp/prisma/schema.prisma, which the importer inserts into.
COLUMNS = {
    "features": "modelId layer index sourceSetName creatorId maxActApprox hasVector vector "
    "hookName topkCosSimIndices topkCosSimValues neg_str neg_values pos_str pos_values "
    "frac_nonzero",
    "explanations": "id modelId layer index description authorId notes umap_x umap_y",
    "activations": "id tokens index layer modelId dataSource maxValue maxValueTokenIndex "
    "minValue values creatorId",
}


def rows_of(directory, kind):
    (folder,) = directory.glob(f"*/*/{kind}")
    files = sorted(folder.glob("batch-*.jsonl.gz"))
    return [json.loads(line) for file in files for line in gzip.open(file, "rt")]


def test_cards_are_neuronpedias_rows(lm, tmp_path):
    out = tmp_path / "exports"
    export_neuronpedia(lm, out)
    for kind, columns in COLUMNS.items():
        rows = rows_of(out, kind)
        assert {key for row in rows for key in row} == set(columns.split()), kind
    features = rows_of(out, "features")
    assert [row["index"] for row in features] == [str(i) for i in range(lm.head.num_prototypes)]
    weight = weight_of(lm.model)
    raised = weight @ lm.head.prototypes[3]
    raised -= raised.mean()
    largest = pytest.approx(raised.topk(10).values.tolist(), rel=1e-4, abs=1e-6)
    assert features[3]["pos_values"] == largest
    assert features[3]["topkCosSimIndices"][0] == 3
    places = lm.lens.index.to_pylist()
    activations = rows_of(out, "activations")
    assert len(activations) == len(places)
    for row, place in zip(activations[:20], places[:20], strict=True):
        at = row["maxValueTokenIndex"]
        assert row["tokens"][at] == place["token"]
        assert row["values"][at] == place["activation"] == row["maxValue"] == sum(row["values"])
        assert "".join(row["tokens"][:at]).endswith(place["before"][-20:])
    # The importer leaves out rows whose id it has, of whatever model.
    for row in (*activations, *rows_of(out, "explanations")):
        assert row["id"].startswith(f"{row['modelId']}-{row['layer']}-")
    assert {file.stem for file in out.glob("*/*/*.jsonl")} >= {"model", "release", "source"}


def test_the_head_is_a_dictionary_of_sae_lens_for_the_states_of_its_hook(small_model, lm, tmp_path):
    from transformer_lens.model_bridge import TransformerBridge

    export_sae_lens(lm, tmp_path / "dictionary")
    dictionary = SAE.load_from_disk(tmp_path / "dictionary")
    other = prismlm.load(small_model)
    models = {"hf_model": other.model, "tokenizer": other.tokenizer}
    bridge = TransformerBridge.boot_transformers(other.model.config.model_type, **models)
    ids = lm.encode("The court ruled that")
    with torch.no_grad(), capture(lm.model) as seen:
        lm.model(ids)
        _, cache = bridge.run_with_cache(ids)
    states = cache[dictionary.cfg.metadata.hook_name]
    torch.testing.assert_close(states, seen.z, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dictionary(states[0]), lm.head(states[0]).reconstruction)
    for export in (export_sae_lens, export_neuronpedia):
        with pytest.raises(InputError, match="exists already"):
            export(lm, tmp_path / "dictionary")
