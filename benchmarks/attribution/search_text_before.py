"""Search what the text before leaves open: T, how much of it decides, how long; and the last token.

    python -m benchmarks.attribution.planted_model planted --facts 32 --epochs 1 --seed 1
    python -m benchmarks.attribution.model_bank planted bank
    python -m benchmarks.attribution.search_text_before planted --bank bank

Every choice is judged by recall of planted facts, tail-patch (the gain alone), the share of a
held-out document's own domain and LDS of a bank of models, on the half of the questions that
choices are made on and on the other. The best choice has the largest least share of the best figure
of any choice, over recall, gain and own share.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.attribution.datamodels import base_setting, number_of, trained_on
from benchmarks.attribution.judge_planted import domains, recalled
from benchmarks.attribution.judges.passages import best
from benchmarks.attribution.judges.retraining import linear_datamodeling
from benchmarks.attribution.judges.tail_patch import tail_patch
from benchmarks.attribution.methods.explain import Explained, temporary_cells
from benchmarks.attribution.methods.setting import Setting
from benchmarks.attribution.model_bank import read_predictions
from benchmarks.attribution.search_choices import (
    NAMED,
    halves,
    mean_with_error,
    patch_predictions,
    planted_setting,
)
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.explain.positions import HEAVIEST
from prismlm.files import read_json, write_json
from prismlm.index.cells import Cells
from prismlm.index.layout import find_lens, read_meta

# T, ρ, C, h, B; ρ = 1 takes domains out, a C without end documents, B = 1 the token read last.
NONE = 1e12
TRIED = (
    (0.05, 1.0, NONE, 32.0, 1.0),
    (0.2, 1.0, NONE, 32.0, 1.0),
    (0.2, 0.75, 300.0, 32.0, 1.0),
    (0.2, 0.5, 300.0, 32.0, 1.0),
    (0.2, 0.9, 300.0, 32.0, 1.0),
    (0.2, 0.75, 1000.0, 32.0, 1.0),
    (0.3, 0.75, 1000.0, 32.0, 1.0),
    (0.2, 0.9, 1000.0, 32.0, 1.0),
    (0.3, 0.9, 1000.0, 32.0, 1.0),
    (0.5, 0.9, 1000.0, 32.0, 1.0),
    (0.3, 1.0, 1000.0, 32.0, 1.0),
    (0.3, 0.9, NONE, 32.0, 1.0),
    (0.3, 0.9, 1000.0, 8.0, 1.0),
    (0.3, 0.9, 1000.0, 128.0, 1.0),
    (0.3, 1.0, NONE, 6.0, 10.0),
    (0.3, 0.9, 1000.0, 6.0, 1.0),
    (0.3, 0.9, 1000.0, 6.0, 4.0),
    (0.3, 0.9, 1000.0, 6.0, 10.0),
    (0.3, 0.9, 1000.0, 6.0, 30.0),
    (0.3, 0.9, 1000.0, 8.0, 10.0),
    (0.3, 0.9, 1000.0, 32.0, 10.0),
)


def main() -> None:
    """Judge every choice that is not judged yet."""
    parser = script_options(__doc__, RESULTS / "attribution_text_before.json")
    parser.add_argument("planted", type=Path, help="the directory that planted_model.py built")
    parser.add_argument("--bank", type=Path, help="that model_bank.py trained, for LDS")
    parser.add_argument("--documents", type=int, default=220, help="held out, for their domains")
    parser.add_argument("--seed", type=int, default=0, help="of halves and predictions")
    given = parser.parse_args()
    setting = planted_setting(given.planted)
    facts = read_json(given.planted / "facts.json")["facts"]
    lens = find_lens(given.planted / "model", None)
    assert lens is not None, "the model has no lens"
    cells = Cells(lens, read_meta(lens).cells or {})
    result: dict[str, Any] = {"tried": []}
    if given.out.is_file():
        before = read_json(given.out)
        # What counted as attributed by another rule is measured again.
        result = before if before.get("heaviest") == HEAVIEST else result
    known = [one["choice"] for one in result["tried"]]
    for temperature, *before in TRIED:
        choice = [temperature, *(None if value == NONE else value for value in before)]
        if choice in known:
            continue
        method = explained(setting, cells, temperature, *before)
        found = {
            "recall": recalled(setting, method, facts, given.seed),
            "gain": gains(setting, method, given.seed),
            "domains": domains(setting, method, given.documents, given.seed),
        }
        halved = {
            half: {
                "recall": found["recall"][half]["mean"],
                "gain": found["gain"][half]["mean"],
                "own share": found["domains"][half]["alike"]["own_share"],
                "accuracy": found["domains"][half]["alike"]["accuracy"],
            }
            for half in ("search", "report")
        }
        result["tried"].append({"choice": choice, **halved})
        result |= {"environment": environment(), "heaviest": HEAVIEST}
        write_json(given.out, result)
        print(choice, halved, flush=True)
    if given.bank is not None:
        foretell(given.bank, result["tried"])
        write_json(given.out, result)


def explained(
    setting: Setting,
    cells: Cells,
    temperature: float,
    stray: float,
    concentration: float,
    span: float,
    same_token: float,
) -> Explained:
    """Return ``explain`` with these choices."""
    before = stray, concentration, span
    return Explained(setting, cells, temperature, before=before, same_token=same_token)


def gains(setting: Setting, method: Explained, seed: int) -> dict[str, dict[str, float]]:
    """Return the mean gain of tail-patch on either half."""
    predictions, _ = patch_predictions(setting, seed)
    named = best(method(predictions), NAMED)
    passages = [[setting.bank.tokens(passage) for passage in row] for row in named.tolist()]
    gain = tail_patch(setting.model, predictions, passages).gain
    searched = halves(len(predictions), seed)
    return {"search": mean_with_error(gain[searched]), "report": mean_with_error(gain[~searched])}


def foretell(folder: Path, tried: list[dict[str, Any]]) -> None:
    """Add the LDS of every choice, on either half of the predictions of a bank of models."""
    files = sorted((folder / "outputs").glob("*.npy"), key=number_of)
    outputs = np.stack([np.load(file) for file in files], 1)
    setting = base_setting(folder)
    cells = temporary_cells(setting)
    subsets = trained_on(folder, len(files), len(setting.bank))
    predictions = read_predictions(folder)
    searched = halves(len(predictions), seed=0)
    for one in tried:
        method = explained(setting, cells, *(NONE if v is None else v for v in one["choice"]))
        found = linear_datamodeling(method(predictions), subsets, outputs)
        one["search"]["LDS"] = float(found[searched].mean())
        one["report"]["LDS"] = float(found[~searched].mean())
        print(one["choice"], "LDS", one["report"]["LDS"], flush=True)


def least(tried: list[dict[str, Any]], half: str = "search") -> np.ndarray:
    """Return, of each choice, its least share of the best figure of any, over the judges."""
    figures = np.array(
        [[one[half][key] for key in ("recall", "gain", "own share")] for one in tried]
    )
    return (figures / figures.max(0)).min(1)


if __name__ == "__main__":
    main()
