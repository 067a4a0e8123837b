"""The MLPs of the signal/noise decoder: sizes, sparse codes, the routers' loss."""

import pytest
import torch
from torch.nn import functional as F

from prismlm.errors import InputError
from prismlm.layers.mlp import SparseCoding
from prismlm.models.decoders.signal_noise import SignalNoiseConfig, SignalNoiseForCausalLM
from prismlm.models.presets import build_config, build_model
from prismlm.ops.sparse_coding import largest_step, naive

VOCAB, WIDTH, LAYERS = 50, 24, 2
NAN, INF = float("nan"), float("inf")
SPARSE = {"mlp": "sparse_coding"}
COMPLETE = {"mlp": "sparse_coding", "sparse_coding_form": "complete"}
EXPERTS = {"mlp": "experts", "num_local_experts": 4}


def build(**settings):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "head_size": 6, "num_hidden_layers": LAYERS}
    return SignalNoiseForCausalLM(SignalNoiseConfig(**sizes | settings)).eval()


def tokens(batch=2, length=9, seed=0):
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def balance(router_logits, chosen):
    """E Σ_e f_e P_e over the tokens of all layers."""
    p = torch.cat(list(router_logits)).softmax(-1)
    used = torch.zeros_like(p).scatter(1, p.topk(chosen).indices, 1.0)
    return p.shape[1] * (used.mean(0) * p.mean(0)).sum()


def cross_entropy(model, ids):
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, ids[:, 1:].flatten())


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({}, 8 * WIDTH**2),
        ({"intermediate_size": 30}, 2 * 30 * WIDTH),
        ({"bias": True}, 8 * WIDTH**2 + 5 * WIDTH),
        (SPARSE, 4 * WIDTH**2),
        (SPARSE | {"intermediate_size": 30, "bias": True}, 30 * WIDTH),
        (COMPLETE, WIDTH**2),
        (EXPERTS, 4 * 8 * WIDTH**2 + 4 * WIDTH),
        (EXPERTS | {"bias": True}, 4 * (8 * WIDTH**2 + 5 * WIDTH) + 4 * WIDTH),
    ],
)
def test_sizes(settings, count):
    """An MLP has 2 d·m, a dictionary d·m or d², experts E · 2 d·m + E·d; m is 4 d."""
    model = build(**settings)
    assert sum(p.numel() for p in model.model.layers[0].mlp.parameters()) == count
    norms = (2 * LAYERS + 1) * WIDTH * (2 if settings.get("bias") else 1)
    attention = 2 * WIDTH**2  # R·d², tied
    whole = sum(p.numel() for p in model.parameters())
    assert whole == VOCAB * WIDTH + LAYERS * (attention + count) + norms


def test_initial_weights():
    wide = {"hidden_size": 96, "num_hidden_layers": 8, "initializer_range": 0.05}
    dictionary = build(**wide, **SPARSE).model.layers[3].mlp.dictionary
    assert dictionary.shape == (96, 384)
    assert dictionary.std().item() == pytest.approx(96**-0.5, rel=0.03)
    assert largest_step(dictionary) > 0.1
    mlp = build(**wide, **EXPERTS).model.layers[3].mlp
    assert mlp.router.weight.std().item() == pytest.approx(0.05, rel=0.15)
    for expert in mlp.experts:
        assert expert.up_proj.weight.std().item() == pytest.approx(0.05, rel=0.03)
        assert expert.down_proj.weight.std().item() == pytest.approx(0.05 / 4, rel=0.03)
    # The layer by itself is initialised too.
    assert SparseCoding(96, 384).dictionary.std().item() == pytest.approx(96**-0.5, rel=0.03)


@pytest.mark.parametrize("form", ["overcomplete", "complete"])
def test_what_a_block_does_with_a_code(form):
    model = build(mlp="sparse_coding", sparse_coding_form=form, initializer_range=0.3).double()
    ids, block, calls = tokens(), model.model.layers[0], []
    handle = block.mlp_norm.register_forward_hook(lambda m, args, z: calls.append((args[0], z)))
    after = model(ids, output_hidden_states=True).hidden_states[1]
    handle.remove()
    (before, z), dictionary = calls[0], block.mlp.dictionary.detach()
    settings = {"step": 0.1, "threshold": 0.1, "steps": 2 if form == "overcomplete" else 1}
    start = z if form == "complete" else None
    code = naive.sparse_code(z, dictionary, **settings, start=start)
    torch.testing.assert_close(block.mlp(z).code, code)
    if form == "complete":
        torch.testing.assert_close(after, code)
        assert after.min() == 0
    else:
        torch.testing.assert_close(after, before + code @ dictionary.T)
    mlp = build(**SPARSE, sparse_coding_steps=5, sparse_coding_threshold=0.3).model.layers[0].mlp
    assert (mlp.steps, mlp.threshold) == (5, 0.3)


@pytest.mark.parametrize("chosen", [1, 2])
def test_the_loss_includes_the_balance_of_the_routers(chosen):
    model = build(**EXPERTS, num_experts_per_tok=chosen, router_aux_loss_coef=0.3)
    ids = tokens()
    output = model(ids, labels=ids)
    assert [tuple(logits.shape) for logits in output.router_logits] == [(18, 4)] * LAYERS
    expected = balance(output.router_logits, chosen)
    torch.testing.assert_close(output.aux_loss, expected)
    torch.testing.assert_close(output.loss, cross_entropy(model, ids) + 0.3 * expected)
    plain = model(ids, labels=ids, output_router_logits=False)
    assert plain.router_logits is None
    assert plain.aux_loss is None
    torch.testing.assert_close(plain.loss, cross_entropy(model, ids))
    output.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
    assert model.model.layers[0].mlp.router.weight.grad.any()
    assert model(ids).loss is None
    assert model.model(ids).router_logits is not None


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_auxiliary_loss_excludes_padding(side):
    model = build(**EXPERTS, initializer_range=0.3)
    ids, pad = tokens(2, 7), torch.full((2, 4), 3)
    alone = model(ids).aux_loss
    order = 1 if side == "left" else -1
    padded = torch.cat((pad, ids)[::order], 1)
    mask = torch.cat((torch.zeros_like(pad), torch.ones_like(ids))[::order], 1)
    torch.testing.assert_close(model(padded, attention_mask=mask).aux_loss, alone)
    assert not torch.allclose(model(padded).aux_loss, alone)
    if side == "left":
        cache = model(padded[:, :6], attention_mask=mask[:, :6], use_cache=True).past_key_values
        last = model(padded[:, 6:], attention_mask=mask, past_key_values=cache)
        assert last.router_logits[0].shape == (10, 4)
        rest = model.model(ids).router_logits
        new = [logits.unflatten(0, (2, 7))[:, 2:].flatten(0, 1) for logits in rest]
        torch.testing.assert_close(last.aux_loss, balance(new, 2), rtol=1e-4, atol=1e-5)


def test_balance_by_hand():
    """Two layers, two tokens, top 1 of 2: f = (3/4, 1/4), P = (0.65, 0.35), 2 Σ f P = 1.15."""
    model = build(mlp="experts", num_local_experts=2, num_experts_per_tok=1)
    p = torch.tensor([[[0.9, 0.1], [0.6, 0.4]], [[0.3, 0.7], [0.8, 0.2]]])
    outputs = {"router_logits": tuple(p.log()), "logits": torch.zeros(1, 2, VOCAB), "loss": None}

    def loss(mask):
        return model._router_losses(outputs, mask, None, None)["aux_loss"].item()

    assert loss(None) == pytest.approx(1.15)
    # The first tokens alone: f = (1/2, 1/2), P = (0.6, 0.4). Any non-zero value is a token.
    for one in (True, 1, 2):
        assert loss(torch.tensor([[one, 0 * one]])) == pytest.approx(1.0)
    assert loss(torch.zeros(1, 2)) == 0


@pytest.mark.parametrize("count", [None, 10])
def test_a_batch_without_tokens_has_no_auxiliary_loss_and_zero_gradients(count):
    model, ids = build(**EXPERTS), tokens()
    labels = None if count is None else torch.full_like(ids, -100)
    output = model(
        ids, attention_mask=torch.zeros_like(ids), labels=labels, num_items_in_batch=count
    )
    assert output.aux_loss == 0
    loss = output.aux_loss if count is None else output.loss
    assert loss == 0
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or not parameter.grad.any(), name
    assert model.model.layers[0].mlp.router.weight.grad is not None


def test_parts_of_a_step_add_up():
    """With the number of items of a step, as from Trainer, the routers' loss counts once."""
    model = build(**EXPERTS, router_aux_loss_coef=0.5)
    parts = [tokens(2, 9), tokens(3, 5, seed=1)]
    count = torch.tensor(2 * 8 + 3 * 4)
    total = sum(model(ids, labels=ids, num_items_in_batch=count).loss for ids in parts)
    means = [model(ids, labels=ids).loss for ids in parts]
    torch.testing.assert_close(total, (16 * means[0] + 12 * means[1]) / 28)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mlp": "expert"}, "mlp"),
        (SPARSE | {"sparse_coding_form": "full"}, "sparse_coding_form"),
        (SPARSE | {"sparse_coding_steps": 1.5}, "sparse_coding_steps"),
        (SPARSE | {"sparse_coding_step_size": INF}, "sparse_coding_step_size"),
        (EXPERTS | {"num_local_experts": 0}, "num_local_experts"),
        (SPARSE | {"intermediate_size": 0}, "intermediate_size"),
        (EXPERTS | {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, of .* 4"),
        ({"output_router_logits": True}, "mlp='gelu' has no router"),
        (EXPERTS | {"router_aux_loss_coef": NAN}, "router_aux_loss_coef"),
        (SPARSE | {"sparse_coding_steps": 0}, "in 0 steps: expected at least 1"),
        (SPARSE | {"sparse_coding_threshold": -1.0}, "threshold"),
    ],
)
def test_settings_out_of_range(settings, words):
    settings = {"model_type": "prismlm_signal_noise", "num_hidden_layers": 1} | settings
    with pytest.raises(InputError, match=words):
        build_model(build_config(settings, VOCAB, 0))


def test_router_logits_need_a_router():
    with pytest.raises(InputError, match="has no router"):
        build()(tokens(), output_router_logits=True)
