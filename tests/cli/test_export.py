"""prismlm export, as a user calls it."""

from __future__ import annotations

import pytest
from sae_lens import SAE

import prismlm.models.sae_lens  # noqa: F401


@pytest.mark.parametrize("to", ["sae-lens", "neuronpedia"])
def test_a_new_directory_is_written(tiny_model, tmp_path, prism, refused, to):
    out = tmp_path / "out"
    assert prism("export", tiny_model, out, "--to", to).stdout.strip() == str(out)
    if to == "sae-lens":
        assert SAE.load_from_disk(out).cfg.architecture() == "prismlm_prototypes"
    else:
        assert list(out.glob("*/*/features/batch-0.jsonl.gz"))
    assert "exists already" in refused("export", tiny_model, out, "--to", to)
