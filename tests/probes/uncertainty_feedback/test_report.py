"""The report of all checks."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, RwkvConfig, RwkvForCausalLM

from prismlm.errors import InputError, NotFiniteError
from prismlm.models.decoders.signal_noise import SignalNoiseConfig
from prismlm.probes.uncertainty_feedback import (
    InspectOptions,
    Sample,
    Signal,
    inspect_uncertainty_feedback,
)
from tests.helpers.feedback_families import FAMILIES, V, attach_drawn
from tests.helpers.feedback_models import (
    make_fed_gpt2,
    make_fed_protot,
    make_tokenizer,
    random_texts,
)

FAST = InspectOptions(permutations=2, passes=2, tokens=10, window=2, mistakes=1)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(eos_token="w0")


def test_a_report_has_every_check_or_its_reason(tokenizer):
    model, _ = make_fed_protot()
    sample = Sample("some", tuple(random_texts(*[20] * 8)))
    result = inspect_uncertainty_feedback(model, tokenizer, sample, name="it", options=FAST)
    assert set(result.left_out) == {"attention"}
    assert "no attention heads" in result.left_out["attention"]
    assert set(result.tables) == {"ablation", "prefill", "hedging", "mistakes", "probe"}
    value = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert value["attention"] is None
    assert value["ablation"]["rows"][3]["signal"] == "shuffled"
    assert [one["finding"].split(":")[0] for one in value["findings"]] == [
        "ablation", "prefill", "hedging", "hedging", "mistakes", "mistakes", "probe",
    ]  # fmt: skip
    again = inspect_uncertainty_feedback(model, tokenizer, sample, name="it", options=FAST)
    assert again.to_dict() == result.to_dict()


@pytest.mark.parametrize("name", [*FAMILIES, "signal-noise"])
def test_every_family_is_read(name, tokenizer):
    torch.manual_seed(0)
    if name == "signal-noise":
        config = SignalNoiseConfig(
            vocab_size=V, hidden_size=16, num_hidden_layers=2, head_size=4, initializer_range=0.4
        )
    else:
        config = FAMILIES[name]()
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    attach_drawn(model, 64)
    sample = Sample("some", tuple(random_texts(*[14] * 8, vocabulary=V)))
    options = InspectOptions(permutations=1, passes=1, tokens=4, window=2, mistakes=1)
    result = inspect_uncertainty_feedback(model, tokenizer, sample, options=options)
    assert set(result.left_out) == ({"attention"} if name == "mamba" else set())
    assert len(result["probe"].rows) == 3
    assert result["prefill"]["rounding"] < 1e-3
    if "attention" in result.tables:
        assert len(result["attention"].rows) == 2


def test_a_model_without_a_cache_is_read_without_what_needs_one(tokenizer):
    torch.manual_seed(0)
    config = RwkvConfig(
        vocab_size=V, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16,
        intermediate_size=24,
    )  # fmt: skip
    model = RwkvForCausalLM(config).eval().requires_grad_(False)
    attach_drawn(model, 64)
    sample = Sample("some", tuple(random_texts(*[14] * 8, vocabulary=V)))
    result = inspect_uncertainty_feedback(model, tokenizer, sample, options=FAST)
    assert set(result.left_out) == {"attention", "prefill", "hedging"}
    assert "returns no cache" in result.left_out["hedging"]
    assert result["mistakes"]["texts"] == 8


def test_texts_that_do_not_do_are_named(tokenizer):
    model, _ = make_fed_gpt2()

    def read(*lengths, checks=()):
        sample = Sample("some", tuple(random_texts(*lengths)))
        return inspect_uncertainty_feedback(model, tokenizer, sample, checks, options=FAST)

    with pytest.raises(InputError, match=r"ablation needs at least 4 texts .* some has 3"):
        read(20, 20, 20, checks=["ablation"])
    result = read(20, 20, 20, 20, 6)
    assert set(result.tables) == {"ablation", "prefill", "hedging", "mistakes"}
    assert "needs at least 8 texts of at least 10 tokens" in result.left_out["attention"]
    other = Sample("other", (torch.tensor([1, 99, 3]),))
    with pytest.raises(InputError, match="hold token 99 and the model has 37"):
        inspect_uncertainty_feedback(model, tokenizer, other)


def test_a_model_that_is_not_finite_is_an_error_and_no_reason(tokenizer):
    model, _ = make_fed_gpt2()
    model.transformer.ln_f.weight.data[0] = torch.nan
    # Neutral codes: nothing is read before the checks.
    options = InspectOptions(signal=Signal("passes", 1), permutations=1)
    sample = Sample("some", tuple(random_texts(*[20] * 8)))
    for check in ("ablation", "probe"):
        with pytest.raises(NotFiniteError):
            inspect_uncertainty_feedback(model, tokenizer, sample, [check], options=options)
