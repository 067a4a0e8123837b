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
    trained, random = result["quality"]["trained"], result["quality"]["random states"]
    head_works = _rise(trained) < _rise(random)
    own = result["domains"][EVIDENCE]
    others = {name: of["own_share"] for name, of in result["domains"].items() if name != EVIDENCE}
    more = [name for name, share in others.items() if share >= own["own_share"]]
    return [
        "A left-to-right decoder made into one of masked diffusion, which reads both sides of what "
        "it predicts; head, cells and evidence are those of left-to-right models, unchanged.",
        "",
        _of_decoder(result["masked"]),
        f"- **Exact**: contributions, residual and bias sum to the logit of a masked token, to "
        f"{result['sums']['largest']:.1e} of max(1, |logit|) over {result['sums']['positions']:,} "
        "positions.",
        f"- **Prototypes alone**: CE {_rise(trained):+.1%}, with random states as prototypes "
        f"{_rise(random):+.1%}: the head {'works' if head_works else 'does **not** work'}.",
        *_of_facts(result),
        f"- **Domains**: {own['own_share']:.2f} of the evidence of held-out text falls on its own "
        f"domain, chance {own['chance']:.2f}; "
        + (f"**not** more than with {', '.join(more)}." if more else "more than with the others."),
    ]


def _of_decoder(masked: dict[str, Any]) -> str:
    before, shares = masked["left_to_right"], masked["one_in"]
    some = {readings: of for readings, of in shares.items() if readings != "1"}
    told = ", ".join(f"{of['ce']:.2f} with 1 in {readings}" for readings, of in some.items())
    count = next(iter(shares.values()))["count_of_tokens"]
    learnt = all(of["ce"] < of["count_of_tokens"] - LEARNT for of in some.values())
    better = [f"1 in {readings}" for readings, of in some.items() if of["ce"] < before]
    return (
        f"- **The decoder**: CE on held-out text {told} masked; the count of tokens {count:.2f}, "
        f"the left-to-right model that it was made of {before:.2f} (all text before a token, "
        "unmasked). Better than the count of tokens: "
        + ("yes" if learnt else "**no**")
        + "; better than the left-to-right model: "
        + (f"with {', '.join(better)} masked" if better else "**never**")
        + ", after more epochs on a part of the same text."
    )


def _of_facts(result: dict[str, Any]) -> list[str]:
    recall, known, twins = result["recall"], result["known"], result["twins"]["mean"]
    kinds = [kind for kind in recall if kind != HIDDEN]
    lost = {kind: _beaten(recall[kind], twins) for kind in kinds}
    knows = all(known[k]["mean"] - 2 * known[k]["error"] > known[k]["chance"] for k in kinds)
    right, hidden = recall[RIGHT][EVIDENCE]["all"], recall[HIDDEN][EVIDENCE]["all"]
    read = right["mean"] - hidden["mean"] > 2 * max(right["error"], hidden["error"])
    return [
        *(
            f"- **Planted facts, {kind}**: recall@10 {recall[kind][EVIDENCE]['all']['mean']:.2f} "
            f"({WORDS} {recall[kind][WORDS]['all']['mean']:.2f}); "
            + (f"**not** clearly above {'; '.join(names)}." if names else "above every control.")
            for kind, names in lost.items()
        ),
        "- **From the right alone**: a left-to-right model has nothing to answer from there. "
        f"Recall is {right['mean']:.2f}, and {hidden['mean']:.2f} with that text masked too: "
        + ("what stands to the right is read." if read else "**not** clearly more."),
        "- **The facts themselves**: the answer is the likeliest of those possible in "
        + ", ".join(f"{known[kind]['mean']:.2f}" for kind in kinds)
        + f" of them (the same order; chance {known[RIGHT]['chance']:.3f}). "
        + (
            "It knows them."
            if knows
            else "It does **not** know them"
            + (
                f", and evidence finds no more than attribute and answer alone ({twins:.2f}): it "
                "does **not** tell places apart."
                if all(TWINS in names for names in lost.values())
                else "."
            )
        ),
    ]


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
        f"last. The head has K = {head['prototypes']:,} and k = {head['prototypes_per_token']}, "
        "weighed by cosines. It "
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
