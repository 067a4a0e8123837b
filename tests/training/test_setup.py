"""Preparing a run: steps, texts, learning rates, dropout, weight decay; and its verdict."""

import math
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from prismlm.corpus import Corpus
from prismlm.errors import InputError, Interrupted
from prismlm.models.presets import build_config, build_model
from prismlm.training import build_recipe, train
from prismlm.training.evaluation import unigram_ce, verdict
from prismlm.training.setup import (
    add_dropout,
    chosen_documents,
    prepare,
    supports_packed_documents,
)
from prismlm.training.trainer import PrismTrainer, training_arguments
from tests.helpers.interrupted import InterruptAfter
from tests.helpers.tiny_head import VOCABULARY
from tests.training.test_run_decoders import DELTANET, PROTOT


@pytest.fixture
def epochs(settings):
    """Two epochs of twenty documents, without a head."""
    del settings["steps"]
    settings["head"] = {"enabled": False}
    settings["data"] |= {"documents": 20}
    return settings | {"epochs": 2, "checkpoint": {"every": 5}}


def test_epochs_become_steps(epochs, tmp_path):
    epochs |= {"batch_size": 1, "gradient_accumulation": 3}
    prepared = prepare(build_recipe(epochs))
    # The last step of an epoch may have fewer micro-batches.
    steps = 2 * -(-len(prepared.rows) // 3)
    assert len(prepared.rows) % 3
    assert prepared.recipe.steps == steps > 10
    run = train(build_recipe(epochs))
    assert run.steps == steps
    # Setting the steps gives the same run.
    counted = {key: value for key, value in epochs.items() if key != "epochs"}
    counted |= {"steps": steps, "out": str(tmp_path / "counted")}
    assert train(build_recipe(counted)).ce == run.ce
    cut = build_recipe(epochs | {"out": str(tmp_path / "cut")})
    with pytest.raises(Interrupted):
        train(cut, progress=InterruptAfter(7))
    assert train(cut, resume=True).ce == run.ce


def test_documents_are_the_same_for_every_seed(epochs, tiny_corpus):
    corpus = Corpus.open(tiny_corpus)
    chosen = chosen_documents(corpus, 20)
    training = corpus.split("train")
    assert len(chosen) == 20 == len(set(chosen))
    assert set(chosen) <= set(training)
    assert not np.array_equal(chosen, training[:20])
    rows = [prepare(build_recipe(epochs | {"seed": seed})).rows for seed in (0, 1)]
    assert rows[0].num_tokens == rows[1].num_tokens
    assert np.array_equal(chosen_documents(corpus, None), training)
    with pytest.raises(InputError, match=f"has {len(training)}"):
        chosen_documents(corpus, len(training) + 1)


@pytest.mark.parametrize(("length", "rate"), [(None, 3e-3), (8, 6e-3)])
def test_the_rate_grows_with_the_root_of_the_rows(settings, tmp_path, length, rate):
    settings["optimizer"] = {"learning_rate": 3e-3, "learning_rate_length": length}
    arguments = training_arguments(build_recipe(settings), tmp_path)
    assert arguments.learning_rate == pytest.approx(rate)


# Two steps up; then with n of 8: a cosine (1 + cos(π n / 8)) / 2, where cos(π/4) = 0.70710678.
COSINE = {2: 1, 4: 0.5 * 1.70710678, 6: 0.5, 8: 0.5 * 0.29289322, 10: 0}


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({}, COSINE),
        ({"final_learning_rate_share": 0.1}, {n: 0.1 + 0.9 * x for n, x in COSINE.items()}),
        ({"schedule": "linear"}, {2: 1, 4: 0.75, 6: 0.5, 8: 0.25, 10: 0}),
        ({"schedule": "constant"}, dict.fromkeys(COSINE, 1)),
    ],
    ids=["cosine", "floor", "linear", "constant"],
)
def test_the_rate_rises_and_falls_as_the_recipe_says(settings, tmp_path, optimizer, expected):
    rates = {"learning_rate": 1e-2, "head_learning_rate": 3e-2, "warmup": 0.2}
    settings |= {"steps": 10, "optimizer": rates | optimizer}
    trainer = PrismTrainer(prepare(build_recipe(settings)), tmp_path)
    trainer.create_optimizer_and_scheduler(10)
    peaks = [group["initial_lr"] for group in trainer.optimizer.param_groups]
    assert set(peaks) == {1e-2, 3e-2}
    for step in range(11):
        rates = [group["lr"] for group in trainer.optimizer.param_groups]
        share = expected.get(step, step / 2 if step < 2 else rates[0] / peaks[0])
        assert rates == pytest.approx([share * peak for peak in peaks])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()


def test_a_tracker_that_is_not_installed_is_named_before_anything_is_written(settings, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    settings["logging"]["report_to"] = ["trackio"]
    recipe = build_recipe(settings)
    with pytest.raises(InputError, match="'trackio', which is not installed: pip install trackio"):
        train(recipe)
    assert not recipe.out.exists()


def test_settings_of_a_head_do_not_bind_a_model_without_one(settings):
    head = {"prototypes": 10**7, "initialise_at_step": 5}
    with pytest.raises(InputError, match="fewer than the 10000000 prototypes"):
        prepare(build_recipe(settings | {"head": head}))
    head |= {"prototypes": 10**5, "initialise_at_step": 10**6, "enabled": False}
    assert prepare(build_recipe(settings | {"head": head})).recipe.steps == settings["steps"]


LLAMA = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2}
LLAMA |= {"intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
MAMBA = {"model_type": "mamba2", "hidden_size": 16, "num_hidden_layers": 2, "state_size": 8}
MAMBA |= {"head_dim": 8, "num_heads": 4, "n_groups": 1, "chunk_size": 8}
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


def dropped_llama(plain, h):
    rotations = plain.rotary_emb(h, torch.arange(9)[None])
    for layer in plain.layers:
        mixed, _ = layer.self_attn(
            layer.input_layernorm(h), position_embeddings=rotations, attention_mask=None
        )
        h = h + F.dropout(mixed, RATE)
        x = layer.post_attention_layernorm(h)
        inner = F.silu(layer.mlp.gate_proj(x)) * layer.mlp.up_proj(x)
        h = h + F.dropout(layer.mlp.down_proj(F.dropout(inner, RATE)), RATE)
    return plain.norm(h)


def dropped_mamba(plain, h):
    for layer in plain.layers:
        h = h + F.dropout(layer.mixer(layer.norm(h)), RATE)
    return plain.norm_f(h)


@pytest.mark.parametrize(("settings", "equation"), [(LLAMA, dropped_llama), (MAMBA, dropped_mamba)])
def test_dropout_is_its_equation_in_training_and_nothing_else(settings, equation):
    model, plain = make(settings), make(settings, rate=0.0)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert torch.equal(states(model.eval()), states(plain.eval()))
    actual = states(model.train())
    torch.manual_seed(3)
    h = F.dropout(plain.get_input_embeddings()(ids()), RATE)
    torch.testing.assert_close(actual, equation(plain.base_model, h))


def test_other_families_have_no_such_dropout():
    with pytest.raises(InputError, match="not 'gpt2'"):
        make({"preset": "gpt2-laptop"})


JAMBA = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("settings", "separate"),
    [
        ({"preset": "llama-tiny"}, True),
        ({"preset": "mamba-laptop", "num_hidden_layers": 1}, False),
        # Weak leaks: a thousandth of the logits before training.
        ({"model_type": "jamba", "hidden_size": 32, "intermediate_size": 32, **JAMBA}, False),
        ({"model_type": "xglm", "d_model": 32, "ffn_dim": 32, "num_layers": 1}, False),
    ],
    ids=["llama", "mamba2", "jamba", "xglm"],
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


@pytest.mark.parametrize("exempt", [None, ["prototypes"]])
@pytest.mark.parametrize("model", [PROTOT | {"decay_mode": "token"}, DELTANET])
def test_affine_matrices_decay_and_what_is_exempt_does_not(settings, tmp_path, model, exempt):
    """Taken by a step without gradients, which is all decay."""
    settings |= {"model": model | {"num_hidden_layers": 2}}
    if exempt is not None:
        settings["optimizer"]["weight_decay_exempt"] = exempt
    trainer = PrismTrainer(prepare(build_recipe(settings)), tmp_path)
    decoder, optimizer = trainer.model.model, trainer.create_optimizer()
    head = trainer.model.prototype_head.prototypes
    (group,) = (g for g in optimizer.param_groups if any(p is head for p in g["params"]))
    assert group["weight_decay"] == 0
    for parameter in decoder.parameters():
        # Nowhere 0, where nothing could decay.
        parameter.data += 1
        parameter.grad = torch.zeros_like(parameter)
    before = {name: p.detach().clone() for name, p in decoder.named_parameters()}
    optimizer.step()
    shrunk = {n for n, p in decoder.named_parameters() if not torch.equal(p, before[n])}
    spared = set().union(*(SPARED[kind] for kind in (SPARED if exempt is None else exempt)))
    assert shrunk == {n for n, p in before.items() if p.ndim > 1} - spared


def test_the_cross_entropy_of_guessing_by_frequency(tiny_corpus):
    corpus = Corpus.open(tiny_corpus)
    training, heldout = np.zeros((2, len(corpus.tokenizer)))
    for counts, split in ((training, "train"), (heldout, "heldout")):
        for number in corpus.split(split):
            for token in corpus.tokens(int(corpus.starts[number]), int(corpus.lengths[number])):
                counts[token] += 1
    guess = (training + 1) / (training + 1).sum()
    expected = -(heldout * np.log(guess)).sum() / heldout.sum()
    assert unigram_ce(corpus) == pytest.approx(expected)
    assert 0 < expected < math.log(len(corpus.tokenizer))


@pytest.mark.parametrize(
    ("ce", "evaluations", "expected"),
    [
        (7.0, (), "no better than token frequencies"),
        (6.0, (5.5, 5.54), "is 2.7 times as high"),
        (6.0, (5.5, 5.9), "was better on held-out text at step 10."),
    ],
)
def test_verdicts(ce, evaluations, expected):
    history = [{"step": 10 * n, "eval_ce": ce_} for n, ce_ in enumerate(evaluations, 1)]
    assert expected in verdict(ce, 7.0, [{"step": 1, "loss": 9.0}, *history])
