"""Write docs/results/labels.md from labels.json; ``--check`` only compares the two."""

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

KINDS = {
    "names": "by `prismlm label`",
    "class_tf_idf": "control: BERTopic's weights",
    "signatures": "control: signature",
}


def main() -> int:
    """Render, or say whether the page is up to date."""
    given = page_options(__doc__).parse_args()
    result = read_result(given.results / "labels.json", "labels.measure")
    return publish({given.results / "labels.md": render(result)}, check=given.check)


def render(result: dict[str, Any]) -> str:
    """Return the page."""
    lines = [
        "# What the names of prototypes are worth",
        "",
        "Generated from `labels.json` by `python -m benchmarks.labels.render`; the JSON by",
        "",
        "    python -m benchmarks.labels.measure MODEL --called NAME",
        "",
        "`prismlm label` names every prototype from the places of its cell, without any model: "
        "*words read last → words that come next*, in brackets words of the text around; a word "
        "that goes on is shown whole, parted where the prototype is. Names are made of four fifths "
        "of the documents and scored on the others. That cells of less than ten places have on the "
        "right what they raise, and not what came next, and that it comes last there where what "
        "came next varies, was chosen with these in view. "
        "*Detection*: of as many passages of 25 tokens that fire as of others, which fire? "
        "*Fuzzing*: the same of one marked place, the word read last and the next one. "
        "Asked is a scorer that knows the words of the label alone, and says that the half with "
        "the rarer words in "
        "common fire. Balanced accuracy, up to 16 passages of each kind; 50 % says nothing. In "
        "brackets the same with "
        "the label of another prototype; the difference with 95 % of a bootstrap over prototypes. "
        "*BERTopic's weights*: the same names with words ranked by class-based TF-IDF, tf ln(1 + "
        "A / f), a cell being a class (Grootendorst 2022), in place of p ln(p / base). "
        "*Signature*: the name of a lens that was not labelled, the tokens that its prototype "
        "raises more than others do.",
        "",
        *table_head("| model | labels | scored | detection | difference | fuzzing | difference |"),
    ]
    for model in result["models"]:
        for key, said in KINDS.items():
            if key in model:
                lines.append(f"| {model['model']} | {said} | {_scored(model[key])} |")
    lines += ["", _weights(result["models"])]
    lines += ["", *_tokens(result["models"])]
    if "asked" in result:
        lines += ["", *_asked(result["asked"])]
    for model in result["models"]:
        lines += ["", *_model(model)]
    return "\n".join(lines).rstrip() + "\n"


def _weights(models: list[dict[str, Any]]) -> str:
    """Return why words are not ranked as BERTopic does, and which models were measured before."""
    said = [
        f"{model['model']}: {' and '.join(_lost(model, key) for key in ('detection', 'fuzzing'))}"
        for model in models
        if "class_tf_idf" in model
    ]
    before = [model["model"] for model in models if "class_tf_idf" not in model]
    return (
        f"What BERTopic's weights lose, in points: {'; '.join(said)}. A cell is a small class, "
        "often of some dozen places, and there are thousands. Then A / f of all but rare words is "
        "near 0 and the weight near tf A / f: how many times as often a word is there as "
        "elsewhere, which is largest for words that came in by accident."
        + f" Measured before that comparison, with brackets and commas of the names taken for "
        f"words of theirs: {', '.join(before)}." * bool(before)
    )


def _lost(model: dict[str, Any], key: str) -> str:
    lost = model["names"][key]["mean"] - model["class_tf_idf"][key]["mean"]
    return f"{100 * lost:.1f} of {key}"


def _tokens(models: list[dict[str, Any]]) -> list[str]:
    """Return the section on the ten tokens of a prototype."""
    lines = [
        "## Ten tokens",
        "",
        "Beside a name a prototype has ten tokens: those that it raises more than the others do, "
        "in standard deviations over the prototypes, of those that the corpus has five times or "
        "more; they stand on the right of a name where a cell has less than ten places, and last "
        "there where what comes next varies. The ten with the largest logits are others. *Has it*: "
        "of predictions of the lens's text, the model's most likely token is among the ten of the "
        "prototype with the most evidence for it; in brackets, among another's. *Hardly there*: of "
        "all tokens of the lists, those that the corpus has less than five times. *Firsts*: "
        "different ones at the head of a list.",
        "",
        *table_head("| model | ten tokens | predictions | has it | hardly there | firsts |"),
    ]
    for model in models:
        for kind, said in (("telling", "raised more than by others"), ("largest", "largest")):
            if "tokens" in model:
                found = model["tokens"][kind]
                lines.append(
                    f"| {model['model']} | {said} | {model['tokens']['predictions']:,} | "
                    f"{found['has']:.1%} ({found['another_has']:.1%}) | {found['rare']:.1%} | "
                    f"{found['different_first']:,} of {model['prototypes']:,} |"
                )
    more = [
        f"{model['model']}: {found['largest']['has'] - found['telling']['has']:+.1%}"
        for model in models
        if (found := model.get("tokens"))
    ]
    return [
        *lines,
        "",
        f"What the ten largest have more of the model's tokens: {', '.join(more)}. They were given "
        "up for it: deviations, five times and one way to write a word were chosen by reading some "
        "forty lists of the demo's model, beside these figures.",
    ]


def _asked(asked: dict[str, Any]) -> list[str]:
    """Return the section on the names that a language model made."""
    scores, failures = asked["scores"], asked["failures"]
    own, embedded = scores["own"], scores["embedded"]
    works = own["detection"]["low"] > 0 and own["fuzzing"]["low"] > 0
    wanted = asked["named"] + sum(failures.values())
    return [
        "## By a language model",
        "",
        "    prismlm label MODEL --endpoint URL --endpoint-model NAME "
        f"--prototypes {wanted} --json > ASKED",
        "    python -m benchmarks.labels.measure MODEL --called NAME --asked ASKED --server WHAT",
        "",
        f"Of {asked['model']}, the {wanted} prototypes most used, by {asked['by']} in "
        f"{asked['server']}. {asked['named']} were named, with {asked['requests']} requests, "
        f"{asked['tokens_in']:,} tokens in and {asked['tokens_out']:,} out; what failed: "
        f"{'; '.join(f'{why} ({count})' for why, count in failures.items()) or 'nothing'}. "
        "Scored by words, as above, beside the names made without a model of the same prototypes:",
        "",
        *table_head("| labels | scored | detection | difference | fuzzing | difference |"),
        f"| by {asked['by']} | {_scored({**own, 'scored': scores['scored']})} |",
        f"| by `prismlm label` | {_scored({**embedded, 'scored': scores['scored']})} |",
        "",
        "**Names by this model "
        + ("say where their prototypes fire.**" if works else "do not work**: chance is as good."),
    ]


def _scored(found: dict[str, Any]) -> str:
    parts = [f"{found['scored']:,}"]
    for name in ("detection", "fuzzing"):
        one = found[name]
        points = f"{100 * one['low']:+.1f} to {100 * one['high']:+.1f} points"
        parts += [f"{one['mean']:.1%} ({one['shuffled']:.1%})", points]
    return " | ".join(parts)


def _model(model: dict[str, Any]) -> list[str]:
    seconds = model["seconds"]
    lines = [
        f"## {model['model'][0].upper()}{model['model'][1:]}",
        "",
        f"{model['prototypes']:,} prototypes, {model['positions']:,} positions; names of "
        f"{model['documents'][0]:,} documents, scored on {model['documents'][1]:,}. Names took "
        f"{seconds['names']:.0f} CPU seconds, scores {seconds['scores']:.0f}.",
        "",
        *table_head("| category | prototypes | scored | detection | fuzzing |"),
    ]
    for row in model["categories"]:
        figures = ("–" if row[k] is None else f"{row[k]:.1%}" for k in ("detection", "fuzzing"))
        lines.append(
            f"| {row['category']} | {row['prototypes']:,} | {row['scored']:,} | "
            f"{' | '.join(figures)} |"
        )
    lines += [
        "",
        f"{len(model['drawn'])} of them, drawn by seed and not selected:",
        "",
        *table_head(
            "| prototype | name | by BERTopic's weights | signature | category | detection |"
        ),
    ]
    for row in model["drawn"]:
        score = "–" if row["detection"] is None else f"{row['detection']:.0%}"
        names = (escaped(row.get(key, "–")) for key in ("name", "class_tf_idf", "signature"))
        cells = " | ".join((*names, row["category"], score))
        lines.append(f"| {row['prototype']} | {cells} |")
    return [*lines, "", measured_on(model["environment"])]


if __name__ == "__main__":
    raise SystemExit(main())
