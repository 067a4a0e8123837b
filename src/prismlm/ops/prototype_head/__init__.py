"""Routing hidden states to prototypes, and the losses of the prototype head (PRISM)."""

from prismlm.ops.prototype_head.fast import nearest, reconstruct, route
from prismlm.ops.prototype_head.fitted import PICKS, fit_weights, pursue
from prismlm.ops.prototype_head.routing import (
    Nearest,
    Routing,
    diversity,
    point_pull,
    prototype_pull,
    residual,
)

__all__ = [
    "PICKS",
    "Nearest",
    "Routing",
    "diversity",
    "fit_weights",
    "nearest",
    "point_pull",
    "prototype_pull",
    "pursue",
    "reconstruct",
    "residual",
    "route",
]
