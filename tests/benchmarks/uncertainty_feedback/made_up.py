"""Made-up results of training and of checks."""

from benchmarks.uncertainty_feedback.validation import (
    NEUTRAL,
    OWN,
    PREVIOUS,
    RECURSION,
    SHUFFLED,
    THIRD,
    ZERO,
)


def row(arm, seed, value, more=0.0, signal="own"):
    """A made-up result: the loss of every signal is ``value``, and ``more`` of all but the own."""
    backbone = "ProtoT" if arm.startswith("ProtoT") else "LLaMA"
    settings = {"corpus": "c", "steps": 5, "batch_size": 2, "data": {"length": 8}}
    counts = {"windows": 4, "documents": 3, "tokens": 1234}
    base = {
        "arm": arm, "backbone": backbone, "seed": seed, "parameters": 100, "resumed": False,
        "processor_seconds": 10.0 if "no feedback" in arm else 13.0,
        "environment": {"date": "2026-01-01"}, "settings": settings,
    }  # fmt: skip
    if "no feedback" in arm:
        whole = counts | {"losses": {"no feedback": value}, "differences": {}}
        return base | {"validation": {"all": whole, "sample": whole}}
    settings["uncertainty_feedback"] = {"levels": 1000, "passes": 2, "signal": signal}
    others = (THIRD, NEUTRAL, ZERO, SHUFFLED, PREVIOUS)
    apart = {name: {"mean": more, "low": more - 0.01, "high": more + 0.02} for name in others}
    whole = counts | {
        "losses": {OWN: value} | dict.fromkeys(others, value + more),
        "differences": apart,
    }
    sample = counts | {
        "losses": whole["losses"] | {RECURSION: value - 0.5},
        "differences": apart | {OWN: {"mean": 0.5, "low": 0.4, "high": 0.6}},
    }
    codes = {name: {"same": 0.25, "distance": 0.0125} for name in (NEUTRAL, OWN, THIRD)}
    table = {"rows": 500, "parameters": 4000, "codes_seen": 100, "rows_moved": 50}
    return base | {
        "validation": {"all": whole, "sample": sample, "codes": codes}, "table": table
    }  # fmt: skip


def interval(value, low, high):
    return {"value": value, "low": low, "high": high}


def checks_of(seed, good):
    """A made-up report; ``good`` moves every figure to the side that the source expects."""
    up = interval(0.5, 0.1, 0.9) if good else interval(0.1, -0.2, 0.4)
    down = interval(-0.5, -0.9, -0.1) if good else interval(-0.1, -0.4, 0.2)
    layer = {"q": 0.01, "added": up}
    return {
        "arm": "two passes",
        "seed": seed,
        "environment": {"date": "2026-01-01"},
        "report": {
            "texts": 7,
            "tokens": 1234,
            "sample": "c, heldout",
            "left_out": {},
            "ablation": {
                "conditions": [
                    {"signal": "zero", "change": interval(9, 8, 10)},
                    {"signal": "shuffled", "change": up},
                ]
            },
            "attention": {
                "layers": [
                    {"layer": 0, "correlation": 0.9, **layer},
                    {"layer": 1, "correlation": 0.3, **layer},
                    {"layer": 2, "correlation": 0.2, **layer},
                ]
            },
            "hedging": {
                "fed": {"hedges": 3},
                "bare": {"hedges": 4},
                "change": up,
                "change_against_shuffled": up,
            },
            "mistakes": {
                "loss_against_zero": interval(-1, -2, -0.5),
                "loss_against_shuffled": down,
            },
            "probe": {
                "layers": [
                    {"depth": 0.0, "code": interval(0.2, 0.1, 0.3), "added": interval(1, 1, 1)},
                    {"depth": 0.5, "code": interval(0.7, 0.6, 0.8), "added": up},
                ]
            },
        },
    }
