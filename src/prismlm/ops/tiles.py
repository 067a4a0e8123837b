"""How much is computed at a time."""

from torch import Tensor

OF_GPU = 2**25
"""Elements: 128 MiB of float32."""


def in_cache(like: Tensor) -> bool:
    """Say whether small tiles are the quickest: on a CPU, whose caches hold them.

    On a GPU starting an operation takes longer than such a tile. With tiles of a CPU's size an H100
    took five times as long for a training step with a head as for one without.
    """
    return like.device.type == "cpu"


def at_once(like: Tensor, of_cache: int, of_gpu: int = OF_GPU) -> int:
    """Return how many elements a tile has.

    Args:
        like: what is tiled.
        of_cache: elements of a tile on a CPU.
        of_gpu: on a GPU.
    """
    return of_cache if in_cache(like) else of_gpu
