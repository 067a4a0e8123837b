"""Costs on paper: numbers worked out by hand, and activations counted while a model runs."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from torch.autograd.graph import saved_tensors_hooks

from prismlm.corpus import Corpus
from prismlm.errors import InputError
from prismlm.models.presets import build_config, build_model
from prismlm.training import build_recipe, estimate, load_recipe, train
from prismlm.training.arithmetic import ACTIVATION_BYTES, flops_per_token, size_of, training_bytes
from prismlm.training.recipe import UncertaintyFeedbackRecipe
from prismlm.training.setup import build_trainer, prepare
from tests.helpers import forked

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
    shapes = {shape for p in model.parameters() for shape in (p.shape, p.shape[::-1])}
    kept = {}

    def pack(tensor):
        # A cast copy of a weight is counted with the parameters.
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.shape not in shapes:
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


SIGNAL_NOISE = {
    "R = 2": {},
    "R = 4": {"expansion": 4},
    "untied": {"tied_output": False},
    "sparse coding": {"mlp": "sparse_coding", "sparse_coding_steps": 3},
    "complete dictionary": {"mlp": "sparse_coding", "sparse_coding_form": "complete"},
    "two steps of it": {
        "mlp": "sparse_coding",
        "sparse_coding_form": "complete",
        "sparse_coding_steps": 2,
    },
    "experts": {"mlp": "experts", "num_local_experts": 5, "num_experts_per_tok": 2},
    "one expert of 3": {"mlp": "experts", "num_local_experts": 3, "num_experts_per_tok": 1},
}


@pytest.mark.parametrize("precision", ["bf16", "float32"])
@pytest.mark.parametrize("name", SIGNAL_NOISE)
def test_signal_noise_attention_keeps_what_it_says(name, precision, settings):
    model = {"preset": "signal-noise-tiny", "hidden_size": 210, "head_size": 14}
    model |= SIGNAL_NOISE[name]
    first, second = (
        saved_bytes(model | {"num_hidden_layers": layers}, precision) for layers in (1, 3)
    )
    recipe = recipe_of(settings, model=model, head={"enabled": False}, precision=precision)
    size = size_of(recipe, 100)
    # Two layers; measured: 1.00 to 1.02.
    assert (second - first) / size.kept_bytes[precision] == pytest.approx(1, abs=0.03)
    held = {"bf16": 18, "float32": 16}[precision] * size.parameters
    tokens = recipe.batch_size * recipe.data.length
    expected = held + tokens * (size.kept_bytes[precision] + 12 * 100)
    assert training_bytes(size, recipe, precision) == expected


def test_what_a_block_of_signal_noise_attention_keeps_by_hand(settings):
    """d = 32, p = 8, R = 4, so 16 heads, m = 128, bf16: 2 bytes a product, 4 in the stream."""
    model = {"preset": "signal-noise-tiny", "hidden_size": 32, "head_size": 8, "expansion": 4}
    size = size_of(recipe_of(settings, model=model), 50)
    attention = 2 * (32 + 4 * 4 * 32) + 4 * (2 * 8 + 16)
    mlp = 2 * (32 + 2 * 128)
    assert size.kept_bytes["bf16"] == 2 * (2 * 4 * 32 + attention + mlp)
    assert size_of(recipe_of(settings), 50).kept_bytes is None


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


SAY_PEAK = """
import atexit, resource, sys
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
atexit.register(lambda: print(peak(), file=sys.stderr, flush=True))
"""


@needs_no_gpu
@pytest.mark.slow
def test_gpt2_xl_is_estimated_in_little_memory(settings, tmp_path):
    path = tmp_path / "recipe.yaml"
    head = {"prototypes": 8192, "initialise_at_step": 5}
    changes = {"model": {"preset": "gpt2-xl"}, "head": head, "device": "cuda"}
    path.write_text(yaml.safe_dump(settings | changes))
    done = forked.run("train", path, "--dry-run", "--json", code=SAY_PEAK + forked.COMMAND)
    assert done.returncode == 0, done.stderr
    expected = json.loads(done.stdout)
    # Of the tiny corpus' 2,048 tokens, not GPT-2's 50,257.
    assert expected["parameters"] == 1_557_611_200 - (50257 - 2048) * 1600
    assert expected["memory_bytes"] > 16 * expected["parameters"]
    # The weights alone would take 5.9 GB.
    assert 100_000 < int(done.stderr.split()[-1]) < 2_000_000


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


@pytest.mark.parametrize(
    ("changes", "multiplied", "width"),
    [
        # d = 32, R = 2, m = 128, V = 50: 2R·d² of attention, tied or not, and the MLP's.
        ({}, 4 * 32**2 + 2 * 32 * 128, 64),
        ({"tied_output": False, "expansion": 1}, 2 * 32**2 + 2 * 32 * 128, 32),
        ({"mlp": "sparse_coding", "sparse_coding_steps": 3}, 4 * 32**2 + 6 * 32 * 128, 64),
        (
            {"mlp": "experts", "num_local_experts": 5, "num_experts_per_tok": 2},
            4 * 32**2 + 2 * (2 * 32 * 128) + 5 * 32,
            64,
        ),
    ],
    ids=["tied", "untied", "sparse coding", "experts"],
)
def test_what_a_token_of_signal_noise_attention_is_multiplied_with(
    changes, multiplied, width, settings
):
    model = {"preset": "signal-noise-tiny", "hidden_size": 32, "head_size": 8} | changes
    recipe = recipe_of(settings, model=model, head={"enabled": False})
    size = size_of(recipe, 50)
    assert size.multiplied == 2 * multiplied + 50 * 32
    assert size.attention_width == width
    # Rows of 32 tokens, two layers.
    attention = 12 * 2 * 32 * width
    assert flops_per_token(size, recipe) == 6 * size.multiplied + attention


def test_a_table_of_codes_takes_what_its_tensors_hold(settings, tmp_path):
    settings["uncertainty_feedback"] = {"enabled": True, "levels": 700, "rows": 90, "passes": 3}
    settings |= {"device": "cpu", "head": {"enabled": False}, "steps": 2}
    recipe = build_recipe(settings)
    without = recipe.model_copy(update={"uncertainty_feedback": UncertaintyFeedbackRecipe()})
    vocabulary = len(Corpus.open(recipe.corpus).tokenizer)
    size, plain = (size_of(of, vocabulary) for of in (recipe, without))
    assert size.table_parameters == 90 * 32
    assert plain.table_parameters == 0

    prepared = prepare(recipe)
    trainer = build_trainer(prepared, tmp_path, [])
    trainer.train()
    table = prepared.model.uncertainty.embedding.weight
    batch = {name: row[None] for name, row in prepared.rows[0].items()}
    prepared.model(**batch).loss.backward()
    held = [table, table.grad, *(v for v in trainer.optimizer.state[table].values() if v.ndim)]
    assert len(held) == 4
    more = training_bytes(size, recipe, "float32") - training_bytes(plain, without, "float32")
    assert sum(tensor.nbytes for tensor in held) == more == 16 * size.table_parameters

    # Two passes more, forward only: 2 of 6 operations for each entry of a matrix, 4 of 12 for
    # attention over rows of 32 tokens in one layer.
    extra = flops_per_token(size, recipe) - flops_per_token(plain, without)
    assert extra == 2 * (2 * size.multiplied + 4 * 32 * 32)

    expected, other = (
        estimate(of.model_copy(update={"device": "cuda", "out": tmp_path / "none"}))
        for of in (recipe, without)
    )
    assert expected.table_parameters == 90 * 32
    if not expected.measured:
        assert expected.memory_bytes - other.memory_bytes == more
        assert expected.seconds / other.seconds == pytest.approx(
            expected.flops_per_token / other.flops_per_token
        )
        # A checkpoint with its optimizer, and the model.
        assert expected.disk_bytes - other.disk_bytes == (12 + 4) * 90 * 32
