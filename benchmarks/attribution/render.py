"""Write docs/results/attribution.md from its JSON; ``--check`` only compares the two."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.attribution.planted_facts import COPIES
from benchmarks.shared.pages import (
    page_options,
    publish,
    read_results,
    runs_made,
    table_head,
)

CONTROLS = ("random", "random states", "shuffled cells")
RIVALS = (
    *("BM25", "BM25, last 16 tokens", "nearest states"),
    *("same token at random", "count of the token", "same token, nearest"),
)
MEANING = {
    "explain": "**`explain`**: the product, from its lens on disk",
    "random": "control: passages at random",
    "alone": "the same, with each prediction as if no text stood before it",
    "random states": "control: random training states as prototypes",
    "shuffled cells": "control: every prototype is given another one's cell",
    "BM25": "BM25 (the text and the predicted token)",
    "BM25, last 16 tokens": "BM25, with the last 16 tokens alone",
    "nearest states": "nearest hidden states, whatever came next",
    "same token at random": "the predicted token came next, at random",
    "count of the token": "how often the predicted token comes next",
    "same token, nearest": "the predicted token came next, nearest state of all positions",
    "evidence by position": "the equation over all positions in memory, with the choices that a "
    "search found best by tail-patch",
}
JUDGED = "recall@10 | tail-patch | specific | own share | accuracy"
TOLD = ("plain", "described", "other style")
GOALS = {"recall": 0.85, "patch": 0.42, "own_share": 0.48, "accuracy": 0.87}


def main() -> int:
    """Render, or say whether the page is up to date."""
    given = page_options(__doc__).parse_args()
    found, worded = (
        read_results(given.results / name, "attribution.judge_planted")
        for name in ("attribution", "attribution_wordings")
    )
    page = render(found, worded)
    return publish({given.results / "attribution.md": page}, check=given.check)


def render(found: list[dict[str, Any]], worded: list[dict[str, Any]]) -> str:
    """Return the page."""
    methods = {one["name"]: one for one in found}
    lines = [
        *_head([one["environment"] for one in found]),
        "## In short",
        "",
        *_short(methods),
        "",
        "## Planted facts, asked in new words",
        "",
        "Recall@10: planted documents among the ten with the largest score for the answer's "
        "tokens, out of those that ten places can hold. *The same answer at random* draws ten "
        "documents that give the same answer to the same kind of question: who finds no more knows "
        "the phrase and not the place.",
        "",
        *_recall(methods),
        "",
        *_worded({one["name"]: one for one in worded}),
        "",
        "## Tail-patch: does the text that is named teach the answer?",
        "",
        "100 held-out predictions with a probability of 0.02 to 0.6. The model takes one step of "
        "SGD, rate 0.05, on the ten passages with the largest scores; *gain* is what the "
        "log-probability of the token gains, in nats. A step on text full of a token raises it "
        "everywhere: *specific* is the gain in log-odds here less its mean in 16 other contexts. "
        "Beside each method, what `explain` has more.",
        "",
        *_patch(methods),
        "",
        *_domains(methods),
        "",
        "## Coded states",
        "",
        "States are kept in int8; `--codes pq` takes a quarter of the bytes, and its cosines are "
        "off by some hundredths.",
        "",
        *_coded(methods),
    ]
    return "\n".join(lines) + "\n"


def _head(runs: list[dict[str, Any]]) -> list[str]:
    return [
        "# What attribution is worth",
        "",
        "Generated from `attribution/` and `attribution_wordings/` by "
        "`python -m benchmarks.attribution.render`; the JSON by",
        "",
        "    python -m benchmarks.attribution.planted_model planted --facts 32 --epochs 1 --seed 1",
        "    python -m benchmarks.attribution.judge_planted planted",
        "",
        runs_made(runs),
        "",
        "A Llama of 1.6 million parameters, trained for one epoch on 3.5 million tokens of the "
        "bundled sample, into which 96 invented facts were written: a third each in 1, 4 and 16 "
        "documents. Every method gives scores to passages of at most 128 tokens of the training "
        "text; a document's score is the sum over its passages, or the best of them for nearest "
        "states and words. One seed; ± is a standard error over questions.",
        "",
    ]


def _short(methods: dict[str, Any]) -> list[str]:
    own = methods["explain"]
    recall, twins = own["recall"]["report"], own["recall"]["report"]["same answer at random"]
    gains = {n: methods[n]["patch"]["report"]["gain"] for n in _rows(methods, "patch")}
    patch, error = gains["explain"]["mean"], gains["explain"]["error"]
    rivals = [n for n in gains if n in (*CONTROLS, *RIVALS)]
    above = [n for n in rivals if gains[n]["mean"] >= patch]
    words = max(gains[name]["mean"] for name in RIVALS[:2] if name in rivals)
    domains = own["domains"]["report"]["alike"]
    shown = recall["mean"] - twins > 2 * recall["error"]
    return [
        "T, ρ and C of `explain` were chosen on one half of all questions; these figures are of "
        "the other, those of the tables below of both. How long the text before counts, h, and how "
        "often a position after the same token, B, were chosen with both halves in view.",
        "",
        f"- Planted facts: recall@10 **{recall['mean']:.3f}** ± {recall['error']:.3f}, goal "
        f"{GOALS['recall']}: {_verdict(recall['mean'] >= GOALS['recall'])}. Documents that give "
        f"the same answer to the same question have {twins:.3f} at random: "
        + (
            "it knows more than the phrase."
            if shown
            else "**does not work** as a test of the name, "
            "since what is found may be the phrase alone."
        ),
        f"- Tail-patch: **{patch:.3f}** ± {error:.3f} nats, goal {GOALS['patch']}: "
        f"{_verdict(patch >= GOALS['patch'])}; BM25 has {words:+.3f}, goal 5 times it: "
        f"{_verdict(patch >= 5 * words)}. "
        + (f"Not above {', '.join(above)}." if above else "Above every control and rival."),
        f"- Domain of held-out text: own share **{domains['own_share']:.3f}** (chance "
        f"{domains['chance']:.3f}), goal {GOALS['own_share']}: "
        f"{_verdict(domains['own_share'] >= GOALS['own_share'])}; accuracy "
        f"**{domains['accuracy']:.3f}** (chance {domains['chance_accuracy']:.3f}), goal "
        f"{GOALS['accuracy']}: {_verdict(domains['accuracy'] >= GOALS['accuracy'])}.",
        _untrained(own, methods["random states"]),
        _alone(own, methods["alone"]),
    ]


def _untrained(own: dict[str, Any], random: dict[str, Any]) -> str:
    """Return what training the prototypes adds, beside random training states."""
    ours, theirs = (
        {
            "recall": one["recall"]["report"]["mean"],
            "tail-patch": one["patch"]["report"]["gain"]["mean"],
            "own share": one["domains"]["report"]["alike"]["own_share"],
            "accuracy": one["domains"]["report"]["alike"]["accuracy"],
        }
        for one in (own, random)
    )
    below = [name for name in ours if ours[name] <= theirs[name]]
    verdict = f"**does not work** in {', '.join(below)}" if below else "helps in all of them"
    return (
        "- What training the prototypes should add to it "
        f"{verdict}: with random training states in their place "
        + ", ".join(f"{name} is {theirs[name]:.3f}" for name in theirs)
        + "."
        + (
            " A cell says where to look, and for that a prototype need not be trained: what is "
            "shown here is evidence by position."
            if below
            else ""
        )
    )


def _alone(own: dict[str, Any], alone: dict[str, Any]) -> str:
    """Return what knowing the text before changes."""
    recall, domains = (
        [one["recall"]["report"]["mean"] for one in (alone, own)],
        [one["domains"]["report"]["alike"] for one in (alone, own)],
    )
    gain = _difference(own["patch"]["gains"], alone["patch"]["gains"])
    return (
        "- With each prediction alone, as if no text stood before it, the same equation has "
        f"recall {recall[0]:.3f} in place of {recall[1]:.3f}, own share "
        f"{domains[0]['own_share']:.3f} in place of {domains[1]['own_share']:.3f}, accuracy "
        f"{domains[0]['accuracy']:.3f} in place of {domains[1]['accuracy']:.3f}. In tail-patch the "
        f"text before changes {gain} nats, of all questions."
    )


def _verdict(reached: bool) -> str:
    return "met" if reached else "**missed**"


def _rows(methods: dict[str, Any], judge: str) -> list[str]:
    return [name for name in MEANING if judge in methods.get(name, {})]


def _recall(methods: dict[str, Any]) -> list[str]:
    known = methods["explain"]["recall"]
    groups = [f"copies {count}" for count in COPIES if f"copies {count}" in known]
    heads = " | ".join(f"in {name.removeprefix('copies ')}" for name in groups)
    lines = table_head(f"| method | all | {heads} |")
    for name in _rows(methods, "recall"):
        found = methods[name]["recall"]
        columns = [f"{found[g]['mean']:.3f} ± {found[g]['error']:.3f}" for g in ("all", *groups)]
        lines.append(f"| {MEANING[name]} | {' | '.join(columns)} |")
    found = methods["explain"]["recall"]
    twins = [f"{found[group]['same answer at random']:.3f}" for group in ("all", *groups)]
    return [*lines, f"| control: the same answer at random | {' | '.join(twins)} |"]


def _worded(methods: dict[str, Any]) -> list[str]:
    known = methods["explain"]["recall"]
    lines = [
        "### In wordings that words cannot solve",
        "",
        "Another model, with 16 facts of each kind: told *plainly*, as above; of a place that the "
        "question only *describes*, in words that training text has for it; in *another style* "
        "than the question's. The JSON by",
        "",
        "    python -m benchmarks.attribution.planted_model worded --facts 16 --seed 1 --epochs 1 "
        '--told plain described "other style"',
        "    python -m benchmarks.attribution.judge_planted worded "
        "--judges recall --out docs/results/attribution_wordings",
        "",
        *table_head(f"| method | {' | '.join(TOLD)} |"),
    ]
    for name in _rows(methods, "recall"):
        found = [methods[name]["recall"][f"told {told}"] for told in TOLD]
        columns = [f"{one['mean']:.3f} ± {one['error']:.3f}" for one in found]
        meaning = MEANING[name]
        if name == "explain" and not methods[name].get("text before"):
            meaning = "`explain`, before it knew the text before; **not measured since**"
        lines.append(f"| {meaning} | {' | '.join(columns)} |")
    twins = [f"{known[f'told {told}']['same answer at random']:.3f}" for told in TOLD]
    return [*lines, f"| control: the same answer at random | {' | '.join(twins)} |"]


def _patch(methods: dict[str, Any]) -> list[str]:
    lines = table_head("| method | gain | specific | `explain` − it, gain | specific |")
    own = methods["explain"]["patch"]
    for name in _rows(methods, "patch"):
        found = methods[name]["patch"]
        columns = [
            f"{found['all'][kind]['mean']:+.3f} ± {found['all'][kind]['error']:.3f}"
            for kind in ("gain", "specific")
        ]
        columns += [
            "–" if name == "explain" else _difference(own[kind], found[kind])
            for kind in ("gains", "specifics")
        ]
        lines.append(f"| {MEANING[name]} | {' | '.join(columns)} |")
    return lines


def _difference(left: list[float], right: list[float]) -> str:
    paired = np.array(left) - np.array(right)
    return f"{paired.mean():+.3f} ± {paired.std(ddof=1) / len(paired) ** 0.5:.3f}"


def _domains(methods: dict[str, Any]) -> list[str]:
    ways = ("alike", "evidence", "raised")
    heads = " | ".join(f"{name}, {way}" for name in ("own share", "accuracy") for way in ways)
    lines = [
        "## Held-out documents: does the share fall on their own domain?",
        "",
        "The first 128 tokens of 220 held-out documents, of twelve domains. *Own share*: of the "
        "document's domain. *Accuracy*: its lift over the mean of all documents is the largest. "
        "Tokens count alike; by their *evidence*, as `explain` sums a whole text; or as much as "
        "their context *raised* their log-probability. Other methods say how alike passages are, "
        "which is no share. `explain` counts the text before by the domains that the corpus names "
        "for its documents, the same that are asked for.",
        "",
        *table_head(f"| method | {heads} |"),
    ]
    for name in _rows(methods, "domains"):
        found = methods[name]["domains"]["all"]
        columns = [f"{found[way][key]:.3f}" for key in ("own_share", "accuracy") for way in ways]
        lines.append(f"| {MEANING[name]} | {' | '.join(columns)} |")
    found = methods["explain"]["domains"]["all"]
    columns = [f"{found[way][k]:.3f}" for k in ("chance", "chance_accuracy") for way in ways]
    return [*lines, f"| chance | {' | '.join(columns)} |"]


def _coded(methods: dict[str, Any]) -> list[str]:
    lines = table_head(f"| | {JUDGED} |")
    for name in ("explain", "explain, pq"):
        lines.append(f"| {name} | {_columns(_judged(methods[name], 'all'))} |")
    return lines


def _columns(judged: np.ndarray) -> str:
    recall, patch, specific, share, accuracy = judged.tolist()
    return f"{recall:.3f} | {patch:+.3f} | {specific:+.3f} | {share:.3f} | {accuracy:.3f}"


def _judged(found: dict[str, Any], questions: str) -> np.ndarray:
    """Return what is in the columns of ``JUDGED``, of all questions or of a half of them."""
    patch, domains = found["patch"][questions], found["domains"][questions]["alike"]
    return np.array(
        [
            found["recall"][questions]["mean"],
            patch["gain"]["mean"],
            patch["specific"]["mean"],
            domains["own_share"],
            domains["accuracy"],
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
