"""Write docs/results/attribution_latency.md from its JSON; ``--check`` only compares the two."""

from __future__ import annotations

from typing import Any

from benchmarks.shared.pages import measured_on, page_options, publish, read_result, table_head

LIMITS = ((10_000_000, 5.0), (1_000_000_000, 20.0))


def main() -> int:
    """Render, or say whether the page is up to date."""
    given = page_options(__doc__).parse_args()
    result = read_result(given.results / "attribution_latency.json", "attribution.latency")
    return publish({given.results / "attribution_latency.md": render(result)}, check=given.check)


def render(result: dict[str, Any]) -> str:
    """Return the page."""
    lines = [
        "# How long attribution takes",
        "",
        "Generated from `attribution_latency.json` by "
        "`python -m benchmarks.attribution.render_latency`;",
        "the JSON by",
        "",
        "    python -m benchmarks.attribution.latency MODEL --large 100000000 --work DIR",
        "    python -m benchmarks.attribution.latency MODEL --called NAME --generation-alone",
        "",
        _where(result["environment"]),
        "",
        *_tokens(result["lens"], result["tokens"]),
        *_generation(result["generation"]),
    ]
    return "\n".join(lines) + "\n"


def _where(where: dict[str, Any]) -> str:
    load = where.get("load", where.get("load_average"))
    if "date" in where:
        measured = measured_on(where)
    else:
        measured = f"torch {where['torch']}, {where['threads']} thread, {where['machine']}."
    return (
        f"{measured} The machine ran other jobs: {load:.1f} processes waited for its "
        f"{where['cores']} cores on average."
    )


def _tokens(lens: dict[str, Any], tokens: dict[str, Any]) -> list[str]:
    lines = [
        "## One token",
        "",
        f"Shares by source, ten documents and ten passages of {lens['tokens_timed']:,} single "
        f"predictions along held-out text; K = {lens['prototypes']:,} prototypes, "
        f"{lens['prototypes_per_token']} in use per token, states of width {lens['width']}. "
        "*First*: asked for the first time, with reading from the disk and comparing checksums. "
        "*Warm*: asked again. CPU time is what this process used, without its waiting for a core; "
        "*load* is how many processes waited for the machine's two cores. "
        "The larger lens has the ranges of the real one, each so many times as large, with states "
        "that differ by noise. The text of passages, which is read from the corpus when it is "
        "looked at, is not in it.",
        "",
        *table_head(
            "| positions | first, p50 | first, p99 | warm, p50 | warm, p99 | warm, p99, CPU time "
            "| load | measured at |"
        ),
    ]
    verdicts: list[str] = []
    for positions, found in sorted(tokens.items(), key=lambda row: int(row[0])):
        first, warm, cpu = (found[key] for key in ("first", "warm", "warm_cpu"))
        lines.append(
            f"| {int(positions):,} | {first['p50_ms']:.2f} | {first['p99_ms']:.2f} | "
            f"{warm['p50_ms']:.2f} | {warm['p99_ms']:.2f} | {cpu['p99_ms']:.2f} | "
            f"{found['environment']['load_average']:.1f} | {found['environment']['commit']} |"
        )
        most = next(limit for size, limit in LIMITS if int(positions) <= size)
        verdicts.append(
            f"Goal at {int(positions):,} positions: p99 of at most {most:g} ms: "
            f"**{_verdict(warm['p99_ms'] <= most)}**, {warm['p99_ms']:.2f} ms by the clock, "
            f"{cpu['p99_ms']:.2f} ms of CPU time."
        )
    return [*lines, "", *verdicts, ""]


def _generation(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "## Beside generation",
        "",
        "Median of rounds in which the ways take turns, over generation alone; least and most in "
        "brackets. *Parts*: every logit split. *Attributed*: and shares by source, ten documents "
        "and ten passages over all of them. *Steps*: and every step with its prototypes put into "
        "objects, which is done when they are looked at.",
        "",
        *table_head(
            "| model | parameters | K | k | positions | tokens | rounds | generation alone, ms "
            "| parts | attributed | steps |"
        ),
    ]
    for row in rows:
        ratios = (row["ratio"][key] for key in ("parts_alone", "attributed", "with_steps"))
        said = (f"{r['median']:.3f} ({r['least']:.3f} to {r['most']:.3f})" for r in ratios)
        lines.append(
            f"| {row['model']} | {row['parameters'] / 1e6:.1f} M | {row['prototypes']:,} | "
            f"{row['prototypes_per_token']} | {row['positions']:,} | {row['tokens']} | "
            f"{row['samples']} | {row['milliseconds']['plain']:.0f} | {' | '.join(said)} |"
        )
    verdicts = [
        f"{row['model']}: **{_verdict(row['ratio']['attributed']['median'] <= 1.1)}**"
        f"{_unsettled(row['ratio']['attributed'])}"
        for row in rows
    ]
    return [
        *lines,
        "",
        "Target: at most 1.10 for shares, documents and passages, by the median: "
        f"{'; '.join(verdicts)}.",
        "",
        *(f"{row['model']}: {measured_on(row['environment'])}  " for row in rows),
    ]


def _unsettled(ratio: dict[str, float]) -> str:
    settled = not ratio["least"] <= 1.1 <= ratio["most"]
    return "" if settled else " (single rounds are on both sides)"


def _verdict(reached: bool) -> str:
    return "met" if reached else "missed"


if __name__ == "__main__":
    raise SystemExit(main())
