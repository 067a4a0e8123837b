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
            "| load |"
        ),
    ]
    verdicts: list[str] = []
    for positions, found in sorted(tokens.items(), key=lambda row: int(row[0])):
        first, warm, cpu = (found[key] for key in ("first", "warm", "warm_cpu"))
        lines.append(
            f"| {int(positions):,} | {first['p50_ms']:.2f} | {first['p99_ms']:.2f} | "
            f"{warm['p50_ms']:.2f} | {warm['p99_ms']:.2f} | {cpu['p99_ms']:.2f} | "
            f"{found['environment']['load_average']:.1f} |"
        )
        most = next(limit for size, limit in LIMITS if int(positions) <= size)
        verdicts.append(
            f"Goal at {int(positions):,} positions: p99 of at most {most:g} ms: "
            f"**{_verdict(warm['p99_ms'] <= most)}**, {warm['p99_ms']:.2f} ms by the clock, "
            f"{cpu['p99_ms']:.2f} ms of CPU time."
        )
    return [*lines, "", *verdicts, ""]


def _generation(found: dict[str, Any]) -> list[str]:
    ratio = found["ratio"]["attributed"]["median"]
    lines = [
        "## Beside generation",
        "",
        f"{found['tokens']} tokens from a {found['model_type']} of "
        f"{found['parameters'] / 1e6:.1f} million parameters with "
        f"{found['prototypes']:,} prototypes,",
        f"{found['prototypes_per_token']} per token: "
        f"median of {found['samples']} rounds in which the ways take turns.",
        "",
        *table_head("| | ms | against generation alone: median, least, most |"),
        f"| generation alone | {found['milliseconds']['plain']:.0f} | |",
    ]
    for key, name in (
        ("parts_alone", "and every logit split"),
        ("attributed", "and shares by source, ten documents and ten passages over all of them"),
        ("with_steps", "and every step with its prototypes put into objects"),
    ):
        r = found["ratio"][key]
        lines.append(
            f"| {name} | {found['milliseconds'][key]:.0f} | {r['median']:.3f}, "
            f"{r['least']:.3f}, {r['most']:.3f} |"
        )
    lines += [
        "",
        "Target: at most 1.10 for shares, documents and passages. "
        f"**{_verdict(ratio <= 1.1).capitalize()}** by the median: {ratio:.3f}"
        f"{_unsettled(found['ratio']['attributed'])}. "
        "Steps are built when they are looked at, which the last row does too.",
    ]
    return lines


def _unsettled(ratio: dict[str, float]) -> str:
    settled = not ratio["least"] <= 1.1 <= ratio["most"]
    return "" if settled else "; single rounds are on both sides"


def _verdict(reached: bool) -> str:
    return "met" if reached else "missed"


if __name__ == "__main__":
    raise SystemExit(main())
