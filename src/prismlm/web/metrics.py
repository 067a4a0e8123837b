"""What Prometheus is told of a server."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class Metrics:
    """Counters of one server, in a registry of its own.

    Args:
        gauges: what is looked up when it is asked for, by name.

    Attributes:
        requests: by path and status.
        tokens: read and written.
        first_token, answer, attribution: seconds to the first token, to the end of an answer, and
            of finding what it relies on.
    """

    def __init__(self, gauges: dict[str, Callable[[], float]]) -> None:
        own = self._registry = CollectorRegistry()
        labels = ("path", "status")
        self.requests = Counter("prismlm_requests", "Requests answered.", labels, registry=own)
        self.tokens = Counter("prismlm_tokens", "Tokens of requests.", ("kind",), registry=own)
        self.first_token, self.answer, self.attribution = (
            Histogram(f"prismlm_{name}_seconds", said, registry=own, buckets=SECONDS)
            for name, said in (
                ("first_token", "To the first token."),
                ("answer", "To the end of an answer."),
                ("attribution", "To find what an answer relies on."),
            )
        )
        for name, look in gauges.items():
            Gauge(f"prismlm_requests_{name}", f"Requests {name}.", registry=own).set_function(look)

    def text(self) -> bytes:
        """Return all of it in Prometheus's text format."""
        return generate_latest(self._registry)
