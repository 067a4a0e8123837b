"""Write docs/results/first_light.md from first_light.json; ``--check`` only compares the two."""

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

QUALITY = (
    ("ce", "CE of the model", "{:.3f}"),
    ("prototype_only_ce", "prototype-only CE", "{:.3f}"),
    ("explained_share", "explained share", "{:.3f}"),
    ("fvu", "FVU", "{:.3f}"),
    ("agreement", "agreement", "{:.3f}"),
    ("in_use", "in use", "{:.3f}"),
    ("usage_perplexity", "usage perplexity", "{:.0f}"),
)


def main() -> int:
    """Render, or say whether the page is up to date."""
    given = page_options(__doc__).parse_args()
    result = read_result(given.results / "first_light.json", "first_light.measure")
    return publish({given.results / "first_light.md": render(result)}, check=given.check)


def render(result: dict[str, Any]) -> str:
    """Return the page."""
    lines = [
        "# First light: the demo's model",
        "",
        "Generated from `first_light.json` by `python -m benchmarks.first_light.render`; the JSON "
        "by",
        "",
        "    prismlm demo --train --no-serve --out prismlm-demo",
        "    python -m benchmarks.first_light.measure prismlm-demo",
        "",
        *_setting(result),
        *_quality(result["quality"]),
        *domains(result["domain_share"]),
        *_prototypes(result["prototypes"]),
    ]
    return "\n".join(lines) + "\n"


def _setting(result: dict[str, Any]) -> list[str]:
    where, recipe = result["environment"], result["recipe"]
    heldout = result["corpus"]["heldout"]
    return [
        f"{result['parameters']:,} parameters and {result['head_parameters']:,} in the head "
        f"(K = {recipe['head']['prototypes']:,}, k = {recipe['head']['prototypes_per_token']}), "
        f"{result['steps']:,} steps, {result['training_tokens']:,} tokens of the bundled sample "
        f"({result['corpus']['tokens']:,} tokens, {heldout['tokens']:,} of them in "
        f"{heldout['documents']:,} held-out documents). One seed.",
        "",
        measured_on(where),
        "",
    ]


def _quality(quality: dict[str, Any]) -> list[str]:
    trained, control = quality["trained"], quality["random_states"]
    rows = [
        f"| {name} | {form.format(trained[key])} | {form.format(control[key])} |"
        for key, name, form in QUALITY
    ]
    beats = trained["prototype_only_ce"] < control["prototype_only_ce"]
    gap = trained["prototype_only_ce"] - trained["ce"]
    control_gap = control["prototype_only_ce"] - control["ce"]
    return [
        "## What the prototypes carry",
        "",
        f"{trained['tokens']:,} held-out predictions. The control takes K random training hidden "
        "states of the same model as prototypes, untrained.",
        "",
        *table_head("| | trained prototypes | control: random states |"),
        *rows,
        "",
        f"Without the residual the model loses {gap:.3f} nats with its trained prototypes and "
        f"{control_gap:.3f} with random states"
        + (
            "."
            if beats
            else ": **training does not beat the control, so by this figure it does not work.**"
        ),
        "",
    ]


def domains(figures: dict[str, Any]) -> list[str]:
    """Return the section on domains: trained prototypes beside both controls."""
    trained = figures["trained"]
    columns = (trained, figures["random_states"], figures["shuffled_map"])
    own = " | ".join(f"{column['own_share']:.3f}" for column in columns)
    accuracy = " | ".join(f"{column['accuracy']:.3f}" for column in columns)
    comparisons = [
        _comparison(control, measure, figures[key][measure])
        for control, key in (
            ("random states", "trained_minus_random_states"),
            ("one shuffled map", "trained_minus_shuffled_map"),
        )
        for measure in ("own_share", "accuracy")
    ]
    return [
        "## Does the evidence point to the right domain?",
        "",
        f"{trained['documents']:,} held-out documents, evidence for the words that stand there, "
        "traced through each prototype's activation over the training text. *Own share*: mean "
        "share of the attributed evidence that falls on the document's own domain. *Accuracy*: "
        "documents whose own domain has the largest share relative to its share overall. The "
        f"shuffled map is the mean of {figures['shuffles']} shuffles.",
        "",
        "| | trained prototypes | control: random states | control: shuffled map | chance |",
        "|---|---|---|---|---|",
        f"| own share | {own} | {trained['chance']:.3f} |",
        f"| accuracy | {accuracy} | {trained['chance_accuracy']:.3f} |",
        "",
        "Trained prototypes against each control, document by document (mean difference, 95 % "
        "interval of a paired bootstrap):",
        "",
        *comparisons,
        "",
        *(_worth(figures, measure) for measure in ("own_share", "accuracy")),
        "",
    ]


def _worth(figures: dict[str, Any], measure: str) -> str:
    """Say whether a measure beats both controls, without which it does not work."""
    name = measure.replace("_", " ").capitalize()
    lost = [
        control
        for control, key in (("random states", "random_states"), ("a shuffled map", "shuffled_map"))
        if figures[f"trained_minus_{key}"][measure]["low"] <= 0
    ]
    if lost:
        return f"- {name} **does not work**: not better than {' and '.join(lost)}."
    return f"- {name} works: better than both controls."


def _comparison(control: str, measure: str, interval: dict[str, float]) -> str:
    low, high = interval["low"], interval["high"]
    verdict = "better" if low > 0 else "**worse**" if high < 0 else "**no difference shown**"
    return (
        f"- {measure.replace('_', ' ')} against {control}: {interval['difference']:+.3f} "
        f"({low:+.3f} to {high:+.3f}), {verdict}"
    )


def _prototypes(prototypes: list[dict[str, Any]]) -> list[str]:
    lines = [
        "## Ten prototypes, drawn by seed and not selected",
        "",
        "Signature tokens are the largest entries of τ W p. Contexts are the nearest five in the "
        "training text, each from another document; the token in brackets is the one whose hidden "
        "state is near, and what follows begins with the token it predicts.",
        "",
    ]
    for row in prototypes:
        tokens = ", ".join(
            f"{_code(token)} {value:+.2f}"
            for token, value in zip(row["top_tokens"], row["top_values"], strict=True)
        )
        lines += [
            f"### {row['prototype']}: {_plain(row['name'])}",
            "",
            f"Used by {row['usage']:.3%} of positions. Signature: {tokens}",
            "",
        ]
        lines += [
            f"- {context['cosine']:.3f} · {context['domain']} · {context['source']}: "
            f"…{_plain(context['before'])}**[{_plain(context['token'])}]**"
            f"{_plain(context['after'])}…"
            for context in row["contexts"]
        ]
        lines.append("")
    return lines[:-1]


def _plain(text: str) -> str:
    return escaped(text).replace("\n", " ↵ ")


def _code(token: str) -> str:
    shown = token.replace("\n", "↵").replace(" ", "␣").replace("\t", "→")
    return f"`` {shown} ``" if "`" in shown else f"`{shown}`"


if __name__ == "__main__":
    raise SystemExit(main())
