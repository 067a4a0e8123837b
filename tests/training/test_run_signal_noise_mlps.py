"""Signal/noise decoders with each kind of MLP, trained with a head in several micro-batches."""

import pytest
import torch

import prismlm
from prismlm.layers import PrototypeHead
from prismlm.models.presets import build_config, build_model
from prismlm.training import PrismForCausalLM, build_recipe, train
from tests.helpers.tiny_head import PULLS, VOCABULARY, batch
from tests.helpers.two_processes import gradients_of

SIZES = {
    "model_type": "prismlm_signal_noise",
    "hidden_size": 24,
    "head_size": 6,
    "num_hidden_layers": 1,
}
MLPS = {
    "gelu": {},
    "sparse coding": {"mlp": "sparse_coding"},
    "complete dictionary": {"mlp": "sparse_coding", "sparse_coding_form": "complete"},
    "experts": {"mlp": "experts", "num_local_experts": 3, "router_aux_loss_coef": 0.2},
}


def make(**settings):
    torch.manual_seed(0)
    model = build_model(build_config(SIZES | settings, VOCABULARY, 0))
    head = PrototypeHead(24, 12, 3)
    head.reset_parameters(torch.Generator().manual_seed(1))
    return PrismForCausalLM(model, head, weights=PULLS, detach=True)


def parts_of(rows, *sizes):
    cuts = zip(*(value.split(list(sizes)) for value in rows.values()), strict=True)
    return [dict(zip(rows, part, strict=True)) for part in cuts]


@pytest.mark.parametrize("name", MLPS)
def test_a_step_in_parts_is_the_step(name):
    rows = batch(6, 10)
    rows["labels"] = rows["labels"].clone()
    rows["labels"][:3, 4:] = -100
    parts = parts_of(rows, 2, 4)
    found, losses = gradients_of(make(**MLPS[name]), parts)
    if name != "experts":
        whole, sums = gradients_of(make(**MLPS[name]), [rows])
    else:
        # Routers' losses are means over each part, which count as their parts' predictions do.
        reference = make(**MLPS[name])
        predictions = [int((part["labels"][:, 1:] != -100).sum()) for part in parts]
        total = 0
        for part, count in zip(parts, predictions, strict=True):
            output = reference.model(
                input_ids=part["input_ids"], labels=part["labels"], use_cache=False
            )
            assert output.aux_loss >= 1
            total = total + output.loss * count / sum(predictions)
        total.backward()
        whole = {n: p.grad for n, p in reference.named_parameters() if n.startswith("model.")}
        assert whole["model.model.layers.0.mlp.router.weight"].any()
        sums = {"ce": total.detach()}
    # Prototypes are pulled to the nearest state of each part.
    whole.pop("prototype_head.prototypes", None)
    for key, value in whole.items():
        torch.testing.assert_close(found[key], value, rtol=2e-5, atol=2e-7, msg=key)
    torch.testing.assert_close(losses["ce"], sums["ce"])


@pytest.mark.parametrize("name", MLPS)
def test_it_trains_with_a_head_and_generates(name, settings):
    settings["model"] = SIZES | {"hidden_size": 32, "head_size": 8} | MLPS[name]
    settings["head"]["detach"] = True
    settings["optimizer"] = {"learning_rate": 1e-2, "head_learning_rate": 1e-2}
    settings["gradient_accumulation"] = 2
    recipe = build_recipe(settings)
    result = train(recipe)
    losses = [row["ce"] for row in result.history if "ce" in row]
    # The complete dictionary, d² parameters and a stream of ReLU's output, learns slowest: 7.28.
    assert losses[-1] < losses[0] - 0.25
    # A uniform guess costs log 2048 = 7.62.
    assert result.quality.ce < 7.4
    trace = prismlm.load(recipe.out).explain("The river", generate=2)
    assert sum(step.target_from == "generated" for step in trace) == 2
