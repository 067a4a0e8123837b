"""Write docs/results/prototype_mixer_judge.md from judge/; ``--check`` only compares the two."""

from __future__ import annotations

from typing import Any

from benchmarks.shared.pages import (
    escaped,
    measured_on,
    page_options,
    publish,
    ranged,
    read_results,
    table_head,
)
from prismlm.direction_marks import marks_shown

# ProtoT, Table 22.
SOURCE = {"mamba2": 1150.78, "protot": 1015.93, "llama": 938.59, "deltanet": 894.70}
CALLED = {"mamba2": "Mamba", "protot": "ProtoT", "llama": "LLaMA", "deltanet": "DeltaNet"}
CLAIMS = (
    ("Mamba is above ProtoT", "mamba2", "protot"),
    ("ProtoT is above LLaMA", "protot", "llama"),
    ("ProtoT is above DeltaNet", "protot", "deltanet"),
    ("LLaMA is above DeltaNet", "llama", "deltanet"),
)


def main() -> int:
    """Render, or say whether the page is up to date."""
    given = page_options(__doc__).parse_args()
    folder = given.results / "prototype_mixer" / "judge"
    results = read_results(folder, "prototype_mixer.judge")
    return publish({given.results / "prototype_mixer_judge.md": render(results)}, check=given.check)


def render(results: list[dict[str, Any]]) -> str:
    """Return the page."""
    rated = [one for one in results if one["ratings"]]
    lines = [
        "# Which model continues a text best, and is the judge worth asking?",
        "",
        "Generated from `prototype_mixer/judge/` by `python -m "
        "benchmarks.prototype_mixer.render_judge`; `benchmarks/prototype_mixer/judge.py` writes "
        "that and says how. After ProtoT, B.1 to B.3.",
        "",
        _first_sentence(results),
        "",
        *_judges([one for one in results if one["judge"]]),
        *_ratings(rated),
        *_claims(rated),
        *_bleu([one for one in results if one["bleu"]]),
        *(f"- `{one['called']}`: {measured_on(one['environment'])}" for one in results),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _first_sentence(results: list[dict[str, Any]]) -> str:
    judges = [one for one in results if one["judge"]]
    usable = [one["called"] for one in judges if one["judge"]["usable"]]
    unusable = [one["called"] for one in judges if not one["judge"]["usable"]]
    said = [f"**{', '.join(f'`{name}`' for name in unusable)}: unusable as a judge.**"] * bool(
        unusable
    )
    said += [f"**{', '.join(f'`{name}`' for name in usable)}: usable as a judge.**"] * bool(usable)
    return " ".join(said)


def _judges(results: list[dict[str, Any]]) -> list[str]:
    lines = [
        "## The judge, judged first",
        "",
        "A judge is asked which of two continuations of a held-out text is better, in both orders: "
        "what really follows, or the same words shuffled; or what follows another text; or the "
        "text's last six words again and again. Who judges *by likelihood* is not asked: it "
        "prefers what it finds more probable, a token; *by typicality*, what is as probable as the "
        "second half of the text itself is after the first. A share is the mean of both orders, a "
        "tie being a half, with Wilson's 95 % interval over texts; who does not look at the texts "
        "gets 50 %. The source reports no such examination.",
        "",
        *table_head(
            "| judge | texts | prefers real to shuffled, % | to that of another text, % | to "
            "repetition, % | changes with the order, % | same place in both orders, % | says A, "
            "% | ties, % | usable |"
        ),
    ]
    for one in results:
        judge = one["judge"]
        order, real = judge["order"], judge["preferred"]
        controls = ("shuffled", "elsewhere", "repeated")
        shares = [real[name] for name in controls]
        shares += [order[name] for name in ("changed", "by_position", "first")]
        cells = [_percent(share) for share in shares]
        lines.append(
            f"| `{one['called']}` | {one['prompts']} of {escaped(one['text'])} | "
            f"{' | '.join(cells)} | {100 * order['ties']:.0f} | "
            f"{'yes' if judge['usable'] else 'no'} |"
        )
    reasons = [(one["called"], reason) for one in results for reason in one["judge"]["reasons"]]
    said = [f"- `{called}` is unusable: {reason}." for called, reason in reasons]
    return [*lines, "", *said, ""]


def _ratings(results: list[dict[str, Any]]) -> list[str]:
    lines = ["## Ratings, beside Table 22", ""]
    if not results:
        head = table_head("| model | source, Elo | ours |")
        rows = [f"| {CALLED[name]} | {elo:.2f} | – |" for name, elo in SOURCE.items()]
        return [*lines, "Not measured here yet: no models were judged.", "", *head, *rows, ""]
    lines += [
        "Online Elo is what Chatbot Arena began with (steps of 4 from 1,000, mean over shuffled "
        "resamples of prompts): with few games it has not gone far from 1,000. Bradley–Terry is "
        "what it computes now, with mean 1,000. 95 % intervals are of a bootstrap over prompts. "
        "The source judged by Gemma-3-4B-IT, and says neither step nor number of games.",
        "",
    ]
    for one in results:
        judge = f"Judge `{one['called']}`, {one['prompts']} prompts of {escaped(one['text'])}"
        if not one["ratings"]["readable"]:
            judge += ". **Not to be read, since the judge is unusable**"
        lines += [f"{judge}:", "", *table_head("| model | source | online Elo | Bradley–Terry |")]
        for row in one["ratings"]["models"]:
            theirs = SOURCE.get(row["model"])
            lines.append(
                f"| {_name(row['model'])} | {'–' if theirs is None else f'{theirs:.2f}'} | "
                f"{ranged(row['elo'], 'value', '.0f')} | "
                f"{ranged(row['bradley_terry'], 'value', '.0f')} |"
            )
        lines += ["", *_pairs(one["ratings"]), ""]
    return lines


def _pairs(ratings: dict[str, Any]) -> list[str]:
    lines = table_head("| first | second | prompts | won | lost | mean score of the first |")
    for row in ratings["pairs"]:
        score = ranged(row["score"], "value", ".3f") if row["games"] else "–"
        lines.append(
            f"| {_name(row['first'])} | {_name(row['second'])} | {row['games']} | {row['won']} | "
            f"{row['lost']} | {score} |"
        )
    order = ratings["order"]
    said = f"{order['pairs']} pairs; {_percent(order['changed'])} % change with the order."
    return [*lines, "", said]


def _claims(results: list[dict[str, Any]]) -> list[str]:
    lines = ["## Claims of the source", ""]
    head = table_head("| claim | source | here |")
    for said, above, below in CLAIMS:
        gap = f"{SOURCE[above] - SOURCE[below]:+.0f}"
        head.append(f"| {said} | {gap} | {_shown(results, above, below)} |")
    note = (
        "Shown: by a usable judge, the mean score of the first lies above a half with all of its "
        "95 % interval over prompts; the opposite: below. The source gives no intervals."
    )
    return [*lines, note, "", *head, ""]


def _shown(results: list[dict[str, Any]], above: str, below: str) -> str:
    """Say what the usable judges who saw both models say of a claim."""
    found: list[str] = []
    for one in results:
        for row in one["ratings"]["pairs"] if one["ratings"]["readable"] else []:
            if {row["first"], row["second"]} != {above, below} or not row["games"]:
                continue
            value, low, high = (row["score"][key] for key in ORDER)
            if row["first"] == below:
                value, low, high = 1 - value, 1 - high, 1 - low
            said = "shown" if low > 0.5 else "the opposite" if high < 0.5 else "not shown"
            found.append(f"{said}: {value:.3f} ({low:.3f} to {high:.3f}), `{one['called']}`")
    return "; ".join(found) or "not measured: no usable judge saw both"


def _bleu(results: list[dict[str, Any]]) -> list[str]:
    lines = ["## BLEU", ""]
    if not results:
        return [*lines, "Not measured here yet: no models wrote.", ""]
    for one in results:
        lines += [
            f"Against the {one['bleu']['prompts']} real continuations, smoothed, 0 to 100, by "
            "`sacrebleu`; beside it against those of other prompts. The source prints BLEU from 0 "
            "to 1, where 0.0359 is its best, unsmoothed.",
            "",
            *table_head("| model | BLEU | of another prompt | difference | of the corpus |"),
        ]
        for name, row in one["bleu"]["models"].items():
            cells = (ranged(row[key], "value", ".2f") for key in KEYS)
            lines.append(f"| {_name(name)} | {' | '.join(cells)} | {row['corpus']:.2f} |")
        lines.append("")
        samples = {sample["text"]: sample for sample in one["bleu"]["samples"]}
        for text, sample in samples.items():
            best = [_name(s["best"]) for s in one["bleu"]["samples"] if s["text"] == text]
            lines += _sample(sample, " and ".join(f"{name}'s" for name in best))
    return lines


KEYS = ("mean", "other_prompt", "difference")


def _sample(sample: dict[str, Any], whose: str) -> list[str]:
    lines = [
        f"### The prompt of {whose} best",
        "",
        f"Prompt: {_text(sample['text'])}",
        "",
        f"Reference: {_text(sample['reference'])}",
        "",
    ]
    for one in sample["texts"]:
        figures = f"{one['bleu']:.1f}, unsmoothed {one['unsmoothed']:.1f}"
        lines.append(f"- {_name(one['model'])} ({figures}): {_text(one['text'])}")
    return [*lines, ""]


def _name(model: str) -> str:
    return CALLED.get(model) or f"`{escaped(model)}`"


def _text(text: str) -> str:
    """Return untrusted text as one line that Markdown and terminals only show."""
    line = " ".join(marks_shown(text).split())
    return escaped("".join(c if c.isprintable() else "�" for c in line))


def _percent(share: dict[str, Any]) -> str:
    if share["value"] is None:
        return "–"
    return "{:.0f} ({:.0f} to {:.0f})".format(*(100 * share[key] for key in ORDER))


ORDER = ("value", "low", "high")


if __name__ == "__main__":
    raise SystemExit(main())
