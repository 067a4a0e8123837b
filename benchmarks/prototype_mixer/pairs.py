"""How alike the pairs are that ``prismlm eval pairs`` makes: the source's Table 12, of ours.

    python -m benchmarks.prototype_mixer.pairs DATA [--per-slice 500] [--seed 0]

DATA is a directory as the command takes it. The pairs are made in a folder that is removed: of
corpora that may not be passed on, figures alone are kept, and examples from sentences written here.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.eval.pairs import INTERVENTIONS, SLICES, read_pairs
from prismlm.eval.perturbations.generate import FILES, PERTURB, PairOptions, write_pairs
from prismlm.files import write_json

# Written for this page.
SENTENCES = {
    "synonym": "Perhaps the doctor bought the film at that shop.",
    "typo": "The river was frozen in the winter.",
    "spelling": "Her favorite color is on the door.",
    "morphology": "They walked slowly to the house by the rivers.",
    "contraction": "I do not know who they are.",
    "punctuation": "However, the train was late and the bus was full.",
    "abbreviation": "Doctor Hill came in January 1990.",
    "gender": "She told us that her brother lost his hat.",
    "negation": "The bridge is open in the morning.",
    "number": "We saw three boats and bought a book.",
}
QUANTILES = (0.05, 0.5, 0.95)


def main() -> None:
    """Make pairs twice, compare them byte for byte, and write what is known of them."""
    parser = script_options(__doc__, RESULTS / "prototype_mixer_pairs.json")
    parser.add_argument("data", type=Path)
    parser.add_argument("--per-slice", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    options = PairOptions(per_slice=given.per_slice, seed=given.seed)
    with tempfile.TemporaryDirectory() as folder:
        first, second = (Path(folder) / name for name in ("first", "second"))
        result = write_pairs(first, given.data, options)
        write_pairs(second, given.data, options)
        result["same_bytes"] = all(
            (first / name).read_bytes() == (second / name).read_bytes() for name in FILES
        )
        rows = [row for name in FILES for row in read_pairs(first / name).to_pylist()]
    for found in result["slices"]:
        found |= spread([row for row in rows if row["slice"] == found["slice"]])
    result |= {"examples": examples(), "environment": environment()}
    write_json(given.out, result)
    print(f"wrote {given.out}")


def spread(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return quantiles of similarity, and how many words were changed in how many pairs."""
    words = [(row["original"].split(), row["perturbed"].split()) for row in rows]
    changed = Counter(
        sum(a != b for a, b in zip(before, after, strict=True))
        for before, after in words
        if len(before) == len(after)
    )
    return {
        "quantiles": [
            float(q) for q in np.quantile([row["similarity"] for row in rows], QUANTILES)
        ],
        "words_changed": {str(count): changed[count] for count in sorted(changed)},
    }


def examples() -> list[dict[str, str]]:
    """Return a pair of each slice, of sentences that are nobody else's."""
    found: list[dict[str, str]] = []
    for name in (*SLICES, *INTERVENTIONS):
        change = PERTURB[name](SENTENCES[name], random.Random(0))
        assert change is not None
        found.append({"slice": name, "original": SENTENCES[name], "perturbed": change.text})
    return found


if __name__ == "__main__":
    main()
