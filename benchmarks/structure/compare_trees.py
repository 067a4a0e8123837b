"""Whether a move of modules left results as they were: two trees run the same, and are compared.

    python -m benchmarks.structure.compare_trees BEFORE AFTER [--keep DIR] [--out FILE.json]

BEFORE and AFTER are git revisions, checkouts, or folders of outputs that ``--keep`` left. Each runs
``scenario.py`` in a folder of its own: the quick demo on the bundled corpus, trainings of tiny
models of the other families, and every command. Exit codes, what is printed and every file have to
be the same, but for the two tables below. Progress, on stderr, is not compared. Exits with 1 if
anything differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.structure.differences import Allowed, Comparison, Group, differing
from benchmarks.structure.renames import Renames
from benchmarks.structure.trees import Outputs, is_kept, read_outputs, run_tree

# What is meant to be called otherwise AFTER. A tree that has not renamed is asked in the old words.
RENAMES = Renames(
    commands={"inspect uncertainty": "inspect uncertainty-feedback"},
    recipe_keys={"uncertainty": "uncertainty_feedback"},
    inner_keys={
        "routing_tokens": "channel_tokens",
        "spectra_tokens": "attention_head_tokens",
        "shared_routing_layers": "shared_gate_layers",
        "shared_routing_temperature": "shared_gate_temperature",
        "routing_temperature": "gate_temperature",
        "shared_routing": "shared_gates",
    },
    files={
        "routing.csv": "channels.csv",
        "spectra.csv": "heads.csv",
        "spectra.json": "heads.json",
        "tensorboard/routing": "tensorboard/channels",
        "tensorboard/spectra": "tensorboard/heads",
    },
    hidden={"steer --help": "--category"},
)

# What differs between two runs of one tree: where, what, and why. Nothing else is left out, but
# for what follows from place and moment, in differences.py: paths of the trees and their outputs,
# when TensorBoard wrote an event, and the order of notes in the header of a safetensors file.
NUMBER = r"-?\d[\d.]*(?:[eE][+-]?\d+)?"
DRY = "--dry-run"
ALLOWED = (
    Allowed(
        rf"training\.jsonl$|trainer_state\.json$|{DRY}",
        rf'("tokens_per_second": ){NUMBER}',
        "how fast the machine was",
    ),
    Allowed("tfevents", rf'(tag: "train/tokens_per_second" simple_value: ){NUMBER}', "the same"),
    Allowed(
        rf"^index .*--json|{DRY}",
        rf'("seconds(?:_per_step)?": ){NUMBER}',
        "how long it took, or is expected to take",
    ),
    Allowed(r"^index ", r"^(time) .*$", "how long it took, as people read it"),
    Allowed(DRY, rf'("memory_bytes": ){NUMBER}', "counts what the process holds already"),
    Allowed(
        f"^train .*{DRY}",
        r'("disk_bytes": )\d+',
        "of a checkpoint that notes how fast the machine was, in more digits or fewer",
    ),
    Allowed(
        r"\.json$",
        r'("(?:prismlm|python|torch|transformers(?:_version)?|optuna(?:-integration)?|botorch)": )'
        r'"[^"]+"',
        "versions of what wrote the file",
    ),
    Allowed(r"^--version$", r"^(prismlm ).*$", "a version"),
    Allowed(
        r"study\.journal$",
        r'("(?:worker_id|datetime_start|datetime_complete)":)"[^"]+"',
        "when Optuna noted a trial, and in which process",
    ),
)
# What is said of a run and not of the machine that it ran on.
OF_A_RUN = ("commit", "paths", "renames", "seconds")


def main() -> None:
    """Run, compare, print and write."""
    given = _arguments()
    with tempfile.TemporaryDirectory() as temporary:
        kept = given.keep or Path(temporary)
        before = _outputs(given.before, kept / "before")
        after = _outputs(given.after, kept / "after")
        groups = Comparison(before, after, RENAMES, ALLOWED).groups()
    for line in table(groups):
        print(line)
    for line in notes(before, after):
        print(line)
    if given.out is not None:
        text = json.dumps(report(before, after, groups), ensure_ascii=False, indent=2)
        given.out.write_text(text + "\n", encoding="utf-8")
        print(f"wrote {given.out}")
    sys.exit(1 if differing(groups) else 0)


def table(groups: list[Group]) -> list[str]:
    """Return what was compared, line by line, and under it what differs."""
    width = max(len(group.name) for group in groups)
    lines = [f"{'compared':<{width}}  items  differ"]
    for group in groups:
        lines.append(f"{group.name:<{width}}  {group.items:5}  {len(group.differences):6}")
        for difference in group.differences:
            lines.append(f"    {difference.item}")
            lines += [f"        {line}" for line in difference.lines]
    items, differ = sum(group.items for group in groups), differing(groups)
    verdict = "equal" if not differ else "NOT EQUAL"
    return [*lines, f"{verdict}: {differ} of {items} items differ"]


def notes(before: Outputs, after: Outputs) -> list[str]:
    """Return what ran where, and what of the machine was not the same for both."""
    lines = [
        f"{name}: {side.tree['commit']}, {len(side.said)} commands in {side.tree['seconds']:.0f} s"
        for name, side in (("BEFORE", before), ("AFTER", after))
    ]
    for kind, words in after.tree["renames"].items():
        for old, new in words.items():
            lines.append(f"renamed AFTER ({kind.replace('_', ' ')}): {old} → {new}")
    return lines + [
        f"not the same {key}: {before.tree[key]}, then {after.tree.get(key)}"
        for key in before.tree
        if key not in OF_A_RUN and before.tree[key] != after.tree.get(key)
    ]


def report(before: Outputs, after: Outputs, groups: list[Group]) -> dict[str, Any]:
    """Return the same as JSON values."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "equal": not differing(groups),
        **{
            name: {key: value for key, value in side.tree.items() if key != "paths"}
            for name, side in (("before", before), ("after", after))
        },
        "allowed": [one._asdict() for one in ALLOWED],
        "compared": [
            {"what": group.name, "items": group.items, "differ": len(group.differences)}
            for group in groups
        ],
        "differences": [
            {"what": group.name, **difference._asdict()}
            for group in groups
            for difference in group.differences
        ],
    }


def _outputs(name: str, folder: Path) -> Outputs:
    if is_kept(name):
        return read_outputs(Path(name))
    print(f"running {name}", file=sys.stderr)
    return run_tree(name, folder, RENAMES, lambda line: print(line, file=sys.stderr, flush=True))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Run two trees and compare what they do.",
        epilog="BEFORE and AFTER: a git revision, a checkout, or a folder that --keep left.",
    )
    parser.add_argument("before", metavar="BEFORE")
    parser.add_argument("after", metavar="AFTER")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep outputs in DIR/before and DIR/after"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the figures as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
