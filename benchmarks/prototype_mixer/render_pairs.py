"""Write docs/results/prototype_mixer_pairs.md from its JSON; ``--check`` only compares the two."""

from __future__ import annotations

from typing import Any

from benchmarks.shared.pages import (
    escaped,
    measured_on,
    page_options,
    publish,
    read_result,
    table_head,
)

# The source's Table 12: mean similarity and mean edit distance.
SOURCE = {
    "synonym": (0.828, 5.89),
    "typo": (0.775, 1.03),
    "spelling": (0.956, 1.20),
    "morphology": (0.881, 1.00),
    "contraction": (0.895, 2.54),
    "punctuation": (0.983, 1.09),
    "abbreviation": (0.894, 7.23),
}
CLOSE = 0.25
REASONS = {"unlike": "below the threshold", "unchanged": "unchanged", "spare": "not needed"}


def main() -> int:
    """Render, or say whether the page is up to date."""
    given = page_options(__doc__).parse_args()
    result = read_result(given.results / "prototype_mixer_pairs.json", "prototype_mixer.pairs")
    return publish({given.results / "prototype_mixer_pairs.md": render(result)}, check=given.check)


def render(value: dict[str, Any]) -> str:
    """Return the page."""
    lines = [
        "# Pairs of sentences for studies of robustness",
        "",
        "Generated from `prototype_mixer_pairs.json` by",
        "`python -m benchmarks.prototype_mixer.render_pairs`;",
        "`python -m benchmarks.prototype_mixer.pairs DATA` writes that.",
        "",
        f"`prismlm eval pairs` made {value['per_slice']:,} pairs of each slice with seed "
        f"{value['seed']}, from sentences of WikiText-2, DailyDialog and AG News. A perturbation "
        f"is kept if the cosine of its embedding (all-MiniLM-L6-v2) with the original's is "
        f"{value['similarity']} or more; interventions are not filtered. Two runs with one seed "
        f"gave {'the same bytes' if value['same_bytes'] else '**different bytes**'}.",
        "",
        "The pairs are not shipped: AG News is for research, DailyDialog CC BY-NC-SA. The command "
        "makes them again, byte for byte, where the same versions of the libraries run.",
        "",
        *_strength(value["slices"]),
        *_origins(value["slices"]),
        *_examples(value["examples"]),
        measured_on(value["environment"]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _strength(slices: list[dict[str, Any]]) -> list[str]:
    lines = [
        "## How strong the changes are",
        "",
        "Mean cosine and mean Levenshtein distance in characters, beside the source's Table 12.",
        "",
        *table_head("| slice | source's cosine | ours | 5 % to 95 % | source's distance | ours |"),
    ]
    for row in slices:
        theirs = SOURCE.get(row["slice"])
        cosine, distance = (
            ("–", "–") if theirs is None else (f"{theirs[0]:.3f}", f"{theirs[1]:.2f}")
        )
        low, _, high = row["quantiles"]
        lines.append(
            f"| {row['slice']} | {cosine} | {row['similarity']:.3f} | {low:.3f} to {high:.3f} | "
            f"{distance} | {row['distance']:.2f} |"
        )
    return [*lines, "", *_verdicts(slices), ""]


def _verdicts(slices: list[dict[str, Any]]) -> list[str]:
    ours = {row["slice"]: row for row in slices if row["slice"] in SOURCE}
    higher = [name for name in ours if ours[name]["similarity"] > SOURCE[name][0]]
    near = [name for name in ours if abs(ours[name]["distance"] / SOURCE[name][1] - 1) <= CLOSE]
    least = min(ours, key=lambda name: ours[name]["similarity"])
    synonyms = ours["synonym"]["words_changed"]
    return [
        f"- Cosine: ours is higher in {len(higher)} of {len(ours)} slices ({', '.join(higher)}). "
        "Two sentences of ours have up to twenty words, of which one is changed; the source's "
        "examples have three to five, and it does not say how long its sentences are.",
        f"- Distance: ours is within {CLOSE:.0%} of the source's in {len(near)} of {len(ours)} "
        f"({', '.join(near)}).",
        f"- Typos are the least alike of the seven, though they change one letter: "
        f"{'shown' if least == 'typo' else f'not shown, {least} are'}.",
        f"- One to three synonyms a sentence: one in {synonyms.get('1', 0)}, two in "
        f"{synonyms.get('2', 0)}, three in {synonyms.get('3', 0)}. The source does not give "
        "its mix.",
    ]


def _origins(slices: list[dict[str, Any]]) -> list[str]:
    sources = sorted({source for row in slices for source in row["sources"]})
    lines = [
        "## Where they come from, and what was left out",
        "",
        "Candidates are sentences that a slice's rule could change, until the slice was full. No "
        "word changes more than a tenth of a slice while there are others, so that some are not "
        "needed.",
        "",
        *table_head(
            f"| slice | {' | '.join(sources)} | candidates | {' | '.join(REASONS.values())} |"
        ),
    ]
    for row in slices:
        counts = [row["sources"].get(source, 0) for source in sources]
        left_out = [row["left_out"].get(reason, 0) for reason in REASONS]
        cells = " | ".join(f"{count:,}" for count in (*counts, row["candidates"], *left_out))
        lines.append(f"| {row['slice']} | {cells} |")
    templates = sum(row["sources"].get("template", 0) for row in slices)
    return [*lines, "", f"Sentences made from templates: {templates:,}.", ""]


def _examples(examples: list[dict[str, str]]) -> list[str]:
    lines = [
        "## An example of each",
        "",
        "Of sentences written for this page, not of the corpora.",
        "",
        *table_head("| slice | original | changed |"),
    ]
    lines += [
        f"| {row['slice']} | {escaped(row['original'])} | {escaped(row['perturbed'])} |"
        for row in examples
    ]
    return [*lines, ""]


if __name__ == "__main__":
    raise SystemExit(main())
