"""``prismlm explore`` with one route more: ``POST /api/plain`` writes without attribution.

    python -m benchmarks.explorer.beside_plain explore MODEL …

So the same process, the same threads and the same weights write in both ways.
"""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

import prismlm.explorer
from prismlm.cli.app import main
from prismlm.explain.language_model import PrismLM

create_app = prismlm.explorer.create_app


class Plain(BaseModel):
    """What is to be written."""

    text: str
    generate: int


def with_plain(lm: PrismLM, **how: Any) -> FastAPI:
    """Return the explorer of a model, which also writes plainly."""
    app = create_app(lm, **how)

    @app.post("/api/plain")
    def plain(asked: Plain) -> dict[str, Any]:
        """Return when each token was there, in seconds, of ``lm.generate``."""
        times: list[float] = []
        # A pass is a token: the prompt's is that of the first.
        hook = lm.model.register_forward_hook(lambda *_: times.append(time.perf_counter()))
        try:
            lm.generate(asked.text, tokens=asked.generate)
        finally:
            hook.remove()
        return {"times": times}

    return app


if __name__ == "__main__":
    prismlm.explorer.create_app = with_plain
    main()
