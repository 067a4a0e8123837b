"""A head attached to a checkpoint, fine-tuned or not; and a model trained again without texts."""

import json
import os
import shutil
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import prismlm
from prismlm.cli.app import app
from prismlm.corpus import Corpus
from prismlm.errors import InputError, Interrupted, PrismError
from prismlm.explain.what_if import what_if
from prismlm.files import read_json, write_json
from prismlm.models.base import merge_adapter
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.sidecar import HEAD_FILE, META_FILE, load_sidecar
from prismlm.models.uncertainty_feedback import uncertainty_of
from prismlm.training import tuning
from prismlm.training.attach import AttachOptions, attach, estimate_attach
from prismlm.training.fit import FitOptions
from prismlm.training.tuning import LoraOptions, TableOptions, adapt, train_without, untaught
from tests.helpers.processes import losses_of_tuning
from tests.helpers.spread_runs import launch as spread
from tests.helpers.tiny import build_small_corpus

# The package has a function of the module's name.
module = sys.modules[attach.__module__]
FIT = FitOptions(prototypes=48, prototypes_per_token=4, epochs=2, batch=128, frequent=300, drawn=50)
OPTIONS = AttachOptions(fit=FIT, window=64, contexts=4, heldout_tokens=500)


@pytest.fixture(scope="module")
def base(tiny_model, tmp_path_factory):
    """The tiny model as a plain Hugging Face checkpoint."""
    directory = tmp_path_factory.mktemp("base") / "plain"
    shutil.copytree(tiny_model, directory, ignore=shutil.ignore_patterns("lens", META_FILE))
    (directory / HEAD_FILE).unlink()
    return directory


@pytest.fixture(scope="module")
def corpus(tiny_model, tmp_path_factory):
    """Some five thousand tokens."""
    return build_small_corpus(tiny_model, tmp_path_factory.mktemp("corpus"), every=20)


@pytest.fixture(scope="module")
def attached(base, corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("attached") / "model"
    return attach(str(base), [corpus], out, OPTIONS)


def test_a_model_whose_layers_are_on_disk(base, attached, corpus, tmp_path, monkeypatch):
    layers = dict.fromkeys(("model.layers", "model.embed_tokens", "lm_head"), "disk")

    def opened(path, *, device):
        assert device == "balanced"
        places = layers | {"model.norm": "cpu", "model.rotary_emb": "cpu"}
        return read_checkpoint(path, device=places)

    monkeypatch.setattr(module, "read_checkpoint", opened)
    options = replace(OPTIONS, device="balanced")
    estimated = estimate_attach(str(base), [corpus], options)
    assert estimated.figures["states"] == attached.states
    result = attach(str(base), [corpus], tmp_path / "spread", options)
    found, expected = (each.quality.to_dict() for each in (result, attached))
    # The product of a matrix with a single state is rounded by its place in memory.
    near = pytest.approx(expected["mean_state_ce"], rel=1e-6)
    assert found == expected | {"mean_state_ce": near}
    heads = [load_sidecar(each.directory).head for each in (result, attached)]
    assert torch.equal(heads[0].prototypes, heads[1].prototypes)
    with pytest.raises(InputError, match="through which --uncertainty cannot train"):
        replace(options, uncertainty=TableOptions())
    tuned = replace(options, lora=LoraOptions())
    for run in (partial(attach, out=tmp_path / "tuned"), estimate_attach):
        with pytest.raises(InputError, match="start several, which divide the model"):
            run(str(base), [corpus], options=tuned)


def test_the_model_is_unchanged_and_explains_and_its_base_is_recorded(attached, base, corpus):
    lm, plain = prismlm.load(attached.directory), AutoModelForCausalLM.from_pretrained(base)
    ids = torch.arange(20)[None]
    assert torch.equal(plain(input_ids=ids).logits, lm.model(input_ids=ids).logits)
    # Linked, not copied: both names are of one file.
    assert os.path.samefile(*(p / "model.safetensors" for p in (base, attached.directory)))
    trace = lm.explain("The cell is the smallest unit", generate=3)
    assert trace.passages(3)
    assert lm.lens.meta.trained_on is False
    assert lm.lens.meta.tokens == attached.states
    assert lm.lens.meta.labels["source"] == "embedded"
    assert any("→" in name for name in lm.lens.names)
    meta = read_json(attached.directory / META_FILE)
    assert meta["base"]["name"] == str(base)
    read = meta["provenance"]["attached"]["read"]
    assert read["fingerprint"] == Corpus.open(corpus).fingerprint
    assert not (attached.directory / module.WORK).exists()


FLOAT32 = {"lora": LoraOptions(0.2, batch=4, rank=2), "precision": "float32", "states_gb": 4e-4}
TABLE = {"uncertainty": TableOptions(0.2, batch=4)}
CASES = {"tuned": FLOAT32 | TABLE, "sharded": FLOAT32 | {"device": "balanced"}}
# Rows of a step: of one, the second process has none, and of 33 fewer passes.
BATCHES = (1, 33)


def tuning_job(base, corpus, batch):
    return base, corpus, LoraOptions(rank=2, blocks=0.5, batch=batch), batch


@pytest.fixture(scope="module")
def launched(base, corpus, tmp_path_factory):
    """Attach and fine-tune in one start of two processes; return what each found."""
    directory = tmp_path_factory.mktemp("two")
    attached = {
        name: (str(base), [corpus], directory / name, replace(OPTIONS, **options))
        for name, options in CASES.items()
    }
    tuning = {batch: (*tuning_job(base, corpus, batch), "cpu") for batch in BATCHES}
    return directory, spread(directory, {"attach": attached, "tuning": tuning})


@pytest.mark.parametrize("name", CASES)
def test_two_processes_attach_the_head_of_one(base, corpus, launched, tmp_path, name):
    """Each reads some of the states, and takes half of every step."""
    here = replace(OPTIONS, **CASES[name] | {"device": "auto"})
    one = attach(str(base), [corpus], tmp_path / "one", here).directory
    two = launched[0] / name
    assert {path.name for path in two.iterdir()} == {path.name for path in one.iterdir()}
    for path in (*one.glob("*.safetensors"), *one.glob("adapter/*.safetensors")):
        ours, theirs = load_file(two / path.relative_to(one)), load_file(path)
        for key, value in theirs.items():
            if key == "seen":
                # Of codes, whose number is more stable than which they are.
                assert int(ours[key].sum()) == pytest.approx(int(value.sum()), rel=5e-2)
            else:
                assert (ours[key] - value).norm() <= 1e-3 * value.norm(), key
    history = [(path / "training.jsonl").read_text().splitlines() for path in (two, one)]
    for ours, theirs in zip(*(map(json.loads, lines) for lines in history), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)
    ours, theirs = (load_sidecar(path).provenance for path in (two, one))
    assert ours["attached"] | {"device": "auto"} == theirs["attached"]
    for part in {"quality", "fine_tuned", "uncertainty_feedback"} & theirs.keys():
        assert ours[part] == pytest.approx(theirs[part], rel=1e-2)
    lenses = [prismlm.load(path).lens for path in (two, one)]
    assert lenses[0].meta.tokens == lenses[1].meta.tokens


@pytest.mark.parametrize("batch", BATCHES)
def test_processes_that_share_the_base_take_the_steps_of_one(base, corpus, launched, batch):
    losses, learned, _ = losses_of_tuning(*tuning_job(base, corpus, batch))
    for results in launched[1]:
        ours, adapters, share = results[batch]
        assert ours == pytest.approx(losses, rel=1e-6)
        assert share == pytest.approx(0.5, abs=0.02)
        for mine, theirs in zip(adapters, learned, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_the_same_command_returns_the_result_and_other_settings_are_refused(
    base, corpus, attached, tmp_path
):
    again = attach(str(base), [corpus], attached.directory, OPTIONS)
    assert (again.quality, again.states) == (attached.quality, attached.states)
    with pytest.raises(InputError, match=r"begun with other settings \(window: 64 → 32\)"):
        attach(str(base), [corpus], attached.directory, replace(OPTIONS, window=32))
    # A part of a lens by another number of processes is discarded.
    out = shutil.copytree(attached.directory, tmp_path / "model")
    lens = out / attached.lens.relative_to(attached.directory)
    left = lens.with_name(f".{lens.name}.partial") / "part-00000-of-00002"
    left.mkdir(parents=True)
    (left / "run.json").write_text('{"shards": 2}')
    shutil.rmtree(lens)
    assert attach(str(base), [corpus], out, OPTIONS).lens == lens
    assert [path.name for path in lens.parent.iterdir()] == [lens.name]


def test_texts_become_a_corpus_which_may_be_smaller_than_the_prototypes(base, tmp_path):
    (texts := tmp_path / "texts").mkdir()
    for number in range(80):
        (texts / f"{number}.txt").write_text(f"The story of house number {number}. " * 8)
    many, out = replace(OPTIONS, fit=FitOptions(prototypes=10**7), window=32), tmp_path / "model"
    with pytest.raises(InputError, match="typo does not exist"):
        attach(str(base), [tmp_path / "typo"], out, many)
    for run in (partial(attach, out=out), estimate_attach):
        with pytest.raises(InputError, match="fewer than the 10,000,000 prototypes"):
            run(str(base), [texts], options=many)
    # What the message advises is then possible in the same place; without a number, one that fits.
    fitting = replace(OPTIONS, fit=replace(FIT, prototypes=None))
    result = attach(str(base), [texts], out, fitting)
    assert result.corpus == out / "corpora" / "texts"
    noted = read_json(out / META_FILE)["provenance"]["attached"]
    assert noted["fit.prototypes"] == max(4, result.states // 16)
    lm = prismlm.load(out)
    assert lm.head.num_prototypes == noted["fit.prototypes"]
    assert lm.explain("The story of house").passages(1)


def test_a_model_in_bfloat16(base, corpus, tmp_path):
    half = shutil.copytree(base, tmp_path / "half")
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(half)
    result = attach(str(half), [corpus], tmp_path / "model", OPTIONS)
    lm = prismlm.load(result.directory)
    assert lm.model.dtype == torch.bfloat16
    assert lm.explain("The cell is the smallest unit").passages(1)
    assert result.quality.recovered > 0.5


def test_a_broken_model_is_named_and_can_be_repaired(base, tmp_path):
    model, out, texts = tmp_path / "harmed", tmp_path / "out", [tmp_path / "a.txt"]
    shutil.copytree(base, model, ignore=shutil.ignore_patterns("*.safetensors"))
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(model, max_shard_size="20KB")
    sorted(model.glob("model-*.safetensors"))[1].unlink()
    texts[0].write_text("Some text, and a little more of it. " * 60)
    texts.append(shutil.copy(texts[0], tmp_path / "b.txt"))
    for run in (partial(attach, out=out), estimate_attach):
        with pytest.raises(PrismError, match=f"the checkpoint in {model} cannot be read"):
            run(str(model), texts, options=OPTIONS)
    # Nothing broken was copied, so that the same command resumes with what was put right.
    shutil.rmtree(model)
    shutil.copytree(base, model)
    assert attach(str(model), texts, out, OPTIONS).lens.is_dir()


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
    """The tiny model, fine-tuned on houses that are red and a tower that is green."""
    work = tmp_path_factory.mktemp("tuned")
    texts = {"red": "House number {} is red. ", "green": "The tower is green. "}
    rows = [
        {"id": f"{colour}-{n}", "text": text.format(n) * 8}
        for colour, text in texts.items()
        for n in range(24)
    ]
    (work / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lora = LoraOptions(epochs=8, rank=8, blocks=1, learning_rate=1e-2, batch=4)
    attach(str(base), [work / "texts.jsonl"], work / "model", replace(OPTIONS, lora=lora))
    return prismlm.load(work / "model")


def test_fine_tuning_lowers_the_loss_and_the_directory_is_a_plain_checkpoint(base, tuned):
    assert load_sidecar(tuned.path).provenance["fine_tuned"]["steps"] > 1
    assert tuned.lens.meta.trained_on == "fine-tuned"
    assert "by fine-tuning" in tuned.explain("House number", generate=2).to_html()
    adapter = tuned.path / "adapter"
    assert read_json(adapter / "adapter_config.json")["base_model_name_or_path"] == str(base)
    assert not list(adapter.glob("*.md"))
    # A number that no text has.
    ids = torch.tensor([tuned.tokens_of("House number 77 is red. " * 8)])
    plain = AutoModelForCausalLM.from_pretrained(base)
    before = plain(ids, labels=ids).loss
    merged = AutoModelForCausalLM.from_pretrained(tuned.path)(ids, labels=ids)
    assert merged.loss < before - 0.5
    adapted = PeftModel.from_pretrained(plain, adapter)(ids)
    torch.testing.assert_close(merged.logits, adapted.logits, atol=1e-4, rtol=1e-4)


def test_a_run_that_was_cut_off_is_bound_to_the_options_of_its_finished_parts(
    base, corpus, tmp_path, monkeypatch
):
    lora, table = LoraOptions(0.2, batch=4, rank=2), TableOptions(0.2, batch=4)
    options, out = replace(OPTIONS, lora=lora, uncertainty=table), tmp_path / "model"

    def cut(*args, **kwargs):
        raise KeyboardInterrupt

    def run(**changes):
        return attach(str(base), [corpus], out, replace(options, **changes))

    with monkeypatch.context() as patched:
        patched.setattr(module, "save_uncertainty", cut)
        with pytest.raises(Interrupted, match="finished parts are kept"):
            run()
    with pytest.raises(InputError, match=r"begun with other settings .*lora\.rank: 2 → 4"):
        run(lora=replace(lora, rank=4))
    adapter = out / "adapter" / "adapter_model.safetensors"
    written = adapter.stat().st_mtime_ns
    result = run()
    assert adapter.stat().st_mtime_ns == written
    assert load_sidecar(out).provenance["uncertainty_feedback"] == result.uncertainty
    assert result.quality.ce == pytest.approx(result.uncertainty["ce"], rel=1e-4)


def test_fine_tuning_in_bf16_keeps_the_angles_of_positions(base, corpus, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base)
    before = {name: value.clone() for name, value in model.named_buffers()}
    options, out = LoraOptions(0.05, batch=4, rank=2), tmp_path / "adapter"
    adapt(model, Corpus.open(corpus), options, out, base="tiny", window=64, bf16=True)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert any("inv_freq" in name for name in before)
    for name, value in before.items():
        assert torch.equal(model.get_buffer(name), value), name


SETTINGS = (
    "--prototypes 48 --prototypes-per-token 4 --epochs 1 --batch 128 --window 64 --contexts 4 "
    "--uncertainty --uncertainty-epochs 0.5"
)


def test_a_table_is_trained_and_its_effect_is_reported(base, corpus, tmp_path):
    def run(*words):
        return CliRunner().invoke(app, ["attach", *map(str, words), *SETTINGS.split()])

    out = tmp_path / "model"
    done = run(base, "--corpus", corpus, "--out", out, "--json")
    assert done.exit_code == 0, done.output
    value = json.loads(done.stdout)
    effect = value["uncertainty"]
    assert effect["tokens"] > 100
    assert effect["ce"] != effect["ce_without"]
    # The head is measured on the model with its table.
    assert value["quality"]["ce"] == pytest.approx(effect["ce"], rel=1e-4)
    lm = prismlm.load(out)
    feedback = uncertainty_of(lm.model)
    assert feedback.embedding.weight.shape[0] == 64
    assert feedback.embedding.weight.any()
    assert os.path.samefile(base / "model.safetensors", out / "model.safetensors")
    # With nothing fed back it is the base model.
    plain, ids = AutoModelForCausalLM.from_pretrained(out), torch.arange(20)[None]
    with torch.no_grad():
        bare = lm.model(ids, uncertainty_codes=torch.full_like(ids, -1), use_cache=False).logits
        torch.testing.assert_close(bare, plain(ids).logits)
    assert len(lm.explain("The river", generate=3)) > 3
    refused = run(out, "--corpus", corpus, "--out", tmp_path / "again")
    assert "has a table of uncertainty codes already" in " ".join(refused.output.split())


def test_an_adapter_is_trained_again_without_documents(base, tuned):
    plain = AutoModelForCausalLM.from_pretrained(base)
    for one, other in zip(plain.parameters(), untaught(tuned).parameters(), strict=True):
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

    monkeypatch.setattr(tuning, "train", train)
    corpus = Corpus.open(tiny_corpus)
    train_without(lm, [corpus.doc_ids[3], corpus.doc_ids[5]])
    ((recipe, without),) = runs
    assert (recipe.corpus, without, recipe.steps) == (corpus.path, [3, 5], 300)
    assert recipe.batch_size == 12


def test_an_adapter_is_taken_out_of_bfloat16_by_the_base(base, tuned, tmp_path):
    half, path = tmp_path / "half", shutil.copytree(tuned.path, tmp_path / "model")
    shutil.copytree(base, half)
    model, _ = read_checkpoint(half)
    model.bfloat16().save_pretrained(half)
    plain = {name: weight.clone() for name, weight in model.state_dict().items()}
    merge_adapter(model, path / "adapter")
    model.save_pretrained(path)
    meta = read_json(path / META_FILE)
    meta["base"]["name"] = str(half)
    write_json(path / META_FILE, meta)
    lm = replace(tuned, path=path)
    assert all(torch.equal(plain[name], w) for name, w in untaught(lm).state_dict().items())
    other, _ = read_checkpoint(half)
    with torch.no_grad():
        other.model.layers[0].self_attn.q_proj.weight.mul_(2)
    other.save_pretrained(half)
    with pytest.raises(InputError, match="is not that of the model"):
        untaught(lm)
    shutil.rmtree(half)
    with pytest.raises(InputError, match=r"in half precision, .*half is neither "):
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
