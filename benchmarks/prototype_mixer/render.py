"""Write docs/results/prototype_mixer.md from its folder; ``--check`` only compares the two."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from benchmarks.prototype_mixer.source_tables import NAMES
from benchmarks.prototype_mixer.table_sections import Row, counted, sections, spread, warmed_up
from benchmarks.shared.pages import page_options, publish, read_results, runs_made, table_head


def main() -> int:
    """Render, or say whether the page is up to date."""
    given = page_options(__doc__).parse_args()
    folder = given.results / "prototype_mixer"
    rows = read_results(folder, "prototype_mixer.measure", "longer-*.json")
    page = render(rows, sections(folder / "tables"))
    return publish({given.results / "prototype_mixer.md": page}, check=given.check)


def render(longer: list[Row], tables: Sequence[str] = ()) -> str:
    """Return the page: the sections of ``table_sections``, and the long runs after them."""
    lines = [
        "# The prototype mixer beside attention, Mamba and the delta rule",
        "",
        "Generated from the files of `prototype_mixer/` by "
        "`python -m benchmarks.prototype_mixer.render`.",
        "",
        "Models of 1.4 to 1.6 million parameters and a vocabulary of 4,096; what is larger says "
        "so. In every table all models see the same rows in the same order. One size, one corpus: "
        "what holds here need not hold at the source's. [Four models of 7.7 million "
        "parameters](prototype_mixer_four_models.md) are followed there to 20 million tokens, on "
        "the way to which ProtoT's place beside LLaMA changes.",
        "",
        "Settings that are not the source's: rows are padded, so that no model sees two documents "
        "in one; in place of the source's Mamba, of as many layers as its other models, stands "
        "Mamba 2 of 5 layers beside models of 3. Where a section says that the rate rises over "
        "another share of the steps than the source's 2%, there is no dropout either (the source: "
        "0.1). Weight decay acts on embeddings and prototypes too, which the source spares.",
        "",
        *tables,
        *_longer(longer),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _longer(rows: list[Row]) -> list[str]:
    """Return the long runs, perplexity over LLaMA's by seeds that both have."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        found[row["model"]][row["seed"]] = row["perplexity"]
    settings = rows[0]["settings"]
    lines = [
        "## A small text, read four times",
        "",
        f"{settings['steps']:,} steps of {settings['batch_size']} rows of "
        f"{settings['data']['length']} on the bundled sample's long documents "
        f"({statistics.mean(row['tokens'] for row in rows) / 1e6:.1f} M tokens, about four times "
        f"the whole), at the source's rates, {warmed_up(rows)}; perplexity of all its held-out "
        "text, mean over seeds "
        "with least and most. These ProtoTs are the ones whose [channels](channels.md) are read.",
        "",
        "    python -m benchmarks.prototype_mixer.measure corpus-long corpus",
        "    python -m benchmarks.prototype_mixer.measure corpus-long longer --seed 0 --keep",
        "",
        *table_head("| | parameters | perplexity | over LLaMA's |"),
    ]
    sizes = {row["model"]: row["parameters"] for row in rows}
    for name, by_seed in sorted(found.items()):
        llama = found.get("llama", {})
        over = [value / llama[seed] for seed, value in by_seed.items() if seed in llama]
        ratio = f"{spread(over, '.3f')} ({counted(len(over))})" if over and name != "llama" else ""
        cell = f"{spread([*by_seed.values()], '.2f')}, {counted(len(by_seed))}"
        lines.append(f"| {NAMES[name]} | {sizes[name]:,} | {cell} | {ratio} |")
    return [*lines, "", runs_made([row["environment"] for row in rows]), ""]


if __name__ == "__main__":
    raise SystemExit(main())
