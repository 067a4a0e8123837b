"""Write docs/results/channels.md from its JSON; ``--check`` only compares the two."""

from __future__ import annotations

from typing import Any

from benchmarks.shared.pages import measured_on, page_options, publish, read_result, table_head
from prismlm.instruments.channels.effects import SHORT, channel_name

ORDINALS = ("shortest", "second", "third", "longest")


def main() -> int:
    """Render, or say whether the page is up to date."""
    given = page_options(__doc__).parse_args()
    result = read_result(given.results / "channels.json", "prototype_mixer.channels")
    return publish({given.results / "channels.md": render(result)}, check=given.check)


def render(value: dict[str, Any]) -> str:
    """Return the page."""
    settings = value["settings"]
    lines = [
        "# What channels hold, and what the model does without them",
        "",
        "Generated from `channels.json` by `python -m benchmarks.prototype_mixer.render_channels`;",
        "`benchmarks/prototype_mixer/channels.py` writes that and says how.",
        "",
        *_model(value["model"], settings),
        *_concepts(value),
        *_models(value),
        *_unselected(value["channels"], settings["seed"]),
        *_locality(value["locality"]),
        *_measures(value["measures"]),
        *_lags(value["lags"], settings["lag_tokens"]),
        measured_on(value["environment"]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _model(model: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    layers = [f"{low:.1f} to {high:.1f}, median {middle:.1f}" for low, middle, high in (
        model["half_lives"]
    )]  # fmt: skip
    read = {
        name: f"{settings[f'{name}_tokens']:,}" if settings[f"{name}_tokens"] else "all"
        for name in ("train", "heldout")
    }
    return [
        f"Model `{model['name']}`, {model['parameters']:,} parameters, {model['layers']} layers of "
        f"{', '.join(map(str, sorted(set(model['channels']))))} channels. Corpus "
        f"`{settings['corpus']}`: {read['train']} tokens of the training split for finding "
        f"channels, {read['heldout']} of the held-out split for everything else. Half-lives by "
        f"layer, in tokens: {'; '.join(layers)}.",
        "",
    ]


def _concepts(value: dict[str, Any]) -> list[str]:
    settings, concepts = value["settings"], value["concepts"]
    controls = settings["controls"]
    lines = [
        "## Concepts found by what writes",
        "",
        "Each channel's words are those that write into it most beyond its mean gate in the "
        "training split; d is how far its gate at them lies above its mean, in standard "
        "deviations. Channels are taken by d, the largest first, if held-out text has "
        f"{settings['minimum_cases']} cases or more: one a document, a word of the concept that "
        "comes next where one also came before, and to which the model gives "
        f"{settings['minimum_probability']:.0%} or more. {value['passed_over']} were passed over "
        "for having fewer. Nothing of an intervention is looked at before.",
        "",
        f"Change of the word's probability when the write gate is zero, beside {controls} channels "
        "drawn from the same layer. Size is the absolute change. Rank 1 of "
        f"{controls + 1}: it moves the words more than every control. p is over cases, exact and "
        "of one side, that its size is larger than the controls'.",
        "",
    ]
    if not concepts:
        return [*lines, "No concept had enough cases, so nothing was tested.", ""]
    lines += [
        "| channel | words | half-life | d | cases | base, % | median change, % | 95 % interval | "
        "median size, % | controls' sizes, % | rank | p | beats its controls |",
        "|" + "---|" * 13,
    ]
    lines += [_concept_row(concept, settings["tested"]) for concept in concepts]
    lines += ["", _verdict(value), "", *_other_interventions(concepts, settings), ""]
    return lines


def _concept_row(concept: dict[str, Any], tested: str) -> str:
    effect = _effect(concept, tested)
    sizes = effect["control_sizes"]
    words = ", ".join(_cell(word["text"].strip()) for word in concept["words"])
    return (
        f"| {channel_name((concept['layer'], concept['channel']))} | {words} | "
        f"{concept['half_life']:.1f} | {concept['difference']:.2f} | {effect['cases']} | "
        f"{100 * concept['baseline']:.1f} | {effect['median_relative']:+.2f} | "
        f"{interval_text(effect['interval'])} | {effect['median_size']:.2f} | "
        f"{min(sizes):.2f} to {max(sizes):.2f} | {effect['rank']} | {effect['p_size']:.2g} | "
        f"{'yes' if effect['beats_controls'] else 'no'} |"
    )


def _verdict(value: dict[str, Any]) -> str:
    concepts, chance = value["concepts"], value["overall"]
    effects = [_effect(concept, value["settings"]["tested"]) for concept in concepts]
    won = sum(effect["beats_controls"] for effect in effects)
    lowered = sum(effect["median_relative"] < 0 for effect in effects)
    works = chance < 0.05
    return (
        f"{won} of {len(concepts)} beat their controls; in {lowered} the median change is a fall. "
        f"Ranks as good as these over all {len(concepts)} have a probability of {chance:.2g} by "
        "chance (each concept counts once). "
        + (
            "**Channels found by write activation move their words more than other channels do.**"
            if works
            else "**This does not work here: channels found by write activation are not shown to "
            "move their words more than other channels do.**"
        )
    )


def _other_interventions(concepts: list[dict[str, Any]], settings: dict[str, Any]) -> list[str]:
    names = [effect["intervention"] for effect in concepts[0]["effects"]]
    lines = [
        "Every intervention: median change, %, and in brackets the rank. Zero in the write gate "
        "and zero in the read gate are one ablation. `−∞` is before the softmax, so that the other "
        "channels share the gate; random is the mean over three random prototypes.",
        "",
        "| channel | " + " | ".join(SHORT[name] for name in names) + " |",
        "|" + "---|" * (len(names) + 1),
    ]
    for concept in concepts:
        cells = [
            f"{effect['median_relative']:+.2f} ({effect['rank']})" for effect in concept["effects"]
        ]
        place = channel_name((concept["layer"], concept["channel"]))
        lines.append(f"| {place} | {' | '.join(cells)} |")
    return lines


def _models(value: dict[str, Any]) -> list[str]:
    lines = [
        "## The same words in every model",
        "",
        "The channel that is written most at the words, in each model by itself. Beside d stands "
        "the largest d of any channel when each word is replaced by a random word of like "
        "frequency, mean ± standard deviation over 999 draws, with the share of draws that reach "
        "d. Change, rank and p are of the write gate at zero, as above.",
        "",
        "| words | model | times | channel | d | random words | p of d | cases | "
        "median change, % | 95 % interval | rank | p |",
        "|" + "---|" * 12,
    ]
    rows = [(model["model"], row) for model in value["models"] for row in model["rows"]]
    names = list(dict.fromkeys(row["name"] for _, row in rows))
    notes: list[str] = []
    for name in names:
        for model, row in rows:
            if row["name"] == name:
                lines.append(_model_row(model, row))
                if row["said"]:
                    notes.append(f"- {name}, `{model}`: {row['said']}")
    lines.append("")
    for bundled, what in ((False, "Concepts found above"), (True, "Bundled sets of cases")):
        lines += [_emerged(rows, bundled, what, len(value["models"]))]
    lines += ["", "Of a bundled target that is several tokens, the first is predicted.", ""]
    return [*lines, *(["Not measured:", "", *notes, ""] if notes else [])]


def _model_row(model: str, row: dict[str, Any]) -> str:
    found, effect = row["found"], row["effect"]
    cells = [f"{_cell(row['name'])}{' (bundled)' if row['bundled'] else ''}", f"`{model}`"]
    if found is None:
        cells += ["–"] * 5
    else:
        cells += [
            f"{found['occurrences']:,}",
            channel_name((found["layer"], found["channel"])),
            f"{found['difference']:.2f}",
            f"{found['shuffled_mean']:.2f} ± {found['shuffled_deviation']:.2f}",
            f"{found['p']:.3f}",
        ]
    if effect is None:
        cells += ["–"] * 5
    else:
        cells += [
            str(effect["cases"]),
            f"{effect['median_relative']:+.2f}",
            interval_text(effect["interval"]),
            f"{effect['rank']} of {len(effect['control_sizes']) + 1}",
            f"{effect['p_size']:.2g}",
        ]
    return f"| {' | '.join(cells)} |"


def _emerged(rows: list[tuple[str, Any]], bundled: bool, what: str, models: int) -> str:
    kept = [row for _, row in rows if row["bundled"] == bundled]
    found = [row["found"] for row in kept if row["found"]]
    tested = [row["effect"] for row in kept if row["effect"]]
    return (
        f"- {what}, {models} {'model' if models == 1 else 'models'}: a channel stands out beyond "
        f"random words (p of d below 0.05) in {sum(f['emerges'] for f in found)} of {len(found)}; "
        f"masking it beats its controls in {sum(e['beats_controls'] for e in tested)} of "
        f"{len(tested)}."
    )


def _unselected(channels: list[dict[str, Any]], seed: int) -> list[str]:
    lines = [
        "## Ten channels, unselected",
        "",
        f"Drawn from all channels by seed {seed}. Tokens with their mean write gate over the "
        "channel's, among those that occur 20 times or more in the training split; sequences of "
        "the held-out split that write most, cut around the token that does (in brackets).",
        "",
    ]
    for row in channels:
        tokens = ", ".join(
            f"{_code(token['text'])} ×{token['ratio']:.1f}" for token in row["tokens"]
        )
        lines += [
            f"**{channel_name((row['layer'], row['channel']))}**, half-life "
            f"{row['half_life']:.1f} tokens, mean write gate {row['mean_gate']:.3f}: {tokens}",
            "",
        ]
        for sequence in row["sequences"]:
            before, token, after = (
                _cell(" ".join(sequence[key].split())) for key in ("before", "token", "after")
            )
            lines.append(
                f"- {sequence['total']:.1f} over {sequence['length']} tokens: "
                f"…{_plain(before)} **[{_plain(token)}]** {_plain(after)}…"
            )
        lines.append("")
    return lines


def _locality(found: dict[str, Any]) -> list[str]:
    lines = ["## Half-life and repetition", ""]
    if found["said"]:
        return [*lines, f"Not measured: {found['said']}", ""]
    rho, parts = found["spearman"], found["quartiles"]
    lines += [
        "Repetition is 1 − distinct / all over the ten most writing tokens of a channel's ten most "
        f"writing sequences. Spearman's ρ with half-life over {rho['count']} channels: "
        f"{rho['rho']:+.3f} (p {rho['p']:.2g}). The source reports that a short half-life goes "
        "with more repetition, which is a negative ρ. All layers are pooled and not controlled "
        "for: their half-lives differ (above), so that a difference between layers would show here "
        "as one between channels.",
        "",
        *table_head("| quartile of half-life | channels | mean repetition |"),
    ]
    for name, count, mean in zip(ORDINALS, parts["counts"], parts["means"], strict=True):
        lines.append(f"| {name} | {count} | {'–' if mean is None else f'{mean:.3f}'} |")
    return [
        *lines,
        "",
        f"Cohen's d of the shortest against the longest: {parts['cohens_d']:.2f}.",
        "",
    ]


def _measures(found: dict[str, Any]) -> list[str]:
    lines = [
        "## Sparsity by layer",
        "",
        "Write gate / read gate; mutual information with the token after Miller and Madow.",
        "",
        *table_head("| layer | max over mean | Gini | entropy, nats | mutual information, nats |"),
    ]
    keys = ("sparsity_ratio", "gini", "entropy", "mutual_information_corrected")
    for write, read in zip(found["write"], found["read"], strict=True):
        cells = " | ".join(f"{write[key]:.3f} / {read[key]:.3f}" for key in keys)
        lines.append(f"| {write['layer']} | {cells} |")
    return [*lines, ""]


def _lags(rows: list[dict[str, Any]], tokens: int) -> list[str]:
    lines = [
        "## Reading before writing",
        "",
        f"Cross-correlation of read and write gate over {tokens:,} held-out tokens: how many "
        "channels have their peak at each lag. At 1 a channel is read one token before it is "
        "written. Beside it, how many channels exceed shuffled reading at some lag (p below 0.05), "
        "and the mean correlation at lags 0 and 1, in brackets with reading shuffled.",
        "",
    ]
    if not rows:
        return lines
    names = list(rows[0]["peaks"])
    lines += [
        "| layer | " + " | ".join(names) + " | beyond chance | at 0 | at 1 |",
        "|" + "---|" * (len(names) + 4),
    ]
    for row in rows:
        at = [
            f"{_figure(row['correlation'], i)} ({_figure(row['null_mean'], i)})"
            for i in (names.index("0"), names.index("1"))
        ]
        peaks = " | ".join(str(row["peaks"][name]) for name in names)
        lines.append(
            f"| {row['layer']} | {peaks} | {row['beyond_chance']} of {row['channels']} | "
            f"{' | '.join(at)} |"
        )
    return [*lines, "", "A layer with shared gates reads by its write gate: 1 at lag 0.", ""]


def _effect(concept: dict[str, Any], name: str) -> dict[str, Any]:
    return next(e for e in concept["effects"] if e["intervention"] == name)


def _figure(values: list[float | None], place: int) -> str:
    value = values[place] if values else None
    return "–" if value is None else f"{value:+.3f}"


def _code(text: str) -> str:
    shown = text.replace(" ", "·").replace("\n", "↵").replace("`", "'")
    return f"`{shown}`"


def _plain(text: str) -> str:
    """Return text that Markdown does not read as marks."""
    return "".join(f"\\{letter}" if letter in "*_<>[]`#$" else letter for letter in text)


def _cell(text: str) -> str:
    """Return text that a Markdown table takes as it is."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def interval_text(interval: tuple[float, float] | None) -> str:
    """Return an interval's ends, or a dash."""
    return "–" if interval is None else f"{interval[0]:+.2f} to {interval[1]:+.2f}"


if __name__ == "__main__":
    raise SystemExit(main())
