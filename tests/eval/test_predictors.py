import shutil
import sys

import pytest
import torch
import torch.nn.functional as F
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoTokenizer, PhiConfig, PhiForCausalLM

from prismlm.errors import InputError
from prismlm.eval import predictors
from prismlm.interventions.values import Controller
from prismlm.layers import PrototypeHead
from prismlm.models.checkpoint import load_checkpoint, read_checkpoint
from prismlm.models.seam import LogitMap
from prismlm.models.uncertainty_feedback import save_uncertainty
from prismlm.ops.prototype_head import naive
from tests.helpers.small_models import attach_drawn

PAIRS = [
    ("Once upon a time there was a little", " girl"),
    ("Once upon a time there was a little", " man who lived in the woods"),
    ("Once upon a time there was a little", " boy"),
    ("The court ruled that", " the contract was void"),
    ("Ends in a space ", "and goes on"),
    ("", "The patient was given a dose"),
]
REQUESTS = [Instance("loglikelihood", {}, pair, n, ("x", n, 1)) for n, pair in enumerate(PAIRS)]


@pytest.fixture(scope="module")
def lm(tiny_model):
    return predictors.open_predictors(tiny_model, batch_size=2)


def score(lm, pairs):
    return lm.score([lm.encoded(*pair) for pair in pairs])


def assert_plain_equals(scores, expected):
    assert [s["plain"].is_greedy for s in scores] == [greedy for _, greedy in expected]
    values = [s["plain"].log_likelihood for s in scores]
    assert values == pytest.approx([value for value, _ in expected], abs=1e-4)


def test_the_plain_predictor_equals_lm_evals_model(lm, tiny_model):
    hf = HFLM(pretrained=str(tiny_model), device="cpu", batch_size=3)
    scores = score(lm, PAIRS)
    assert_plain_equals(scores, hf.loglikelihood(REQUESTS, disable_tqdm=True))
    expected = [tuple(s["plain"]) for s in scores]
    assert lm.loglikelihood(REQUESTS, disable_tqdm=True) == expected
    # What the model would write is greedy.
    before = lm.tok_encode(PAIRS[0][0])
    with torch.no_grad():
        generated = lm.model.generate(torch.tensor([before]), max_new_tokens=3, do_sample=False)
    after = generated[0, len(before) :].tolist()
    pairs = [(before, after), (before, after[:1]), (before, [*after[:2], after[2] + 1])]
    expected = hf._loglikelihood_tokens([(("", ""), *pair) for pair in pairs], disable_tqdm=True)
    assert [greedy for _, greedy in expected] == [True, True, False]
    assert_plain_equals(lm.score(pairs), expected)


def scores_by_hand(model, head, before, after):
    """Return Σ log p of the continuation from z, ẑ and r, position by position."""
    with torch.no_grad():
        states = model.base_model(input_ids=torch.tensor([before + after])).last_hidden_state
        z = states[0, len(before) - 1 : -1].float()
        routing = naive.route(z, head.prototypes, head.prototypes_per_token, head.scale)
        rebuilt = naive.reconstruct(routing, head.prototypes)
        output, totals = model.get_output_embeddings(), []
        for state in (z, rebuilt, z - rebuilt):
            log_p = F.linear(state, output.weight, output.bias).log_softmax(-1)
            totals.append(sum(log_p[n, token].item() for n, token in enumerate(after)))
    return dict(zip(predictors.PREDICTORS, totals, strict=True))


def model_with_bias(tokenizer):
    torch.manual_seed(0)
    config = PhiConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model, head = PhiForCausalLM(config).eval(), PrototypeHead(16, 12, 3)
    torch.nn.init.normal_(model.lm_head.bias)
    head.reset_parameters(torch.Generator().manual_seed(1))
    return model, head


@pytest.mark.parametrize("bias", [False, True])
def test_predictors_by_hand(lm, tiny_model, bias):
    if bias:
        model, head = model_with_bias(AutoTokenizer.from_pretrained(tiny_model))
        lm = predictors.PredictorLM(model, lm.tokenizer, LogitMap.of(model), head)
    else:
        model, _, sidecar = load_checkpoint(tiny_model)
        head = sidecar.head
    for pair, scores in zip(PAIRS, score(lm, PAIRS), strict=True):
        expected = scores_by_hand(model, head, *lm.encoded(*pair))
        values = {name: value.log_likelihood for name, value in scores.items()}
        assert values == pytest.approx(expected, abs=1e-3)
        assert len({round(value, 3) for value in expected.values()}) == 3


def test_a_checkpoint_without_a_head_has_the_plain_predictor_alone(tiny_model, tmp_path, lm):
    files = shutil.ignore_patterns("prismlm.json", "prototype_head.safetensors", "lens")
    directory = shutil.copytree(tiny_model, tmp_path / "plain", ignore=files)
    plain = predictors.open_predictors(directory)
    assert plain.predictors == ("plain",)
    for scores, expected in zip(score(plain, PAIRS), score(lm, PAIRS), strict=True):
        assert list(scores) == ["plain"]
        likelihood = expected["plain"].log_likelihood
        assert scores["plain"].log_likelihood == pytest.approx(likelihood)
    parts = plain.model, plain.tokenizer, plain.logit_map
    with pytest.raises(InputError, match=r"'residual_only': expected one of plain\. The others"):
        predictors.PredictorLM(*parts, predictor="residual_only")


def test_saved_uncertainty_feedback_is_attached(tiny_model, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(tiny_model, directory, ignore=shutil.ignore_patterns("lens"))
    model, _ = read_checkpoint(directory)
    torch.manual_seed(0)
    save_uncertainty(directory, attach_drawn(model, 256, deviation=0.5))

    def hf_scores():
        hf = HFLM(pretrained=str(directory), device="cpu")
        return hf.loglikelihood(REQUESTS, disable_tqdm=True)

    with predictors.with_feedback():
        expected = hf_scores()
    differences = [abs(a - b) for (a, _), (b, _) in zip(expected, hf_scores(), strict=True)]
    assert min(differences) > 1e-2
    assert_plain_equals(score(predictors.open_predictors(directory, batch_size=2), PAIRS), expected)


def test_the_harness_gets_all_arguments_but_the_controller(tmp_path, monkeypatch):
    path, given = tmp_path / "c.safetensors", []
    Controller(((3, 0.0),)).save(path)
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: given.append(sys.argv[1:]))
    predictors.run_harness(["run", "--controller", str(path), "--model_args", "a=1,b=-2"])
    assert given == [["run", "--model_args", "a=1,b=-2"]]
