"""The Hugging Face Hub: whether it can be reached, and models downloaded from it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from prismlm.errors import InputError, check_path, first_line
from prismlm.run_state import run_interruptibly

# The hub's own client retries for minutes, and DNS lookups have no timeout.
SECONDS = 6.0
NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def hub_error() -> str | None:
    """Return why the hub cannot be reached, within six seconds; None if it can, or if offline."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.is_offline_mode():
        return None
    session: Any = get_session()
    try:
        run_interruptibly(lambda: session.head(constants.ENDPOINT, timeout=SECONDS), SECONDS)
    except TimeoutError:
        return f"{constants.ENDPOINT} does not answer"
    except Exception as error:  # the client's errors have no common base
        return f"{constants.ENDPOINT} cannot be reached: {error}"
    return None


@contextmanager
def fetching(what: str, instead: str) -> Iterator[None]:
    """Let the hub's clients download ``what`` in the block, from their caches if it is unreachable.

    InputError if that fails; it suggests ``instead`` for ``--data``.
    """
    silent, before = hub_error(), list[tuple[Any, bool]]()
    for name in ("huggingface_hub.constants", "datasets.config") if silent else ():
        settings: Any = import_module(name)
        before.append((settings, settings.HF_HUB_OFFLINE))
        settings.HF_HUB_OFFLINE = True
    try:
        yield
    except Exception as error:  # the clients' errors have no common base
        raise InputError(
            f"{what} cannot be downloaded from the hub ({silent or error}). With a network, what "
            f"is missing is downloaded once; without, name {instead} by --data."
        ) from error
    finally:
        for settings, offline in before:
            settings.HF_HUB_OFFLINE = offline


def model_directory(model: Path | str, revision: str | None = None) -> Path:
    """Return a local model directory, or that of ``org/name``, downloaded from the hub.

    A local directory of that name takes precedence; if the hub does not answer, its cache is used.

    Args:
        model: a directory, or a model's name on the hub.
        revision: a branch, tag or commit on the hub.
    """
    directory = check_path("the model", model)
    name = str(model)
    if directory.exists() or not NAME.fullmatch(name):
        if revision is not None:
            raise InputError(
                f"revision is {revision!r}, and {directory} is a directory here or no name of the "
                "hub: expected a model there, such as org/name."
            )
        return directory
    return download(name, revision)


def download(name: str, revision: str | None = None, patterns: list[str] | None = None) -> Path:
    """Return the directory of a model of the hub with its files, or those that match patterns."""
    from huggingface_hub import snapshot_download

    silent = hub_error()
    options: dict[str, Any] = {"allow_patterns": patterns, "local_files_only": bool(silent)}
    try:
        return Path(snapshot_download(name, revision=revision, **options))
    except Exception as error:  # the client's errors have no common base
        wanted = name if revision is None else f"{name} at {revision}"
        raise InputError(
            f"{wanted} is neither a directory here nor a model that can be downloaded from the "
            f"Hugging Face hub ({silent or first_line(error)}). Check the name (ORG/NAME), "
            "the network, and your access (`hf auth login`), or give a directory."
        ) from error
