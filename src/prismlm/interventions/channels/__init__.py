"""Interventions on the channels of prototype mixers, as values and in their scope."""

from prismlm.interventions.channels.clamp import ClampGates, GateRecord, record_gates
from prismlm.interventions.channels.interventions import (
    Intervention,
    MaskRead,
    MaskWrite,
    Reinitialise,
)
from prismlm.interventions.channels.scope import intervene

__all__ = [
    "ClampGates",
    "GateRecord",
    "Intervention",
    "MaskRead",
    "MaskWrite",
    "Reinitialise",
    "intervene",
    "record_gates",
]
