"""Write docs/results/themes.md from themes.json; ``--check`` only compares the two."""

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

KINDS = {
    "word": "one marked word, text of different documents",
    "document": "passages of one document",
    "topic": "documents of one source, such as one subject of arXiv",
}
FIGURES = ("disentanglement", "coverage", "themes")


def main() -> int:
    """Render, or say whether the page is up to date."""
    given = page_options(__doc__).parse_args()
    result = read_result(given.results / "themes.json", "labels.themes")
    return publish({given.results / "themes.md": render(result)}, check=given.check)


def render(result: dict[str, Any]) -> str:
    """Return the page."""
    lines = [
        "# Are a model's units about one thing each?",
        "",
        "Generated from `themes.json` by `python -m benchmarks.labels.render_themes`; the JSON by",
        "",
        "    python -m benchmarks.labels.themes planted MODEL",
        "    python -m benchmarks.labels.themes units MODEL --of KIND --called NAME",
        "",
        "`prismlm inspect themes` judges a unit by the ten sequences that activate it most: how "
        "well their main theme is disentangled from others, how many of the ten hold it, which is "
        "its coverage, and how many themes there are, 1 to 10 each; ProtoT's rubric, §5.1 and "
        "A.10. There a large language model judges. Here words alone do, "
        "[as defined](../lens.md#themes), which know no synonyms: these figures are not to be "
        "compared with the source's. Beside each stand units of ten random sequences of the same "
        "corpus, as long and with as many marks, which the source does not have.",
        "",
        *_units(result["units"]),
        *_planted(result["planted"]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _units(units: list[dict[str, Any]]) -> list[str]:
    lines = [
        "## Units of models",
        "",
        "Means; in brackets those of random sequences, then the difference with 95 % of a "
        "bootstrap over units.",
        "",
        *means(units),
    ]
    said = [f"{one['called']}: {one['said']}" for one in units if one["said"]]
    lines += [
        "",
        "Whether a ProtoT's channels are of fewer themes than a LLaMA's heads, as the source finds "
        "of large ones, is not settled by these: both are far too small, and so is the text that "
        "their sequences are chosen from.",
        "",
        "*By a mark*: the main theme has a word that is marked in half of its sequences or more, "
        "and in two at least, such as a comma; of the others it is what the text is about. "
        "*Documents*: that the ten sequences of a unit are of, in the mean. Those of one document "
        "share its names and its subject, so that a unit whose sequences are of few documents has "
        "a theme for that alone. Random ones are drawn by length from all documents of the split; "
        "no control has sequences of as few documents as the units have. "
        + " ".join(f"{s[0].upper()}{s[1:]}." for s in dict.fromkeys(said)),
        "",
        *histograms(units),
        *drawn_units(units),
    ]
    return [*lines, ""]


def means(units: list[dict[str, Any]]) -> list[str]:
    """Return a table of mean figures beside those of random sequences."""
    lines = table_head(
        "| units | judged | disentanglement | coverage | number of themes | by a mark | documents |"
    )
    for one in units:
        cells = [beside(one["figures"][figure]) for figure in FIGURES]
        share = one["of_marked_words"] / one["units"]
        lines.append(
            f"| {one['of']} of {one['called']} | {one['units']:,} | {' | '.join(cells)} | "
            f"{share:.0%} | {one['documents']:.1f} |"
        )
    return lines


def histograms(units: list[dict[str, Any]]) -> list[str]:
    """Return a table of how many units have each value."""
    lines = [
        "How many units have each value, 1 to 10, and of random sequences in brackets:",
        "",
        *table_head("| units | figure |" + "".join(f" {i} |" for i in range(1, 11))),
    ]
    for one in units:
        for figure in FIGURES:
            found = one["figures"][figure]
            pairs = zip(found["histogram"], found["random_histogram"], strict=True)
            cells = " | ".join(f"{own} ({chance})" for own, chance in pairs)
            lines.append(f"| {one['of']} of {one['called']} | {figure} | {cells} |")
    return lines


def drawn_units(units: list[dict[str, Any]]) -> list[str]:
    """Return tables of the units that were drawn."""
    lines: list[str] = []
    for one in units:
        lines += [
            "",
            f"### {one['of'].capitalize()} of {one['called']}",
            "",
            f"{len(one['drawn'])} of them, drawn by seed and not selected"
            + (f"; {one['left_out']:,} more had fewer than ten sequences" * bool(one["left_out"]))
            + ":",
            "",
            *table_head("| unit | documents | disentanglement | coverage | themes | main theme |"),
        ]
        for row in one["drawn"]:
            figures = " | ".join(str(row[figure]) for figure in FIGURES)
            lines.append(
                f"| {row['unit']} | {row['documents']} | {figures} | {escaped(row['theme'])} |"
            )
        lines += ["", measured_on(one["environment"])]
    return lines


def beside(found: dict[str, Any]) -> str:
    """Return a mean beside that of random sequences, and their difference."""
    return (
        f"{found['mean']:.1f} ({found['random_mean']:.1f}), {found['difference']:+.1f} "
        f"({found['low']:+.1f} to {found['high']:+.1f})"
    )


def _planted(found: dict[str, Any]) -> list[str]:
    lines = [
        "## Is the judge right? Units of planted themes",
        "",
        f"{found['units']:,} units whose ten passages were drawn from 1 to 10 known themes, in "
        "parts of random size, of the bundled sample. Similarity by TF-IDF was taken, not by token "
        "embeddings, and its threshold, a share of random pairs, by the mean ρ on one half of the "
        f"{found['documents']:,} documents; this is the other half. Spearman's ρ of what was found "
        "with what was planted, and the mean absolute error.",
        "",
        *table_head(
            "| similarity | threshold | planted | ρ of themes | error | ρ of coverage | error "
            "| ρ of disentanglement with coverage |"
        ),
    ]
    for one in found["reported"]:
        for kind, row in one["kinds"].items():
            themes, coverage = row["themes"], row["coverage"]
            lines.append(
                f"| {one['by']} | {one['quantile']:.0%} | {KINDS[kind]} | {themes['rho']:.2f} | "
                f"{themes['error']:.1f} | {coverage['rho']:.2f} | {coverage['error']:.1f} | "
                f"{row['disentanglement']['rho']:.2f} |"
            )
    chosen = found["reported"][0]
    random = chosen["random"]
    tried = ", ".join(
        f"{one['by']} {one['quantile']:.0%} {one['mean_rho']:.2f}" for one in found["tried"]
    )
    lines += [
        "",
        f"Control, {found['random_units']:,} units of ten random passages: {random['themes']:.1f} "
        f"themes, coverage {random['coverage']:.1f}, disentanglement "
        f"{random['disentanglement']:.1f}. Themes of a marked word, which is what the judge looks "
        "at, and of one document are found; broad topics, of which two passages share few words, "
        "are hardly told from random ones: a unit of that kind looks like noise here.",
        "",
        f"Mean ρ where it was chosen: {tried}.",
        "",
        "What was found by TF-IDF, by the number of themes that were planted:",
        "",
        *table_head(
            "| planted themes |"
            + "".join(f" {kind}: themes | coverage (planted) |" for kind in KINDS)
        ),
    ]
    for themes in range(1, 11):
        rows = [r for r in chosen["by_themes"] if r["planted"] == themes]
        cells = " | ".join(
            f"{r['themes']:.1f} | {r['coverage']:.1f} ({r['planted_coverage']:.1f})" for r in rows
        )
        lines.append(f"| {themes} | {cells} |")
    return [*lines, "", measured_on(found["environment"])]


if __name__ == "__main__":
    raise SystemExit(main())
