"""The demo: a real model with its prototypes, or a small one trained on the spot."""

from prismlm.demo.estimate import estimate_demo, estimate_fetched
from prismlm.demo.fetch import Unreachable
from prismlm.demo.fetched import SMOLLM2, run_fetched
from prismlm.demo.prompts import PROMPTS, TEMPERATURE, Answer, DemoResult
from prismlm.demo.trained import FULL, QUICK, DemoSize, run_demo

__all__ = [
    "FULL",
    "PROMPTS",
    "QUICK",
    "SMOLLM2",
    "TEMPERATURE",
    "Answer",
    "DemoResult",
    "DemoSize",
    "Unreachable",
    "estimate_demo",
    "estimate_fetched",
    "run_demo",
    "run_fetched",
]
