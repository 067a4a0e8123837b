"""What goes wrong in a run: it says what, leaves what can be gone on from, and goes on from it."""

from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from prismlm.errors import PrismError
from prismlm.training import PrismForCausalLM, build_recipe, train
from prismlm.training.checkpoints import list_checkpoints
from tests.helpers import forked
from tests.helpers.runs import assert_same_run, curve


@contextmanager
def poisoned(parameter, step, value, *, after_update=False):
    """Put a value into a weight before the forward pass of a step, or after its update."""
    seen = {"steps": 0}

    def poison():
        with torch.no_grad():
            seen["model"].get_parameter(parameter).view(-1)[0] = value

    def before(module, args):
        if isinstance(module, PrismForCausalLM) and module.training:
            seen["model"] = module
            seen["steps"] += 1
            if seen["steps"] == step and not after_update:
                poison()

    def after(optimizer, args, kwargs):
        if seen["steps"] == step and after_update:
            poison()

    handles = [register_module_forward_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@pytest.fixture(scope="module")
def straight(same_settings, tmp_path_factory):
    """A run that nothing happens to."""
    out = tmp_path_factory.mktemp("straight") / "model"
    return train(build_recipe(same_settings | {"out": str(out)}))


def assert_recovers(settings, straight):
    """Go on with a broken run and compare it with one that nothing happened to."""
    recipe = build_recipe(settings)
    resumed = train(recipe, resume=True)
    assert_same_run(recipe.out, straight.directory)
    assert curve(resumed.history) == curve(straight.history)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_names_step_weight_and_checkpoint(settings, straight, value):
    recipe = build_recipe(settings)
    checkpoint = recipe.out / "checkpoints" / "checkpoint-10"
    weight = "model.model.norm.weight"
    with poisoned(weight, 15, value), pytest.raises(PrismError) as error:
        train(recipe)
    message = str(error.value)
    assert "the loss is nan at step 15 (ce nan" in message
    assert f"The weight {weight} is not finite" in message
    assert f"The last good checkpoint is {checkpoint} (step 10)" in message
    assert list_checkpoints(checkpoint.parent) == [checkpoint]
    assert not (recipe.out / "prismlm.json").exists()
    assert_recovers(settings, straight)


def test_an_update_that_breaks_a_weight_is_not_saved(settings, straight):
    recipe = build_recipe(settings)
    checkpoint = recipe.out / "checkpoints" / "checkpoint-10"
    weight = "prototype_head.prototypes"
    poison = poisoned(weight, 20, float("inf"), after_update=True)
    with poison, pytest.raises(PrismError) as error:
        train(recipe)
    assert f"the weight {weight} is not finite after step 20" in str(error.value)
    assert f"{checkpoint} (step 10)" in str(error.value)
    assert list_checkpoints(checkpoint.parent) == [checkpoint]
    assert_recovers(settings, straight)


def test_the_same_before_the_first_checkpoint_says_that_there_is_none(settings):
    poison = poisoned("model.lm_head.weight", 3, float("nan"))
    with poison, pytest.raises(PrismError, match=r"step 3.*No checkpoint was written before"):
        train(build_recipe(settings))


FILLED_DISK = """
import resource, sys, yaml
from contextlib import contextmanager
from prismlm.training import build_recipe, train
from prismlm.errors import PrismError

class FillAfter:
    left = 15
    @contextmanager
    def task(self, *args):
        yield self
    def advance(self, amount=1):
        self.left -= 1
        if self.left == 0:
            # Modules first imported from now on leave no cut bytecode.
            sys.dont_write_bytecode = True
            limits = int(sys.argv[2]), resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    def note(self, text):
        pass

recipe = build_recipe(yaml.safe_load(open(sys.argv[1])))
try:
    train(recipe, progress=FillAfter())
except PrismError as error:
    sys.exit(f"error: {error}")
"""


# The tensors of the model; its optimizer state, beyond the size of the tensors.
@pytest.mark.parametrize("size", [20_000, 400_000])
def test_a_write_that_fails_leaves_the_checkpoint_before(settings, straight, tmp_path, size):
    path, out = tmp_path / "recipe.yaml", Path(settings["out"])
    path.write_text(yaml.safe_dump(settings))
    done = forked.run(path, str(size), code=FILLED_DISK)
    assert done.returncode == 1, done.stderr
    checkpoint = out / "checkpoints" / "checkpoint-10"
    assert f"The last good checkpoint is {checkpoint} (step 10)" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(checkpoint.parent.iterdir()) == [checkpoint]
    assert not (out / "prismlm.json").exists()
    assert_recovers(settings, straight)
