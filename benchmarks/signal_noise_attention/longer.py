"""Signal/noise attention and GPT-2 with ten million parameters: curves, maps and roles.

    prismlm train recipes/signal_noise_attention/ten-million.yaml     # and ten-million-gpt2.yaml
    python -m benchmarks.signal_noise_attention.longer corpus-mixed OWN_DIR GPT2_DIR [OTHER_RATE …]
    python -m benchmarks.render signal_noise_attention

Writes docs/results/signal_noise_longer/ and, of the first two models, the source's figures to
docs/images/: loss and length of the gradient (Fig. 2a, b), a signal and a noise head of the sixth
layer on the source's sentence (Fig. 2c, d), and its signal head of most lift for each role
(Fig. 3). Short runs at other rates are read for their loss alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from benchmarks.pages.signal_noise_attention import REACH
from benchmarks.render import parsed
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from benchmarks.signal_noise_attention.read import read
from prismlm.corpus import Corpus
from prismlm.explain.attention_maps import heads_of, read_maps
from prismlm.files import read_json, write_json
from prismlm.models.checkpoint import read_checkpoint
from prismlm.pages.plots import save_maps
from prismlm.probes.heads.roles import ROLES, load_role_cases, search_roles

NAMES = ("Prism", "GPT-2")
LAYER, HEAD = 5, 2  # the source's "Layer 6, Head 2"
POINTS = 60  # of a curve
IMAGES = Path("docs/images")
Row = dict[str, Any]


def main() -> None:
    """Write figures and pictures."""
    parser = script_options(__doc__, RESULTS / "signal_noise_longer")
    for name in ("corpus", "own", "gpt2"):
        parser.add_argument(name, type=Path)
    parser.add_argument("others", type=Path, nargs="*", help="short runs at other rates")
    parser.add_argument("--images", type=Path, default=IMAGES)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    corpus, runs = Corpus.open(args.corpus), dict[str, Row]()
    for name, directory in zip(NAMES, (args.own, args.gpt2), strict=True):
        run = trained(directory) | read(directory, corpus, seed=0)
        uses = run["heads"].pop("uses")
        run["heads"] |= {"uniform": uses["uniform"], "heads": [short(h) for h in uses["heads"]]}
        runs[name] = run | {"environment": environment()}
    args.images.mkdir(parents=True, exist_ok=True)
    training(runs).savefig(args.images / "prism-training.png", dpi=130)
    runs[NAMES[0]]["shown"] = maps(args.own, args.images)
    for name, run in runs.items():
        write_json(args.out / f"{name.lower()}.json", run)
    if args.others:
        write_json(args.out / "rates.json", {one.name: last(trained(one)) for one in args.others})


def trained(directory: Path) -> Row:
    """Return a run's settings, losses and gradients; those of training are means of a stretch."""
    recipe, rows = (
        read_json(directory / "training.json")["recipe"],
        parsed(directory / "training.jsonl"),
    )
    steps = [row for row in rows if "grad_norm" in row]
    stretch = max(1, len(steps) // POINTS)
    points: list[Row] = []
    for first in range(0, len(steps), stretch):
        part = steps[first : first + stretch]
        means = {key: sum(row[key] for row in part) / len(part) for key in ("ce", "grad_norm")}
        points.append({"step": part[-1]["step"], "tokens": part[-1]["tokens"]} | means)
    return {
        "settings": {key: recipe[key] for key in recipe if key not in ("corpus", "out")},
        "curve": points,
        "heldout": [
            {"step": row["step"], "ce": row["eval_ce"]} for row in rows if "eval_ce" in row
        ],
        "ce": rows[-1]["final_ce"],
        "tokens": steps[-1]["tokens"],
        "parameters": read_checkpoint(directory)[0].num_parameters(),
    }


def short(head: Row) -> Row:
    """Return the figures of a head that the page shows."""
    return {key: head[key] for key in ("layer", "group", "relative_entropy", REACH)}


def last(run: Row) -> Row:
    """Return what tells one rate from another."""
    settings = run["settings"]
    of = {"model": settings["model"]["preset"], "rate": settings["optimizer"]["learning_rate"]}
    return of | {key: run[key] for key in ("ce", "tokens")} | {"steps": settings["steps"]}


def training(runs: dict[str, Row]) -> Figure:
    """Return the source's Fig. 2a and b."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    losses, gradients = figure.subplots(1, 2)
    for name, run in runs.items():
        tokens = [point["tokens"] / 1e6 for point in run["curve"]]
        a_step = run["tokens"] / run["curve"][-1]["step"] / 1e6
        label = f"{name} (pale: training)"
        (line,) = losses.plot(tokens, [p["ce"] for p in run["curve"]], alpha=0.4, label=label)
        heldout = [(p["step"] * a_step, p["ce"]) for p in run["heldout"]]
        losses.plot(*zip(*heldout, strict=True), color=line.get_color())
        gradients.plot(tokens, [p["grad_norm"] for p in run["curve"]], label=name)
    losses.set_ylim(top=7)
    losses.set_ylabel("loss, nats per token")
    gradients.set_ylabel("length of the gradient")
    gradients.set_ylim(bottom=0)
    for axes in (losses, gradients):
        axes.set_xlabel("million tokens read")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
        axes.legend(frameon=False)
    return figure


def maps(directory: Path, images: Path) -> Row:
    """Draw the source's Fig. 2c and d, and Fig. 3; return which heads are shown."""
    model, tokenizer = read_checkpoint(directory)
    cases = load_role_cases()
    pair = [
        head
        for group in ("signal", "noise")
        for head in heads_of(model, layer=LAYER, head=HEAD, group=group)
    ]
    # Rows come by role, the best first.
    found = search_roles(model, tokenizer, cases, heads_of(model, group="signal")).rows
    best = {role: next(row for row in found if row["role"] == role) for role in ROLES}
    by_role = [
        heads_of(model, layer=row["layer"], head=row["head"], group="signal")[0]
        for row in best.values()
    ]
    for name, heads in {"prism-maps": pair, "prism-roles": by_role}.items():
        # Two roles may have the same head.
        drawn = read_maps(model, tokenizer, cases[0].text, list(dict.fromkeys(heads)))
        at = {one.head: one for one in drawn}
        save_maps([at[head] for head in heads], images / f"{name}.png")
    return {"pair": [head.title for head in pair], "roles": best}


if __name__ == "__main__":
    main()
