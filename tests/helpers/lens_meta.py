"""A lens with other contents, as if it had been built so."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from prismlm import fingerprints
from prismlm.files import read_json, write_json
from prismlm.lens import layout


def change_meta(lens: Path, **values: Any) -> None:
    """Change values of ``meta.json``, and note the files as they are now."""
    files = layout.describe_files(lens)
    value = read_json(lens / layout.META_FILE) | {"files": files} | values
    del value["digest"]
    write_json(lens / layout.META_FILE, value | {"digest": fingerprints.of_json(value)})
    table = pq.read_table(lens / layout.PROTOTYPES_FILE)
    layout.write_prototypes(table, lens / layout.PROTOTYPES_FILE, value["files"])
