"""Results on a GPU equal those on a CPU up to rounding; skipped without a GPU."""

import pytest
import torch

import prismlm
from prismlm.layers import PrototypeHead
from prismlm.models.presets import build_config, build_model
from prismlm.ops import prototype_head, prototype_mixer
from prismlm.training import AttachOptions, FitOptions, attach, build_recipe, train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
GPU, CPU = "cuda", "cpu"


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def leaf(x, device):
    return x.detach().to(device, copy=True).requires_grad_()


def assert_near(run, tolerance):
    """Compare what ``run(device)`` returns on both; None is left out."""
    # Copies: moving a model moves its gradients too.
    results = (
        [t.detach().to(CPU, copy=True) for t in run(device) if t is not None]
        for device in (CPU, GPU)
    )
    for a, b in zip(*results, strict=True):
        scale = a.double().norm().clamp_min(1e-9)
        assert ((a.double() - b.double()).norm() / scale).item() < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(513, 576, 5000, 48), (64, 64, 100, 100)])
def test_route_chooses_the_same_prototypes(shape, dtype):
    n, width, count, k = shape
    z, bank = random(n, width).to(dtype), random(count, width, seed=1).to(dtype)
    mask = random(n, seed=2) > -1
    cpu, gpu = (
        prototype_head.route(z.to(device), bank.to(device), k, 1.5, mask.to(device))
        for device in (CPU, GPU)
    )
    assert (gpu.indices.cpu() == cpu.indices).float().mean() > 0.97
    torch.testing.assert_close(gpu.cosines.cpu(), cpu.cosines, atol=2e-3, rtol=0)
    points = gpu.nearest_point_cosine.cpu(), cpu.nearest_point_cosine
    torch.testing.assert_close(*points, atol=2e-2, rtol=0)


@pytest.mark.parametrize("weights", ["cosine", "fitted"])
def test_heads_and_their_gradients(weights):
    def step(device):
        head = PrototypeHead(64, 600, 48, weights=weights)
        head.place_on(random(600, 64, seed=1))
        z = leaf(random(700, 64), device)
        rebuilt = head.to(device)(z).reconstruction
        rebuilt.square().mean().backward()
        return [rebuilt, *(t.grad for t in (z, *head.parameters()))]

    assert_near(step, tolerance=1e-4)


@pytest.mark.parametrize("length", [1, 17, 1500])
def test_prefix_means_and_their_gradients(length):
    gates = [random(2, length, 8, seed=n).softmax(-1) for n in (1, 2)]
    inputs = [*gates, random(2, length, 24, seed=3), torch.linspace(0.2, 0.99, 8)]

    def step(device):
        leaves = [leaf(t, device) for t in inputs]
        out, state = prototype_mixer.prefix_mean(*leaves)
        (out.square().mean() + state.sums.square().mean()).backward()
        return [out, state.mass, *(t.grad for t in leaves)]

    assert_near(step, tolerance=1e-5)


@pytest.mark.parametrize(
    "preset", ["protot-laptop", "signal-noise-laptop", "deltanet", "mamba-laptop", "llama-laptop"]
)
def test_decoders_their_gradients_and_caches(preset):
    changes = {"num_hidden_layers": 2, "dropout": 0.0} if preset == "deltanet" else {}
    torch.manual_seed(0)
    model = build_model(build_config({"preset": preset} | changes, 300, 0))
    ids = torch.randint(300, (2, 90), generator=torch.Generator().manual_seed(1))

    def step(device):
        model.to(device).train()
        model.zero_grad()
        output = model(input_ids=ids.to(device), labels=ids.to(device))
        output.loss.backward()
        return [output.logits, *(p.grad for p in model.parameters())]

    assert_near(step, tolerance=2e-3)
    model.eval()
    with torch.no_grad():
        whole = model(input_ids=ids.to(GPU)).logits
        first = model(input_ids=ids[:, :60].to(GPU), use_cache=True)
        name = "past_key_values" if "past_key_values" in first else "cache_params"
        later = model(input_ids=ids[:, 60:61].to(GPU), **{name: first[name]})
    torch.testing.assert_close(later.logits[:, 0], whole[:, 60], atol=2e-3, rtol=1e-3)


def test_a_model_is_trained_and_explained(tiny_corpus, tmp_path):
    recipe = {
        "corpus": str(tiny_corpus),
        "out": str(tmp_path / "model"),
        "model": {"preset": "protot-laptop", "num_hidden_layers": 2},
        "head": {"prototypes": 64, "prototypes_per_token": 8, "initialise_at_step": 5},
        "data": {"length": 64},
        "steps": 12,
        "device": GPU,
        "precision": "bf16",
    }
    assert train(build_recipe(recipe)).ce < 9
    step = prismlm.load(tmp_path / "model", device=GPU).explain("The court found")[-1]
    parts = sum(p.contribution for p in step.prototypes) + step.residual + step.bias
    assert parts == pytest.approx(step.model_logit, abs=1e-3)


def test_a_head_is_attached_and_explained(tiny_model, tiny_corpus, tmp_path):
    fit, ces = FitOptions(prototypes=64, prototypes_per_token=16, epochs=0.5), []
    for device in (GPU, CPU):
        how = AttachOptions(fit=fit, device=device, precision="float32")
        made = attach(str(tiny_model), [tiny_corpus], tmp_path / device, how)
        ces.append(made.quality.prototype_only_ce)
    assert ces[0] == pytest.approx(ces[1], abs=0.05)
    assert prismlm.load(tmp_path / GPU).explain("The court found").passages(3)
