"""Routing hidden states to prototypes, and the losses of the prototype head (PRISM)."""

from prismlm.ops.prototype_head.fitted import fit_weights
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
    "Nearest",
    "Routing",
    "WindowScan",
    "diversity",
    "fit_weights",
    "inverse_norms",
    "nearest",
    "point_pull",
    "prototype_pull",
    "reconstruct",
    "residual",
    "route",
    "scan_windows",
]
