"""The page says of every goal what its figures say, and compares what belongs together."""

import numpy as np
import pytest

from benchmarks.attribution.datamodels import TEMPERATURE, TEMPERATURES, named, tried_choices
from benchmarks.attribution.render_retraining import (
    GRADIENTS,
    PRODUCT,
    best_choice,
    paired,
    render,
)
from benchmarks.attribution.search_choices import mean_with_error

PREDICTIONS = 40
SEARCHED = np.arange(PREDICTIONS) % 2 == 0
ENVIRONMENT = {"date": "2026-01-01", "commit": "abc", "machine": "some"}
SECONDS = {"once": 1.0, "a prediction": 0.5}
CHOSEN = "evidence T=0.2 cells=16"


def around(mean, seed):
    noise = np.random.default_rng(seed).normal(size=PREDICTIONS) * 0.02
    return mean + noise - noise.mean()


def judged(mean, seed):
    each = around(mean, seed)
    return {
        "all": mean_with_error(each),
        "search": mean_with_error(each[SEARCHED]),
        "report": mean_with_error(each[~SEARCHED]),
        "each": each.tolist(),
        "resampled": each.tolist(),
        "seconds": SECONDS,
    }


def described(mean, seed):
    each = around(mean, seed)
    return mean_with_error(each) | {"each": each.tolist()}


def results(own=0.3, rival=0.1, qld=True):
    names = ["random", "count of the token", "bm25", *GRADIENTS, *map(named, tried_choices())]
    names += [f"random states T={t:g}" for t in TEMPERATURES]
    names += [f"{kind} T={TEMPERATURE:g}" for kind in ("explain", "alone")]
    means = dict.fromkeys(names, 0.05) | {CHOSEN: own, "gradient cosine": rival}
    lds = {
        "environment": ENVIRONMENT,
        "models": 100,
        "documents": 1200,
        "predictions": PREDICTIONS,
        "searched": SEARCHED.tolist(),
        "seconds to read the documents": 20.0,
        "methods": {name: judged(mean, row) for row, (name, mean) in enumerate(means.items())},
    }
    tool = {
        name: {"lds": described(mean, 90 + row), "seconds": SECONDS}
        for row, (name, mean) in enumerate(
            {"Bergson EK-FAC": 0.15, "bm25": 0.05, CHOSEN: own}.items()
        )
    }
    if qld:
        for row, name in enumerate(tool):
            tool[name]["qld"] = described(0.1 * row, row)
    lost = {
        name: {
            "lost": described(mean, 7),
            "each": np.stack([around(mean, 7)] * 3, 1).tolist(),
        }
        for name, mean in {"random": 0.0, "bm25": 0.2, PRODUCT: own}.items()
    }
    return (
        lds,
        {"environment": ENVIRONMENT, "bergson": "9.9", "models": 100, "methods": tool},
        {"environment": ENVIRONMENT, "asked": [40, 60], "methods": {}},
        {
            "environment": ENVIRONMENT,
            "predictions": PREDICTIONS,
            "together": 5,
            "seeds": [0, 1, 2],
            "methods": lost,
        },
        {"runs": [timed(64, 20.0), timed(128, 40.0)]},
    )


def timed(documents, seconds):
    return {
        "environment": ENVIRONMENT,
        "model": "a model",
        "parameters": 134_500_000,
        "predictions": 4,
        "prompt": 64,
        "document": 128,
        "positions": 400_000,
        "explain": {"a prediction": 0.3, "documents": 800},
        "ekfac": {"documents": documents, "a prediction": seconds, "once": 9.0},
    }


def line(page, words):
    return next(row for row in page.splitlines() if row.startswith(words))


@pytest.mark.parametrize("own", [0.3, 0.12])
def test_goals_are_met_or_missed_by_their_figures(own):
    page = render(*results(own=own))
    met = own == 0.3
    assert ("**missed**" in line(page, "- LDS **")) != met
    assert ("**missed**" in line(page, "- Above every gradient")) != met
    assert ("**missed**" in line(page, "- Forgetting")) != met


def test_what_lies_within_two_errors_is_not_shown():
    above = line(render(*results(own=0.151)), "- Above every gradient")
    assert "the nearest is Bergson's EK-FAC" in above
    assert "**not shown**" in above


def test_the_choice_is_made_on_the_half_to_choose_on():
    lds, *_ = results()
    better = "evidence T=0.1 cells=16"
    lds["methods"][better]["search"]["mean"] = 0.9
    assert best_choice(lds) == better


def test_the_temperature_of_explain_is_beside_the_best():
    lds, tool, more, lost, real = results()
    lds["methods"]["count of the token"]["all"]["mean"] = 0.2
    said = line(render(lds, tool, more, lost, real), "- `explain` itself")
    assert "**below** control: how often the predicted token comes next" in said


def test_what_was_not_measured_is_said():
    page = render(*results(qld=False))
    assert "- QLD by Bergson: not measured." in page
    assert "| – | 0.5 | 1 |" in page


def test_what_is_judged_of_explain_stands_before_what_is_of_its_reference():
    lds, tool, more, lost, real = results()
    said = line(render(lds, tool, more, lost, real), "- QLD by Bergson")
    assert "evidence by position" in said
    tool["methods"][PRODUCT] = tool["methods"][CHOSEN] | {"qld": described(0.9, 3)}
    said = line(render(lds, tool, more, lost, real), "- QLD by Bergson")
    assert "**`explain`**" in said
    assert "**0.900**" in said


def test_predictions_judged_later_count_and_rivals_are_compared_on_those_they_have():
    lds, tool, more, lost, real = results()
    more["methods"] = {name: {"qld": {"each": [0.5] * 40}} for name in (CHOSEN, "bm25")}
    page = render(lds, tool, more, lost, real)
    assert "--qld 60 --qld-from 40" in page
    first, words = (np.array(tool["methods"][name]["qld"]["each"]) for name in (CHOSEN, "bm25"))
    said = line(page, "- QLD by Bergson")
    assert f"**{(first.mean() + 0.5) / 2:.3f}**" in said
    both = paired(np.append(first, [0.5] * 40), np.append(words, [0.5] * 40))
    assert f"paired {both[0]:+.3f} ± {both[1]:.3f}" in said
    apart = paired(first, tool["methods"]["Bergson EK-FAC"]["qld"]["each"])
    assert f"on the first 40: ours less it {apart[0]:+.3f} ± {apart[1]:.3f}" in said


def test_the_time_of_explain_is_a_share_of_that_over_the_most_documents():
    lds, tool, more, lost, real = results()
    said = line(render(lds, tool, more, lost, real), "- On a model (134.5 M parameters)")
    assert "20.0 s over 64 and 40.0 s over 128 beginnings" in said
    assert "0.75% of EK-FAC's over 128: met" in said
    real["runs"].pop()
    said = line(render(lds, tool, more, lost, real), "- On a model (134.5 M parameters)")
    assert "1.50% of EK-FAC's over 64: **missed**" in said


def test_what_is_less_than_planned_is_said():
    assert "Not finished" not in render(*results())
    lds, tool, more, lost, real = results()
    page = render(lds | {"models": 60}, tool, more, lost | {"seeds": [0]}, real)
    said = line(page, "- **Not finished**")
    assert said == "- **Not finished**: 60 of 100 models, 1 of 3 seeds for forgetting."


def test_differences_are_paired():
    left = np.array([1.0, 2.0, 4.0])
    assert paired(left, left - 1) == (1.0, 0.0)
