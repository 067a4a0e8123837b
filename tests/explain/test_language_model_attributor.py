"""Attribution from states that plain transformers give, against `explain` of the whole model."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

import prismlm
from prismlm import Attributor
from prismlm.corpus import Corpus
from prismlm.errors import DecompositionError, FormatError, InputError, StaleLensError
from prismlm.models.checkpoint import final_norm
from prismlm.models.seam import output_embedding
from prismlm.models.sidecar import Sidecar, base_of, load_sidecar, save_sidecar
from tests.explain.conftest import shares_of
from tests.helpers.families import make_directory
from tests.helpers.mixer_models import make_model, save_with_head

TEXT = "The patient was given a dose"


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
