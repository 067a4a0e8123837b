"""Our decoders as Hugging Face models: caches, padding, packing, generation, checkpoints."""

import copy
import math
import shutil

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache

from prismlm.errors import FormatError, InputError
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.decoders.own_decoder import RecurrentCache
from prismlm.models.decoders.protot import ProtoTConfig
from prismlm.models.seam import LogitMap, capture, verify_logit_map
from prismlm.ops.delta_rule import naive as naive_rule
from prismlm.ops.prototype_mixer import naive as naive_mean
from prismlm.probes.heads.spectra import signal_noise_layers
from prismlm.training.parallel import recompute_activations
from prismlm.training.setup import supports_packed_documents
from tests.helpers.own_models import (
    CLOSE,
    FAMILIES,
    RECURRENT,
    SIGNAL_NOISE,
    gradients,
    own_model,
    tokens,
)

OPTIONS = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
ADAPTERS = {
    "LoRA": (LoraConfig, {"r": 3, "init_lora_weights": False}),
    "DoRA": (LoraConfig, {"r": 3, "init_lora_weights": False, "use_dora": True}),
    "IA3": (IA3Config, {"feedforward_modules": [], "init_ia3_weights": False}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return own_model(request.param)


@pytest.fixture(scope="module", params=RECURRENT)
def recurrent(request):
    return own_model(request.param)


@pytest.fixture(scope="module", params=SIGNAL_NOISE)
def signal_noise(request):
    return own_model(request.param)


@torch.no_grad()
def test_cached_logits_equal_uncached_in_any_pieces(model):
    ids = tokens(2, 40)
    whole = model(ids, use_cache=False)
    assert whole.past_key_values is None
    for sizes in ([1] * 40, [17, 1, 1, 21], [40]):
        cache, parts = None, []
        for piece in ids.split(sizes, dim=1):
            output = model(piece, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            parts.append(output.logits)
        torch.testing.assert_close(torch.cat(parts, 1), whole.logits, **CLOSE)
        assert cache.get_seq_length() == 40


@torch.no_grad()
def test_no_position_sees_what_comes_after_it(model):
    ids = tokens(1, 30)
    changed = ids.clone()
    changed[0, 20:] = tokens(10, seed=1)
    before, after = model(ids).logits[0], model(changed).logits[0]
    torch.testing.assert_close(before[:20], after[:20], rtol=0, atol=0)
    assert (before[20:] - after[20:]).abs().amax(-1).min() > 1e-3


@torch.no_grad()
def test_dropout_acts_only_in_training(model):
    model, ids = copy.deepcopy(model), tokens(1, 10)
    model.config.dropout = 0.0
    for block in model.model.layers:
        block.dropout = 0.5
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_padding_changes_no_logits(model, side):
    ids = tokens(2, 24)
    short = {"left": slice(9, 24), "right": slice(0, 15), "middle": [0, 3, *range(10, 23)]}[side]
    mask = torch.ones(2, 24, dtype=torch.int64)
    mask[1] = 0
    mask[1, short] = 1
    together = model(ids, attention_mask=mask)
    alone = model(ids[1:, short])
    torch.testing.assert_close(together.logits[1:, short], alone.logits, **CLOSE)
    torch.testing.assert_close(together.logits[:1], model(ids[:1]).logits, **CLOSE)
    # Padding in the cache is ignored too.
    more = tokens(2, 3, seed=3)
    longer = torch.cat([mask, torch.ones(2, 3, dtype=torch.int64)], 1)
    cached = model(more, attention_mask=longer, past_key_values=together.past_key_values)
    plain = model(more[1:], past_key_values=alone.past_key_values)
    torch.testing.assert_close(cached.logits[1:], plain.logits, **CLOSE)


@torch.no_grad()
def test_packed_documents_do_not_see_each_other(model):
    assert supports_packed_documents(model)
    pieces = [tokens(1, n, seed=n) for n in (7, 1, 30, 12)]
    position_ids = torch.cat([torch.arange(p.shape[1]) for p in pieces])[None]
    empty = type(model(pieces[0], use_cache=True).past_key_values)(model.config.num_hidden_layers)
    expected = torch.cat([model(piece).logits for piece in pieces], 1)
    for caching in ({"use_cache": False}, {"use_cache": True}, {"past_key_values": empty}):
        packed = model(torch.cat(pieces, 1), position_ids=position_ids, **caching).logits
        torch.testing.assert_close(packed, expected, **CLOSE)


@pytest.mark.parametrize(
    "way",
    [{"num_beams": 4, "num_return_sequences": 2}, {"do_sample": True}],
    ids=["beams", "sampled"],
)
def test_generation_with_a_cache_equals_generation_without(model, way):
    ids, generated = tokens(2, 9), []
    for use_cache in (True, False):
        torch.manual_seed(3)
        generated.append(model.generate(ids, **OPTIONS | way, use_cache=use_cache))
    assert torch.equal(*generated)


def test_left_padded_batches_generate_what_each_row_generates_alone(model):
    ids = tokens(3, 12)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    mask[1, :1] = 0
    out = model.generate(ids, attention_mask=mask, **OPTIONS)
    for row, first in enumerate((7, 1, 0)):
        alone = model.generate(ids[row : row + 1, first:], **OPTIONS)
        assert torch.equal(out[row, 12:], alone[0, 12 - first :])


def test_checkpoints_round_trip(model, tmp_path):
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(model)
    assert not [*info["missing_keys"], *info["unexpected_keys"]]
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    tied = model.config.tie_word_embeddings
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    ids = tokens(1, 9)
    assert torch.equal(loaded.eval()(ids).logits, model(ids).logits)
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == loaded.config.to_dict()
    bare = AutoModel.from_pretrained(tmp_path).eval()
    logits = bare(ids).last_hidden_state @ loaded.lm_head.weight.T
    torch.testing.assert_close(logits, model(ids).logits)
    copy.deepcopy(model).bfloat16().save_pretrained(tmp_path / "half")
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").eval()
    logits = half(tokens(1, 30)).logits
    assert half.dtype == logits.dtype == torch.bfloat16
    assert (logits.float() - model(tokens(1, 30)).logits).abs().mean() < 0.15


def test_gradient_checkpointing_gives_the_same_gradients_without_a_cache(model):
    model, ids, runs = copy.deepcopy(model), tokens(2, 20), []
    cache = model(ids, use_cache=True).past_key_values
    plain = gradients(model.train(), input_ids=ids, labels=ids)
    assert all(g is not None and g.abs().max() > 0 for g in plain.values())
    recompute_activations(model)
    handle = model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    again = gradients(model, input_ids=ids, labels=ids)
    handle.remove()
    assert len(runs) == 2
    torch.testing.assert_close(again, plain, rtol=1e-5, atol=1e-7)
    assert model(ids, use_cache=True).past_key_values is None
    with pytest.raises(InputError, match=r"none with positions while it trains with gradient"):
        model(ids, past_key_values=cache)


@torch.no_grad()
def test_the_head_sees_the_state_before_the_output_embedding(model):
    assert LogitMap.of(model) == LogitMap()
    assert verify_logit_map(model, LogitMap()) < 1e-6
    ids = tokens(2, 9)
    with capture(model) as seen:
        output = model(ids, output_hidden_states=True)
    assert torch.equal(seen.z, output.hidden_states[-1])
    assert len(output.hidden_states) == model.config.num_hidden_layers + 1
    for keep, at in ((2, slice(-2, None)), (torch.tensor([1, 4]), [1, 4])):
        torch.testing.assert_close(model(ids, logits_to_keep=keep).logits, output.logits[:, at])
    embeds = model.get_input_embeddings()(ids)
    torch.testing.assert_close(model(inputs_embeds=embeds).logits, output.logits)


def test_wrong_input(model):
    ids = tokens(2, 6)
    for inputs, words in (
        ({}, "and not both"),
        ({"input_ids": ids, "past_key_values": DynamicCache()}, "Cache that it returned"),
    ):
        with pytest.raises(InputError, match=words):
            model(**inputs)
    cache = model(ids, use_cache=True).past_key_values
    cache.reset()
    assert cache.get_seq_length() == 0


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("protot", {"temperature_mode": "multipy"}, "temperature_mode"),
        ("protot", {"alpha": math.nan}, "alpha"),
        ("protot", {"dropout": 1.0}, "dropout"),
        ("protot", {"convolution_layers": [5]}, "convolution_layers"),
        ("protot", {"initial_temperatures": [1.0]}, "initial_temperatures"),
        ("protot", {"gate_temperature": 0.0}, "gate_temperature"),
        ("protot", {"num_channels": 1.5}, "num_channels"),
        ("source", {"hidden_size": "6"}, "hidden_size"),
        ("source", {"noise_weight": 1.01}, "noise_weight"),
        ("source", {"frequency_ratio": math.inf}, "frequency_ratio"),
        ("source", {"head_size": 3}, "head size of 3 .* width of 24"),
        ("source", {"head_size": 24, "expansion": 1}, "make 1 heads: expected an even"),
    ],
)
def test_settings_that_make_no_model(family, settings, words):
    with pytest.raises(InputError, match=words):
        own_model(family, **settings)


def adapted(model, kind, targets):
    torch.manual_seed(1)
    config, settings = ADAPTERS[kind]
    wrapped = get_peft_model(model, config(target_modules=targets, **settings)).eval()
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return wrapped


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize(
    ("family", "targets"),
    [("source", ["projection"]), ("protot", ["value_projection", "output_projection"])],
)
@torch.no_grad()
def test_unmerged_merged_and_reloaded_adapters_are_the_same(family, targets, kind, tmp_path):
    ids, plain = tokens(2, 9), own_model(family)
    wrapped = adapted(copy.deepcopy(plain), kind, targets)
    unmerged = wrapped(ids).logits
    assert (unmerged - plain(ids).logits).abs().max() > 0.05
    wrapped.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path).eval()
    close = {"atol": 2e-5, "rtol": 1e-4}
    torch.testing.assert_close(again(ids).logits, unmerged, **close)
    torch.testing.assert_close(wrapped.merge_and_unload()(ids).logits, unmerged, **close)


def test_matrices_include_the_adapter():
    x = torch.randn(1, 3, 24)
    wrapped = adapted(own_model("source"), "DoRA", ["projection"])
    merged = copy.deepcopy(wrapped).merge_and_unload()
    for actual, expected in zip(*map(signal_noise_layers, (wrapped, merged)), strict=True):
        torch.testing.assert_close(actual.dictionary(x), expected.dictionary(x))
    wrapped = adapted(own_model("protot"), "LoRA", ["output_projection"])
    merged = copy.deepcopy(wrapped).merge_and_unload()
    layers = zip(wrapped.get_base_model().model.layers, merged.model.layers, strict=True)
    for actual, expected in layers:
        torch.testing.assert_close(actual.mixer.output_map, expected.mixer.output_map)


@torch.no_grad()
def greedy(model, ids, steps):
    """Continue without a cache and without generate."""
    for _ in range(steps):
        logits = model(ids, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1)[:, None]], 1)
    return ids


def test_generation_in_pieces_and_from_a_cache_equals_the_uncached_loop(recurrent):
    ids = tokens(1, 11)
    whole = recurrent.generate(ids, prefill_chunk_size=4, **OPTIONS)
    assert torch.equal(whole, greedy(recurrent, ids, 8))
    cache = RecurrentCache(recurrent.config.num_hidden_layers)
    first = recurrent.generate(ids, past_key_values=cache, **OPTIONS | {"max_new_tokens": 3})
    more = torch.cat([first, tokens(1, 4, seed=5)], 1)
    # Without a mask, generate would treat pad_token_id as padding.
    inputs = {"past_key_values": cache, "attention_mask": torch.ones_like(more)}
    continued = recurrent.generate(more, **inputs, **OPTIONS)
    assert torch.equal(continued, greedy(recurrent, more, 8))


@torch.no_grad()
def test_a_mask_covers_the_new_positions_or_the_cache_too(recurrent):
    ids = tokens(2, 9)
    whole = recurrent(ids).logits
    mask = torch.ones(2, 12, dtype=torch.int64)
    cache = recurrent(ids[:, :6], attention_mask=mask[:, :6], use_cache=True).past_key_values
    for wrong in (1, 6, 10):
        with pytest.raises(InputError, match=r"expected \[2, 3\], or \[2, 9\] including the"):
            recurrent(ids[:, 6:], attention_mask=mask[:, :wrong], past_key_values=cache)
    for width in (3, 9):
        rest = {"attention_mask": mask[:, :width], "past_key_values": copy.deepcopy(cache)}
        torch.testing.assert_close(recurrent(ids[:, 6:], **rest).logits, whole[:, 6:], **CLOSE)
    with pytest.raises(InputError, match=r"position_ids are \[6\]: expected \[2, 6\], or \[1, 6\]"):
        recurrent(ids[:, :6], position_ids=torch.arange(6))
    with pytest.raises(InputError, match=r"^2 tokens cannot be removed"):
        cache.crop(-2)


def test_a_float64_model_is_exact(recurrent, monkeypatch):
    """Compared with the naive forms."""
    exact = copy.deepcopy(recurrent).double()
    # Longer than a block of 32 positions, or a chunk, and no multiple of one.
    monkeypatch.setattr("prismlm.ops.delta_rule.chunked.CHUNK", 16)
    ids = tokens(2, 41)
    output = exact(ids, output_gates=True)
    assert {gates.dtype for gates in tree_leaves(output.gates)} == {torch.float64}
    logits, fast = output.logits, gradients(exact, input_ids=ids, labels=ids)
    fast = {name: gradient.clone() for name, gradient in fast.items()}
    monkeypatch.setattr("prismlm.layers.prototype_mixer.prefix_mean", naive_mean.prefix_mean)
    monkeypatch.setattr("prismlm.layers.delta_mixer.delta_rule", naive_rule.delta_rule)
    torch.testing.assert_close(exact(ids).logits, logits, rtol=1e-12, atol=1e-12)
    for name, gradient in gradients(exact, input_ids=ids, labels=ids).items():
        assert (fast[name] - gradient).norm() <= 1e-12 * gradient.norm(), name


@torch.no_grad()
def test_the_loss_is_the_mean_over_labels_or_over_a_given_count(recurrent):
    ids = tokens(2, 10)
    labels = ids.clone()
    labels[0, :5] = -100
    output = recurrent(ids, labels=labels)
    shared = recurrent(ids, labels=labels, num_items_in_batch=torch.tensor(100))
    log_p = output.logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    kept = log_p[labels[:, 1:] != -100]
    torch.testing.assert_close(output.loss, -kept.mean())
    torch.testing.assert_close(shared.loss, -kept.sum() / 100)


@torch.no_grad()
def test_evidence_comes_layer_by_layer_when_asked_for(recurrent):
    ids = tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    assert recurrent(ids).gates is None
    by_layer = recurrent(ids, attention_mask=mask, output_gates=True).gates
    assert len(by_layer) == recurrent.config.num_hidden_layers
    for layer, gates in enumerate(by_layer):
        if recurrent.config.model_type == "prismlm_deltanet":
            assert gates.shape == (2, 9, recurrent.config.num_heads)
            continue
        for gate in gates:
            parts = gate.unflatten(-1, (recurrent.config.num_groups, -1)).sum(-1)
            torch.testing.assert_close(parts, mask.float()[..., None].expand_as(parts))
        shared = layer in recurrent.config.shared_gate_layers
        assert torch.equal(gates.write, gates.read) == shared


def test_a_setting_by_its_former_name():
    settings = {"num_channels": 4, "hidden_size": 24, "shared_routing_layers": [0]}
    with pytest.raises(StrictDataclassError, match="shared_routing_layers has 'gate' for"):
        ProtoTConfig(**settings)


def test_initial_weights():
    settings = {"hidden_size": 96, "num_hidden_layers": 8, "initializer_range": 0.05}
    block = own_model("untied", **settings).model.layers[3]
    assert block.mlp.up_proj.weight.std().item() == pytest.approx(0.05, rel=0.03)
    for output in (block.mlp.down_proj, block.attention.output_projection):
        assert output.weight.std().item() == pytest.approx(0.05 / 4, rel=0.03)


def test_a_cache_has_one_unrotated_tensor_per_head(signal_noise):
    ids = tokens(2, 11)
    cache = signal_noise(ids, use_cache=True).past_key_values
    attention = signal_noise.model.layers[0].attention
    assert cache.layers[0].keys.shape == (2, 2 * attention.heads, 11, 6)
    z = signal_noise.model.layers[0].attention_norm(signal_noise.model.embed_tokens(ids))
    expected = (z @ attention.projection.weight.T).unflatten(2, (-1, 6)).transpose(1, 2)
    torch.testing.assert_close(cache.layers[0].keys, expected)


def test_assisted_generation_gives_the_same(signal_noise):
    """Tokens can be removed from this cache, unlike from a recurrent state."""
    ids = tokens(1, 6)
    plain = signal_noise.generate(ids, **OPTIONS)
    assert torch.equal(signal_noise.generate(ids, prompt_lookup_num_tokens=2, **OPTIONS), plain)


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


def test_noise_weights_out_of_range(signal_noise):
    decoder = copy.deepcopy(signal_noise)
    before = decoder.model.noise_weight.clone()
    for weight in (-0.1, math.nan, torch.tensor([0.1, 0.2])):
        with pytest.raises(InputError, match=r"λ is .* one number from 0 to 1"):
            decoder.set_noise_weight(weight)
    assert torch.equal(decoder.model.noise_weight, before)
    decoder.set_noise_weight(torch.tensor(0.5))
    assert decoder.model.noise_weight == 0.5
