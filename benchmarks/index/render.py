"""Write docs/results/index.md from index.json; ``--check`` only compares the two."""

from __future__ import annotations

from typing import Any

from benchmarks.shared.pages import measured_on, page_options, publish, read_result, table_head

TARGET = 1.4
EXTRAPOLATED = {"10⁹": 10**9, "10¹²": 10**12}
DAY = 86_400
MIB = 2**20
# Tokens between which memory is to be flat (parts end with a whole document), what is called so.
FROM, TO = 10**6, 1.01 * 10**7
FLAT = 1.1


def main() -> int:
    """Render, or say whether the page is up to date."""
    given = page_options(__doc__).parse_args()
    result = read_result(given.results / "index.json", "index.measure")
    return publish({given.results / "index.md": render(result)}, check=given.check)


def render(result: dict[str, Any]) -> str:
    """Return the page."""
    where = result.get("environment", {})
    lines = [
        "# The index: its time, and how it grows",
        "",
        "Generated from `index.json` by `python -m benchmarks.index.render`; the JSON by",
        "",
        "    prismlm demo --train --no-serve --out prismlm-demo",
        "    python -m benchmarks.index.measure ratio prismlm-demo/model prismlm-demo/corpus",
        "    python -m benchmarks.index.measure ratio MODEL CORPUS --called NAME --tokens 40000 "
        "[--bf16]",
        "    python -m benchmarks.index.measure growth prismlm-demo/corpus",
        "",
        *_ratio(result["ratio"]),
        *_growth(result.get("growth", []), where.get("growth")),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _ratio(found: list[dict[str, Any]]) -> list[str]:
    lines = [
        "## Beside its own forward passes",
        "",
        "Every pass is made alone, alone with logits, and with all that the index does (L = 64, "
        "window 256, stride 192), in turns. CPU seconds; intervals are 95 % over resampled passes. "
        "The first column of ratios is the strict reading, the last against plain calls of the "
        "model. In bf16 the passes are so too, and plain calls are not.",
        "",
        *table_head(
            "| model | parameters | width | K | tokens | over passes without logits "
            "| … second half | over passes with logits |"
        ),
    ]
    for row in found:
        ratios = (row[key] for key in ("ratio", "ratio_last_half", "ratio_with_logits"))
        said = (f"{r['ratio']:.2f} ({r['low']:.2f} to {r['high']:.2f})" for r in ratios)
        lines.append(
            f"| {row['model']} | {row['parameters'] / 1e6:.1f} M | {row['width']} | "
            f"{row['prototypes']:,} | {row['tokens']:,} | {' | '.join(said)} |"
        )
    verdicts = [
        f"{row['model']}: {'met' if row['ratio']['ratio'] <= TARGET else '**missed**'}"
        for row in found
    ]
    return [
        *lines,
        "",
        f"Target: at most {TARGET} × the same passes without logits: {'; '.join(verdicts)}. How "
        "likely each next token was takes a product with the whole vocabulary, as logits do, and "
        "the exact choice of the nearest one with all prototypes: both weigh much beside a small "
        "model and less beside a larger one.",
        "",
        *(f"{row['model']}: {measured_on(row['environment'])}  " for row in found),
        "",
    ]


def _taken(row: dict[str, Any]) -> int:
    return row["memory_bytes"] - row["memory_bytes_before"]


def _growth(rows: list[dict[str, Any]], where: dict[str, Any] | None) -> list[str]:
    if not rows:
        return ["## Growth", "", "Not measured yet."]
    last = rows[-1]
    speed = last["tokens"] / last["cpu_seconds"]
    lines = [
        "## Growth",
        "",
        "Corpora of growing size, cut from one and repeated under new document names, each "
        "indexed in a process of its own by an untrained model of one layer (width 32, K = 256, "
        "L = 16), so that the index and not the model is what is measured. Memory is what the "
        "process took for itself at its largest, beyond what it had before, and in all; pages of "
        "mapped files, which the system takes back where it needs them, are not in it."
        + (" With what finds spans word for word." if rows[0].get("verbatim") else ""),
        "",
        "| tokens | documents | CPU seconds | tokens a CPU second | memory, MiB | in all, MiB | "
        "lens on disk, MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['tokens']:,} | {row['documents']:,} | {row['cpu_seconds']:.1f} | "
        f"{row['tokens'] / row['cpu_seconds']:,.0f} | {_taken(row) / MIB:.0f} | "
        f"{row['memory_bytes'] / MIB:.0f} | {row['disk_bytes'] / MIB:.1f} |"
        for row in rows
    ]
    large = [row for row in rows if row["tokens"] >= FROM]
    if len(large) > 1:
        first = large[0]
        grown = "; ".join(
            f"at {row['tokens']:,} {_taken(row) / _taken(first):.2f} times as large, "
            f"{row['memory_bytes'] / first['memory_bytes']:.2f} times in all"
            for row in large[1:]
        )
        meant = [row for row in large if row["tokens"] <= TO]
        flat = all(_taken(row) <= FLAT * _taken(first) for row in meant)
        lines += [
            "",
            f"Beside that at {first['tokens']:,} tokens, memory is {grown}. Goal: flat from "
            "10⁶ to 10⁷ tokens, within a tenth of what the index takes: "
            f"{'met' if flat else '**missed**'}.",
        ]
    lines += [
        "",
        f"At the last row's {speed:,.0f} tokens a CPU second, time being linear in tokens: "
        + "; ".join(
            f"{name} tokens take {name} / {speed:,.0f} s = {tokens / speed / DAY:,.2f} CPU days"
            for name, tokens in EXTRAPOLATED.items()
        )
        + ". Divide by the number of shards. For another model, put its own tokens a second in the "
        "place of this one: `prismlm index --dry-run` measures it.",
        "",
        measured_on(where),
    ]
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
