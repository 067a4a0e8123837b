"""The trainer and what it is given: texts, rates, dropout, weight decay, steps; verdicts."""

import math
import sys
from types import MappingProxyType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Trainer

from prismlm.corpus import Corpus
from prismlm.errors import InputError, Interrupted
from prismlm.models.presets import build_config, build_model
from prismlm.models.sidecar import load_sidecar
from prismlm.training import build_recipe, setup, train
from prismlm.training.evaluation import unigram_ce, verdict
from prismlm.training.setup import chosen_documents, prepare
from prismlm.training.trainer import PrismTrainer, latest_checkpoint, training_arguments
from tests.helpers.interrupted import InterruptAfter
from tests.helpers.spread_runs import with_values
from tests.helpers.tiny_head import VOCABULARY
from tests.training.test_run_decoders import DELTANET, PROTOT

# Losses of the first steps of the recipe below, seed 0, float32 on one core.
GOLDEN = (7.6218, 7.6096, 7.6303, 7.4971, 7.3736, 7.2193,
          6.5992, 5.9995, 5.8362, 5.8127, 5.8883, 5.8438)  # fmt: skip


def trainer_of(settings, directory, changes=MappingProxyType({})):
    return PrismTrainer(prepare(build_recipe(with_values(settings, changes))), directory / "run")


class PlainTrainer(Trainer):
    """Hugging Face's own, with the product of the mean and the share of labels that ours takes."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = (inputs["labels"] != -100).sum()
        return model(**inputs).loss * (labels / num_items_in_batch)


def test_a_detached_head_leaves_the_model_bit_for_bit(settings, tmp_path):
    # Losses that would swamp the gradient if they reached the model or its clipping.
    losses = {"losses.prototype_pull": 50.0, "losses.residual": 500.0, "losses.warmup": 0.3}
    # Hugging Face's own Trainer spares no matrix from weight decay.
    optimizer = {"optimizer.max_grad_norm": 0.5, "optimizer.weight_decay_exempt": []}
    changes = {"gradient_accumulation": 2, "steps": 12, "head.detach": True, **losses, **optimizer}
    recipe = build_recipe(with_values(settings, changes))
    prepared = prepare(recipe)
    arguments = training_arguments(recipe, tmp_path / "plain")
    arguments.use_cache, arguments.save_strategy = False, "no"
    rows = [
        {k: v for k, v in prepared.rows[i].items() if k != "token_mask"}
        for i in range(len(prepared.rows))
    ]
    PlainTrainer(prepared.model.model, arguments, train_dataset=rows).train()
    plain = prepared.model.model.state_dict()
    trainer = trainer_of(settings, tmp_path, changes)
    start = trainer.model.prototype_head.prototypes.detach().clone()
    trainer.train()
    ours = trainer.model.model.state_dict()
    assert plain.keys() == ours.keys()
    for name, value in plain.items():
        assert torch.equal(value, ours[name]), name
    assert not torch.equal(start, trainer.model.prototype_head.prototypes)
    assert max(row.get("head_grad_norm", 0) for row in trainer.state.log_history) > 1


def test_every_prediction_of_a_step_counts_alike(settings, tmp_path):
    """Rows with few labels and with many: in one micro-batch, and one row per micro-batch."""
    # The head's losses that are means over labels.
    weights = {"prototype_pull": 0.0, "point_pull": 0.0, "residual": 0.0, "prototype_only_kl": 1.0}
    changes = {"model.attention_dropout": 0.0, "losses": weights, "steps": 12, "logging.every": 3}
    changes["data"] = {"length": 128, "packing": "padded", "documents": 60}
    curves, decoders = [], []
    for size, accumulation in ((4, 1), (1, 4)):
        changes |= {"batch_size": size, "gradient_accumulation": accumulation}
        changes["optimizer.learning_rate"] = 2e-2
        trainer = trainer_of(settings, tmp_path / str(size), changes)
        labels = [int((row["labels"] != -100).sum()) for row in trainer.train_dataset]
        assert max(labels) > 1.15 * sum(labels) / len(labels)
        trainer.train()
        names = ("loss", "ce", "grad_norm")
        curves.append([[row[name] for name in names] for row in logged(trainer)])
        decoders.append(trainer.model.state_dict())
    torch.testing.assert_close(*map(torch.tensor, curves), rtol=1e-4, atol=1e-5)
    for name, value in decoders[0].items():
        torch.testing.assert_close(decoders[1][name], value, rtol=1e-3, atol=1e-4, msg=name)


def test_the_loss_curve_is_the_recorded_one(settings, tmp_path):
    pulls = {"losses.prototype_pull": 1.0, "losses.point_pull": 0.5, "losses.residual": 1.0}
    rates = {"optimizer.learning_rate": 2e-2, "optimizer.weight_decay_exempt": []}
    trainer = trainer_of(settings, tmp_path, {"steps": 12, "logging.every": 1, **pulls, **rates})
    trainer.train()
    assert [row["loss"] for row in logged(trainer)] == pytest.approx(list(GOLDEN), abs=2e-3)


@pytest.fixture(scope="module")
def trained(same_settings, tmp_path_factory):
    """A run of two micro-batches a step, each of which is logged."""
    losses = {"prototype_pull": 1.0, "point_pull": 2.0, "residual": 3.0, "warmup": 0.5}
    losses = {f"losses.{name}": value for name, value in losses.items()}
    directory = tmp_path_factory.mktemp("trained")
    changes = {"gradient_accumulation": 2, "logging.every": 1, "out": str(directory), **losses}
    settings = with_values(same_settings, changes)
    trainer = trainer_of(settings, directory)
    trainer.train()
    return settings, trainer


def logged(trainer):
    return [row for row in trainer.state.log_history if "loss" in row]


def test_logged_parts_are_averages_that_add_up_and_rise_from_the_initialisation(trained):
    rows = logged(trained[-1])
    for row in rows[5:]:
        total = row["prototype_pull"] + 2 * row["point_pull"] + 3 * row["residual"]
        assert row["loss"] == pytest.approx(row["ce"] + row["loss_scale"] * total, abs=1e-5)
    # Initialised after step 5 of 30, full after step 15.
    scales = [row["loss_scale"] for row in rows]
    assert scales[:6] == [0.0] * 6
    assert scales[5:16] == pytest.approx([i / 10 for i in range(11)])
    assert scales[16:] == [1.0] * 14
    assert "residual" not in rows[4]
    assert rows[4]["loss"] == pytest.approx(rows[4]["ce"])


def test_a_checkpoint_has_the_weights_of_the_model_in_memory(trained):
    _, trainer = trained
    saved = AutoModelForCausalLM.from_pretrained(latest_checkpoint(trainer.checkpoints))
    torch.testing.assert_close(saved.state_dict(), trainer.model.model.state_dict(), rtol=0, atol=0)
    head = load_sidecar(latest_checkpoint(trainer.checkpoints), saved).head
    assert torch.equal(head.prototypes, trainer.model.prototype_head.prototypes)


def test_bf16_autocast_trains_close_to_float32(trained, tmp_path):
    settings, plain = trained
    trainer = trainer_of(settings, tmp_path, {"precision": "bf16"})
    trainer.train()
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    losses = [[row["ce"] for row in logged(each)] for each in (plain, trainer)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], abs=0.1)


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
    trainer = trainer_of(settings, tmp_path, {"steps": 10, "optimizer": rates | optimizer})
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
    setup.add_dropout(model, rate)
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
    assert setup.supports_packed_documents(model) == separate


SPARED = {
    "embeddings": {"model.embed_tokens.weight"},
    "prototypes": {f"model.layers.{layer}.mixer.prototypes" for layer in range(2)},
    "decays": {f"model.layers.{layer}.mixer.decay_map" for layer in range(2)},
}


@pytest.mark.parametrize("exempt", [None, ["prototypes"]])
@pytest.mark.parametrize("model", [PROTOT | {"decay_mode": "token"}, DELTANET])
def test_affine_matrices_decay_and_what_is_exempt_does_not(settings, tmp_path, model, exempt):
    """Taken by a step without gradients, which is all decay."""
    if exempt is not None:
        settings["optimizer"]["weight_decay_exempt"] = exempt
    trainer = trainer_of(settings, tmp_path, {"model": model | {"num_hidden_layers": 2}})
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
