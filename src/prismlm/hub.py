"""The Hugging Face Hub: whether it answers, and models fetched from it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from prismlm.errors import InputError, check_path, first_line
from prismlm.run_state import answering

# Its own client would try for minutes; names that nobody resolves have no limit but this one.
SECONDS = 6.0
NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def silence() -> str | None:
    """Return why the hub cannot be reached, or None if it answers, or is not to be asked.

    It takes at most six seconds.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.is_offline_mode():
        return None
    session: Any = get_session()
    try:
        answering(lambda: session.head(constants.ENDPOINT, timeout=SECONDS), SECONDS)
    except TimeoutError:
        return f"{constants.ENDPOINT} does not answer"
    except Exception as error:  # the client raises what it likes, from OSError to its own kinds
        return f"{constants.ENDPOINT} cannot be reached: {error}"
    return None


@contextmanager
def fetching(what: str, instead: str) -> Iterator[None]:
    """Let the clients of models and datasets fetch something during the block.

    Where the hub is silent, they use what they have fetched before, and no network.

    Args:
        what: is fetched.
        instead: of it, what a command takes by ``--data``.

    Raises:
        InputError: it cannot be had.
    """
    silent, held = silence(), list[tuple[Any, bool]]()
    for name in ("huggingface_hub.constants", "datasets.config") if silent else ():
        settings: Any = import_module(name)
        held.append((settings, settings.HF_HUB_OFFLINE))
        settings.HF_HUB_OFFLINE = True
    try:
        yield
    except Exception as error:  # the clients raise what they like, from OSError to their own kinds
        raise InputError(
            f"{what} cannot be had from the hub ({silent or error}). With a network, what is "
            f"missing is fetched once; without, name {instead} by --data."
        ) from error
    finally:
        for settings, before in held:
            settings.HF_HUB_OFFLINE = before


def model_directory(model: Path | str, revision: str | None = None) -> Path:
    """Return where a model directory lies; one named ``org/name`` is fetched from the hub.

    A directory of that name here comes first. What was fetched before is taken from the hub's
    cache where the hub does not answer.

    Args:
        model: a directory, or a model's name on the hub.
        revision: a branch, tag or commit on the hub.

    Raises:
        InputError: there is neither; or a revision of a directory.
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
    from huggingface_hub import snapshot_download

    silent = silence()
    try:
        fetched: Any = snapshot_download(name, revision=revision, local_files_only=bool(silent))
    except Exception as error:  # the client raises what it likes, from OSError to its own kinds
        wanted = name if revision is None else f"{name} at {revision}"
        raise InputError(
            f"{wanted} is neither a directory here nor a model that can be had from the hub: "
            f"{silent or first_line(error)}"
        ) from error
    return Path(fetched)
