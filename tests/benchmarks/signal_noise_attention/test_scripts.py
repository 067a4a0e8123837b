"""Signal/noise attention trained, read and timed by the scripts, and the page of all three."""

import json
import math
import shutil

import pytest
import torch

from benchmarks.signal_noise_attention import claims as signal_noise_claims
from benchmarks.signal_noise_attention import measure as signal_noise_training
from benchmarks.signal_noise_attention import read as signal_noise_reading
from benchmarks.signal_noise_attention import render as render_signal_noise_attention
from benchmarks.signal_noise_attention import timing as signal_noise_attention
from benchmarks.signal_noise_attention.measure import RATED, VARIANTS
from prismlm.corpus import Corpus
from prismlm.training import build_recipe

SMALL = {"preset": "signal-noise-laptop", "hidden_size": 32, "head_size": 8, "num_hidden_layers": 1}
TWO = {
    "ratio π": signal_noise_training.Variant(SMALL),
    "GPT-2": signal_noise_training.Variant(
        {"preset": "gpt2-laptop", "n_embd": 30, "n_layer": 1, "n_positions": 128}, None
    ),
}


def run(module, monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["script", *map(str, words)])
    return module.main()


def test_every_run_is_a_recipe_and_another_one():
    runs = [*signal_noise_training.runs("train"), *signal_noise_training.runs("rates")]
    assert len({run.slug for run in runs}) == len(runs) == len(VARIANTS) + 2 * len(RATED)
    recipes = [signal_noise_training.recipe_of(run, "c", 0) for run in runs]
    assert len({json.dumps(recipe) for recipe in recipes}) == len(runs)
    for recipe in recipes:
        build_recipe(recipe | {"out": "o"})


@pytest.fixture
def figures(tiny_corpus, tmp_path, monkeypatch):
    """A folder of results: two models trained for a few steps, read, and small timings."""
    monkeypatch.setattr(signal_noise_training, "VARIANTS", TWO)
    monkeypatch.setattr(signal_noise_reading, "VARIANTS", TWO)
    monkeypatch.setattr(signal_noise_training, "LENGTH", 32)
    monkeypatch.setattr(signal_noise_reading, "LENGTH", 32)
    monkeypatch.setattr(signal_noise_reading, "HEAD_TOKENS", 500)
    out, work = tmp_path / "results", tmp_path / "work"
    words = [tiny_corpus, "train", "--steps", 12, "--threads", 1]
    words += ["--work", work, "--out", out / "signal_noise_attention"]
    run(signal_noise_training, monkeypatch, *words)
    run(signal_noise_training, monkeypatch, tiny_corpus, "describe", "--out", out)
    words = [
        tiny_corpus,
        work,
        "--threads",
        1,
        "--seeds",
        0,
        "--out",
        out / "signal_noise_readings",
    ]
    run(signal_noise_reading, monkeypatch, *words)
    words = ["--quick", "--rounds", 2, "--threads", 1, "--out", out / "signal_noise_attention.json"]
    run(signal_noise_attention, monkeypatch, *words)
    return out


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
    assert first["spectra"]["rates"] == second["spectra"]["rates"]
    rates = [
        [layer["before"]["whole"] for layer in row["untrained"]["rates"]] for row in (first, second)
    ]
    assert rates[0] != rates[1]
    assert torch.equal(searched[0], searched[2])
    assert not torch.equal(searched[1], searched[3])


def test_the_page_is_what_the_scripts_measured(figures, tiny_corpus, monkeypatch, capsys):
    assert run(render_signal_noise_attention, monkeypatch, "--results", figures) == 0
    page = (figures / "signal_noise_attention.md").read_text(encoding="utf-8")
    own, other = (
        json.loads((figures / "signal_noise_attention" / f"{name}-0.json").read_text())
        for name in ("ratio-pi", "gpt-2")
    )
    assert own["perplexity"] == pytest.approx(math.exp(own["ce"]))
    assert f"| ratio π | {own['ce']:.4f} |  | 0 | {own['parameters']:,} |" in page
    row = f"| GPT-2 | {other['ce']:.4f} | {other['ce'] - own['ce']:+.4f} | 0 |"
    assert row in page

    reading = json.loads((figures / "signal_noise_readings" / "ratio-pi-0.json").read_text())
    layer = reading["spectra"]["rates"][0]
    assert f"| ratio π | {layer['before']['difference']:.4g} | {layer['gain']:.4g} (" in page
    gpt2 = json.loads((figures / "signal_noise_readings" / "gpt-2-0.json").read_text())
    heads = gpt2["heads"]["uses"]["heads"]
    shares = [head["first_share"] / (1 - head["self_share"]) for head in heads]
    assert f"| GPT-2 | {sum(shares) / len(shares):.3g} | {max(shares):.3g} | " in page
    random = reading["untrained"]["rates"]
    assert len(random) == len(reading["spectra"]["rates"])
    assert random[0]["noise_weight"] == reading["spectra"]["rates"][0]["noise_weight"]
    assert f"| ratio π, untrained | {random[0]['before']['difference']:.4g} |" in page
    assert "untrained" not in gpt2
    counted = reading["roles"]["roles"][0]
    assert f"| ratio π | subject | {counted['found']} | {counted['untrained']} |" in page
    for noted in (own["corpus"], reading["corpus"]):
        assert noted["fingerprint"] == Corpus.open(tiny_corpus).fingerprint
    described = json.loads((figures / "stories.json").read_text())
    assert sum(source["tokens"] for source in described["sources"]) == described["tokens"]
    assert f"fingerprint {described['fingerprint']}: {described['sources'][0]['source']} (" in page
    assert str(figures.parent) not in json.dumps([reading, gpt2])

    timing = json.loads((figures / "signal_noise_attention.json").read_text())
    found = timing["parts"]["attention"]["rows"][0]["ratios"]["combined / plain"]["elapsed"]
    assert f"{found['ratio']:.3f} ({found['low']:.3f} to {found['high']:.3f})" in page
    held = [row for row in timing["parts"]["decode"]["rows"] if row["what"] == "heads"]
    assert [row["cache_ratios"]["one tensor"] for row in held] == [0.5, 0.5]

    assert run(render_signal_noise_attention, monkeypatch, "--results", figures, "--check") == 0
    # What is there is not measured again.
    capsys.readouterr()
    words = [tiny_corpus, "m", "--threads", 1, "--seeds", 0]
    words += ["--out", figures / "signal_noise_readings"]
    run(signal_noise_reading, monkeypatch, *words)
    assert capsys.readouterr().out.count("is there") == 2


@pytest.mark.parametrize(
    ("effects", "ps", "expected", "answer"),
    [
        ([0.5, 0.3], [0.01, 0.04], 1, "**yes, in every seed**"),
        ([-0.5, -0.3], [0.01, 0.04], 1, "**no: the opposite, in every seed**"),
        ([-0.5, -0.3], [0.01, 0.04], -1, "**yes, in every seed**"),
        ([0.5, -0.3], [0.01, 0.04], 1, "not shown"),
        ([0.5, 0.3], [0.01, 0.06], 1, "not shown"),
        ([0.5], [0.01], 1, "yes, in the one seed there is"),
    ],
)
def test_a_claim_holds_where_every_seed_has_its_sign(effects, ps, expected, answer):
    assert signal_noise_claims.verdict(effects, ps, expected) == answer


def a_row(seed, variant="ratio π", **more):
    """A made-up reading: signal heads alike to uniform attention, noise heads on themselves."""
    even = {"first_share": 0.02, "self_share": 0.02, "relative_entropy": 1.0}
    heads = [
        {"group": "signal", "first_share": 0.015, "self_share": 0.02, "relative_entropy": 0.995},
        {"group": "noise", "first_share": 0.004, "self_share": 0.32, "relative_entropy": 0.5},
    ]
    compared = {"signal_median": 66.0, "noise_median": 50.0, "effect": 0.75, "p": 0.01}
    comparison = [compared | {"measure": name} for name in signal_noise_claims.MEASURES]
    uniform = even | dict.fromkeys(signal_noise_claims.MEASURES, 66.0) | even
    return {
        "variant": variant,
        "seed": seed,
        "heads": {"uses": {"heads": heads, "uniform": uniform}, "comparison": comparison},
        "spectra": {},
        "gradient": {"mean": 1.0, "greatest": 2.0},
        "environment": {"date": "2026-01-01"},
    } | more  # fmt: skip


def rates(gain):
    one = {
        "before": {"difference": 5.0}, "gain": gain, "gain_over_scaled": gain,
        "gain_over_shuffled": gain, "gradient_cosine": 0.1,
        "incoherence": {"own": 0.1, "random": 0.1},
    }  # fmt: skip
    return [one, one]


def page_of(*rows, runs=None):
    return "\n".join(signal_noise_claims.claims(list(rows), runs))


def test_a_gain_that_random_weights_have_too_is_not_training():
    def read(seed, gain, random=None):
        control = {} if random is None else {"untrained": {"rates": rates(random)}}
        return a_row(seed, spectra={"rates": rates(gain)}, **control)

    unread = page_of(*(read(seed, 2.0 + seed / 10) for seed in range(3)))
    assert "The untrained control was not read" in unread
    assert "untrained |" not in unread
    alike = page_of(*(read(seed, 2.0 + seed / 10, 2.05 + seed / 20) for seed in range(3)))
    assert "in 6 of 6 layers of all seeds. With random weights it does in 6 of 6. So that" in alike
    assert "beyond what random weights do: not shown." in alike
    assert "| ratio π, untrained | 5 | 2.1 (6 of 6)" in alike
    above = page_of(*(read(seed, 2.0 + seed / 100, -1.0) for seed in range(3)))
    assert "beyond what random weights do: **yes**." in above


def test_noise_heads_are_not_what_makes_a_sink_small():
    page = page_of(a_row(0), a_row(0, "GPT-2"))
    assert f"| ratio π | {0.015 / 0.98:.3g} | {0.015 / 0.98:.3g} | {0.02 / 0.98:.3g} |" in page
    assert "No model here has a sink" in page
    assert "Smaller with ratio π than with GPT-2" not in page
    with_sink = a_row(0, "GPT-2")
    with_sink["heads"]["uses"]["heads"] = [
        {"group": "attention", "first_share": 0.4, "self_share": 0.2, "relative_entropy": 0.5}
    ]
    with_sink["heads"]["comparison"] = None
    page = page_of(a_row(0), with_sink)
    assert "Above uniform attention, in some seed: GPT-2." in page
    # 0.4 of the 0.8 that is not on the token itself.
    less = f"{0.015 / 0.98 - 0.5:+.4f}"
    assert f"Smaller with ratio π than with GPT-2: not shown (difference {less}, 1 seed)" in page


def test_reaching_further_is_not_credited_to_the_ratio():
    rows = [a_row(seed) for seed in range(3)] + [a_row(seed, "ratio 1") for seed in range(3)]
    page = page_of(*rows)
    assert "reach further than noise heads: **yes, in every seed**. That alone does not" in page
    assert (
        "The gap between the groups is narrower with ratio 1 than with ratio π: not shown" in page
    )
    assert "By reach and entropy signal heads are near uniform attention" in page
    settings = {"steps": 750, "batch_size": 8, "data": {"length": 256}}
    few = page_of(*rows, runs=[{"settings": settings}])
    assert "trained for 750 steps, at most 1,536,000 tokens: 0.47% of the source's" in few


def test_resonance_is_judged_by_what_was_trained():
    def read(seed, variant, normalised):
        layer = {"signal_noise": 2.0}
        own = {"ratio": "own", "scaling": "base", "normalised": normalised, "layers": [layer]}
        other = own | {"ratio": "3", "position": {"normalised": 0.5}}
        return a_row(seed, variant, spectra={"cross_terms": [own, other]})

    ours = [read(seed, "ratio π", 0.4 + seed / 1000) for seed in range(3)]
    page = page_of(*ours, *(read(seed, "ratio 2", 0.5) for seed in range(3)))
    assert "| ratio 2 | 2 (2 to 2) | 0.5000 (0.5000 to 0.5000) | 3 |" in page
    assert "than with ratio 2: **yes, in every seed**" in page
    assert "π keeps the groups further apart than other ratios: **yes**" in page
    page = page_of(*ours, *(read(seed, "ratio 3", 0.3) for seed in range(3)))
    assert "other ratios: **no**; less far than with ratio 3." in page
    assert "other ratios: not shown." in page_of(ours[0], read(0, "ratio 2", 0.5))
    # By the settings, whatever the reading says: 1/√30000 and √(3/10000) of a head of 20.
    assert "| 3 | base | 0.401 | 0.5 | 0 (1:1) | 0 (3:1) |" in page


def test_losses_beyond_the_trained_length_have_an_error():
    def read(seed, difference):
        bucket = {"low": 32, "high": 63, "difference": difference, "difference_error": 0.004}
        loss = {"trained_length": 32, "documents": 7, "buckets": [bucket]}
        return a_row(seed, spectra={"loss": loss})

    page = page_of(read(0, 0.25), read(1, 0.5), a_row(0, "GPT-2"))
    assert "| ratio π | +0.375 (+0.250 to +0.500) ± 0.004 | 7 |" in page
    assert "GPT-2 is missing: its learned positions" in page


def test_roles_are_beside_random_weights():
    best = {"lift": 2.0, "control": 1.0, "excess": 0.5, "q": 0.01}
    role = {"role": "subject", "found": 3, "untrained": 1, "best": best}
    read = {"sentences": 12, "heads": 6, "draws": 10_000, "level": 0.05, "roles": [role]}
    page = page_of(a_row(0, roles=read), a_row(1))
    assert "| ratio π | subject | 3 | 1 | 6 | 2.00 | 1.00 | 0.50 | 0.01 |" in page
    assert "in every seed that was read: ratio π, subject." in page
    assert "Do heads look for" not in page_of(a_row(1))


def test_as_many_parameters_are_compared_with_gpt2():
    def trained(variant, seed, ce):
        settings = {"corpus": "c", "steps": 2, "batch_size": 1, "data": {"length": 4}}
        return {
            "variant": variant, "factor": 1.0, "seed": seed, "settings": settings, "ce": ce,
            "parameters": 100, "environment": {"date": "2026-01-01"},
        }  # fmt: skip

    rows = [trained("GPT-2", seed, 5 + seed / 10) for seed in range(3)]
    rows += [trained("R = 4", seed, 4.5 + seed / 10 + seed / 1000) for seed in range(3)]
    rows += [trained("R = 2, untied", seed, 5.1 - seed / 10) for seed in range(2)]
    page = render_signal_noise_attention.render(rows, [], {})
    line = "Lower loss with {} than with GPT-2 (100 parameters and 100): {} "
    assert line.format("R = 4", "**yes, in every seed**") in page
    assert line.format("R = 2, untied", "not shown") in page
