"""Write docs/results/chain.md from chain.json; ``--check`` only compares the two."""

from __future__ import annotations

from typing import Any

from benchmarks.shared.pages import measured_on, page_options, publish, read_result, table_head

HEADINGS = (
    "cases",
    "Pearson",
    "Spearman",
    "same sign",
    "median change / part",
    "median part",
    "median change",
    "median \\|change\\|",
)
CHANNELS = {
    "largest": "the largest positive part of all layers",
    "random": "a random other channel of its layer",
    "smallest": "the smallest part, either way, of its layer",
    "loudest": "the loudest other channel of all layers",
}
TOKENS = {
    "credited": "the token credited most in that channel",
    "distant": "another token at a similar distance",
}


def main() -> int:
    """Render, or say whether the page is up to date."""
    given = page_options(__doc__).parse_args()
    result = read_result(given.results / "chain.json", "prototype_mixer.chain")
    return publish({given.results / "chain.md": render(result)}, check=given.check)


def render(result: dict[str, Any]) -> str:
    """Return the page."""
    found, settings = result["summary"], result["settings"]
    lines = [
        *_head(result),
        *_in_words(found),
        "## What an activation is made of, directly",
        "",
        *_shares(found, result["model"]["layers"]),
        "## Without a channel",
        "",
        "`MaskWrite` on the channel, at every position; change is the activation before minus "
        "after, with everything that follows from it. In brackets 95 % intervals over cases, drawn "
        "1,000 times; four cases share a sequence, so they are somewhat too narrow.",
        "",
        "The loudest channel is the one whose reading is longest, whatever its direction: a "
        "control that knows the position and not the prototype. The channel credited most is "
        f"itself the loudest of all in {found['is_loudest']:.0%} of the cases.",
        "",
        *_table(found["channels"], CHANNELS),
        *_table({"all": found["channels_pooled"]}, {"all": "the first three together"}, head=False),
        "",
        "Parts of the first three differ in size by orders of magnitude, so their correlations are "
        "not to be compared as if they were alike. The first three together, by layer:",
        "",
        *_table(found["by_layer"], {layer: f"layer {layer}" for layer in found["by_layer"]}),
        "",
        "## Without a token",
        "",
        f"In the channel with the largest part; {found['median_distance']:g} positions back in the "
        "median. First, its position's write into that channel taken out. The mass then falls too, "
        "so that what is left weighs more, which a part with the mass as it is does not see.",
        "",
        *_table(found["writes"], TOKENS),
        "",
        f"Then the token replaced by {settings['replacements']} others of the text's, mean: that "
        "changes all channels, and all layers.",
        "",
        *_table(found["tokens"], TOKENS),
        "",
        "## Which changes more?",
        "",
        *table_head("| | share of cases |"),
        *(f"| {name} | {share:.3f} |" for name, share in found["larger"].items()),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _head(result: dict[str, Any]) -> list[str]:
    """Return what was measured, and with what."""
    model, found, settings = result["model"], result["summary"], result["settings"]
    return [
        "# Do direct parts say what happens without a channel or a token?",
        "",
        "Generated from `chain.json` by `python -m benchmarks.prototype_mixer.render_chain`; "
        "the JSON by",
        "",
        "    prismlm train recipes/prototype_mixer/laptop.yaml --set steps=1200 --set batch_size=8",
        "    python -m benchmarks.prototype_mixer.chain models/protot-laptop corpus",
        "",
        f"One model of type `{model['type']}`: {model['parameters']:,} parameters, "
        f"{model['layers']} layers of {model['channels']} channels, {model['prototypes']:,} "
        f"prototypes, τ {model['scale']:.3f}, {model['steps']:,} steps on `"
        f"{result['corpus']['name']}`, one seed. {len(result['cases'])} positions of held-out text "
        f"(seed {settings['seed']}), each with the prototype of the largest activation, "
        f"{found['median_activation']:.3f} in the median.",
        "",
        measured_on(result["environment"]),
        "",
    ]


def _in_words(found: dict[str, Any]) -> list[str]:
    """Return what the figures come to, in words that they decide."""
    largest, loudest = found["channels"]["largest"], found["channels"]["loudest"]
    more = found["larger"]
    return [
        "**A direct part is not the effect of a removal.** Without the channel credited most the "
        f"activation changes by {largest['median_ratio']:.2f} of its part in the median, and in "
        f"{1 - largest['same_sign']:.0%} of the cases the other way: later layers, other positions "
        "and the norm answer. Larger parts do go with larger effects (Spearman "
        f"{largest['spearman'][0]:.2f}, and {loudest['spearman'][0]:.2f} for the loudest other "
        "channel). The channel credited most changes the activation more than a random one of its "
        f"layer in {more['largest channel than random']:.0%} of the cases, but more than the "
        f"loudest other in {more['largest channel than the loudest other']:.0%}, and it is itself "
        f"the loudest in {found['is_loudest']:.0%}: much of that is how loud a channel is, not "
        "what it says. The token credited most changes it more than another at a similar distance "
        f"in {more['credited token than another']:.0%}.",
        "",
    ]


def _shares(found: dict[str, Any], layers: int) -> list[str]:
    names = ["embedding", *(f"SwiGLU {i}" for i in range(layers))]
    names += [f"mixer {i}" for i in range(layers)]
    return [
        "| " + " | ".join(names) + " |",
        "|" + "---|" * len(names),
        "| " + " | ".join(f"{share:+.3f}" for share in found["shares"]) + " |",
        "",
        f"Medians of each share by itself, so they need not sum to 1. The largest channel alone: "
        f"{found['largest_share']:.3f}. Sums of all parts differ from the model's own activation "
        f"by at most {found['largest_error']:.1e} τ.",
        "",
    ]


def _table(rows: dict[str, Any], names: dict[str, str], *, head: bool = True) -> list[str]:
    lines = [f"| | {' | '.join(HEADINGS)} |", "|---|" + "---|" * len(HEADINGS)] if head else []
    return lines + [f"| {names[key]} | {_row(row)} |" for key, row in rows.items()]


def _row(row: dict[str, Any]) -> str:
    cells = [
        f"{row['cases']:,}",
        *(
            f"{r:.2f} ({low:.2f} to {high:.2f})"
            for r, low, high in (row["pearson"], row["spearman"])
        ),
        f"{row['same_sign']:.2f}",
        f"{row['median_ratio']:.2f}",
        *(f"{row[key]:.4f}" for key in ("median_part", "median_change", "median_absolute_change")),
    ]
    return " | ".join(cells)


if __name__ == "__main__":
    raise SystemExit(main())
