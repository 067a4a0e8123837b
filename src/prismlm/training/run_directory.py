"""The directory of a run: whose it is, who is writing to it, and what may go on in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prismlm.errors import InputError, changes
from prismlm.files import keep_json, read_json
from prismlm.models.sidecar import META_FILE
from prismlm.run_state import LOCK_FILE, writing
from prismlm.training import checkpoints, distributed
from prismlm.training.device import resolved
from prismlm.training.recipe import Recipe
from prismlm.training.recipe_values import flat
from prismlm.training.setup import CHECKPOINTS, Prepared

RUN_FILE = "training.json"
ATTACH_FILE = "attach.json"
COMMANDS = {RUN_FILE: "train", ATTACH_FILE: "attach"}
# Where a search for hyper-parameters keeps what it does, and the recipe it ends with.
SEARCH = "search"
BEST_FILE = "best.yaml"
# What may differ when a run is resumed: it changes neither weights nor figures.
FREE_TO_CHANGE = ("corpus", "out", "checkpoint.every", "checkpoint.keep", "logging.tensorboard")


@contextmanager
def exclusive(out: Path, note: str = RUN_FILE) -> Iterator[None]:
    """Keep other processes from writing to ``out`` during the block.

    ``out`` is made if it is not there, and removed if nothing was put into it; what a killed run
    left half-written in it is removed.

    Args:
        out: the directory.
        note: the file that says that it is such a run's.

    Raises:
        InputError: another run holds it, it cannot be made, or it holds something else.
    """
    check_ours(out, note)
    with writing(out, within=True):
        yield


def check_ours(out: Path, note: str = RUN_FILE) -> None:
    """Check that ``out`` is new, empty or a run of prismlm that left this note.

    Raises:
        InputError: it holds something else.
    """
    if not out.exists() or (out / note).is_file():
        return
    if (out / SEARCH).is_dir():
        raise InputError(
            f"{out} holds a search. Train its best recipe, {out / SEARCH / BEST_FILE}, or choose "
            "another out."
        )
    if not out.is_dir() or any(path.name != LOCK_FILE for path in out.iterdir()):
        raise InputError(
            f"{out} exists and was not written by prismlm {COMMANDS[note]}. Choose another out, or "
            "remove it."
        )


def check_run_directory(recipe: Recipe, *, resume: bool) -> None:
    """Check that ``recipe.out`` may be written to.

    Raises:
        InputError: it holds something else, a run that ``resume`` was not asked for, or a run of
            another recipe.
    """
    out = recipe.out
    check_ours(out)
    if not (out / RUN_FILE).is_file():
        return
    if not resume:
        raise InputError(
            f"{out} holds a training run. Resume it with --resume, choose another out, or "
            "remove it."
        )
    changed = differences(read_json(out / RUN_FILE), recipe)
    if changed:
        raise InputError(
            f"{out} was begun with another recipe ({'; '.join(changed)}), so it cannot be resumed "
            "with this one. Put these settings back, or train into another out."
        )


def differences(before: dict[str, Any], recipe: Recipe) -> list[str]:
    """Return what a recipe changes that changes results, as ``key: before → now``.

    Args:
        before: ``recipe``, and ``resolved``: what ``auto`` meant.
        recipe: the recipe now.
    """
    # A run begun before a setting was there ran with what is now its default, but for decay.
    defaults = Recipe(corpus=recipe.corpus, out=recipe.out, model={}, steps=1)
    past = {"optimizer.weight_decay_exempt": []}
    then = flat(defaults.to_dict()) | past | flat(before["recipe"]) | before.get("resolved", {})
    now = flat(recipe.to_dict()) | resolved(recipe)
    if not recipe.steps:
        # They follow from the epochs, which are compared.
        now["steps"] = then["steps"]
    return changes(_compared(then), _compared(now))


def _compared(flat: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in flat.items() if k not in FREE_TO_CHANGE and v is not None}


def begin(prepared: Prepared) -> None:
    """Note what the run is, or check that it is the one that was noted.

    Raises:
        InputError: the run was begun with another corpus or another number of processes.
    """
    out = prepared.recipe.out
    corpus = {"name": prepared.corpus.name, "fingerprint": prepared.corpus.fingerprint}
    processes = distributed.world_size()
    if (out / RUN_FILE).is_file():
        noted = read_json(out / RUN_FILE)
        if noted.get("processes", 1) != processes:
            raise InputError(
                f"{out} was begun with {noted.get('processes', 1)} processes, and these are "
                f"{processes}: their steps would hold other rows. Start as many as before, or "
                "train into another out."
            )
        if noted["corpus"]["fingerprint"] != corpus["fingerprint"]:
            raise InputError(
                f"{out} was begun with another corpus than {prepared.corpus.path}. Give the same "
                "corpus, or train into another out."
            )
    else:
        run = {"recipe": prepared.recipe.to_dict(), "resolved": resolved(prepared.recipe)}
        keep_json(out / RUN_FILE, run | {"corpus": corpus, "processes": processes})


def checkpoint_to_resume(prepared: Prepared) -> Path | None:
    """Return the newest checkpoint of a run, or None if there is none yet.

    Raises:
        InputError: it is of another run: another recipe, corpus or step.
        FormatError: it is damaged.
    """
    checkpoint = checkpoints.latest_checkpoint(prepared.recipe.out / CHECKPOINTS)
    if checkpoint is None:
        return None
    with checkpoints.guard_reading(checkpoint):
        made = read_json(checkpoint / META_FILE)["provenance"]
        foreign = differences(made, prepared.recipe)
        if made["corpus"]["fingerprint"] != prepared.corpus.fingerprint:
            foreign.append(f"corpus: {made['corpus']['name']} → {prepared.corpus.name}")
        if made["steps"] != checkpoints.step_of(checkpoint):
            foreign.append(f"steps done: {made['steps']} → {checkpoints.step_of(checkpoint)}")
        checkpoints.open_state(checkpoint)
    if foreign:
        raise InputError(
            f"the checkpoint {checkpoint} is of another run than {prepared.recipe.out} "
            f"({'; '.join(foreign)}). Move it away, and training resumes from the one before."
        )
    return checkpoint
