"""The Hugging Face Hub: whether it answers at all, asked before anything waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from prismlm.errors import InputError
from prismlm.run_state import answering

# Its own client would try for minutes; names that nobody resolves have no limit but this one.
SECONDS = 6.0


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
