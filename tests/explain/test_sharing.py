"""Models on the Hugging Face Hub, here a server that speaks its routes."""

from __future__ import annotations

import json
import shutil

import pyarrow as pa
import pytest
from huggingface_hub import close_session, constants
from typer.testing import CliRunner

import prismlm
from prismlm.cli.app import app
from prismlm.errors import InputError
from prismlm.lens.cells import Keys
from tests.helpers.hub_server import Hub, sha

NAME, TEXT = "acme/tiny", "The heart pumps blood"


@pytest.fixture(scope="module")
def moved(small_model, tmp_path_factory):
    """The tiny model in a folder of its own, with its user's files and a base that lies here."""
    directory = tmp_path_factory.mktemp("moved") / "model"
    shutil.copytree(small_model, directory)
    about = json.loads((directory / "prismlm.json").read_text())
    about["base"]["name"] = str(directory.parent / "base")
    named = {"peft_type": "LORA", "base_model_name_or_path": str(directory / "base")}
    for name, text in {
        "prismlm.json": json.dumps(about),
        "attach.json": json.dumps({"corpus": str(directory)}),
        "adapter/adapter_config.json": json.dumps(named),
        "adapter/adapter_model.safetensors": "weights",
        "adapter/fine-tuning.json": str(directory),
        "corpora/tokens.bin": "a text of one's own",
        "checkpoint-100/optimizer.pt": "states",
        f"lens/{prismlm.load(directory).lens.name}/.notes": str(directory),
    }.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)
    return directory


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A hub that this process's client talks to, with a cache of its own."""
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    with Hub() as served:
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        settings = {"ENDPOINT": served.url, "HUGGINGFACE_CO_URL_TEMPLATE": template}
        settings |= {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
        settings |= {"HF_HUB_CACHE": str(tmp_path / "cache")}
        for name, value in settings.items():
            monkeypatch.setattr(constants, name, value)
        yield served


def push(*arguments):
    pushed = CliRunner().invoke(app, ["push", *map(str, arguments)])
    assert pushed.exit_code == 0, pushed.output
    return pushed


def test_what_is_pushed_explains_the_same_elsewhere_without_its_corpus(moved, server, tmp_path):
    trace = prismlm.load(moved).explain(TEXT, generate=3)
    pushed = push(moved, NAME, "--private")
    assert pushed.stdout.strip() == f"{server.url}/{NAME}"
    assert server.private == {NAME}
    files = server.repositories[NAME][-1]
    assert not any(str(tmp_path.parents[1]).encode() in data for data in files.values())
    kept_back = {"attach.json", "corpora/tokens.bin", "checkpoint-100/optimizer.pt"}
    assert not {*kept_back, "adapter/fine-tuning.json"} & files.keys()
    assert "adapter/adapter_model.safetensors" in files
    named = json.loads(files["adapter/adapter_config.json"])
    assert named == {"peft_type": "LORA", "base_model_name_or_path": "base"}
    assert b"library_name: prismlm" in files["README.md"]
    fetched = [prismlm.load(NAME), prismlm.load(NAME, revision=sha(1))]
    server.__exit__()
    close_session()
    # Without the server, what was fetched is in the cache.
    fetched.append(prismlm.load(NAME))
    before = trace.to_dict()
    for lm in fetched:
        explained = lm.explain(TEXT, generate=3).to_dict()
        assert explained == before | {name: explained[name] for name in ("model", "lens")}
        assert all(passage["text"] for passage in explained["passages"])


def test_a_card_that_exists_stays(moved, server):
    for _ in range(2):
        push(moved, NAME, "--no-lens")
    server.repositories[NAME][-1]["README.md"] = b"mine"
    push(moved, NAME)
    files = server.repositories[NAME][-1]
    with pytest.raises(InputError, match="acme/tiny is public"):
        prismlm.load(moved).push_to_hub(NAME, private=True)
    assert server.repositories[NAME][-1] is files
    assert files["README.md"] == b"mine"
    assert any(name.startswith("lens/") for name in files)
    (moved / "README.md").write_text("of the directory")
    card = prismlm.load(moved).push_to_hub(NAME, dry_run=True).card
    (moved / "README.md").unlink()
    assert card == "of the directory"


def test_the_card_tells_what_the_directory_knows_and_text_not_to_be_passed_on_is_refused(
    moved, monkeypatch
):
    lm, card = prismlm.load(moved), prismlm.load(moved).push_to_hub(NAME, dry_run=True).card
    meta, cells = lm.lens.meta, lm.lens.cells
    assert f"{meta.tokens:,} tokens of {meta.documents:,} documents" in card
    limit = "Training text that the lens does not hold is not shown."
    assert (limit in card) == (meta.trained_on is not True)
    assert all(f"| {license} |" in card for license in cells.keys("license").names)
    refused_kinds = ["CC-BY-NC-4.0", "(unknown)", "CC BY Non Commercial 4.0", "cc-by-nc4.0"]
    kinds = [*refused_kinds, "CC-BY-SA-4.0", "text public-domain (Gutenberg)"]
    column = [kinds[i % len(kinds)] for i in range(len(cells.documents))]
    monkeypatch.setattr(cells, "keys", lambda _: Keys.from_chunks([pa.array(column)]))
    with pytest.raises(InputError) as refused:
        lm.push_to_hub(NAME)
    assert [kind for kind in kinds if kind in str(refused.value)] == refused_kinds
    assert lm.push_to_hub(NAME, allow_licenses=refused_kinds, dry_run=True).files
    assert lm.push_to_hub(NAME, with_lens=False, dry_run=True).files


def test_what_is_neither_here_nor_on_the_hub(moved, server):
    for name, words in (
        ("acme/nobody", "acme/nobody at main is neither a directory here nor a"),
        (moved, "is a directory here"),
    ):
        with pytest.raises(InputError, match=words):
            prismlm.load(name, revision="main")
    server.__exit__()
    close_session()
    with pytest.raises(InputError, match="was not uploaded"):
        prismlm.load(moved).push_to_hub(NAME)
