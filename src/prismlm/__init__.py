"""Interpretable-by-design language models: trace every predicted token to training text.

lm = prismlm.load("my-model")
trace = lm.explain("Aspirin reduces", generate=20)
trace.sources(by="domain")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prismlm.explain.audit import Audit
    from prismlm.explain.language_model import Attributor, PrismLM, load
    from prismlm.explain.trace import Trace
    from prismlm.interventions.values import Ablate, Clamp, Controller, Group, Scale
    from prismlm.lens.build import index
    from prismlm.models.decoders.protot import ProtoTConfig, ProtoTForCausalLM
    from prismlm.models.decoders.signal_noise import SignalNoiseConfig, SignalNoiseForCausalLM
    from prismlm.models.uncertainty_feedback import (
        attach_uncertainty,
        load_uncertainty,
        save_uncertainty,
    )
    from prismlm.training import attach, train

__version__ = "0.1.0"

# Imported on first use: PyTorch and transformers take seconds to load.
_MODULES = {
    "prismlm.explain.audit": ("Audit",),
    "prismlm.explain.language_model": ("Attributor", "PrismLM", "load"),
    "prismlm.explain.trace": ("Trace",),
    "prismlm.interventions.values": ("Ablate", "Clamp", "Controller", "Group", "Scale"),
    "prismlm.lens.build": ("index",),
    "prismlm.models.decoders.protot": ("ProtoTConfig", "ProtoTForCausalLM"),
    "prismlm.models.decoders.signal_noise": ("SignalNoiseConfig", "SignalNoiseForCausalLM"),
    "prismlm.models.uncertainty_feedback": (
        "attach_uncertainty",
        "load_uncertainty",
        "save_uncertainty",
    ),
    "prismlm.training": ("attach", "train"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Ablate",
    "Attributor",
    "Audit",
    "Clamp",
    "Controller",
    "Group",
    "PrismLM",
    "ProtoTConfig",
    "ProtoTForCausalLM",
    "Scale",
    "SignalNoiseConfig",
    "SignalNoiseForCausalLM",
    "Trace",
    "__version__",
    "attach",
    "attach_uncertainty",
    "index",
    "load",
    "load_uncertainty",
    "save_uncertainty",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'prismlm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
