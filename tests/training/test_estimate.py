"""Costs on paper: numbers worked out by hand, and activations counted while a model runs."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch.autograd.graph import saved_tensors_hooks

from prismlm.errors import InputError
from prismlm.models.presets import build_config, build_model
from prismlm.training import build_recipe, estimate, load_recipe, train
from prismlm.training.arithmetic import ACTIVATION_BYTES, flops_per_token, size_of, training_bytes

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def recipe_of(settings, **changes):
    return build_recipe(settings | {"device": "cuda", "precision": "bf16"} | changes)


def small(settings, **changes):
    return recipe_of(
        settings,
        model={"preset": "gpt2-small"},
        head={
            "prototypes": 8192,
            "prototypes_per_token": 16,
            "initialise_at_step": 5,
            "position_share": 0.25,
        },
        data={"length": 1024},
        batch_size=2,
        **changes,
    )


def test_operations_per_token_by_hand(settings):
    recipe = small(settings)
    size = size_of(recipe, 50257)
    assert size.parameters == 124_439_808
    assert size.multiplied == 124_439_808 - 1024 * 768
    assert size.head_parameters == 8192 * 768 + 1
    # The head sees a quarter of the positions.
    by_hand = 741_920_256 + 113_246_208 + (12_582_912 + 82_944) / 4
    assert flops_per_token(size, recipe) == by_hand
    distilled = recipe.losses.model_copy(update={"prototype_only_kl": 1.0})
    with_logits = recipe.model_copy(update={"losses": distilled})
    assert flops_per_token(size, with_logits) == by_hand + 4 * 50257 * 768 / 4
    # An embedding of its own is looked up, never multiplied.
    untied = size_of(
        small(settings).model_copy(
            update={"model": {"preset": "gpt2-small", "tie_word_embeddings": False}}
        ),
        50257,
    )
    assert untied.parameters == size.parameters + 50257 * 768
    assert untied.multiplied == size.multiplied


def test_memory_of_a_step_by_hand(settings):
    recipe = small(settings)
    parameters = 124_439_808 + 8192 * 768 + 1
    activations = 2 * 1024 * (60 * 12 * 768 + 12 * 50257)
    expected = 18 * parameters + activations
    assert training_bytes(size_of(recipe, 50257), recipe, "bf16") == expected


def saved_bytes(settings, precision):
    """Return the bytes that one token of a forward pass keeps for the backward pass."""
    torch.manual_seed(0)
    model = build_model(build_config(settings, 100, 0))
    ids = torch.randint(100, (2, 128))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        # A cast copy of a weight is counted with the parameters.
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.numel() % ids.numel() == 0:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with (
        saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
    ):
        model(input_ids=ids, labels=ids, use_cache=False)
    return sum(size for size, _ in kept.values()) / ids.numel()


@pytest.mark.parametrize("precision", ["bf16", "float32"])
@pytest.mark.parametrize(
    ("preset", "width", "low", "high"),
    [("gpt2-laptop", "n_embd", 0.85, 1.15), ("llama-laptop", "hidden_size", 0.6, 1.1)],
)
def test_the_activations_of_a_layer_are_what_the_formula_says(precision, preset, width, low, high):
    settings = {"preset": preset, width: 210}
    first, second = (
        saved_bytes(settings | {"num_hidden_layers": layers}, precision) for layers in (1, 3)
    )
    share = (second - first) / 2 / 210 / ACTIVATION_BYTES[precision]
    assert low < share < high


@needs_no_gpu
def test_without_a_gpu_a_run_is_refused_and_an_estimate_is_calculated(settings):
    recipe = recipe_of(settings)
    with pytest.raises(InputError, match=r"no CUDA GPU here.*--set device=cpu"):
        train(recipe)
    assert not recipe.out.exists()
    expected = estimate(recipe)
    assert not expected.measured
    assert expected.device == "H100"
    assert "there is no CUDA GPU here" in expected.basis
    assert "30% of its 989 TFLOP/s in bf16" in expected.basis
    seconds = 4 * 32 * expected.flops_per_token / (0.3 * 989e12)
    assert expected.seconds == pytest.approx(30 * seconds)
    assert estimate(recipe_of(settings, device="cpu")).measured
    assert not recipe.out.exists()


def test_a_model_too_large_for_this_machine_is_calculated_too(settings):
    giant = {"preset": "gpt2-xl", "n_embd": 102_400, "num_hidden_layers": 4}
    expected = estimate(recipe_of(settings, model=giant, device="auto", precision="float32"))
    assert not expected.measured
    assert "GB are free here" in expected.basis
    assert expected.memory_bytes > 16 * expected.parameters > 1e12


@needs_no_gpu
def test_gpt2_xl_is_estimated_in_little_memory(settings, tmp_path):
    path = tmp_path / "recipe.yaml"
    head = {"prototypes": 8192, "initialise_at_step": 5}
    changes = {"model": {"preset": "gpt2-xl"}, "head": head, "device": "cuda"}
    path.write_text(yaml.safe_dump(settings | changes))
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    done = subprocess.run(
        [sys.executable, "-m", "prismlm", "train", str(path), "--dry-run", "--json"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    expected = json.loads(done.stdout)
    # Of the tiny corpus' 2,048 tokens, not GPT-2's 50,257.
    assert expected["parameters"] == 1_557_611_200 - (50257 - 2048) * 1600
    assert expected["memory_bytes"] > 16 * expected["parameters"]
    # The weights alone would take 5.9 GB.
    assert max(before, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) < 2_000_000


@needs_no_gpu
@pytest.mark.parametrize(
    ("size", "millions", "head", "gigabytes"),
    [
        ("small", 124.44, 6.29, (20, 45)),
        ("medium", 354.82, 8.39, (30, 45)),
        ("large", 774.03, 10.49, (30, 45)),
        ("xl", 1557.61, 13.11, (40, 60)),
    ],
)
def test_the_recipes_of_the_source_are_estimated_without_a_gpu(
    size, millions, head, gigabytes, tiny_corpus, tmp_path
):
    path = Path(__file__).parents[2] / f"recipes/fineweb-edu-10b/{size}.yaml"
    settings = [f"corpus={tiny_corpus}", f"out={tmp_path / 'model'}"]
    recipe = load_recipe(path, settings)
    assert 8 * recipe.positions_per_step == 524_288
    assert 8 * recipe.positions_per_step * recipe.steps == pytest.approx(10e9, rel=1e-4)
    expected = estimate(recipe)
    # The tiny corpus has 2,048 tokens, GPT-2 50,257.
    width = expected.head_parameters // recipe.head.prototypes
    assert expected.parameters + (50257 - 2048) * width == pytest.approx(millions * 1e6, rel=1e-4)
    assert expected.head_parameters == pytest.approx(head * 1e6, rel=1e-3)
    assert expected.device == "H100"
    assert expected.precision == "bf16"
    # With GPT-2's vocabulary a micro-batch fits on an H100.
    needed = training_bytes(size_of(recipe, 50257), recipe, "bf16")
    assert gigabytes[0] < needed / 1e9 < gigabytes[1]
    with pytest.raises(InputError, match="--set device=cpu"):
        train(recipe)
