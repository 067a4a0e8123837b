from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

import prismlm
from prismlm.cli.index import _local_device
from prismlm.lens.layout import read_meta
from tests.helpers import forked
from tests.helpers.forked import SOURCES
from tests.helpers.lens_meta import change_meta


@pytest.fixture
def copy(tiny_model, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "copy"))


def listing(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


def test_index_with_its_defaults(prism, tiny_model, tiny_corpus, copy):
    shutil.rmtree(copy / "lens")
    arguments = ["index", copy, "--corpus", tiny_corpus, "--contexts", 8, "--json"]
    arguments += ["--precision", "float32"]
    result = prism(*arguments)
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    lens = copy / "lens" / "sample"
    meta = read_meta(lens)
    # The recipe's 128 tokens, three quarters of them, and the corpus the model was trained on.
    assert (meta.window, meta.stride, meta.contexts) == (128, 96, 8)
    assert meta.trained_on is True
    assert summary["lens"] == str(lens)
    assert (summary["tokens"], summary["documents"]) == (meta.tokens, meta.documents)
    usage = pq.read_table(lens / "prototypes.parquet")["usage"].to_numpy()
    assert summary["prototypes"] == len(usage) == 192
    assert summary["in_use"] == (usage > 0).sum()
    kept = pq.read_table(lens / "index.parquet")["prototype"].to_pylist()
    assert summary["with_contexts"] == len(set(kept))
    assert "Indexing: " in result.stderr
    same = tiny_model / "lens" / "sample"
    assert (lens / "index.parquet").read_bytes() == (same / "index.parquet").read_bytes()

    refused = prism(*arguments)
    assert refused.returncode == 2
    assert "--overwrite" in refused.stderr


def test_a_stale_lens_is_rebuilt_by_the_command_that_the_message_names(
    prism, copy, tiny_corpus, tmp_path
):
    head = copy / "prototype_head.safetensors"
    tensors = load_file(str(head))
    tensors["prototypes"][0, 0] += 0.5
    save_file(tensors, str(head))
    meta = json.loads((copy / "prismlm.json").read_text(encoding="utf-8"))
    del meta["provenance"]["corpus"]
    (copy / "prismlm.json").write_text(json.dumps(meta), encoding="utf-8")
    result = prism(
        "index", copy, "--corpus", tiny_corpus, "--overwrite", "--contexts", 2, "--window", 64,
        "--split", "heldout", "--no-text",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "with contexts" in result.stdout
    lens = prismlm.load(copy).lens
    assert lens is not None
    assert (lens.meta.window, lens.meta.stride, lens.meta.split) == (64, 48, "heldout")
    assert lens.meta.trained_on is None
    assert lens.index["token"].null_count == lens.index.num_rows


def test_dry_run_writes_nothing(prism, tiny_model, tiny_corpus):
    before = listing(tiny_model)
    result = prism(
        "index", tiny_model, "--corpus", tiny_corpus, "--lens", "new", "--dry-run", "--json"
    )
    assert result.returncode == 0, result.stderr
    estimate = json.loads(result.stdout)
    lens = tiny_model / "lens" / "sample"
    assert estimate["tokens"] == read_meta(lens).tokens
    assert 0.01 < estimate["seconds"] < 600
    assert estimate["memory_bytes"] > 10**8
    assert listing(tiny_model) == before


def test_arguments_that_cannot_be_used(refused, tiny_model, tiny_corpus, tmp_path):
    index = ["index", tiny_model, "--corpus", tiny_corpus, "--lens", "new"]
    for arguments, words in (
        ([*index, "--split", "held-out"], ["'held-out'", "'heldout'"]),
        ([*index, "--window", 4000], ["4000", "reads 512"]),
        ([*index, "--window", 0], ["'--window'"]),
        ([*index, "--stride", 0], ["'--stride'"]),
        ([*index, "--contexts", 0], ["'--contexts'"]),
        ([*index, "--positions", 0], ["--positions is 0", "above 0 and up to 1"]),
        ([*index, "--positions", 1.5], ["--positions is 1.5"]),
        ([*index, "--positions", "nan"], ["--positions is nan"]),
        ([*index, "--codes", "int4"], ["--codes is 'int4'", "'int8' or 'pq'"]),
        ([*index, "--precision", "bf17"], ["'bf17'", "'bf16'"]),
        ([*index, "--device", "cpuu"], ["the device 'cpuu' cannot be used", "expected cpu"]),
        (["index", tiny_model, "--corpus", tmp_path], ["is not a corpus"]),
        (["index", tmp_path, "--corpus", tiny_corpus], ["prismlm.json"]),
        ([*index[:-1], ".hidden"], ["dot"]),
        ([*index, "--shard", "3/2"], ["--shard 3/2", "I/N"]),
    ):
        message = refused(*arguments)
        assert all(word in message for word in words), message
    assert not (tiny_model / "lens" / "new").exists()


def test_inspect(prism, refused, tiny_model, copy):
    result = prism("inspect", tiny_model, "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    meta = read_meta(tiny_model / "lens" / "sample")
    assert found["tokens"] == found["convergence"][-1]["tokens"] == meta.tokens
    assert 0 < found["converged_at"] <= 1
    assert found["convergence"][0]["share"] < 0.2
    index = pq.read_table(tiny_model / "lens" / "sample" / "index.parquet")
    assert found["contexts"] == index.num_rows
    assert len(found["by_prototype"]) == 192
    shown = prism("inspect", tiny_model)
    assert shown.returncode == 0, shown.stderr
    for words in ("nearest", "share", "duplicate share", "effective documents"):
        assert words in shown.stdout
    # Whether there was enough text is the last that it says.
    assert " ".join(shown.stdout.split()).endswith(found["verdict"])
    assert prism("inspect", "index", tiny_model, "--json").stdout == result.stdout

    contexts = copy / "lens" / "sample" / "contexts.safetensors"
    whole = contexts.read_bytes()
    contexts.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "is damaged" in refused("inspect", copy)
    shutil.rmtree(copy / "lens")
    assert "has no lens" in refused("inspect", copy)


def test_a_lens_without_a_curve_is_inspected(prism, copy):
    change_meta(copy / "lens" / "sample", convergence=[])
    shown = prism("inspect", copy)
    assert shown.returncode == 0, shown.stderr
    assert "no convergence curve" in shown.stdout


def test_each_process_has_a_gpu_of_its_own(monkeypatch):
    assert [_local_device(name) for name in ("cuda", "cpu")] == ["cuda", "cpu"]
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert [_local_device(name) for name in ("cuda", "cuda:1", "cpu")] == [
        "cuda:3",
        "cuda:1",
        "cpu",
    ]


def under_torchrun(arguments):
    """Run three processes as a user does: four starts of Python with PyTorch."""
    environment = {**os.environ, "PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"]
    done = subprocess.run(
        [*command, "-m", "prismlm", *map(str, arguments)],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    return [(done.returncode, done.stdout, done.stderr)]


def as_torchrun_does(arguments):
    """Fork three processes that the environment tells what torchrun would tell them."""
    stated = (
        "import os; os.environ |= {{'WORLD_SIZE': '3', 'LOCAL_WORLD_SIZE': '3', 'RANK': '{0}'}}\n"
    )
    started = [
        forked.start(*arguments, code=stated.format(rank) + forked.COMMAND) for rank in range(3)
    ]
    streams = [process.communicate(240) for process in started]
    return [(p.returncode, *said) for p, said in zip(started, streams, strict=True)]


@pytest.mark.parametrize(
    "spread", [pytest.param(under_torchrun, marks=pytest.mark.slow), as_torchrun_does]
)
def test_shards_under_torchrun_and_by_hand(prism, copy, tiny_corpus, spread):
    arguments = ["index", copy, "--corpus", tiny_corpus, "--contexts", 8]
    arguments += ["--precision", "float32"]
    done = spread([*arguments, "--lens", "spread", "--json"])
    assert [code for code, _, _ in done] == [0] * len(done), done
    assert json.loads("".join(stdout for _, stdout, _ in done))["prototypes"] == 192
    first = prism(*arguments, "--lens", "parts", "--shard", "2/2", "--json")
    assert json.loads(first.stdout) == {"lens": None, "shards": 2, "done": [2], "left": [1]}
    assert prism(*arguments, "--lens", "parts", "--shard", "1/2").returncode == 0
    lenses = copy / "lens"
    for name in ("index.parquet", "contexts.safetensors", "mass.parquet", "meta.json"):
        whole = (lenses / "sample" / name).read_bytes()
        assert (lenses / "spread" / name).read_bytes() == whole, name
        assert (lenses / "parts" / name).read_bytes() == whole, name
    assert sorted(path.name for path in lenses.iterdir()) == ["parts", "sample", "spread"]
