"""The Hugging Face Hub: whether it answers at all, asked before anything waits for it."""

from __future__ import annotations

from typing import Any

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
