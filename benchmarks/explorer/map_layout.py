"""Time the map of 16,384 prototypes of width 1,600, made anew in one process.

    python -m benchmarks.explorer.map_layout
    python -m benchmarks.explorer.render

The prototypes are drawn by seed: in groups, which a map must show, each far from its group. Time
is that of what `prismlm map` does between reading and writing: neighbours, then places.
"""

from __future__ import annotations

import resource
import time

import numpy as np
import torch
from scipy.spatial import KDTree

from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.files import write_json
from prismlm.labels.map import laid_out, nearest_prototypes

PROTOTYPES, WIDTH, GROUPS, SEED = 16_384, 1_600, 256, 0
# Of a prototype's length, what it has of its own beside the unit vector of its group.
OWN = 4.0
GOAL = 300
NEAR = 10


def main() -> None:
    """Lay them out, and write how long it took."""
    given = script_options(__doc__, RESULTS / "explorer_map.json").parse_args()
    prototypes, groups = drawn(PROTOTYPES, WIDTH, GROUPS)
    began, processor = time.perf_counter(), time.process_time()
    nearest = nearest_prototypes(prototypes)
    found, found_processor = time.perf_counter(), time.process_time()
    places = laid_out(prototypes, nearest)
    ended, ended_processor = time.perf_counter(), time.process_time()
    same, chance = group_neighbours(places, groups)
    result = {
        "prototypes": PROTOTYPES,
        "width": WIDTH,
        "groups": GROUPS,
        "goal_seconds": GOAL,
        "seconds": {"neighbours": found - began, "places": ended - found},
        "processor_seconds": {
            "neighbours": found_processor - processor,
            "places": ended_processor - found_processor,
        },
        "same_group": {"map": same, "dealt_out": chance, "cosines": near(nearest.indices, groups)},
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "environment": environment(),
    }
    print(result)
    write_json(given.out, result)


def drawn(count: int, width: int, groups: int) -> tuple[torch.Tensor, list[str]]:
    """Return prototypes [count, width] and the group of each, as many in every one."""
    generator = torch.Generator().manual_seed(SEED)
    centres = torch.nn.functional.normalize(torch.randn(groups, width, generator=generator))
    of = torch.arange(count) % groups
    own = torch.randn(count, width, generator=generator) * OWN / width**0.5
    return centres[of] + own, [f"group {number}" for number in of.tolist()]


def group_neighbours(places: np.ndarray, groups: list[str]) -> tuple[float, float]:
    """Return how many of the nearest at places [K, 2] share a group, and how many do by chance."""
    names = np.array(groups)
    nearest = np.asarray(KDTree(places).query(places, NEAR + 1)[1])
    dealt = np.random.default_rng(SEED).permutation(names)
    same, chance = (float((of[nearest[:, 1:]] == of[:, None]).mean()) for of in (names, dealt))
    return same, chance


def near(indices: torch.Tensor, groups: list[str]) -> float:
    """Return how many of the nearest by cosine, itself aside, are of the same group."""
    names = np.array(groups)
    return float((names[indices[:, 1:].numpy()] == names[:, None]).mean())


if __name__ == "__main__":
    main()
