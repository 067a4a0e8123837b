"""Write docs/results/smollm2.md from the JSON of attach/; ``--check`` only compares the two."""

from __future__ import annotations

import io
import json
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

import prismlm.demo
from benchmarks.shared.pages import (
    escaped,
    measured_on,
    page_options,
    publish,
    read_result,
    read_results,
    runs_made,
    table_head,
)
from prismlm.demo.fetched import LENS, SHIPPED
from prismlm.explain.quality import HeadQuality
from prismlm.models.sidecar import META_FILE
from prismlm.training import FitOptions

GOAL, SHARE_GOAL = 0.15, 0.88
# Prototypes shown, the seed that they are drawn by, and characters of a context on either side.
DRAWN, SEED, AROUND = 24, 0, 48
NOT_YET = "- What misses **does not work** yet: the residual is where much of a prediction is."
OTHER_STATES = " The two were measured on different draws of held-out states of the same text."
WEIGHED = {
    "cosine": "weighed by cosines",
    "nearest": "the nearest, their weights fitted",
    "fitted": "chosen by matching pursuit, their weights fitted",
}
# What one run of a pair has that the other has not.
AGAINST = {
    ("cosine", "nearest"): "Weights fitted by non-negative least squares in place of cosines",
    ("nearest", "fitted"): "Prototypes chosen by matching pursuit in place of the nearest",
}


def main() -> int:
    """Render, or say whether the page is up to date."""
    given = page_options(__doc__).parse_args()
    found = read_results(given.results / "attach", "attach.frontier")
    spent = read_result(given.results / "attach_time.json", "attach.time_to_attach")
    page = render(found, shipped()) + "\n".join(["", *_time(spent)]) + "\n"
    return publish({given.results / "smollm2.md": page}, check=given.check)


COMMANDS = (
    "    python -m benchmarks.attach.frontier states MODEL CORPUS --work DIR --gb 3",
    "    python -m benchmarks.attach.frontier fit MODEL --work DIR --prototypes K --per-token k "
    "--steps N --weights HOW",
    "    python -m benchmarks.attach.frontier control MODEL --work DIR --prototypes K "
    "--per-token k",
)


def shipped() -> dict[str, Any]:
    """Return what the demo's archive says of itself, and its size."""
    path = Path(prismlm.demo.__file__).parent / "shipped" / SHIPPED
    with zipfile.ZipFile(path) as archive:
        meta = json.loads(archive.read(META_FILE))
        lens = json.loads(archive.read(f"{LENS}/meta.json"))
        tables = {
            name: pq.read_table(io.BytesIO(archive.read(f"{LENS}/{name}.parquet")))
            for name in ("prototypes", "index")
        }
    return meta["provenance"] | {"lens": lens, "bytes": path.stat().st_size, **tables}


def render(found: list[dict[str, Any]], demo: dict[str, Any]) -> str:
    """Return the page."""
    fits = [one for one in found if one["part"] == "fit"]
    best = min(fits, key=lambda one: _over(one["points"][-1]))
    last = best["points"][-1]
    worse, share = _over(last), last["explained_share"]
    lines = [
        "# A head on a real model",
        "",
        "Generated from `attach/` by `python -m benchmarks.attach.render`; the JSON by, with a "
        "corpus of the model's tokenizer,",
        "",
        *COMMANDS,
        "",
        runs_made([one["environment"] for one in found]),
        "",
        f"SmolLM2-135M-Instruct, as its GGUF file (Q4_1) has it, on {best['states']:,} hidden "
        f"states of the bundled sample, which it was not trained on; measured on "
        f"{last['tokens']:,} held-out states. Matching pursuit, and sixteen at a time, were chosen "
        "with 1,500 of these in view.",
        "",
        "## In short",
        "",
        f"- The best of the runs below has {best['prototypes']:,} prototypes, "
        f"{best['per_token']} a token, {WEIGHED[_weights(best)]}, after {best['steps']:,} steps of "
        f"{best['batch']}: alone it predicts at a cross-entropy "
        f"**{worse:+.1%}** above the model's, goal at most {GOAL:+.0%}: {_verdict(worse <= GOAL)}.",
        f"- Explained share **{share:.3f}**, goal {SHARE_GOAL}: {_verdict(share >= SHARE_GOAL)}.",
        f"- It recovers {last['recovered']:.1%} of what the states say beyond their mean.",
        *_control(found, best),
        *_pairs(fits),
        f"- With K = {demo['attached']['fit.prototypes']:,}, {WEIGHED[_weighed(demo)]}, two epochs "
        "and the model fine-tuned, what ships with the demo has "
        f"**{_over(demo['quality']):+.1%}** and **{demo['quality']['explained_share']:.3f}**.",
        *([] if worse <= GOAL and share >= SHARE_GOAL else [NOT_YET]),
        "",
        "## What ships with the demo",
        "",
        *_shipped(demo),
        "",
        f"### {DRAWN} of its prototypes",
        "",
        *_drawn(demo),
        "",
        "## Heads",
        "",
        *_table(found),
        "",
        *_less_text([one for one in found if _weights(one) == "fitted"]),
        "### More text",
        "",
        *_more_text(fits),
        "",
        "### More steps",
        "",
        *_curve(max(fits, key=lambda one: one["steps"])),
    ]
    return "\n".join(lines) + "\n"


def _weights(one: dict[str, Any]) -> str:
    """Return how a run weighs prototypes; cosines were the only way once."""
    return one.get("weights", "cosine")


def _weighed(demo: dict[str, Any]) -> str:
    """Return how the demo's head weighs prototypes."""
    return demo["attached"].get("fit.weights", "cosine")


def _control(found: list[dict[str, Any]], best: dict[str, Any]) -> list[str]:
    """Say what random states as prototypes do, and which figure tells a fitted head from them."""
    alike = ("prototypes", "per_token")
    lines: list[str] = []
    for one in found:
        if one["part"] != "control" or _weights(one) != _weights(best):
            continue
        if any(one[name] != best[name] for name in alike):
            continue
        control, last = one["points"][-1], best["points"][-1]
        told = [
            f"{what} {'tells' if better else '**does not tell**'} the fitted head from them"
            for what, better in (
                ("the cross-entropy", _over(last) < _over(control)),
                ("the explained share", last["explained_share"] > control["explained_share"]),
            )
        ]
        lines.append(
            f"- Control, as many random states as prototypes: {_over(control):+.1%} and an "
            f"explained share of {control['explained_share']:.3f}: {'; '.join(told)}."
        )
    return lines


def _pairs(fits: list[dict[str, Any]]) -> list[str]:
    """Say what another choice of prototypes and weights changes where all else is the same."""
    same = ("prototypes", "per_token", "states", "steps")
    by_all = {(_weights(one), *(one[name] for name in same)): one for one in fits}
    lines: list[str] = []
    for (before, after), what in AGAINST.items():
        for one in fits:
            other = by_all.get((before, *(one[name] for name in same)))
            if _weights(one) != after or other is None:
                continue
            new, old = one["points"][-1], other["points"][-1]
            lines.append(
                f"- {what}, K = {one['prototypes']:,}, {one['steps']:,} steps: {_over(old):+.1%} "
                f"becomes {_over(new):+.1%}, the explained share {old['explained_share']:.3f} "
                f"{new['explained_share']:.3f}." + (OTHER_STATES if old["ce"] != new["ce"] else "")
            )
    return lines


def _shipped(demo: dict[str, Any]) -> list[str]:
    quality, made = demo["quality"], demo["attached"]
    cells = demo["lens"]["cells"]
    point = quality | {"recovered": HeadQuality(**quality).recovered}
    rows = {
        "documents, positions": f"{demo['lens']['documents']:,}, {demo['lens']['tokens']:,}",
        "CE of held-out pairs, questions and all": f"{quality['ce']:.3f}",
        "K, k, steps": f"{made['fit.prototypes']:,}, {made['fit.prototypes_per_token']}, "
        f"{made['steps']:,}",
        "CE of the prototypes alone": f"{quality['prototype_only_ce']:.3f}, {_over(point):+.1%}",
        "recovered": f"{point['recovered']:.1%}",
        "explained share": f"{quality['explained_share']:.3f}",
        "FVU": f"{quality['fvu']:.3f}",
        "agreement": f"{quality['agreement']:.1%}",
        "in use": f"{quality['in_use']:.1%}",
        "positions in cells, code": f"{cells['rows']:,}, {cells['codes']}",
        "archive": f"{demo['bytes'] / 1e6:.1f} MB",
    }
    return [
        "`python -m benchmarks.attach.demo_model --work DIR` fine-tunes SmolLM2 on one in six "
        "documents of the bundled sample, attaches a head and writes the archive that has the "
        f"figures below; on {quality['tokens']:,} tokens of documents held out. Its control is in "
        "the next table: random states, at the same K and k, of the model before fine-tuning.",
        "",
        *table_head("| | |"),
        *(f"| {name} | {value} |" for name, value in rows.items()),
    ]


def _table(found: list[dict[str, Any]]) -> list[str]:
    lines = [
        "Weights: *cosine* as the source has them, of the k nearest; *nearest*: fitted to the k "
        "nearest, tried before and not in the package; *fitted*: to k chosen by matching pursuit.",
        "",
    ]
    lines += table_head(
        "| K | k | weights | states | steps | CE | prototypes alone | above | recovered "
        "| explained share | FVU | agreement | in use | MB in bf16 |"
    )
    by = ("prototypes", "per_token", "states", "part", "steps")
    for one in sorted(found, key=lambda one: [_weights(one), *(one[name] for name in by)]):
        last = one["points"][-1]
        steps = f"{one['steps']:,}" if one["part"] == "fit" else "control: random states"
        size = 2 * one["prototypes"] * one["width"] / 1e6
        lines.append(
            f"| {one['prototypes']:,} | {one['per_token']} | {_weights(one)} | "
            f"{one['states']:,} | {steps} | "
            f"{last['ce']:.3f} | "
            f"{last['prototype_only_ce']:.3f} | {_over(last):+.1%} | {last['recovered']:.1%} | "
            f"{last['explained_share']:.3f} | {last['fvu']:.3f} | {last['agreement']:.1%} | "
            f"{last['in_use']:.1%} | {size:.1f} |"
        )
    return lines


def _drawn(demo: dict[str, Any]) -> list[str]:
    """Return a table of prototypes that nobody chose."""
    prototypes, index = demo["prototypes"], demo["index"]
    chosen = np.random.default_rng(SEED).choice(prototypes.num_rows, DRAWN, replace=False)
    lines = [
        f"Drawn by seed {SEED} and not selected: what each speaks for, the share of positions that "
        "use it, and its two nearest contexts: it speaks for what comes after the token in "
        "brackets, the last that was read.",
        "",
        *table_head("| prototype | speaks for | in use at | nearest contexts |"),
    ]
    numbers = index["prototype"].to_numpy()
    for number in sorted(chosen.tolist()):
        row = prototypes.slice(number, 1).to_pylist()[0]
        rows = [index.slice(n, 1).to_pylist()[0] for n in np.flatnonzero(numbers == number)[:2]]
        contexts = "; ".join(_context(one) for one in rows) or "none"
        name = escaped(row["name"].replace("|", "¦"))
        lines.append(f"| {number} | {name} | {row['usage']:.2%} | {contexts} |")
    return lines


def _context(row: dict[str, Any]) -> str:
    """Return a context in one line."""
    text = f"…{row['before'][-AROUND:]}[{row['token'].strip()}]{row['after'][:AROUND]}…"
    return escaped(" ".join(text.split()).replace("|", "¦"))


def _less_text(found: list[dict[str, Any]]) -> list[str]:
    """Return what prototypes for fewer states each are worth where there are fewest states."""
    fits = [one for one in found if one["part"] == "fit"]
    if not fits:
        return []
    fewest = min(one["states"] for one in fits)
    alike = [one for one in fits if one["states"] == fewest]
    rows = sorted(alike, key=lambda one: one["prototypes"])
    controls = {
        one["prototypes"]: f"{_over(one['points'][-1]):+.1%}"
        for one in found
        if one["part"] == "control" and one["states"] == fewest
    }
    each = FitOptions().of_states(fewest).prototypes
    return [
        "### Less text",
        "",
        f"On {fewest:,} states, k = {rows[0]['per_token']}, {rows[0]['steps']:,} steps, measured "
        f"on {rows[0]['points'][-1]['tokens']:,} held-out states. Without `--prototypes`, `attach` "
        f"takes one for 16 states where these are few, here {each:,}: a card then has places to "
        "show.",
        "",
        *table_head(
            "| K | states each | above | random states as prototypes | explained share | FVU |"
        ),
        *(
            f"| {one['prototypes']:,} | {fewest / one['prototypes']:.0f} | {_over(last):+.1%} | "
            f"{controls.get(one['prototypes'], '–')} | "
            f"{last['explained_share']:.3f} | {last['fvu']:.3f} |"
            for one in rows
            for last in one["points"][-1:]
        ),
        "",
    ]


def _more_text(fits: list[dict[str, Any]]) -> list[str]:
    """Return what heads of one size and as many steps are worth on more and more states."""
    sizes = [(one["prototypes"], one["per_token"], one["steps"], _weights(one)) for one in fits]
    size = max(sizes, key=sizes.count)
    alike = [one for one, its in zip(fits, sizes, strict=True) if its == size]
    alike.sort(key=lambda one: one["states"])
    over = [_over(one["points"][-1]) for one in alike]
    doublings = [math.log2(one["states"]) for one in alike]
    slope = float(np.polyfit(doublings, over, 1)[0]) if len(alike) > 1 else math.nan
    return [
        f"K = {size[0]:,}, k = {size[1]}, {WEIGHED[size[3]]}, {size[2]:,} steps each, so "
        f"that fewer states are seen more often. A doubling of the text changes *above* by "
        f"{100 * slope:+.1f} points (a line through these rows; a longer one is a guess).",
        "",
        *table_head("| states | each seen | above | explained share | FVU |"),
        *(
            f"| {one['states']:,} | {one['steps'] * one['batch'] / one['states']:.1f} times | "
            f"{_over(last):+.1%} | {last['explained_share']:.3f} | {last['fvu']:.3f} |"
            for one in alike
            for last in one["points"][-1:]
        ),
    ]


def _curve(best: dict[str, Any]) -> list[str]:
    lines = [
        f"K = {best['prototypes']:,}, k = {best['per_token']}, {WEIGHED[_weights(best)]}; step 0 "
        f"is as placed. A step is {best['batch']} states, so {best['steps']:,} steps see each "
        f"state {best['steps'] * best['batch'] / best['states']:.1f} times.",
        "",
        *table_head("| step | above | recovered | explained share | FVU | agreement |"),
    ]
    return lines + [
        f"| {point['step']:,} | {_over(point):+.1%} | {point['recovered']:.1%} | "
        f"{point['explained_share']:.3f} | {point['fvu']:.3f} | {point['agreement']:.1%} |"
        for point in best["points"]
    ]


def _time(spent: dict[str, Any]) -> list[str]:
    """Return what each part of the command took, beside bare passes over the same tokens."""
    tokens, bare = spent["tokens"], spent["passes"]["seconds"] / spent["passes"]["tokens"]
    rows = sorted(spent["parts"].items(), key=lambda part: -part[1])
    return [
        "## Time to attach",
        "",
        f"`prismlm attach` on {tokens:,} tokens, with the K, k and epochs of the demo's head and "
        "without fine-tuning, timed by `python -m benchmarks.attach.time_to_attach MODEL`. "
        "Processor seconds of one thread; the last column is per token, over a bare float32 pass "
        f"of the model, {1000 * bare:.2f} ms a token. Parts within others are listed too; what is "
        "not reported, such as opening the model, is in the total. "
        f"{measured_on(spent['environment'])}",
        "",
        *table_head("| part | s | over a pass |"),
        *(
            f"| {name} | {seconds:.0f} | {seconds / tokens / bare:.2f} |"
            for name, seconds in rows
            if seconds >= 0.5
        ),
        f"| **all** | {spent['seconds']:.0f} | {spent['seconds'] / tokens / bare:.2f} |",
    ]


def _over(point: dict[str, Any]) -> float:
    return point["prototype_only_ce"] / point["ce"] - 1


def _verdict(met: bool) -> str:
    return "met" if met else "**missed**"


if __name__ == "__main__":
    raise SystemExit(main())
