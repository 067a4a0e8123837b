"""Write docs/results/support.md from its JSON; ``--check`` only compares the two."""

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

FILES = ("support.json", "support_smollm2.json")
NEVER_SEEN = ("unseen", "shuffled words", "random letters")
TOLD_APART = 0.75
# By how much a mean AUC has to be larger to count as more.
ADDS = 0.01
BOTH = "both, the score"


def main() -> int:
    """Render, or say whether the page is up to date."""
    given = page_options(__doc__).parse_args()
    results = [read_result(given.results / name, "attribution.support") for name in FILES]
    return publish({given.results / "support.md": render(results)}, check=given.check)


def render(results: list[dict[str, Any]]) -> str:
    """Return the page."""
    lines = [
        "# Support: is this in the corpus at all?",
        "",
        "Generated from `support.json` and `support_smollm2.json`, the demo's model, by "
        "`python -m benchmarks.attribution.render_support`; the JSON by, with `--unseen FILE` for "
        "a corpus that holds nothing out,",
        "",
        "    python -m benchmarks.attribution.support MODEL CORPUS --other NAME=FILE "
        "--synonyms TSV",
        "",
        "Texts have some 32 tokens and are read by themselves. *Strong* is called so that 5 % of "
        "unseen text is, *none* so that 5 % is by the score and 2 % by how many words stand "
        "together; the 2 % were chosen with these texts in view. Unseen texts here are of other "
        "documents than the scale was measured on. *In other words* has a share of its longer "
        "words replaced by a synonym of their first sense, which is often not the one meant.",
    ]
    for result in results:
        lines += ["", *_section(result)]
    return "\n".join(lines) + "\n"


def _section(result: dict[str, Any]) -> list[str]:
    """Return what was measured of one model."""
    kinds, auc = result["kinds"], result["auc"]
    told = [name for name in kinds if name.endswith("in other words")]
    others = [name for name in kinds if name not in ("verbatim", *NEVER_SEEN, *told)]
    lines = [
        f"## {result['model']['parameters']:,} parameters, "
        f"a corpus of {result['corpus']['tokens']:,} tokens",
        "",
        measured_on(result["environment"]),
        "",
        *table_head("| text | strong | weak | none | mean score |"),
    ]
    for name, found in kinds.items():
        levels = found["levels"]
        columns = " | ".join(f"{levels[level]:.0%}" for level in ("strong", "weak", "none"))
        replaced = result["words_replaced"].get(name)
        note = "" if replaced is None else f" ({replaced:.1f} words replaced)"
        lines.append(f"| {name}{note} | {columns} | {found['score']:.2f} |")
    lines += [
        "",
        "How often one text has more support than another (AUC, 0.5 is chance):",
        "",
        *table_head(f"| | {' | '.join(('unseen', *others, *NEVER_SEEN[1:]))} |"),
    ]
    for name in ("verbatim", *told, "unseen"):
        cells = [
            f"{auc[name][other]:.3f}" if other != name else "–"
            for other in ("unseen", *others, *NEVER_SEEN[1:])
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    compared = [*others, *NEVER_SEEN[1:]]
    lines += ["", *_alone(result, ["verbatim", *told], compared)]
    lines += ["", *_attributed(result)]
    lines += ["", *_verdicts(auc, told, others), "", "The first text of each kind:", ""]
    lines += [
        f"- *{name}*: {escaped(' '.join(t.split()))}" for name, t in result["examples"].items()
    ]
    return lines


def _alone(result: dict[str, Any], more: list[str], less: list[str]) -> list[str]:
    """Return how well states and words do by themselves, beside both: the controls."""
    means: dict[str, float] = {}
    scores = {BOTH: result["auc"]}
    scores |= {f"{name} alone": found for name, found in result["alone"].items()}
    lines = [
        "The score adds how near states come and the logarithm of how many words stand together. "
        "Each by itself, from the same texts:",
        "",
        *table_head(
            f"| | {' | '.join(f'{name} above unseen' for name in more)} | "
            f"{' | '.join(f'unseen above {name}' for name in less)} | mean |"
        ),
    ]
    for name, auc in scores.items():
        found = [auc[one]["unseen"] for one in more] + [auc["unseen"][one] for one in less]
        mean = sum(found) / len(found)
        lines.append(f"| {name} | {' | '.join(f'{value:.3f}' for value in found)} | {mean:.3f} |")
        means[name] = mean
    alone = max((name for name in means if name != BOTH), key=lambda name: means[name])
    gain = means[BOTH] - means[alone]
    verdict = "more than either" if gain >= ADDS else f"**no more than {alone}**"
    return [
        *lines,
        "",
        f"On average both tell {verdict} ({gain:+.3f}). Text in "
        "other words is made by replacing words, which leaves runs of the others: that favours "
        "words, and a paraphrase that shares none was not tried.",
    ]


def _attributed(result: dict[str, Any]) -> list[str]:
    """Return how much of the evidence is attributed, and how well that tells texts apart."""
    ways = result["attributed"]
    kinds = list(result["kinds"])
    head = " | ".join(f"{kind}" for kind in kinds)
    lines = [
        "How much of the evidence is attributed, of each kind of text, and in brackets how often "
        "it is less than of verbatim text (AUC). *Cells alone*, the control: all evidence of a "
        "prototype whose own cell has a position with the predicted token, whether or not a "
        "position that weighs anything relies on the prototype. What relying is with fitted "
        "weights, the demo's model, was chosen with 50 texts of each kind in view.",
        "",
        *table_head(f"| | {head} |"),
    ]
    for way, found in ways.items():
        cells = [
            f"{found['mean'][kind]:.0%}"
            + (f" ({found['auc']['verbatim'][kind]:.2f})" if kind != "verbatim" else "")
            for kind in kinds
        ]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    told = {way: found["auc"]["verbatim"]["unseen"] for way, found in ways.items()}
    verdict = "told apart" if told["explain"] >= TOLD_APART else "**does not work**"
    return [
        *lines,
        "",
        f"Verbatim above unseen text by what is attributed: {verdict}, {told['explain']:.3f}; by "
        f"cells alone {told['cells alone']:.3f}.",
    ]


def _verdicts(auc: dict[str, dict[str, float]], told: list[str], others: list[str]) -> list[str]:
    """Say whether the goals are met."""
    least = min((auc["verbatim"][other] for other in others), default=float("nan"))
    lines = [
        "Goal: verbatim text above text of other domains with an AUC of 0.95: "
        f"**{'met' if least >= 0.95 else 'missed'}**, {least:.3f}."
    ]
    for name in told:
        found = auc[name]["unseen"]
        lines.append(
            f"Goal: text {name} above unseen text, 0.8: "
            f"**{'met' if found >= 0.8 else 'missed'}**, {found:.3f}."
        )
    return [*lines, *(_apart(name, 1 - auc[name]["unseen"]) for name in NEVER_SEEN[1:])]


def _apart(name: str, found: float) -> str:
    """Say whether what is no text is told from unseen text."""
    told = "told apart" if found >= TOLD_APART else "**does not work**"
    return f"Unseen text above {name}: {told}, {found:.3f}."


if __name__ == "__main__":
    raise SystemExit(main())
