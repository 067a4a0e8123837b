"""The signal/noise decoder as a Hugging Face model."""

import copy
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from prismlm.errors import FormatError, InputError
from prismlm.models.checkpoint import read_checkpoint
from tests.helpers.own_models import CLOSE, SIGNAL_NOISE, own_model, tokens

OPTIONS = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(scope="module", params=SIGNAL_NOISE)
def model(request):
    return own_model(request.param)


def test_initial_weights():
    settings = {"hidden_size": 96, "num_hidden_layers": 8, "initializer_range": 0.05}
    mlp = own_model("source", **settings).model.layers[3].mlp
    assert mlp.up_proj.weight.std().item() == pytest.approx(0.05, rel=0.03)
    assert mlp.down_proj.weight.std().item() == pytest.approx(0.05 / 4, rel=0.03)


def test_a_cache_has_one_unrotated_tensor_per_head(model):
    ids = tokens(2, 11)
    cache = model(ids, use_cache=True).past_key_values
    attention = model.model.layers[0].attention
    assert cache.layers[0].keys.shape == (2, 2 * attention.heads, 11, 6)
    z = model.model.layers[0].attention_norm(model.model.embed_tokens(ids))
    expected = (z @ attention.projection.weight.T).unflatten(2, (-1, 6)).transpose(1, 2)
    torch.testing.assert_close(cache.layers[0].keys, expected)


def test_assisted_generation_gives_the_same(model):
    """Tokens can be removed from this cache, unlike from a recurrent state."""
    ids = tokens(1, 6)
    plain = model.generate(ids, **OPTIONS)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=2, **OPTIONS), plain)


def test_lambda_stays_exact_in_half_precision(tmp_path):
    """0.1 is 0.10009765625 in bf16, and a step of its schedule may vanish."""
    exact, model, dtype = torch.tensor(0.0731), own_model("source"), torch.bfloat16
    assert exact.to(dtype).float() != exact
    model.set_noise_weight(exact.item())
    model.save_pretrained(tmp_path / "float32")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "float32", dtype=dtype)
    for half in (loaded, copy.deepcopy(model).to(dtype)):
        assert half.dtype == half.lm_head.weight.dtype == dtype
        assert half.model.noise_weight.dtype == torch.float32
        assert half.model.noise_weight == exact
        half.save_pretrained(tmp_path / "half")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
        assert (again.dtype, again.config.noise_weight) == (dtype, 0.0731)
        assert again.model.noise_weight == exact
    # Initialised under another default dtype.
    initial = AutoModelForCausalLM.from_config(model.config, dtype=dtype)
    assert initial.model.noise_weight.dtype == torch.float32
    assert initial.model.noise_weight == exact


def test_a_checkpoint_without_noise_weight_is_refused(tiny_model, tmp_path):
    own_model("source").save_pretrained(tmp_path)
    for path in tiny_model.glob("tokenizer*"):
        shutil.copy(path, tmp_path)
    file = tmp_path / "model.safetensors"
    weights = {k: v for k, v in load_file(file).items() if not k.endswith("noise_weight")}
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(FormatError, match=r"has no model\.noise_weight"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("pads", [0, 3])
def test_the_eager_implementation_is_the_same(pads):
    model, ids = own_model("source"), tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :pads] = 0
    expected = model(ids, attention_mask=mask).logits
    model.set_attn_implementation("eager")
    eager = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(eager[mask.bool()], expected[mask.bool()], **CLOSE)


def test_noise_weights_out_of_range(model):
    before = model.model.noise_weight.clone()
    for weight in (-0.1, math.nan, torch.tensor([0.1, 0.2])):
        with pytest.raises(InputError, match=r"λ is .* one number from 0 to 1"):
            model.set_noise_weight(weight)
    assert torch.equal(model.model.noise_weight, before)
    model.set_noise_weight(torch.tensor(0.5))
    assert model.model.noise_weight == 0.5


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"head_size": 3}, "head size of 3 .* width of 24"),
        ({"head_size": 24, "expansion": 1}, "make 1 heads: expected an even"),
    ],
)
def test_sizes_that_do_not_fit_together(settings, words):
    with pytest.raises(InputError, match=words):
        own_model("source", **settings)
