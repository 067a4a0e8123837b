"""Write docs/results/masked_diffusion.md from its JSON; ``--check`` only compares the two."""

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

EVIDENCE, RANDOM = "evidence by position", "random states as prototypes"
# Names are words that no other document has, so BM25 finds what it is asked for.
WORDS = "BM25"
RIGHT, HIDDEN = "text on the right", "text on the right, masked too"
# Nats a token below the count of tokens that count as something learnt.
LEARNT = 0.2
TWINS = "attribute and answer, any place"


def main() -> int:
    """Render, or say whether the page is up to date."""
    given = page_options(__doc__).parse_args()
    result = read_result(given.results / "masked_diffusion.json", "masked_diffusion.judge")
    return publish({given.results / "masked_diffusion.md": render(result)}, check=given.check)


def render(result: dict[str, Any]) -> str:
    """Return the page."""
    lines = [
        "# Masked diffusion: nothing assumes left to right",
        "",
        *_verdicts(result),
        "",
        "Generated from `masked_diffusion.json` by `python -m benchmarks.masked_diffusion.render`; "
        "the JSON by",
        "",
        "    python -m benchmarks.attribution.planted_model planted --epochs 1 --seed 1",
        "    python -m benchmarks.masked_diffusion.train planted diffusion",
        "    python -m benchmarks.masked_diffusion.judge planted diffusion",
        "",
        measured_on(result["environment"]),
        "",
        *_setting(result),
        "",
        "## What the decoder knows",
        "",
        *_knows(result),
        "",
        "## The head",
        "",
        *_head(result),
        "",
        "## Planted facts",
        "",
        *_facts(result),
        "",
        "## Domains",
        "",
        *_domains(result),
        "",
        "## What it writes",
        "",
        *_written(result),
    ]
    return "\n".join(lines) + "\n"


def _verdicts(result: dict[str, Any]) -> list[str]:
    """Say what works and what does not, from the figures alone."""
    quality, masked = result["quality"], result["masked"]
    trained, random = quality["trained"], quality["random states"]
    head_works = _rise(trained) < _rise(random)
    readings = str(result["head"]["readings"])
    at = masked["one_in"][readings]
    recall = result["recall"]
    won = {
        kind: _beaten(recall[kind], result["twins"]["mean"]) for kind in recall if kind != HIDDEN
    }
    right, hidden = recall[RIGHT][EVIDENCE]["all"], recall[HIDDEN][EVIDENCE]["all"]
    domains = result["domains"]
    own = domains[EVIDENCE]
    others = [found["own_share"] for name, found in domains.items() if name != EVIDENCE]
    return [
        "A left-to-right decoder made into one of masked diffusion, which reads both sides of what "
        "it predicts; head, cells and evidence are those of left-to-right models, unchanged.",
        "",
        f"- **The decoder**: with one token in {readings} masked, CE {at['ce']:.2f} on held-out "
        f"text; the count of tokens {at['count_of_tokens']:.2f}, the left-to-right model that it "
        f"was made of {masked['left_to_right']:.2f} (unmasked text before each token). "
        + _of_decoder(at["ce"], at["count_of_tokens"], masked["left_to_right"]),
        f"- **Exact**: contributions, residual and bias sum to the logit of a masked token, to "
        f"{result['sums']['largest']:.1e} of max(1, |logit|) over {result['sums']['positions']:,} "
        "positions.",
        f"- **Prototypes alone**: CE {_rise(trained):+.1%}, with random states as prototypes "
        f"{_rise(random):+.1%}: the head {'works' if head_works else 'does **not** work'}.",
        *(
            f"- **Planted facts, {kind}**: recall@10 {recall[kind][EVIDENCE]['all']['mean']:.2f} "
            f"({WORDS} {recall[kind][WORDS]['all']['mean']:.2f}); "
            + (f"**not** clearly above {', '.join(lost)}." if lost else "above every control.")
            for kind, lost in won.items()
        ),
        "- **From the right alone**: a left-to-right model has nothing to answer from there. "
        f"Recall is {right['mean']:.2f}, and {hidden['mean']:.2f} with that text masked too: "
        + (
            "what stands to the right is read."
            if right["mean"] - hidden["mean"] > 2 * max(right["error"], hidden["error"])
            else "**not** clearly more."
        ),
        f"- **Domains**: {own['own_share']:.2f} of the evidence of held-out text falls on its own "
        f"domain, chance {own['chance']:.2f}; "
        + (
            "more than with any other method."
            if own["own_share"] > max(others)
            else "**not** the most of all methods."
        ),
    ]


def _of_decoder(own: float, count: float, before: float) -> str:
    if own >= count - LEARNT:
        return "It has learnt **nothing** beyond how frequent tokens are."
    better = "It is better than that" if own < before else "It is **not** as good as that"
    return f"{better}, and has learnt more than how frequent tokens are."


def _knows(result: dict[str, Any]) -> list[str]:
    masked = result["masked"]
    lines = [
        "Cross-entropy on held-out text, in nats a token, by how much of it is masked; in the last "
        "row nothing is left to read. *Opened alone* is the left-to-right model without its causal "
        "mask and not trained on. *Count of tokens* predicts each token by how often it stands "
        "in all training text of the left-to-right model, which on this text has "
        f"{masked['left_to_right']:.3f}, each token after all that stands before it, unmasked.",
        "",
        *table_head("| masked | masked diffusion | opened alone | count of tokens | difference |"),
    ]
    for readings, of in masked["one_in"].items():
        share = f"1 in {readings}" if readings != "1" else "all"
        own, count = of["ce"], of["count_of_tokens"]
        lines.append(
            f"| {share} | {own:.3f} | {of['ce_before']:.3f} | {count:.3f} | {own - count:+.3f} |"
        )
    return lines


def _rise(quality: dict[str, Any]) -> float:
    return quality["prototype_only_ce"] / quality["ce"] - 1


def _beaten(found: dict[str, Any], twins: float) -> list[str]:
    """Return the controls that evidence by position is not two standard errors above."""
    own = found[EVIDENCE]["all"]
    floor = own["mean"] - 2 * own["error"]
    others = {name: of["all"]["mean"] for name, of in found.items()} | {TWINS: twins}
    return [
        name for name, mean in others.items() if name not in (EVIDENCE, "BM25") and mean >= floor
    ]


def _setting(result: dict[str, Any]) -> list[str]:
    model, training, head = result["model"], result["training"], result["head"]
    masked = head["readings"]
    return [
        f"The left-to-right model read {training['tokens_before']:,} tokens once. It is trained on "
        f"without its causal mask, which is opened little by little; the state before a masked "
        f"token goes on predicting it. {model['parameters']:,} parameters in {model['layers']} "
        f"layers; {training['tokens']:,} tokens of {training['documents']:,} documents: one in "
        f"{training['every']} of what was read before, and new documents "
        f"with planted facts; {training['epochs']} epochs in {training['cpu_seconds'] / 60:.0f} "
        f"CPU minutes of one core, loss {training['history'][-1]['loss']:.2f} nats a token in the "
        f"last. The head has K = {head['prototypes']:,} and k = {head['prototypes_per_token']}. It "
        f"is fitted to {head['states']:,} states: training text is read {masked} times with one "
        f"in {masked} tokens masked, every token once. The same states are the positions that "
        "evidence is spread over.",
    ]


def _head(result: dict[str, Any]) -> list[str]:
    lines = [
        f"On held-out text with one token in {result['head']['readings']} masked; *share* is the "
        "explained share, *recovered* how "
        "much of what the state tells beyond its mean the prototypes tell.",
        "",
        *table_head(
            "| prototypes | CE | prototypes alone | above | share | FVU | agreement | recovered |"
        ),
    ]
    for name, of in result["quality"].items():
        lines.append(
            f"| {name} | {of['ce']:.3f} | {of['prototype_only_ce']:.3f} | {_rise(of):+.1%} "
            f"| {of['explained_share']:.3f} | {of['fvu']:.3f} | {of['agreement']:.2f} "
            f"| {of['recovered']:.2f} |"
        )
    return lines


def _facts(result: dict[str, Any]) -> list[str]:
    recall, known = result["recall"], result["known"]
    kinds = list(recall)
    twins = result["twins"]
    lines = [
        "Recall@10 of the documents that a fact was planted in, asked in words that no document "
        "has, the answer masked; ± is a standard error over facts. *Text on the right* begins with "
        "the mask. *Masked too* is its control: nothing is left to read. "
        f"*{TWINS.capitalize()}* draws among all documents that tell this answer of any place.",
        "",
        *table_head(f"| | {' | '.join(kinds)} |"),
    ]
    for name in recall[kinds[0]]:
        cells = (f"{_figure(recall[kind][name]['all'])}" for kind in kinds)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines.append(f"| {TWINS} |{f' {_figure(twins)} |' * len(kinds)}")
    copies = [key for key in recall[kinds[0]][EVIDENCE] if key != "all"]
    lines += ["", f"{EVIDENCE.capitalize()}, by the number of documents that tell the fact:", ""]
    lines += table_head(f"| documents | {' | '.join(kinds)} |")
    for key in copies:
        cells = (_figure(recall[kind][EVIDENCE][key]) for kind in kinds)
        lines.append(f"| {key} | {' | '.join(cells)} |")
    chance = known[kinds[0]]["chance"]
    told = ", ".join(f"{kind} {_figure(known[kind])}" for kind in kinds)
    return [
        *lines,
        "",
        f"How often the answer is the likeliest of those that the attribute could have had (chance "
        f"{chance:.3f}): {told}. Documents are found by how near states are; where this is near "
        "chance, the model does not know the fact itself.",
    ]


def _domains(result: dict[str, Any]) -> list[str]:
    found = result["domains"]
    lines = [
        f"{found[EVIDENCE]['documents']} held-out documents, the first {result['asked_tokens']} "
        "tokens of each, all masked once; *accuracy* is how often a document's own domain has the "
        "largest lift.",
        "",
        *table_head("| | own share | chance | accuracy | chance |"),
    ]
    return lines + [
        f"| {name} | {of['own_share']:.3f} | {of['chance']:.3f} | {of['accuracy']:.2f} "
        f"| {of['chance_accuracy']:.2f} |"
        for name, of in found.items()
    ]


def _written(result: dict[str, Any]) -> list[str]:
    lines = [
        "Holes in the first held-out texts of a seed's order, not selected; filled in a token a "
        "step, the surest first.",
        "",
    ]
    for hole in result["filled"]:
        before, was, filled, after = (
            escaped(" ".join(hole[key].split())) for key in ("before", "was", "filled", "after")
        )
        lines.append(f"- … {before} **[{filled}]** {after} … (it was: *{was}*)")
    return lines


def _figure(found: dict[str, float]) -> str:
    return f"{found['mean']:.2f} ± {found['error']:.2f}"


if __name__ == "__main__":
    raise SystemExit(main())
