"""Write docs/results/attribution_latency.md from its JSON; ``--check`` only compares the two."""

from __future__ import annotations

from typing import Any

from benchmarks.shared.pages import measured_on, page_options, publish, read_result, table_head

ROWS = (
    ("attribution", "attribution: shares by source, ten documents"),
    ("from_state", "with routing and splitting the logit before it"),
)


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
        "    python -m benchmarks.attribution.latency prismlm-demo/model",
        "",
        _where(result["environment"]),
        "",
        *_token(result["lens"], result["token"]),
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


def _token(lens: dict[str, Any], token: dict[str, Any]) -> list[str]:
    p99, cpu_p99 = token["attribution"]["p99_ms"], token["attribution_cpu"]["p99_ms"]
    lines = [
        "## One token from a warm lens",
        "",
        f"A synthetic lens of K = {lens['prototypes']:,} prototypes with L = {lens['contexts']} "
        f"contexts of width {lens['width']},",
        f"{lens['prototypes_per_token']} prototypes in use per token, all with positive evidence; "
        f"{lens['tokens_timed']:,} tokens, milliseconds. The lens has",
        "been read through once before. CPU time is",
        "what this process used, without its waiting for a core.",
        "",
        *table_head("| | p50 | p99 | p50, CPU time | p99, CPU time |"),
    ]
    for key, name in ROWS:
        wall, cpu = token[key], token[f"{key}_cpu"]
        lines.append(
            f"| {name} | {wall['p50_ms']:.2f} | {wall['p99_ms']:.2f} | {cpu['p50_ms']:.2f} | "
            f"{cpu['p99_ms']:.2f} |"
        )
    lines += [
        "",
        f"Target: p99 of attribution at most 5 ms. By the clock **{_verdict(p99 <= 5)}**, "
        f"{p99:.2f} ms; of CPU time {cpu_p99:.2f} ms.",
        "",
    ]
    return lines


def _generation(found: dict[str, Any]) -> list[str]:
    ratio = found["ratio"]["attributed"]["median"]
    lines = [
        "## Beside generation",
        "",
        f"{found['tokens']} tokens from a {found['model_type']} of "
        f"{found['parameters'] / 1e6:.1f} million parameters with "
        f"{found['prototypes']:,} prototypes,",
        f"{found['prototypes_per_token']} per token, {found['contexts']} contexts each: "
        f"median of {found['samples']} rounds in which the ways take turns.",
        "",
        *table_head("| | ms | against generation alone: median, least, most |"),
        f"| generation alone | {found['milliseconds']['plain']:.0f} | |",
    ]
    for key, name in (
        ("parts_alone", "and every logit split"),
        ("attributed", "and shares by source and ten documents over all of them"),
        ("with_steps", "and every step with its prototypes put into objects"),
    ):
        r = found["ratio"][key]
        lines.append(
            f"| {name} | {found['milliseconds'][key]:.0f} | {r['median']:.3f}, "
            f"{r['least']:.3f}, {r['most']:.3f} |"
        )
    lines += [
        "",
        "Target: at most 1.10 for shares and documents. "
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
