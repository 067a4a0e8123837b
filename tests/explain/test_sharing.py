"""Models on the Hugging Face Hub, here a server that speaks its routes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pyarrow as pa
import pytest

import prismlm
from prismlm.errors import InputError
from prismlm.lens.cells import Keys
from tests.helpers.hub_server import hub, sha

NAME = "acme/tiny"
EXPLAIN = """
import json, sys
import prismlm
lm = prismlm.load(sys.argv[1], revision=sys.argv[2] if len(sys.argv) > 2 else None)
trace = lm.explain("The heart pumps blood", generate=3)
print(json.dumps([trace.to_dict(), [p.to_dict() for p in trace.passages(5)]]))
"""


@pytest.fixture(scope="module")
def moved(tiny_model, tmp_path_factory):
    """The tiny model in a folder of its own, with its user's files and a base that lies here."""
    directory = tmp_path_factory.mktemp("moved") / "model"
    shutil.copytree(tiny_model, directory)
    about = json.loads((directory / "prismlm.json").read_text())
    about["base"]["name"] = str(directory.parent / "base")
    (directory / "prismlm.json").write_text(json.dumps(about))
    (directory / "attach.json").write_text(json.dumps({"corpus": str(directory)}))
    (directory / "adapter").mkdir()
    named = {"peft_type": "LORA", "base_model_name_or_path": str(directory / "base")}
    (directory / "adapter" / "adapter_config.json").write_text(json.dumps(named))
    (directory / "adapter" / "adapter_model.safetensors").write_bytes(b"weights")
    (directory / "adapter" / "fine-tuning.json").write_text(str(directory))
    (directory / "corpora").mkdir()
    (directory / "corpora" / "tokens.bin").write_text("a text of one's own")
    (directory / "checkpoint-100").mkdir()
    (directory / "checkpoint-100" / "optimizer.pt").write_text("states")
    (directory / "lens" / prismlm.load(directory).lens.name / ".notes").write_text(str(directory))
    return directory


def in_process(server, cache, *arguments):
    settings = {"HF_ENDPOINT": server.url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0"}
    environment = os.environ | settings | {"HF_TOKEN": "hf_test", "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )


def push(server, tmp_path, *arguments):
    return in_process(server, tmp_path / "pushing", "-m", "prismlm", "push", *arguments)


def test_what_is_pushed_explains_the_same_elsewhere_without_its_corpus(moved, tmp_path):
    lm = prismlm.load(moved)
    trace = lm.explain("The heart pumps blood", generate=3)
    with hub() as server:
        pushed = push(server, tmp_path, str(moved), NAME, "--private")
        assert pushed.returncode == 0, pushed.stderr
        assert pushed.stdout.strip() == f"{server.url}/{NAME}"
        assert server.private == {NAME}
        files = server.repositories[NAME][-1]
        assert not any(str(tmp_path.parents[1]).encode() in data for data in files.values())
        kept_back = {"attach.json", "corpora/tokens.bin", "checkpoint-100/optimizer.pt"}
        assert not kept_back & files.keys()
        adapter = {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"}
        assert {name for name in files if name.startswith("adapter/")} == adapter
        named = json.loads(files["adapter/adapter_config.json"])
        assert named == {"peft_type": "LORA", "base_model_name_or_path": "base"}
        assert b"library_name: prismlm" in files["README.md"]
        told = [in_process(server, tmp_path / "a", "-c", EXPLAIN, NAME)]
        told.append(in_process(server, tmp_path / "b", "-c", EXPLAIN, NAME, sha(1)))
    # Without the server, what was fetched is in the cache.
    told.append(in_process(server, tmp_path / "a", "-c", EXPLAIN, NAME))
    for one in told:
        assert one.returncode == 0, one.stderr
        explained, passages = json.loads(one.stdout)
        before = json.loads(json.dumps(trace.to_dict()))
        where = {"model": explained["model"], "lens": explained["lens"]}
        assert explained == before | where
        expected = trace.passages(5)
        assert [p["text"] for p in passages] == [p.to_dict()["text"] for p in expected]
        assert all(p["text"] for p in passages)


def test_the_card_tells_what_the_directory_knows(moved):
    card = prismlm.load(moved).push_to_hub(NAME, dry_run=True).card
    lens = prismlm.load(moved).lens
    assert f"{lens.meta.tokens:,} tokens of {lens.meta.documents:,} documents" in card
    limit = "Training text that the lens does not hold is not shown."
    assert (limit in card) == (lens.meta.trained_on is not True)
    for license in set(lens.cells.keys("license").names):
        assert f"| {license} |" in card


def test_a_card_that_exists_stays(moved, tmp_path):
    with hub() as server:
        for _ in range(2):
            assert push(server, tmp_path, str(moved), NAME, "--no-lens").returncode == 0
        server.repositories[NAME][-1]["README.md"] = b"mine"
        assert push(server, tmp_path, str(moved), NAME).returncode == 0
        files = server.repositories[NAME][-1]
        refused = push(server, tmp_path, str(moved), NAME, "--private")
        assert "acme/tiny is public" in refused.stderr
        assert server.repositories[NAME][-1] is files
        assert files["README.md"] == b"mine"
        assert any(name.startswith("lens/") for name in files)
    (moved / "README.md").write_text("of the directory")
    try:
        assert prismlm.load(moved).push_to_hub(NAME, dry_run=True).card == "of the directory"
    finally:
        (moved / "README.md").unlink()


def test_text_that_may_not_be_passed_on_is_named_before_anything_is_uploaded(moved, monkeypatch):
    lm = prismlm.load(moved)
    cells = lm.lens.cells
    refused_kinds = ["CC-BY-NC-4.0", "(unknown)", "CC BY Non Commercial 4.0", "cc-by-nc4.0"]
    kinds = [*refused_kinds, "CC-BY-SA-4.0", "text public-domain (Gutenberg)"]
    column = [kinds[i % len(kinds)] for i in range(len(cells.documents))]
    monkeypatch.setattr(cells, "keys", lambda _: Keys.from_chunks([pa.array(column)]))
    with pytest.raises(InputError) as refused:
        lm.push_to_hub(NAME)
    message = str(refused.value)
    assert all(kind in message for kind in refused_kinds)
    assert "CC-BY-SA" not in message
    assert "Gutenberg" not in message
    assert lm.push_to_hub(NAME, allow_licenses=refused_kinds, dry_run=True).files
    assert lm.push_to_hub(NAME, with_lens=False, dry_run=True).files


def test_what_is_neither_here_nor_on_the_hub(moved, tmp_path):
    with pytest.raises(InputError, match="is a directory here"):
        prismlm.load(moved, revision="main")
    with pytest.raises(InputError, match="expected org/name"):
        prismlm.load(moved).push_to_hub("tiny")
    with hub() as server:
        nobody = in_process(server, tmp_path, "-c", EXPLAIN, "acme/nobody")
        assert "acme/nobody is neither a directory here nor a model" in nobody.stderr
        server.repositories[NAME] = [{"config.json": b"{}"}]
        other = in_process(server, tmp_path, "-c", EXPLAIN, NAME, "no-such-tag")
        assert "acme/tiny at no-such-tag is neither" in other.stderr
    gone = push(server, tmp_path, str(moved), NAME)
    assert gone.returncode == 2
    assert "was not uploaded" in gone.stderr
    assert "Traceback" not in gone.stderr
