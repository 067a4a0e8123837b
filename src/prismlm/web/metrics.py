"""What Prometheus is told of a server."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from prismlm.web.engine import Engine

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class Metrics:
    """Counters of one server, in a registry of its own.

    Attributes:
        requests: by path and status.
        tokens: read and written.
        first_token, whole, attribution: seconds to the first token, to the end of an answer, and
            of finding what it relies on.
    """

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        known = {"registry": self.registry}
        self.requests = Counter(
            "prismlm_requests", "Requests by path and status.", ("path", "status"), **known
        )
        self.tokens = Counter("prismlm_tokens", "Tokens read and written.", ("kind",), **known)
        times = {**known, "buckets": SECONDS}
        self.first_token = Histogram("prismlm_first_token_seconds", "To the first token.", **times)
        self.whole = Histogram("prismlm_answer_seconds", "To the end of an answer.", **times)
        self.attribution = Histogram(
            "prismlm_attribution_seconds", "To find what an answer relies on.", **times
        )
        waiting = Gauge("prismlm_requests_waiting", "Requests that wait.", **known)
        waiting.set_function(lambda: engine.waiting)
        writing = Gauge("prismlm_requests_running", "Requests that are written.", **known)
        writing.set_function(lambda: engine.writing)

    def text(self) -> bytes:
        """Return all of it in Prometheus's text format."""
        return generate_latest(self.registry)
