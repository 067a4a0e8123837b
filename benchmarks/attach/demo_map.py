"""Where the prototypes of the demo's model stand on their map, which ships with it.

    python -m benchmarks.attach.demo_map

Laying 8,192 of them out takes a minute, which a first look should not wait for.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
from safetensors.torch import load

import prismlm.demo
from prismlm.demo.fetched import MAP, SHIPPED
from prismlm.files import atomic_file
from prismlm.labels.map import laid_out, nearest_prototypes
from prismlm.models.sidecar import HEAD_FILE

FOLDER = Path(prismlm.demo.__file__).parent / "shipped"


def main() -> None:
    """Lay the shipped prototypes out, and write their places."""
    with zipfile.ZipFile(FOLDER / SHIPPED) as archive:
        prototypes = load(archive.read(HEAD_FILE))["prototypes"].float()
    places = laid_out(prototypes, nearest_prototypes(prototypes))
    with atomic_file(FOLDER / MAP) as temporary, temporary.open("wb") as file:
        np.save(file, places.astype(np.float32))


if __name__ == "__main__":
    main()
