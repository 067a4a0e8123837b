"""What the prototypes of the demo's model are called, and the tokens that tell them, made anew.

    prismlm demo --no-serve --out prismlm-demo
    python -m benchmarks.attach.demo_names prismlm-demo

The names in prismlm-demo's lens are replaced, and with them those in the archive that ships.
"""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import pyarrow.parquet as pq

import prismlm
import prismlm.demo
from benchmarks.attach.demo_model import STAMP
from benchmarks.shared.options import script_options
from prismlm.demo.fetched import LENS, SHIPPED
from prismlm.files import atomic_file, read_json
from prismlm.index import layout
from prismlm.index.signatures import signatures_of
from prismlm.labels.write import SIGNATURE, label_lens, write_columns

# What stays as it is in the archive, where it is not known or of another file.
KEPT = ("prototype", "usage", "nearest_cosine", "x", "y")


def main() -> None:
    """Name the prototypes of a demo, and put the names into the archive."""
    parser = script_options(__doc__)
    parser.add_argument("demo", type=Path)
    lm = prismlm.load(parser.parse_args().demo / "model")
    lens = lm.lens
    assert lens is not None
    assert lens.corpus is not None
    found = signatures_of(lm.model, lm.head, lens.corpus)
    columns = {"name": found.names, "top_tokens": found.tokens, "top_values": list(found.values)}
    sources = [SIGNATURE] * lens.num_prototypes
    write_columns(lens, columns | {"label_source": sources}, labels=None)
    label_lens(lens, lm.model)
    put_into(Path(prismlm.demo.__file__).parent / "shipped" / SHIPPED, lens.path)


def put_into(archive: Path, lens: Path) -> None:
    """Replace the names in an archive by those of a lens; all else stays to the byte."""
    table = pq.read_table(lens / layout.PROTOTYPES_FILE)
    with zipfile.ZipFile(archive) as before:
        members = {name: before.read(name) for name in before.namelist()}
    names, note = (f"{LENS}/{file}" for file in (layout.PROTOTYPES_FILE, layout.META_FILE))
    former = pq.read_table(io.BytesIO(members[names]))
    for column in KEPT:
        place = table.schema.get_field_index(column)
        table = table.set_column(place, table.schema.field(place), former[column])
    written = io.BytesIO()
    pq.write_table(table, written, compression="none", write_page_checksum=True)
    labels = read_json(lens / layout.META_FILE)["labels"]
    members[names] = written.getvalue()
    members[note] = json.dumps(json.loads(members[note]) | {"labels": labels}).encode()
    with atomic_file(archive) as temporary, zipfile.ZipFile(temporary, "w") as after:
        for name in sorted(members):
            after.writestr(zipfile.ZipInfo(name, STAMP), members[name], zipfile.ZIP_LZMA)


if __name__ == "__main__":
    main()
