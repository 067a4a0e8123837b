import shutil

import pytest
import torch
import torch.nn.functional as F
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoTokenizer, PhiConfig, PhiForCausalLM

from prismlm.errors import InputError
from prismlm.eval.predictors import PREDICTORS, PredictorLM, open_predictors, with_feedback
from prismlm.layers import PrototypeHead
from prismlm.models.checkpoint import load_checkpoint, read_checkpoint
from prismlm.models.seam import LogitMap
from prismlm.models.uncertainty_feedback import save_uncertainty
from prismlm.ops.prototype_head import naive
from tests.helpers.feedback_families import attach_drawn

PAIRS = [
    ("Once upon a time there was a little", " girl"),
    ("Once upon a time there was a little", " man who lived in the woods"),
    ("Once upon a time there was a little", " boy"),
    ("The court ruled that", " the contract was void"),
    ("Ends in a space ", "and goes on"),
    ("", "The patient was given a dose"),
]


@pytest.fixture(scope="module")
def lm(tiny_model):
    return open_predictors(tiny_model, batch_size=2)


def requests(pairs):
    return [Instance("loglikelihood", {}, pair, n, ("x", n, 1)) for n, pair in enumerate(pairs)]


def scored(lm, pairs):
    return lm.score([lm.encoded(*pair) for pair in pairs])


def assert_plain_equals(found, expected):
    assert [score["plain"].is_greedy for score in found] == [greedy for _, greedy in expected]
    assert [score["plain"].log_likelihood for score in found] == pytest.approx(
        [value for value, _ in expected], abs=1e-4
    )


def test_plain_is_what_lm_eval_s_own_model_says(lm, tiny_model):
    own = HFLM(pretrained=str(tiny_model), device="cpu", batch_size=3)
    expected = own.loglikelihood(requests(PAIRS), disable_tqdm=True)
    assert_plain_equals(scored(lm, PAIRS), expected)
    assert lm.loglikelihood(requests(PAIRS), disable_tqdm=True) == [
        tuple(score["plain"]) for score in scored(lm, PAIRS)
    ]


def test_what_the_model_would_write_is_said_to_be_greedy(lm, tiny_model):
    before = lm.tok_encode(PAIRS[0][0])
    with torch.no_grad():
        written = lm.model.generate(torch.tensor([before]), max_new_tokens=3, do_sample=False)
    after = written[0, len(before) :].tolist()
    pairs = [(before, after), (before, after[:1]), (before, [*after[:2], after[2] + 1])]
    own = HFLM(pretrained=str(tiny_model), device="cpu", batch_size=3)
    expected = own._loglikelihood_tokens([(("", ""), *pair) for pair in pairs], disable_tqdm=True)
    assert [greedy for _, greedy in expected] == [True, True, False]
    assert_plain_equals(lm.score(pairs), expected)


def parts_by_hand(model, head, before, after):
    """Σ log p of the continuation from z, ẑ and r, position by position."""
    ids = torch.tensor([before + after])
    with torch.no_grad():
        z = model.base_model(input_ids=ids).last_hidden_state[0, len(before) - 1 : -1].float()
        routing = naive.route(z, head.prototypes, head.prototypes_per_token, head.scale)
        rebuilt = naive.reconstruct(routing, head.prototypes)
        output = model.get_output_embeddings()
        found = []
        for state in (z, rebuilt, z - rebuilt):
            log_p = F.linear(state, output.weight, output.bias).log_softmax(-1)
            found.append(sum(log_p[n, token].item() for n, token in enumerate(after)))
    return dict(zip(PREDICTORS, found, strict=True))


def test_the_parts_by_hand(lm, tiny_model):
    model, _, sidecar = load_checkpoint(tiny_model)
    for pair, found in zip(PAIRS, scored(lm, PAIRS), strict=True):
        expected = parts_by_hand(model, sidecar.head, *lm.encoded(*pair))
        assert {name: score.log_likelihood for name, score in found.items()} == pytest.approx(
            expected, abs=1e-3
        )
        assert len({round(value, 3) for value in expected.values()}) == 3


def test_a_bias_of_the_output_embedding_stands_in_all_three(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    torch.manual_seed(0)
    config = PhiConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = PhiForCausalLM(config).eval()
    torch.nn.init.normal_(model.lm_head.bias)
    head = PrototypeHead(16, 12, 3)
    head.reset_parameters(torch.Generator().manual_seed(1))
    lm = PredictorLM(model, tokenizer, LogitMap.of(model), head)
    (found,) = scored(lm, PAIRS[1:2])
    expected = parts_by_hand(model, head, *lm.encoded(*PAIRS[1]))
    assert {name: score.log_likelihood for name, score in found.items()} == pytest.approx(expected)


def test_a_checkpoint_without_a_head_has_the_plain_one_alone(tiny_model, tmp_path, lm):
    files = shutil.ignore_patterns("prismlm.json", "prototype_head.safetensors", "lens")
    bare = open_predictors(shutil.copytree(tiny_model, tmp_path / "bare", ignore=files))
    assert bare.predictors == ("plain",)
    whole = scored(lm, PAIRS)
    for found, other in zip(scored(bare, PAIRS), whole, strict=True):
        assert list(found) == ["plain"]
        assert found["plain"].log_likelihood == pytest.approx(other["plain"].log_likelihood)
    with pytest.raises(InputError, match=r"'residual_only': expected one of plain\. The others"):
        PredictorLM(bare.model, bare.tokenizer, bare.logit_map, predictor="residual_only")


def test_saved_uncertainty_feedback_is_read_by_both(tiny_model, tmp_path):
    directory = tmp_path / "fed-back"
    shutil.copytree(tiny_model, directory, ignore=shutil.ignore_patterns("lens"))
    model, _ = read_checkpoint(directory)
    torch.manual_seed(0)
    save_uncertainty(directory, attach_drawn(model, 256, deviation=0.5))
    arguments = {"pretrained": str(directory), "device": "cpu"}
    with with_feedback():
        expected = HFLM(**arguments).loglikelihood(requests(PAIRS), disable_tqdm=True)
    without = HFLM(**arguments).loglikelihood(requests(PAIRS), disable_tqdm=True)
    assert min(abs(a[0] - b[0]) for a, b in zip(expected, without, strict=True)) > 1e-2
    assert_plain_equals(scored(open_predictors(directory, batch_size=2), PAIRS), expected)
