"""Undeclared blocks are refused; processes wait for hours."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from prismlm.errors import InputError
from prismlm.training.parallel import blocks, dist, join


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
