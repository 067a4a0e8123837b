"""Write docs/results/edits.md from edits.json; ``--check`` only compares the two."""

from __future__ import annotations

from typing import Any

from benchmarks.shared.pages import escaped, measured_on, page_options, publish, read_result


def main() -> int:
    """Render, or say whether the page is up to date."""
    given = page_options(__doc__).parse_args()
    result = read_result(given.results / "edits.json", "edits.measure")
    return publish({given.results / "edits.md": render(result)}, check=given.check)


def render(result: dict[str, Any]) -> str:
    """Return the page."""
    lines = [
        "# Edits of the demo's model",
        "",
        "Generated from `edits.json` by `python -m benchmarks.edits.render`; the JSON by",
        "",
        "    prismlm demo --train --no-serve --out prismlm-demo",
        "    python -m benchmarks.edits.measure prismlm-demo",
        "",
        *_setting(result),
        *_prototypes(result),
        *_groups(result),
    ]
    return "\n".join(lines) + "\n"


def _setting(result: dict[str, Any]) -> list[str]:
    where, head, drawn = result["environment"], result["head"], result["drawn"]
    return [
        f"{result['parameters']:,} parameters, {result['steps']:,} steps; K = "
        f"{head['prototypes']:,}, k = {head['prototypes_per_token']}, τ = {head['scale']:.2f}. One "
        "seed.",
        "",
        f"{drawn['prompts']} prompts: the first {drawn['prompt_tokens']} tokens of held-out "
        "documents. *Signature*: change of the log-probability that the next token is one of the "
        "ten top tokens of the edited prototypes. *Text*: change of the log-probability of the "
        "text's own next token. *KL*: divergence of the prediction after from that before. All in "
        "nats, means over a prompt's predictions and then over prompts. *Difference*: the edit "
        "less its control, prompt by prompt, with a 95 % bootstrap interval; *d*: that difference "
        "over its standard deviation. The control moves the same change of activation to random "
        f"prototypes of equal activation, {drawn['draws']} draws "
        f"({drawn['cost_draws']} for perplexity). Definitions: [edits](../edits.md).",
        "",
        "The signature measure asks whether the edited logits are those of the named prototype; "
        "that it beats a random one follows almost from the equations. The rows to read are how "
        "much of it there is for what it costs.",
        "",
        measured_on(where),
        "",
    ]


def _prototypes(result: dict[str, Any]) -> list[str]:
    lines = [
        "## Prototypes, drawn by seed from those used by at least "
        f"{result['drawn']['used_by']:.1%} of positions",
        "",
        "*Changed*: share of predictions that the edit changes. *Left*: where a clamp is undefined "
        "(the prototype's signature is not positive at the target) and left out. *Capped*: where "
        "it met k · τ. Perplexity on held-out text: before → after (control).",
        "",
    ]
    for row in result["prototypes"]:
        lines += [
            f"### {row['prototype']}: {_plain(row['name'])}",
            "",
            f"Used by {row['usage']:.2%} of positions.",
            "",
            "| edit | changed | left | capped | signature: edit | control | difference | d | "
            "KL: edit | control | perplexity |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
            *(_prototype_row(name, edit) for name, edit in row["edits"].items()),
            "",
        ]
    return lines


def _prototype_row(name: str, edit: dict[str, Any]) -> str:
    effects = edit["effects"]["prompts"]
    signature, divergence = effects["measures"]["signature"], effects["measures"]["divergence"]
    return (
        f"| {name} | {effects['changed']:.1%} | {effects['left']:.0%} | {effects['capped']:.0%} | "
        f"{signature['edit']:+.3f} | {signature['control']:+.3f} | {_difference(signature)} | "
        f"{divergence['edit']:.3f} | {divergence['control']:.3f} | {_cost(edit['cost'])} |"
    )


def _groups(result: dict[str, Any]) -> list[str]:
    lines = [
        "## Groups: the prototypes of a domain",
        "",
        f"Prototypes with at least {result['drawn']['own']:.0%} of their activation over the "
        "training text in one domain, taken out (−100 %) and doubled (+100 %) among the 16 most "
        "active of a position; the domains with most such prototypes. If a group stood for its "
        "domain, taking it out would lower the text's own log-probability on that domain by more "
        "than elsewhere, and by more than the control.",
        "",
        "| domain | prototypes | strength | prompts | changed | text: edit | control | difference "
        "| d | perplexity on all held-out text |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["groups"]:
        for strength, edit in row["edits"].items():
            for prompts, effects in edit["effects"].items():
                text = effects["measures"]["text"]
                lines.append(
                    f"| {_plain(row['domain'])} | {row['prototypes']} | {strength} | "
                    f"{prompts}, {text['prompts']} | "
                    f"{effects['changed']:.0%} | {text['edit']:+.3f} | {text['control']:+.3f} | "
                    f"{_difference(text)} | {_cost(edit['cost'])} |"
                )
    return [*lines, "", *_in_words(result)]


def _in_words(result: dict[str, Any]) -> list[str]:
    """Say in words what the figures show, from the figures."""
    edits = [edit for row in result["prototypes"] for edit in row["edits"].values()]
    shown = sum(_above_zero(e["effects"]["prompts"]["measures"]["signature"]) for e in edits)
    active = [row["edits"] for row in result["prototypes"]]
    ablations = [edits["ablate"]["effects"]["prompts"]["measures"]["signature"] for edits in active]
    lowered = sum(_below_zero(effect) for effect in ablations)
    removed = [row["edits"]["-100%"]["effects"] for row in result["groups"]]
    own = sum(_below_zero(e["own domain"]["measures"]["text"]) for e in removed)
    others = sum(_below_zero(e["other domains"]["measures"]["text"]) for e in removed)
    return [
        "## Read",
        "",
        f"- {len(edits) - len(ablations)} edits raise a prototype; {shown} of these raise its "
        "signature's tokens more than the control does, with an interval above zero. "
        f"{lowered} of {len(ablations)} ablations lower them more than the control.",
        f"- Taking out a domain's prototypes hurts text of that domain more than the control does "
        f"for {own} of {len(removed)} domains, and text of other domains for {others}: "
        + (
            "the groups are specific to their domains by this figure."
            if own == len(removed) and others == 0
            else "**by this figure the groups are not shown to be specific to their domains.**"
        ),
    ]


def _above_zero(effect: dict[str, Any]) -> bool:
    return effect["difference_interval"][0] > 0


def _below_zero(effect: dict[str, Any]) -> bool:
    return effect["difference_interval"][1] < 0


def _difference(effect: dict[str, Any]) -> str:
    low, high = effect["difference_interval"]
    d = "–" if effect["d"] is None else f"{effect['d']:+.2f}"
    return f"{effect['difference']:+.3f} ({low:+.3f} to {high:+.3f}) | {d}"


def _cost(cost: dict[str, Any]) -> str:
    return f"{cost['perplexity']:.1f} → {cost['edited']:.1f} ({cost['control']:.1f})"


def _plain(text: str) -> str:
    return escaped(text).replace("\n", "↵")


if __name__ == "__main__":
    raise SystemExit(main())
