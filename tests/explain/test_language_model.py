"""What a model writes to be explained, and attribution from states of another engine."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from typer.testing import CliRunner

import prismlm
from prismlm import Attributor
from prismlm.cli.app import app
from prismlm.corpus import Corpus, Document
from prismlm.errors import DecompositionError, FormatError, InputError, StaleLensError
from prismlm.explain.what_if import read_ends
from prismlm.interventions.steering import steer
from prismlm.interventions.values import Ablate
from prismlm.lens.opened_model import settings_not_applied
from prismlm.models.checkpoint import final_norm
from prismlm.models.seam import output_embedding
from prismlm.models.sidecar import Sidecar, base_of, load_sidecar, save_sidecar
from prismlm.models.watch import Hook, watch
from tests.explain.conftest import shares_of
from tests.helpers.families import make_directory
from tests.helpers.mixer_models import make_model, save_with_head

TEXT = "The patient was given a dose of the drug, and the court ruled that"
WRITTEN = 12
OTHERS = list(range(3, 250))
# One after the other, and what of them can be in one file.
SETTINGS = [
    {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 3.0, "early_stopping": True},
    {"bad_words_ids": [[one] for one in OTHERS], "forced_eos_token_id": 7, "min_length": 300},
    {"stop_strings": ["e"], "max_time": 1e-9, "token_healing": True},
]
SAMPLING = {"top_k": 2, "top_p": 0.3, "min_p": 0.2, "typical_p": 0.3, "epsilon_cutoff": 0.2}
# Of lengths, choice and outputs every call decides itself, so nothing is said of them.
UNSAID = {"max_length": 5, "max_new_tokens": 1, "do_sample": True, "temperature": 0.2}
UNSAID |= {"use_cache": False, "return_dict_in_generate": True, "output_scores": True}


@pytest.fixture(scope="module")
def ids_of(lm):
    """What is written without any settings, at a temperature."""
    prompt = lm.encode(TEXT, WRITTEN)
    return {t: lm.write(prompt, WRITTEN, t, 3) for t in (0.0, 0.8)}


@pytest.fixture
def with_file(small_model, tmp_path):
    """The model beside a file that holds all that one can."""
    path = shutil.copytree(small_model, tmp_path / "model")
    file = path / "generation_config.json"
    all_in_one = {"num_beams": 4, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
    all_in_one |= {"suppress_tokens": OTHERS, "prompt_lookup_num_tokens": 3, "guidance_scale": 3.0}
    all_in_one |= {"cache_implementation": "static", "forced_eos_token_id": 2}
    file.write_text(json.dumps(json.loads(file.read_text()) | all_in_one | SAMPLING | UNSAID))
    return path


def test_a_model_left_in_training_mode_answers_without_dropout(lm):
    modes: list[bool] = []
    with watch([Hook(lm.model, lambda module, *_: modes.append(module.training))]):
        try:
            lm.model.train()
            lm.explain(TEXT, generate=2)
            list(prismlm.Audit(lm).read([Document("one", TEXT)]))
            steer(lm, TEXT, [Ablate(0)], generate=2)
            read_ends(lm.model, [1, 2, 3], [0, 1])
            assert lm.model.training
        finally:
            lm.model.eval()
    assert len(modes) > 2
    assert not any(modes)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_probability_is_that_of_a_pass_over_the_returned_text(
    with_file, lm, ids_of, temperature
):
    trace = prismlm.load(with_file).explain(TEXT, generate=WRITTEN, temperature=temperature, seed=3)
    ids = torch.tensor([[step.token_id for step in trace] + [trace[-1].target_id]])
    assert torch.equal(ids, ids_of[temperature])
    with torch.no_grad():
        given = lm.model(input_ids=ids, use_cache=False).logits[0].softmax(-1)
    own = given[torch.arange(len(trace)), ids[0, 1:]].tolist()
    assert [step.probability for step in trace] == pytest.approx(own, abs=1e-5)


@pytest.mark.parametrize("settings", [*SETTINGS, SAMPLING, UNSAID])
def test_no_setting_changes_what_is_written_and_each_is_named(lm, ids_of, settings, monkeypatch):
    ends = {"eos_token_id": lm.model.generation_config.eos_token_id}
    monkeypatch.setattr(lm.model, "generation_config", GenerationConfig(**settings, **ends))
    for temperature, ids in ids_of.items():
        assert torch.equal(lm.write(lm.encode(TEXT, WRITTEN), WRITTEN, temperature, 3), ids)
        said = settings_not_applied(lm.model, temperature)
        for name in settings:
            named = name not in UNSAID and (temperature > 0 or name not in SAMPLING)
            assert (f"{name}=" in said) == named


def test_a_seed_draws_the_same_beside_other_threads(lm):
    def write(seed):
        return lm.generate(TEXT, tokens=40, temperature=1.5 * (seed > 0), seed=seed)

    alone = [write(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(write, range(4))) == alone


def test_it_is_said_wherever_the_answer_is_shown(with_file):
    trace = prismlm.load(with_file).explain(TEXT, generate=2)
    assert trace.to_dict()["notes"] == trace.notes
    assert trace.notes[0].startswith("Not applied: ")
    assert "num_beams=4, " in trace.to_html()
    # Of a text that is only read nothing was generated.
    assert prismlm.load(with_file).explain(TEXT).notes == []
    given = ["generate", str(with_file), TEXT, "--tokens", "2"]
    assert "num_beams=4, " in CliRunner().invoke(app, given).stderr


@pytest.mark.parametrize("changed", ["the weight", "its data"])
def test_the_output_layer_is_that_of_the_weights_as_they_are(lm, changed):
    before, weight = lm.output_layer, lm.model.get_output_embeddings().weight
    assert lm.output_layer is before
    with torch.no_grad():
        (weight if changed == "the weight" else weight.data).mul_(2)
        try:
            torch.testing.assert_close(lm.output_layer.mean, 2 * before.mean)
        finally:
            weight.mul_(0.5)


def test_text_is_streamed_in_whole_characters(lm, monkeypatch):
    """Tokens of single bytes of characters are written, too."""
    pieces = []
    trace = lm.explain(TEXT, generate=40, on_text=pieces.append, temperature=1.5, seed=2)
    assert "".join(pieces) == trace.answer
    assert len(pieces) > 20
    ids = lm.encode("a 東京 b")

    def as_if_written(self, inputs, stopping_criteria, **_):
        for length in range(inputs.shape[1], ids.shape[1]):
            stopping_criteria(ids[:, : length + 1], None)
        return ids

    monkeypatch.setattr(type(lm.model), "generate", as_if_written)
    pieces.clear()
    lm.write(ids[:, :1], 20, 0.0, 0, on_text=pieces.append)
    assert "".join(pieces) == lm.words(ids[0, 1:])
    assert not any("\ufffd" in piece for piece in pieces)


# -- from states that plain transformers give


def states_of(directory, ids):
    """The inputs of the final norm and of the output embedding, as an engine hands them over."""
    model, seen = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval(), []
    for module in (final_norm(model), output_embedding(model)):
        module.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    with torch.no_grad():
        model(torch.tensor([ids]), use_cache=False)
    return seen[-2:]


@pytest.mark.parametrize("name", ["mamba", "gemma2"])
def test_states_of_plain_transformers_give_what_explain_gives(name, small_corpus, tmp_path):
    directory = make_directory(name, Corpus.open(small_corpus), tmp_path / name)
    lm, attributor = prismlm.load(directory), Attributor.load(directory)
    rough = {"rel": 1e-3, "abs": 1e-3}
    for written in (0, 6):
        trace = lm.explain(TEXT, generate=written)
        prompt = len(lm.tokens_of(TEXT))
        ids = [step.token_id for step in trace]
        if written:
            ids.append(trace[-1].target_id)
        raw, normed = states_of(directory, ids)
        for states, normalised in ((normed, True), (raw, False), (raw.float().numpy(), False)):
            given = {"prompt": prompt} if written else {}
            found = attributor.attribute(ids, states, normalised=normalised, **given)
            assert found.answer == trace.answer
            assert found.support.level == trace.support.level
            shares, expected = (shares_of(one.sources("document")) for one in (found, trace))
            assert shares == pytest.approx(expected, **rough)
            for step, expected in zip(found, trace, strict=True):
                assert step.target_id == expected.target_id
                assert step.target_from == expected.target_from
                figures = expected.logit, expected.probability
                assert (step.logit, step.probability) == pytest.approx(figures, **rough)
        # The answer's last token has been predicted, and nothing after it.
        if written:
            fewer = attributor.attribute(ids, normed[:-1], prompt=prompt)
            assert fewer.to_dict() == attributor.attribute(ids, normed, prompt=prompt).to_dict()


def test_no_layer_is_read_and_what_does_not_fit_is_refused(small_model, tmp_path):
    attributor = Attributor.load(small_model)
    model = attributor.lm.model
    read = {name for name, weight in model.named_parameters() if weight.device.type != "meta"}
    assert read == {"model.norm.weight", "lm_head.weight"}
    states = torch.ones(3, model.config.hidden_size)
    assert attributor.attribute([1, 2, 3], states, question="Why?").asked == "Why?"
    for ids, given, error, message in (
        ([1, 2, 3], states * torch.nan, DecompositionError, "not finite"),
        ([[1, 2]], states, InputError, "token_ids"),
        ([1, 2], states, InputError, "a row for each token"),
    ):
        with pytest.raises(error, match=message):
            attributor.attribute(ids, given)
    bare = shutil.copytree(small_model, tmp_path / "bare", ignore=lambda *_: ["lens"])
    with pytest.raises(InputError, match="has no lens"):
        Attributor.load(bare)


def test_another_output_layer_is_refused(small_model, tmp_path):
    copy = shutil.copytree(small_model, tmp_path / "other")
    model = AutoModelForCausalLM.from_pretrained(copy)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.01)
    model.save_pretrained(copy)
    with pytest.raises(FormatError, match="not the one its prototypes"):
        Attributor.load(copy)
    # With a head that says it is its own, beside this lens.
    before = load_sidecar(copy)
    save_sidecar(copy, Sidecar(before.head, before.logit_map, base_of(model)))
    with pytest.raises(StaleLensError, match="output layer"):
        Attributor.load(copy)


def test_a_prototype_mixer_is_refused(tiny_corpus, tmp_path):
    tokenizer = Corpus.open(tiny_corpus).tokenizer
    directory = save_with_head(make_model(len(tokenizer)), tokenizer, tmp_path / "mixer")
    with pytest.raises(InputError, match="prototype mixer"):
        Attributor.load(directory)
