"""The scale of support of the demo's lens, which ships beside it.

    python -m benchmarks.attach.demo_support prismlm-demo/model

The lens of a demo is measured again: in the archive that ships is the scale of the day that it was
made.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import prismlm
import prismlm.demo
from benchmarks.shared.options import script_options
from prismlm.demo.fetched import SUPPORT
from prismlm.files import write_json
from prismlm.index.support import measure_support

FOLDER = Path(prismlm.demo.__file__).parent / "shipped"


def main() -> None:
    """Measure the scale, and write it."""
    parser = script_options(__doc__)
    parser.add_argument("model", type=Path)
    lm = prismlm.load(parser.parse_args().model)
    assert lm.lens is not None
    assert lm.lens.cells is not None
    assert lm.lens.corpus is not None, "the corpus of the demo is not where it was"
    scale = measure_support(
        lm.lens.cells, lm.model, lm.head, lm.lens.corpus, "train", lm.lens.suffixes
    )
    assert scale is not None
    write_json(FOLDER / SUPPORT, asdict(scale))


if __name__ == "__main__":
    main()
