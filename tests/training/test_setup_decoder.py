"""The decoder of a run: dropout, weight decay, and separate documents."""

import pytest
import torch
import torch.nn.functional as F

from prismlm.errors import InputError
from prismlm.models.presets import build_config, build_model
from prismlm.training import build_recipe
from prismlm.training.setup import add_dropout, prepare, supports_packed_documents
from prismlm.training.trainer import PrismTrainer
from tests.helpers.tiny_head import VOCABULARY
from tests.training.test_run_decoders import DELTANET, PROTOT, SIGNAL_NOISE

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


MAMBA = {
    "model_type": "mamba2",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "state_size": 8,
    "head_dim": 8,
    "num_heads": 4,
    "n_groups": 1,
    "chunk_size": 8,
}


RATE = 0.3


def make(settings, rate=RATE):
    torch.manual_seed(0)
    model = build_model(build_config(dict(settings), 50, 0))
    add_dropout(model, rate)
    return model


def ids():
    return torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(1))


def states(model, seed=3):
    torch.manual_seed(seed)
    return model.base_model(input_ids=ids(), use_cache=False).last_hidden_state


def test_llama_is_its_equation():
    model = make(LLAMA).train()
    actual = states(model)
    plain = make(LLAMA, rate=0.0).base_model
    torch.manual_seed(3)
    h = F.dropout(plain.embed_tokens(ids()), RATE)
    positions = torch.arange(9)[None]
    rotations = plain.rotary_emb(h, positions)
    for layer in plain.layers:
        mixed, _ = layer.self_attn(
            layer.input_layernorm(h), position_embeddings=rotations, attention_mask=None
        )
        h = h + F.dropout(mixed, RATE)
        x = layer.post_attention_layernorm(h)
        inner = F.silu(layer.mlp.gate_proj(x)) * layer.mlp.up_proj(x)
        h = h + F.dropout(layer.mlp.down_proj(F.dropout(inner, RATE)), RATE)
    torch.testing.assert_close(actual, plain.norm(h))


def test_mamba_is_its_equation():
    actual = states(make(MAMBA).train())
    plain = make(MAMBA, rate=0.0).base_model
    torch.manual_seed(3)
    h = F.dropout(plain.embeddings(ids()), RATE)
    for layer in plain.layers:
        h = h + F.dropout(layer.mixer(layer.norm(h)), RATE)
    torch.testing.assert_close(actual, plain.norm_f(h))


@pytest.mark.parametrize("settings", [LLAMA, MAMBA])
def test_nothing_is_dropped_but_in_training(settings):
    plain, model = make(settings, rate=0.0), make(settings)
    assert torch.equal(states(model.eval()), states(plain.eval()))
    assert (states(model.train()) - states(plain.train())).abs().max() > 0.1
    assert list(model.state_dict()) == list(plain.state_dict())
    assert model.config.to_dict() == plain.config.to_dict()


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"preset": "gpt2-laptop"}, "model.resid_pdrop"),
        ({"preset": "protot-tiny"}, "model.dropout"),
    ],
)
def test_other_families_are_refused(settings, hint):
    with pytest.raises(InputError, match=r"dropout to 0\.3, which is available") as error:
        make(settings)
    assert hint in str(error.value)


JAMBA = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("settings", "separate"),
    [
        ({"preset": "llama-tiny"}, True),
        ({"model_type": "gpt2", "n_embd": 24, "n_layer": 1, "n_head": 2}, True),
        ({"model_type": "mamba", "hidden_size": 24, "num_hidden_layers": 1}, False),
        ({"preset": "mamba-laptop", "num_hidden_layers": 1}, False),
        # Weak leaks: a thousandth of the logits before training.
        ({"model_type": "jamba", "hidden_size": 32, "intermediate_size": 32, **JAMBA}, False),
        ({"model_type": "xglm", "d_model": 32, "ffn_dim": 32, "num_layers": 1}, False),
    ],
    ids=["llama", "gpt2", "mamba", "mamba2", "jamba", "xglm"],
)
def test_families_that_mix_packed_documents_are_detected(settings, separate):
    torch.manual_seed(0)
    model = build_model(build_config(settings, VOCABULARY, 0))
    assert supports_packed_documents(model) == separate


SPARED = {
    "embeddings": {"model.embed_tokens.weight"},
    "prototypes": {f"model.layers.{layer}.mixer.prototypes" for layer in range(2)},
    "decays": {f"model.layers.{layer}.mixer.decay_map" for layer in range(2)},
}


@pytest.mark.parametrize("exempt", [None, [], ["prototypes"]])
@pytest.mark.parametrize("model", [PROTOT | {"decay_mode": "token"}, DELTANET, SIGNAL_NOISE])
def test_affine_matrices_decay_and_what_is_exempt_does_not(settings, tmp_path, model, exempt):
    """Taken by a step without gradients, which is all decay."""
    settings |= {"model": model | {"num_hidden_layers": 2}}
    if exempt is not None:
        settings["optimizer"]["weight_decay_exempt"] = exempt
    trainer = PrismTrainer(prepare(build_recipe(settings)), tmp_path)
    decoder, optimizer = trainer.model.model, trainer.create_optimizer()
    for parameter in decoder.parameters():
        # Nowhere 0, where nothing could decay.
        parameter.data += 1
        parameter.grad = torch.zeros_like(parameter)
    before = {name: p.detach().clone() for name, p in decoder.named_parameters()}
    optimizer.step()
    shrunk = {n for n, p in decoder.named_parameters() if not torch.equal(p, before[n])}
    spared = set().union(*(SPARED[kind] for kind in (SPARED if exempt is None else exempt)))
    assert shrunk == {n for n, p in before.items() if p.ndim > 1} - spared
