import re
from pathlib import Path

import pytest
import yaml

from prismlm.errors import InputError
from prismlm.models.presets import build_config, build_model
from prismlm.training import Recipe, build_recipe, load_recipe
from prismlm.training.recipe import NoiseWeightRecipe, Section

MINIMAL = "corpus: c\nout: o\nsteps: 200\nmodel: {preset: llama-tiny}\n"
ROOT = Path(__file__).parents[2]


def load(tmp_path, addition="", overrides=(), replaced=("", "")):
    path = tmp_path / "recipe.yaml"
    path.write_text(MINIMAL.replace(*replaced, 1) + addition + "\n", encoding="utf-8")
    return load_recipe(path, overrides)


def refusal(*given):
    with pytest.raises(InputError) as error:
        load(*given)
    return str(error.value)


@pytest.mark.parametrize(
    ("addition", "expected"),
    [
        ("head: {prototype: 5}", ["recipe.yaml", "'head.prototype'", "mean 'head.prototypes'"]),
        ("noise_weight: {initail: 0.1}", ["mean 'noise_weight.initial'"]),
        ("head: {prototypes: many}", ["head.prototypes is 'many'", "valid integer"]),
        ("head: {prototypes: 8, prototypes_per_token: 9}", ["head", "at most prototypes, 8"]),
        ("data: {packing: pad}", ["data.packing is 'pad'", "'packed' or 'padded'"]),
        (
            "head: {initialise_at_step: 200}",
            ["at_step is 200", "200 steps", "; lower it."],
        ),
        ("epochs: 3", ["either steps or epochs"]),
        ("optimizer: {schedule: linear, final_learning_rate_share: 0.1}", ["not 'linear'"]),
        ("optimizer: {learning_rate: .nan}", ["optimizer.learning_rate is nan"]),
        ("optimizer: {betas: [0.9, 1.0]}", ["optimizer.betas.1 is 1.0", "less than 1"]),
        ("data: {length: 100000}", ["data.length is 100000", "512"]),
        ("seed: 1\nseed: 2", ["line 6", "'seed' is given twice"]),
        ("head: {scale: [}", ["recipe.yaml", "line 5"]),
        ("shard_processes: 2", ["for parallel: hsdp, not 'auto'"]),
        ("checkpoint: {asynchronous: true}", ["fsdp2 or hsdp"]),
    ],
)
def test_a_wrong_recipe_names_the_key_and_what_is_allowed(tmp_path, addition, expected):
    message = refusal(tmp_path, addition)
    for part in expected:
        assert part in message


LLAMA = "{preset: llama-tiny}"


@pytest.mark.parametrize(
    ("part", "other", "expected"),
    [
        (LLAMA, "{preset: llama-tinny}", "model.* mean 'llama-tiny'"),
        (LLAMA, "{preset: llama-tiny, hiden_size: 4}", "model.* mean 'hidden_size'"),
        (LLAMA, "{preset: llama-tiny, hidden_size: wide}", "model cannot be built"),
        (LLAMA, "{preset: llama-tiny, vocab_size: 5}", "model.* comes from the corpus"),
        ("corpus: c\n", "", "corpus is missing"),
    ],
)
def test_a_wrong_model_or_a_missing_key_is_refused(tmp_path, part, other, expected):
    assert re.search(rf"recipe\.yaml: .*{expected}", refusal(tmp_path, "", (), (part, other)))


def test_a_key_may_replace_what_an_alias_brings_in(tmp_path):
    text = "optimizer: &o {warmup: 0.1}\nlosses: {<<: *o, warmup: 0.2, residual: 1e-3}"
    losses = load(tmp_path, text).losses
    assert (losses.warmup, losses.residual) == (0.2, 0.001)


def test_overrides_are_yaml_and_as_strict(tmp_path):
    values = ["head.prototypes=64", "optimizer.learning_rate=1e-3", "model.preset=llama-laptop"]
    recipe = load(tmp_path, "", values)
    assert recipe.head.prototypes == 64
    assert recipe.optimizer.learning_rate == 0.001
    assert recipe.model == {"preset": "llama-laptop"}
    assert load(tmp_path, "", ["steps=0", "epochs=3"]).epochs == 3
    for override, expected in (
        ("head.prototype=64", "there is no setting 'head.prototype'"),
        ("head.prototypes", "expected KEY=VALUE"),
        ("steps.a=3", "steps is a single value"),
        ("seed=[", "--set seed"),
    ):
        assert expected in refusal(tmp_path, "", [override])


RECIPES = [*(ROOT / "recipes").rglob("*.yaml"), *(ROOT / "src").rglob("recipes/*.yaml")]


@pytest.mark.parametrize("path", sorted(RECIPES), ids=lambda path: "-".join(path.parts[-2:]))
def test_the_recipes_in_the_repository_are_valid(path):
    recipe = load_recipe(path)
    if path == ROOT / "recipes/laptop.yaml":
        names = ("corpus", "out", "model", "steps")
        minimal = build_recipe({name: getattr(recipe, name) for name in names})
        assert recipe == minimal, "the example says that what it shows are the defaults"
        # Every key stands there, those without a default after "# ".
        text = re.sub(r"^(\s*)# (\s*\w+:)", r"\1\2", path.read_text(encoding="utf-8"), flags=re.M)
        shown = yaml.safe_load(text)
        assert set(shown) == set(Recipe.model_fields)
        for name, section in shown.items():
            kind = getattr(recipe, name)
            if name == "noise_weight":
                kind = NoiseWeightRecipe()
            if isinstance(kind, Section):
                assert set(section) == set(type(kind).model_fields), name


SMALL = {"hidden_size": 16, "num_channels": 4}


def test_the_recipes_of_the_mixers_source_say_what_its_table_says():
    folder = ROOT / "recipes/prototype_mixer"
    recipes = {path.stem: load_recipe(path).to_dict() for path in folder.rglob("*/*.yaml")}
    # Table 15 of the source: shared gates, τ of layer 0, convolution of width 5.
    table = {
        "baseline": (True, 3.0, True),
        "no-shared-gates": (False, 3.0, True),
        "layer-0-temperature-1": (True, 1.0, True),
        "no-convolution": (True, 3.0, False),
        "no-mitigation": (False, 1.0, False),
    }
    for name, row in table.items():
        settings = recipes[f"table-15-{name}"]["model"]
        first, second = build_model(build_config(settings | SMALL, 50, 0)).model.layers[:2]
        temperatures = first.mixer.log_write_temperature.exp().item()
        convolves = {first.mixer.convolves, second.mixer.convolves}
        assert (first.mixer.shared_gates, round(temperatures, 5), *convolves) == row
        assert second.mixer.log_write_temperature.item() == 0
