"""Language models that can be read by construction.

lm = prismlm.load("my-model")
trace = lm.explain("Aspirin reduces", generate=20)
trace.sources(by="domain")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prismlm.lens.edits import Ablate, Clamp, Group, Scale
    from prismlm.lens.language_model import PrismLM, load
    from prismlm.lens.trace import Trace
    from prismlm.models.uncertainty import attach_uncertainty, load_uncertainty, save_uncertainty

__version__ = "0.1.0"

# Names are imported when they are first used: PyTorch and transformers take seconds to load.
_HOMES = {
    "Ablate": "prismlm.lens.edits",
    "Clamp": "prismlm.lens.edits",
    "Group": "prismlm.lens.edits",
    "PrismLM": "prismlm.lens.language_model",
    "Scale": "prismlm.lens.edits",
    "Trace": "prismlm.lens.trace",
    "attach_uncertainty": "prismlm.models.uncertainty",
    "load": "prismlm.lens.language_model",
    "load_uncertainty": "prismlm.models.uncertainty",
    "save_uncertainty": "prismlm.models.uncertainty",
}

__all__ = [
    "Ablate",
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
