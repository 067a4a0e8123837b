"""Compiled blocks train as others do; undeclared blocks are refused; processes wait for hours."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from prismlm.errors import InputError
from prismlm.training.parallel import blocks, compile_blocks, dist, join
from tests.helpers.micro_batches import WEIGHTS
from tests.helpers.tiny_head import batch, make


def test_compiled_blocks_change_no_loss_no_routing_and_no_gradient():
    models, graphs = [make(weights=WEIGHTS, num_hidden_layers=2) for _ in range(2)], []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    compile_blocks(models[1].model, backend)
    for seed in (0, 1):
        outputs = []
        for model in models:
            model.zero_grad()
            outputs.append(model(**batch(seed=seed)))
            outputs[-1].loss.backward()
        plain, compiled = outputs
        torch.testing.assert_close(plain.losses, compiled.losses)
        assert torch.equal(plain.routing.indices, compiled.routing.indices)
        pairs = zip(models[0].named_parameters(), models[1].parameters(), strict=True)
        for (name, expected), actual in pairs:
            torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert graphs, "the blocks were compiled"


def test_a_model_that_does_not_declare_its_blocks_is_told_what_needs_them():
    decoder = torch.nn.Linear(2, 2)
    decoder.config = SimpleNamespace(model_type="own")
    with pytest.raises(InputError, match=r"'own' do not declare their blocks.*--lora.*dropout"):
        blocks(decoder)


@pytest.mark.parametrize("gpu", [False, True])
def test_processes_wait_for_one_that_works_for_hours(gpu, monkeypatch):
    given = {}
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **how: given.update(how))
    join()
    assert given["timeout"] >= timedelta(days=7)
