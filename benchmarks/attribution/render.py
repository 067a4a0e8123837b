"""Write docs/results/attribution.md from its JSON and edits.json; ``--check`` only compares."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.shared.pages import (
    escaped,
    measured_on,
    page_options,
    publish,
    read_result,
    table_head,
)

METHODS = {
    "attribution": "attribution",
    "source_measure": "PRISM's measure A_t",
    "random_states": "control: random states as prototypes",
    "shuffled_map": "control: shuffled prototype → document map",
    "nearest_states": "nearest hidden states",
    "bm25_prompt": "BM25 (prompt)",
    "bm25_answered": "BM25 (prompt and answer)",
    "chance": "ten documents at random",
}
RIVALS = {
    "random_states": "random states",
    "shuffled_map": "a shuffled map",
    **{key: METHODS[key] for key in list(METHODS)[4:]},
}
GROUPS = {"copies_1": "in 1 document", "copies_4": "in 4", "copies_16": "in 16", "all": "all"}
KNOWN = {
    "rank_1_10": "answer ranked 1–10",
    "rank_11_100": "11–100",
    "rank_101_on": "beyond 100",
    "known": "likeliest of eight",
}
DOMAIN_CONTROLS = {"random_states": "random states", "shuffled_map": "one shuffled map"}


def main() -> int:
    """Render, or say whether the page is up to date."""
    given = page_options(__doc__).parse_args()
    result = read_result(given.results / "attribution.json", "attribution.measure")
    edits = read_result(given.results / "edits.json", "edits.measure")
    page = render(result, edits=edits)
    return publish({given.results / "attribution.md": page}, check=given.check)


def render(result: dict[str, Any], *, edits: dict[str, Any] | None) -> str:
    """Return the page."""
    held_out, verbatim = (result["wordings"][name]["summary"] for name in ("held_out", "verbatim"))
    named = result["setting"]["options"].items()
    options = [f"--{name} {value}" for name, value in named]
    lines = [
        "# What attribution is worth",
        "",
        "Generated from `attribution.json` by `python -m benchmarks.attribution.render`; the JSON "
        "by",
        "",
        f"    python -m benchmarks.attribution.planted_model planted {' '.join(options)}",
        "    python -m benchmarks.attribution.measure planted",
        "",
        "## In short",
        "",
        *_verdicts(held_out, verbatim, result["domain_prompts"]),
        "",
        *_setting(result),
        *_planted(held_out),
        *_by_knowledge(held_out),
        *_verbatim(verbatim),
        *_domain_prompts(result["domain_prompts"]),
        *([] if edits is None else edits_section(edits)),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def verdict(interval: dict[str, float]) -> str:
    """Say in a word what a difference with its interval shows."""
    if interval["low"] > 0:
        return "better"
    return "**worse**" if interval["high"] < 0 else "**no difference shown**"


def _verdicts(
    held_out: dict[str, Any], verbatim: dict[str, Any], prompts: list[dict[str, Any]]
) -> list[str]:
    lines = [
        _document_verdict(name, summary["all"])
        for name, summary in (
            ("Documents of a fact, asked in new words", held_out),
            ("The very document whose words are asked", verbatim),
        )
    ]
    return [*lines, *(_domain_verdict(figures) for figures in prompts)]


def _document_verdict(name: str, figures: dict[str, Any]) -> str:
    won = [key for key in RIVALS if figures["attribution_minus"][key]["low"] > 0]
    worth = _worth(RIVALS, won)
    means = {key: value["difference"] for key, value in figures["recall"].items()}
    return (
        f"- {name}: {worth}. Recall@10 {means['attribution']:.3f}; nearest hidden "
        f"states {means['nearest_states']:.3f}, BM25 {means['bm25_prompt']:.3f}, chance "
        f"{means['chance']:.3f}."
    )


def _domain_verdict(figures: dict[str, Any]) -> str:
    won = [
        key for key in DOMAIN_CONTROLS if figures[f"trained_minus_{key}"]["own_share"]["low"] > 0
    ]
    worth = _worth(DOMAIN_CONTROLS, won)
    own, chance = figures["trained"]["own_share"], figures["trained"]["chance"]
    return (
        f"- Domain of the first {figures['tokens']} tokens of a held-out document: share on the "
        f"right domain {own:.3f} ({own / chance:.1f} times chance), "
        f"{figures['random_states']['own_share']:.3f} with random states, "
        f"{figures['shuffled_map']['own_share']:.3f} with a shuffled map: {worth}."
    )


def _worth(names: dict[str, str], keys: list[str]) -> str:
    won = [names[key] for key in keys]
    lost = [name for key, name in names.items() if key not in keys]
    if not lost:
        return f"works: better than {_listed(won)}"
    better = f"better than {_listed(won)}, but " if won else ""
    return f"**does not work**: {better}not better than {_listed(lost)}"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _setting(result: dict[str, Any]) -> list[str]:
    where, setting = result["environment"], result["setting"]
    head, corpus, lens = setting["recipe"]["head"], setting["corpus"], setting["lens"]
    example = setting["example"]
    return [
        "## Setting",
        "",
        f"{setting['facts']} invented facts, a third each in 1, 4 and 16 documents: "
        f"{setting['planted_documents']:,} among {setting['training_documents']:,} training "
        f"documents; the others are one in {setting['options']['every']} of the bundled sample "
        f"({corpus['tokens']:,} tokens in all, {corpus['heldout']['tokens']:,} of them held out). "
        "Each planted document states its fact three times, in three of 16 wordings, "
        "between four sentences of a real training document. A model of "
        f"{setting['parameters']:,} parameters (K = {head['prototypes']:,}, k = "
        f"{head['prototypes_per_token']}, default head) saw {setting['training_tokens']:,} tokens "
        f"in {setting['steps']:,} steps. The lens keeps {lens['contexts']} contexts of each "
        "prototype, one of a document. One seed.",
        "",
        measured_on(where),
        "",
        f"Asked: *{example['prompt']}* → *{example['answer']}*. One of its documents:",
        "",
        f"> {' '.join(escaped(example['document']).split())}",
        "",
    ]


def _planted(summary: dict[str, Any]) -> list[str]:
    columns = {key: name for key, name in GROUPS.items() if key in summary}
    return [
        "## Planted facts, asked in new words",
        "",
        "Recall@10: planted documents among the ten with the largest share in the predictions of "
        "the answer, out of those that ten places can hold. Intervals are 95 %, bootstrapped over "
        "facts; the shuffled map is a mean of shuffles. *Nearest hidden states*: cosine of the "
        "same states to every position of the training text, the best of each document. BM25 "
        "reads words, and a fact's name stands in its own documents alone, so it can hardly miss. "
        "*A_t*: of PRISM, Σ α · uniform over the contexts of each prototype in use.",
        "",
        *_recall_table(summary, columns),
        "",
        "What there is to find. *Rank*: of the answer's first token in the vocabulary. *Likeliest "
        "of eight*: the answer among the eight that its question could have had; chance is 0.125. "
        "*In the lens*: planted documents that any prototype keeps a context of. *Within reach*: "
        "recall@10 of a perfect order of the contexts of the prototypes that carry the answer, the "
        "most that attribution could have.",
        "",
        *table_head(_row("", columns.values())),
        *_figure_rows(summary, columns),
        "",
        *_differences(summary["all"]),
        "",
    ]


def _recall_table(summary: dict[str, Any], columns: dict[str, str]) -> list[str]:
    shown = [f"{name} ({summary[key]['facts']} facts)" for key, name in columns.items()]
    return [
        *table_head(_row("recall@10", shown)),
        *(
            _row(name, (_interval(summary[key]["recall"][method]) for key in columns))
            for method, name in METHODS.items()
        ),
    ]


def _figure_rows(summary: dict[str, Any], columns: dict[str, str]) -> list[str]:
    rows: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
        ("answer's rank, median", lambda f: f"{f['median_rank']:.0f}"),
        ("answer's probability, median", lambda f: f"{f['median_probability']:.2g}"),
        ("likeliest of eight", lambda f: _interval(f["first_of_candidates"])),
        ("explained share, median", lambda f: f"{f['explained_share']:.3f}"),
        ("planted documents in the lens", lambda f: f"{f['in_index']:.3f}"),
        ("within reach", lambda f: f"{f['within_reach']:.3f}"),
    )
    return [_row(name, (form(summary[key]) for key in columns)) for name, form in rows]


def _differences(figures: dict[str, Any]) -> list[str]:
    lines = [
        f"- {name}: {interval['difference']:+.3f} ({interval['low']:+.3f} to "
        f"{interval['high']:+.3f}), {verdict(interval)}"
        for key, name in RIVALS.items()
        for interval in [figures["attribution_minus"][key]]
    ]
    return ["Recall of attribution minus that of, fact by fact:", "", *lines]


def _by_knowledge(summary: dict[str, Any]) -> list[str]:
    columns = {key: name for key, name in KNOWN.items() if key in summary}
    return [
        "### By how well the model knows the answer",
        "",
        "A fact that the model has not learned cannot be traced; these are the same questions, "
        "grouped by rank.",
        "",
        *_recall_table(summary, columns),
        "",
    ]


def _verbatim(summary: dict[str, Any]) -> list[str]:
    columns = {key: name for key, name in GROUPS.items() if key in summary}
    return [
        "## A training document's own words",
        "",
        "A check on the machinery: the prompt is the beginning of one planted document, up to the "
        "answer, and that one document is to be found. Its hidden states are those that the index "
        "saw, so nearest states can hardly miss it.",
        "",
        *_recall_table(summary, columns),
        "",
        *table_head(_row("", columns.values())),
        *_figure_rows(summary, columns),
        "",
        *_differences(summary["all"]),
        "",
    ]


def _domain_prompts(results: list[dict[str, Any]]) -> list[str]:
    lines = [
        "## Domain prompts",
        "",
        "The first tokens of held-out documents, read as `prismlm explain` reads a prompt. *Own "
        "share*: mean share of the attributed evidence that falls on the document's own domain. "
        "*Accuracy*: documents whose own domain has the largest share relative to its share over "
        "all. Whole documents: [first light](first_light.md).",
        "",
        "| tokens | documents | | trained prototypes | control: random states | "
        "control: shuffled map | chance |",
        "|---|---|---|---|---|---|---|",
    ]
    for figures in results:
        for measure, chance in (("own_share", "chance"), ("accuracy", "chance_accuracy")):
            cells = [
                f"{figures[key][measure]:.3f}"
                for key in ("trained", "random_states", "shuffled_map")
            ]
            head = [str(figures["tokens"]), f"{figures['trained']['documents']:,}"]
            name = measure.replace("_", " ")
            row = [*head, name, *cells, f"{figures['trained'][chance]:.3f}"]
            lines.append(f"| {' | '.join(row)} |")
    lines += ["", "Trained prototypes minus each control, document by document:", ""]
    for figures in results:
        for key, name in DOMAIN_CONTROLS.items():
            for measure in ("own_share", "accuracy"):
                interval = figures[f"trained_minus_{key}"][measure]
                lines.append(
                    f"- {figures['tokens']} tokens, {measure.replace('_', ' ')} against {name}: "
                    f"{interval['difference']:+.3f} ({interval['low']:+.3f} to "
                    f"{interval['high']:+.3f}), {verdict(interval)}"
                )
    return [*lines, ""]


def edits_section(result: dict[str, Any]) -> list[str]:
    """Count, for each edit, the prototypes on which it does more than its control."""
    measured = [prototype["edits"] for prototype in result["prototypes"]]
    rows: list[str] = []
    for edit in measured[0]:
        found = [edits[edit]["effects"]["prompts"]["measures"]["signature"] for edits in measured]
        beyond = 0
        for figures in found:
            low, high = figures["difference_interval"]
            beyond += low > 0 if figures["edit"] > 0 else high < 0
        means = [
            sum(figures[key] for figures in found) / len(found)
            for key in ("edit", "control", "difference")
        ]
        cells = [f"{beyond} of {len(found)}", *(f"{mean:+.3f}" for mean in means)]
        rows.append(_row(edit, cells))
    return [
        "## Edits against their controls",
        "",
        "Change of the log-probability of an edited prototype's signature tokens, in nats, beside "
        "the same change of activation on random prototypes of equal activation; means over "
        "prototypes. *Beyond control*: prototypes whose difference from the control has the sign "
        "of the edit's effect and an interval without 0. Costs, and what the measure can say: "
        "[edits](edits.md).",
        "",
        *table_head("| edit | beyond control | edit | control | difference |"),
        *rows,
        "",
    ]


def _row(name: str, cells: Iterable[str]) -> str:
    return f"| {' | '.join([name, *cells])} |"


def _interval(interval: dict[str, float]) -> str:
    mean, low, high = (interval[key] for key in ("difference", "low", "high"))
    return f"{mean:.3f}" if low == high else f"{mean:.3f} ({low:.3f}–{high:.3f})"


if __name__ == "__main__":
    raise SystemExit(main())
