"""Trained models read beside random weights."""

import json
import shutil

import torch

from benchmarks.signal_noise_attention import measure as signal_noise_training
from benchmarks.signal_noise_attention import read as signal_noise_reading
from tests.benchmarks.scripts import run
from tests.benchmarks.signal_noise_attention.two_models import TWO


def test_every_seed_has_random_weights_of_its_own_beside_it(tiny_corpus, tmp_path, monkeypatch):
    pi = {"ratio π": TWO["ratio π"]}
    for module in (signal_noise_training, signal_noise_reading):
        monkeypatch.setattr(module, "VARIANTS", pi)
        monkeypatch.setattr(module, "LENGTH", 32)
    monkeypatch.setattr(signal_noise_reading, "HEAD_TOKENS", 500)
    trained, searched = tmp_path / "work", []
    words = [tiny_corpus, "train", "--steps", 12, "--threads", 1]
    run(
        signal_noise_training, monkeypatch, *words, "--work", trained, "--out", tmp_path / "figures"
    )
    (model,) = (path for path in trained.iterdir() if (path / "model.safetensors").is_file())
    shutil.copytree(model, trained / f"{model.name[:-1]}1")
    search = signal_noise_reading.search_roles

    def noted(one, *others):
        searched.append(one.lm_head.weight)
        return search(one, *others)

    monkeypatch.setattr(signal_noise_reading, "search_roles", noted)
    words = [tiny_corpus, trained, "--threads", 1, "--seeds", 0, 1, "--out", tmp_path / "read"]
    run(signal_noise_reading, monkeypatch, *words)
    first, second = (json.loads(file.read_text()) for file in sorted((tmp_path / "read").iterdir()))
    assert (first["seed"], second["seed"]) == (0, 1)
    # The same model twice, and two draws beside it.
    own, again = (
        [
            {k: v for k, v in layer.items() if "resized" not in k}
            for layer in row["spectra"]["rates"]
        ]
        for row in (first, second)
    )
    assert own == again
    rates = [
        [layer["before"]["whole"] for layer in row["untrained"]["rates"]] for row in (first, second)
    ]
    assert rates[0] != rates[1]
    assert torch.equal(searched[0], searched[2])
    assert not torch.equal(searched[1], searched[3])
