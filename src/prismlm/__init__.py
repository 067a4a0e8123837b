"""Language models that can be read by construction.

lm = prismlm.load("my-model")
trace = lm.explain("Aspirin reduces", generate=20)
trace.sources(by="domain")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prismlm.explain.attributor import Attributor
    from prismlm.explain.language_model import PrismLM, load
    from prismlm.explain.trace import Trace
    from prismlm.interventions.values import Ablate, Clamp, Group, Scale
    from prismlm.models.uncertainty_feedback import (
        attach_uncertainty,
        load_uncertainty,
        save_uncertainty,
    )

__version__ = "0.1.0"

# Names are imported when they are first used: PyTorch and transformers take seconds to load.
_HOMES = {
    "Ablate": "prismlm.interventions.values",
    "Attributor": "prismlm.explain.attributor",
    "Clamp": "prismlm.interventions.values",
    "Group": "prismlm.interventions.values",
    "PrismLM": "prismlm.explain.language_model",
    "Scale": "prismlm.interventions.values",
    "Trace": "prismlm.explain.trace",
    "attach_uncertainty": "prismlm.models.uncertainty_feedback",
    "load": "prismlm.explain.language_model",
    "load_uncertainty": "prismlm.models.uncertainty_feedback",
    "save_uncertainty": "prismlm.models.uncertainty_feedback",
}

__all__ = [
    "Ablate",
    "Attributor",
    "Clamp",
    "Group",
    "PrismLM",
    "Scale",
    "Trace",
    "__version__",
    "attach_uncertainty",
    "load",
    "load_uncertainty",
    "save_uncertainty",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'prismlm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
