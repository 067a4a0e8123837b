"""Tile sizes: how many elements are computed at a time."""

from torch import Tensor

OF_GPU = 2**25  # elements: 128 MiB of float32


def in_cache(like: Tensor) -> bool:
    """Return whether small tiles are fastest: on a CPU, where they fit in its caches.

    On a GPU, launching an operation takes longer than such a tile: with a CPU's tile sizes, a
    training step with a head took five times as long on an H100 as without.
    """
    return like.device.type == "cpu"


def at_once(like: Tensor, of_cache: int, of_gpu: int = OF_GPU) -> int:
    """Return the number of elements of a tile on the device of ``like``."""
    return of_cache if in_cache(like) else of_gpu
