import copy

import pytest
import torch

from benchmarks.prototype_head.head_bank import merged, train_bank
from prismlm.training import build_recipe
from prismlm.training.setup import prepare
from prismlm.training.trainer import PrismTrainer

HEADS = {
    "pulled": {"losses": {"prototype_pull": 1.0, "warmup": 0.5}},
    "small": {
        "head": {"prototypes": 24, "prototypes_per_token": 2},
        "losses": {"prototype_only_kl": 1.0, "prototype_only_ce": 0.5},
        "optimizer": {"head_learning_rate": 1e-2},
    },
    "clusters": {
        "head": {"initialise": "kmeans", "position_share": 0.25},
        "losses": {"prototype_only_kl": 2.0},
    },
}


@pytest.mark.slow
def test_a_banked_head_is_the_head_of_its_own_detached_run(settings, tmp_path):
    settings["evaluation"]["every"] = 0
    bank = train_bank(copy.deepcopy(settings), HEADS, tmp_path / "bank").bank
    for banked in bank:
        own = merged(copy.deepcopy(settings), HEADS[banked.name])
        own["head"]["detach"] = True
        prepared = prepare(build_recipe(own))
        trainer = PrismTrainer(prepared, tmp_path / banked.name)
        trainer.train()
        expected = trainer.model.prototype_head
        got = banked.prism.prototype_head
        torch.testing.assert_close(got.prototypes, expected.prototypes, rtol=1e-4, atol=1e-5)
        assert got.scale.item() == pytest.approx(expected.scale.item(), rel=1e-5)
        assert got.prototypes_per_token == expected.prototypes_per_token
