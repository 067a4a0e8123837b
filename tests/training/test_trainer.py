"""The trainer: a head leaves the model alone, losses of a step, checkpoints, schedules."""

import math
from types import MappingProxyType

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer

from prismlm.errors import InputError
from prismlm.training import build_recipe, train
from prismlm.training.setup import PreviousBatch, prepare, set_training_signal
from prismlm.training.trainer import PrismTrainer, noise_weight_at, training_arguments
from tests.helpers.spread_runs import with_values

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


def test_bf16_autocast_trains_close_to_float32(trained, tmp_path):
    settings, plain = trained
    trainer = trainer_of(settings, tmp_path, {"precision": "bf16"})
    trainer.train()
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    losses = [[row["ce"] for row in logged(each)] for each in (plain, trainer)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], abs=0.1)


def test_a_shuffled_signal_has_the_same_codes_in_another_order_in_training_only(settings):
    settings["head"]["enabled"] = False
    # With dropout, the two models would not predict alike.
    settings["model"]["attention_dropout"] = 0.0
    fed = []
    for signal in ("own", "shuffled"):
        # Predictions of the first steps are nearly alike: only fine codes tell them apart.
        settings["uncertainty_feedback"] = {"enabled": True, "levels": 65536, "signal": signal}
        prepared = prepare(build_recipe(settings))
        set_training_signal(prepared.recipe, prepared.model)
        model, rows = prepared.model.model, [prepared.rows[i] for i in range(4)]
        names = ("input_ids", "position_ids")
        batch = {name: torch.stack([row[name] for row in rows]) for name in names}
        for training in (True, False):
            model.train(training)
            fed.append(model(**batch, use_cache=False).uncertainty_codes)
    own, own_evaluated, other, other_evaluated = fed
    assert torch.equal(own.flatten().sort().values, other.flatten().sort().values)
    assert torch.equal(own < 0, other < 0)
    assert (own != other).double().mean() > 0.2
    assert torch.equal(own, own_evaluated)
    assert torch.equal(own_evaluated, other_evaluated)


def test_the_previous_batch_as_a_signal():
    signal, codes = PreviousBatch(64), torch.full((2, 4), 5)
    assert torch.equal(signal(codes), torch.tensor([[-1, 32, 32, 32]] * 2))
    certain = torch.zeros(2, 3, 7)
    certain[0, :, 0] = 100.0
    signal.remember(certain)
    assert torch.equal(signal(codes), torch.tensor([[-1, 0, 0, 0], [-1, 63, 63, 63]]))
    assert torch.equal(signal(codes[:, :2]), torch.tensor([[-1, 0], [-1, 63]]))
    # Longer than the batch before: neutral. Other numbers of rows: nothing is known of them.
    assert signal(torch.full((2, 6), 5))[1].tolist() == [-1, 63, 63, 63, 32, 32]
    assert set(signal(torch.full((3, 4), 5)).flatten().tolist()) == {-1, 32}


@pytest.fixture
def signal_noise(settings):
    settings["model"] = {"model_type": "prismlm_signal_noise", "hidden_size": 32, "head_size": 8}
    settings["model"]["num_hidden_layers"] = 2
    settings["head"]["enabled"] = False
    settings["logging"]["every"] = 1
    return settings | {"steps": 21}


def test_the_noise_weight_rises_from_the_first_step_to_the_last_and_is_saved(signal_noise):
    result = train(build_recipe(signal_noise))
    values = [row["noise_weight"] for row in result.history if "noise_weight" in row]
    expected = [0.055 - 0.045 * math.cos(math.pi * step / 20) for step in range(21)]
    assert values == pytest.approx(expected, rel=1e-6)
    assert noise_weight_at(0, 1, initial=0.01, final=0.1) == 0.1
    checkpoint = result.directory / "checkpoints" / "checkpoint-20"
    for directory, value in ((result.directory, 0.1), (checkpoint, expected[19])):
        saved = load_file(directory / "model.safetensors")["model.noise_weight"]
        assert saved.item() == pytest.approx(value)


def test_a_noise_weight_that_means_nothing_is_refused(settings, signal_noise):
    signal_noise["model"]["noise_weight"] = 0.3
    llama = settings | {"noise_weight": {"final": 0.2}, "model": {"preset": "llama-tiny"}}
    for wrong in (signal_noise, llama):
        with pytest.raises(InputError, match="noise_weight is a section of its own"):
            train(build_recipe(wrong))
