"""Write docs/results/index.md from index.json; ``--check`` only compares the two."""

from __future__ import annotations

from typing import Any

from benchmarks.shared.pages import measured_on, page_options, publish, read_result, table_head

TARGET = 1.4
EXTRAPOLATED = {"10⁹": 10**9, "10¹²": 10**12}
DAY = 86_400
MIB = 2**20


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
        "    prismlm demo --no-serve --out prismlm-demo",
        "    python -m benchmarks.index.measure ratio prismlm-demo/model prismlm-demo/corpus",
        "    python -m benchmarks.index.measure growth prismlm-demo/corpus",
        "",
        *_ratio(result["ratio"], where.get("ratio")),
        *_growth(result.get("growth", []), where.get("growth")),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _ratio(found: dict[str, Any], where: dict[str, Any] | None) -> list[str]:
    rows = (
        ("the forward passes that the index makes, without logits", found["ratio"]),
        ("… in the second half of the run", found["ratio_last_half"]),
        ("plain calls of the model, with logits", found["ratio_with_logits"]),
    )
    met = found["ratio"]["ratio"] <= TARGET
    return [
        "## Beside its own forward passes",
        "",
        f"The demo's model, width {found['width']}, K = {found['prototypes']:,}, L = 64, window "
        f"256, stride 192; {found['tokens']:,} tokens in {found['passes']:,} passes, each made "
        f"alone, alone with logits, and with all that the index does"
        f"{'' if found.get('cells') else ' but cells, as with `--positions none`'}, in turns. "
        f"CPU seconds, "
        f"{found['threads']} thread(s); intervals are 95 % over resampled passes.",
        "",
        *table_head("| time of the index over that of | ratio | interval |"),
        *(f"| {name} | {r['ratio']:.2f} | {r['low']:.2f} to {r['high']:.2f} |" for name, r in rows),
        "",
        f"Target: at most {TARGET} × the same passes: {'met' if met else '**missed**'}. The first "
        "row is the strict reading. The product with all prototypes and the exact choice of "
        "the nearest weigh much beside a model this small, and less beside a larger one.",
        "",
        measured_on(where),
        "",
    ]


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
        "process took for itself at its largest, beyond what it had before; pages of mapped files, "
        "which the system takes back where it needs them, are not in it."
        + ("" if "cells" in rows[0] else " Without cells, as with `--positions none`.")
        + (" With what finds spans word for word." if rows[0].get("verbatim") else ""),
        "",
        "| tokens | documents | CPU seconds | tokens a CPU second | memory, MiB | lens on disk, "
        "MiB |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        memory = (row["memory_bytes"] - row["memory_bytes_before"]) / MIB
        lines.append(
            f"| {row['tokens']:,} | {row['documents']:,} | {row['cpu_seconds']:.1f} | "
            f"{row['tokens'] / row['cpu_seconds']:,.0f} | {memory:.0f} | "
            f"{row['disk_bytes'] / MIB:.1f} |"
        )
    if len(rows) > 1:
        before, after = (row["memory_bytes"] - row["memory_bytes_before"] for row in rows[-2:])
        lines += [
            "",
            f"From {rows[-2]['tokens']:,} to {last['tokens']:,} tokens, memory is "
            f"{after / before:.2f} times as large.",
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
