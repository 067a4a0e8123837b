"""Write docs/results/explorer.md from explorer.json; ``--check`` only compares the two."""

from __future__ import annotations

from typing import Any, NamedTuple

from benchmarks.shared.pages import (
    measured_on,
    page_options,
    publish,
    ranged,
    read_result,
    table_head,
)

COMMAND = "    python -m benchmarks.explorer.latency --also MODEL --called NAME --pairs 24"
MOST_ADDED = 1.1


class Asked(NamedTuple):
    """What is asked for, in words, and within how many milliseconds it is to be there."""

    words: str
    goal: float | None


KINDS = {
    "first_page": Asked("first page: every byte of it, one file after another", 1000),
    "browser": Asked("first page: in Chromium, until the prompt can be written in", 1000),
    "search": Asked("search of prototypes: names, tokens, contexts", 100),
    "card": Asked("a prototype's card, with 12 contexts", 50),
    "step": Asked("what stands behind a step", 50),
    "against": Asked("what speaks against it", None),
    "document": Asked("a document at a place", None),
    "map": Asked("the map: 16,384 places and names", None),
}


def main() -> int:
    """Render, or say whether the page is up to date."""
    given = page_options(__doc__).parse_args()
    result = read_result(given.results / "explorer.json", "explorer.latency")
    made = read_result(given.results / "explorer_map.json", "explorer.map_layout")
    return publish({given.results / "explorer.md": render(result, made)}, check=given.check)


def render(result: dict[str, Any], made: dict[str, Any]) -> str:
    """Return the page."""
    model, where = result["model"], result["environment"]
    lines = [
        "# How long the explorer takes",
        "",
        "Generated from `explorer.json` by `python -m benchmarks.explorer.render`.",
        "",
        f"{measured_on(where)} It took {result['seconds'] / 60:.0f} minutes"
        f"{', the model made before' * result['made_before']}, on {where['cores']} cores that "
        "others used too: *load* is how many processes ran or waited in the minute "
        "before, so times by the clock are longer than on an idle machine. *Processor* is what the "
        "server itself computed for one request, without its waiting.",
        "",
        "## What a person waits for",
        "",
        COMMAND,
        "",
        f"`prismlm explore` with {model['prototypes']:,} prototypes of width {model['width']}, "
        f"{model['prototypes_per_token']} for each token, over {model['tokens']:,} tokens of "
        f"{model['documents']:,} documents of the bundled sample: {model['positions']:,} positions "
        f"in cells, {model['contexts']:,} contexts, names by `prismlm label`, a lens of "
        f"{model['lens_bytes'] / 1e6:.0f} MB. The backbone ({model['preset']}, "
        f"{model['parameters'] / 1e6:.1f} M parameters) was trained for seconds and the places on "
        "the map are random: it writes poorly, and its cells and names are not those of a good "
        "model. Clients are threads of "
        "one process, each with a connection of its own; what is asked for is drawn by seed. "
        "*First*: the first request of its kind after the start. A goal is met where 99 of 100 "
        "requests are in time.",
        "",
        *table_head(
            "| | goal, ms | clients | requests | p50, ms | p99, ms | first, ms | processor, ms "
            "| load | |"
        ),
        *(_row(row) for row in result["rows"]),
        "",
        *_verdicts(result["rows"]),
        "",
        _sizes(result),
        "",
        *_writing(result["writing"]),
        "",
        *_map(made),
    ]
    return "\n".join(lines) + "\n"


def _row(row: dict[str, Any]) -> str:
    asked = KINDS[row["what"]]
    goal = "–" if asked.goal is None else f"{asked.goal:g}"
    return (
        f"| {asked.words} | {goal} | {row['clients']} | {row['requests']} | {row['p50_ms']:.1f} | "
        f"{row['p99_ms']:.1f} | {row['first_ms']:.0f} | {row['processor_ms']:.1f} | "
        f"{row['load']:.1f} | {_verdict(row, asked.goal)} |"
    )


def _verdict(row: dict[str, Any], goal: float | None) -> str:
    if goal is None:
        return ""
    if row["p99_ms"] <= goal:
        return "met"
    return "**missed**" if row["p50_ms"] > goal else "**missed** by p99"


def _verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """Return what is missed, in sentences."""
    missed = [
        f"- {KINDS[row['what']].words}, {row['clients']} client{'s' * (row['clients'] > 1)}: p50 "
        f"{row['p50_ms']:.0f} ms, p99 {row['p99_ms']:.0f} ms; the goal is "
        f"{KINDS[row['what']].goal:g} ms. The server computed {row['processor_ms']:.0f} ms for one."
        for row in rows
        if "missed" in _verdict(row, KINDS[row["what"]].goal)
    ]
    return ["Missed:", "", *missed] if missed else ["Every goal above is met."]


def _sizes(result: dict[str, Any]) -> str:
    before, after, view = (result[k] for k in ("memory_before", "memory_after", "first_view"))
    return (
        f"The first view is {view['files']} requests and {view['bytes'] / 1e3:.0f} kB. From the "
        f"command to the first answer: {result['seconds_to_start']:.1f} s. Memory of the server: "
        f"{before['resident']:,.0f} MiB resident when it first answered ({before['own']:,.0f} its "
        f"own, the rest mapped files), {after['resident']:,.0f} MiB ({after['own']:,.0f} its own) "
        f"after all requests above, {after['largest']:,.0f} at most."
    )


def _writing(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "## Writing with attribution",
        "",
        COMMAND,
        "",
        "Tokens a second of `POST /api/ask`, from the first `step` event of a written token to the "
        "last, as a client reads them, beside `lm.generate` of the same model in the same process, "
        "from its first token to its last; greedy, in turns, each pair the same beginning of a "
        "document. *Ratio*: seconds a token over those of `lm.generate`, median of pairs with a "
        "95 % interval over resampled pairs. *Whole*: the same of a whole request, with the prompt "
        "and with what `done` tells of the finished text, its passages and shares. Models with "
        "other prototypes than the demo's are the demo's fine-tuned model after `prismlm attach "
        "--weights cosine --prototypes 16384 --epochs 0.3 --contexts 16` on every third of its "
        "documents.",
        "",
        *table_head(
            "| model | parameters | K | pairs | tokens | `lm.generate`, tokens/s | explorer, "
            "tokens/s | ratio | whole | load | |"
        ),
    ]
    for row in rows:
        verdict = "met" if row["high"] <= MOST_ADDED else "not shown"
        verdict = "**missed**" if row["ratio"] > MOST_ADDED else verdict
        lines.append(
            f"| {row['model']} | {row['parameters'] / 1e6:.1f} M | {row['prototypes']:,} | "
            f"{row['pairs']} | {row['tokens']} | {row['plain_tokens_per_second']:.1f} | "
            f"{row['tokens_per_second']:.1f} | {ranged(row, 'ratio', '.2f')} | "
            f"{ranged(row['whole'], 'ratio', '.2f')} | {row['load']:.1f} | {verdict} |"
        )
    return [
        *lines,
        "",
        f"Goal: a ratio of at most {MOST_ADDED}, and an interval that ends there or before.",
    ]


def _map(made: dict[str, Any]) -> list[str]:
    seconds, processor, same = (made[key] for key in ("seconds", "processor_seconds", "same_group"))
    total, goal = sum(seconds.values()), made["goal_seconds"]
    return [
        "## Making the map",
        "",
        "    python -m benchmarks.explorer.map_layout",
        "",
        f"{made['prototypes']:,} prototypes of width {made['width']:,} were laid out in "
        f"{total:.0f} s ({sum(processor.values()):.0f} s of the processor); the goal is "
        f"{goal} s: {'met' if total <= goal else '**missed**'}. Neighbours by cosine took "
        f"{seconds['neighbours']:.0f} s, their places by UMAP {seconds['places']:.0f} s, its "
        f"compilation among them, and the process {made['memory_mib']:,.0f} MiB at most. It is "
        f"what `prismlm map` does, without reading and writing. The prototypes are drawn by seed "
        f"in {made['groups']} groups. Of the ten nearest of each on the map {same['map']:.0%} are "
        f"of its group, {same['dealt_out']:.1%} with groups dealt out anew; of the nearest by "
        f"cosine {same['cosines']:.0%} are.",
        "",
        measured_on(made["environment"]),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
