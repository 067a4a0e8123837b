"""Routing hidden states to prototypes, and the losses of the prototype head (PRISM)."""

from prismlm.ops.prototype_head.fitted import (
    PICKS,
    cosines_of,
    fit_activations,
    fit_weights,
    pursue,
)
from prismlm.ops.prototype_head.routing import (
    Routing,
    diversity,
    inverse_norms,
    point_pull,
    prototype_pull,
    residual,
)
from prismlm.ops.prototype_head.tiled import Nearest, nearest, reconstruct, route
from prismlm.ops.prototype_head.windows import WindowScan, scan_windows

__all__ = [
    "PICKS",
    "Nearest",
    "Routing",
    "WindowScan",
    "cosines_of",
    "diversity",
    "fit_activations",
    "fit_weights",
    "inverse_norms",
    "nearest",
    "point_pull",
    "prototype_pull",
    "pursue",
    "reconstruct",
    "residual",
    "route",
    "scan_windows",
]
