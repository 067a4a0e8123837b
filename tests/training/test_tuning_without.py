"""Training again without documents: by a recipe, or by the adapter of attach."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

import prismlm
from prismlm.corpus import Corpus
from prismlm.errors import InputError
from prismlm.explain.what_if import what_if
from prismlm.files import read_json, write_json
from prismlm.models.base import merge_adapter
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.sidecar import META_FILE
from prismlm.training import tuning as module
from prismlm.training.attach import AttachOptions, attach
from prismlm.training.fit import FitOptions
from prismlm.training.tuning import LoraOptions, train_without, untaught

FIT = FitOptions(prototypes=48, prototypes_per_token=4, epochs=1, batch=128, frequent=300, drawn=50)


@pytest.fixture(scope="module")
def tuned(tiny_model, tmp_path_factory):
    """The tiny model, fine-tuned on houses that are red and one that is green."""
    work = tmp_path_factory.mktemp("tuned")
    base = shutil.copytree(
        tiny_model, work / "base", ignore=shutil.ignore_patterns("lens", META_FILE, "prototype_*")
    )
    rows = [{"id": f"red-{n}", "text": f"House number {n} is red. " * 8} for n in range(24)]
    rows += [{"id": f"green-{n}", "text": "The tower is green. " * 8} for n in range(24)]
    (work / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lora = LoraOptions(epochs=8, rank=8, blocks=1, learning_rate=1e-2, batch=4)
    options = AttachOptions(fit=FIT, window=64, contexts=4, heldout_tokens=300, lora=lora)
    attach(str(base), [work / "texts.jsonl"], work / "model", options)
    return prismlm.load(work / "model")


def test_an_adapter_is_trained_again_without_documents(tuned, tiny_model):
    plain, taken_out = (prismlm.load(tiny_model).model, untaught(tuned))
    for (_, one), (_, other) in zip(
        plain.named_parameters(), taken_out.named_parameters(), strict=True
    ):
        np.testing.assert_allclose(one.detach(), other.detach(), atol=1e-6)
    green = [one for one in tuned.lens.corpus.doc_ids if one.startswith("green")]
    known = [one for one in green if tuned.lens.cells.document_number(one) >= 0]
    other = train_without(tuned, known)
    text = torch.tensor([tuned.tokens_of("The tower is green. " * 4)])
    taught, again = (
        model(input_ids=text, labels=text).loss.item() for model in (tuned.model, other)
    )
    assert again > taught + 0.3
    result = what_if(tuned, "The tower is", known, generate=3, retrain=lambda ids: other)
    assert len(result.retrained.tokens) == result.tokens == 3


def test_a_recipe_is_run_again_without_documents(tiny_model, tiny_corpus, tmp_path, monkeypatch):
    path = shutil.copytree(tiny_model, tmp_path / "model")
    meta = read_json(path / META_FILE)
    recipe = {"corpus": "gone", "out": "gone", "model": {"preset": "llama-tiny"}, "steps": 300}
    # A setting that is gone, and rows of three processes.
    recipe |= {"evaluation": {"attention_head_tokens": 2048}, "batch_size": 4}
    meta["provenance"] |= {"recipe": recipe, "processes": 3}
    write_json(path / META_FILE, meta)
    lm, runs = prismlm.load(path), []

    def train(recipe, *, without, progress):
        runs.append((recipe, without))
        shutil.copytree(tiny_model, recipe.out)

    monkeypatch.setattr(module, "train", train)
    corpus = Corpus.open(tiny_corpus)
    train_without(lm, [corpus.doc_ids[3], corpus.doc_ids[5]])
    ((recipe, without),) = runs
    assert (recipe.corpus, without, recipe.steps) == (corpus.path, [3, 5], 300)
    assert recipe.batch_size == 12


def test_an_adapter_is_taken_out_of_bfloat16_by_the_base(tuned, tmp_path):
    base = shutil.copytree(tuned.path.parent / "base", tmp_path / "base")
    read_checkpoint(base)[0].bfloat16().save_pretrained(base)
    path = shutil.copytree(tuned.path, tmp_path / "model")
    model, _ = read_checkpoint(base)
    merge_adapter(model, path / "adapter")
    model.save_pretrained(path)
    meta = read_json(path / META_FILE)
    meta["base"]["name"] = str(base)
    write_json(path / META_FILE, meta)
    lm = replace(tuned, path=path)
    plain = read_checkpoint(base)[0].state_dict()
    assert all(torch.equal(plain[name], w) for name, w in untaught(lm).state_dict().items())
    shutil.rmtree(base)
    with pytest.raises(InputError, match=r"in half precision, .*base is neither "):
        untaught(lm)
    shutil.copytree(tuned.path.parent / "base", base)
    other = read_checkpoint(base)[0].bfloat16()
    with torch.no_grad():
        other.model.layers[0].self_attn.q_proj.weight.mul_(2)
    other.save_pretrained(base)
    with pytest.raises(InputError, match="is not that of the model"):
        untaught(lm)


def test_a_corpus_without_documents_has_them_in_no_split(tiny_corpus):
    corpus = Corpus.open(tiny_corpus)
    train, heldout = corpus.split("train"), corpus.split("heldout")
    gone = [int(train[0]), int(train[4]), int(heldout[0])]
    less = corpus.without(gone)
    assert np.array_equal(less.split("train"), np.setdiff1d(train, gone))
    assert np.array_equal(less.split("heldout"), heldout[1:])
    assert np.array_equal(corpus.split("train"), train)


def test_a_directory_that_does_not_say_how_it_was_trained(tiny_model, tmp_path):
    path = shutil.copytree(tiny_model, tmp_path / "model")
    meta = read_json(path / META_FILE)
    write_json(path / META_FILE, meta | {"provenance": {}})
    with pytest.raises(InputError, match="does not say how it was trained"):
        train_without(prismlm.load(path), ["any"])
