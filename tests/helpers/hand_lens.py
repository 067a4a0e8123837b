"""A lens small enough to follow by hand, of three prototypes and six positions, and predictions."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from prismlm.explain.attribution import attribute, carriers_of
from prismlm.explain.prediction import Parts, Predictions, Scores
from prismlm.layers import PrototypeHead
from prismlm.lens import layout
from prismlm.lens.cell_files import cells_format, spooled_type, write_run
from prismlm.lens.cells import Int8Codes
from prismlm.lens.lens import Lens
from prismlm.ops.prototype_head import Nearest
from tests.helpers.lens_files import write_cells

# cell, next token, position, angle of the state to (1, 0) in degrees; 0 to 99 are of document "a",
# 100 to 400 of "b"
POSITIONS = [
    (0, 5, 10, 0),
    (0, 5, 20, 8),
    (1, 5, 60, 8),
    (0, 6, 30, 0),
    (1, 5, 150, 0),
    (2, 5, 5, -4),
]
DOCUMENTS = {
    "doc_id": ["a", "b"],
    "source": ["s1", "s2"],
    "domain": ["law", None],
    "license": ["CC0", None],
    "title": [None, "B"],
    "url": [None, None],
    "start": [0, 100],
    "length": [100, 301],
}
# prototype, rank, position, document; prototype 2 has none
CONTEXTS = [(0, 0, 10, "a"), (0, 1, 120, "b"), (1, 0, 30, "a")]


def hand_lens(directory):
    """Write the lens, and open it."""
    codes, cells = Int8Codes(), cells_format(2, 8, 401)
    records = np.empty(len(POSITIONS), spooled_type(cells))
    for column, name in enumerate(("cell", "token", "position")):
        records[name] = [row[column] for row in POSITIONS]
    angles = np.deg2rad([row[3] for row in POSITIONS])
    states = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    codes.put(states, records)
    # Position 20 is after token 4, all others are after token 7.
    records["probability"], records["read"] = 0.5, [7, 4, 7, 7, 7, 7]
    run = write_run(directory / "run", [records], records.dtype, 3)
    entry = write_cells(directory, [run], cells)
    text = [(name, pa.string()) for name in list(DOCUMENTS)[:6]]
    schema = pa.schema([*text, ("start", pa.int64()), ("length", pa.int64())])
    table = pa.table(DOCUMENTS, schema=schema)
    layout.write_table(table, directory / layout.CELL_DOCUMENTS_FILE)
    facts = {row["doc_id"]: row for row in table.drop_columns(["start", "length"]).to_pylist()}
    rows = [
        {"prototype": i, "rank": rank, "position": position, **facts[doc_id]}
        | {"cosine": 0.9, "activation": 0.9, "routed": True}
        | {"before": "before ", "token": "here", "after": " after"}
        for i, rank, position, doc_id in CONTEXTS
    ]
    contexts = pa.Table.from_pylist(rows, schema=layout.INDEX_SCHEMA)
    pq.write_table(contexts, directory / layout.INDEX_FILE)
    meta = layout.LensMeta(
        *("", "", "", "c", "/nowhere", "train", None, 8, 8, 2, 2, 100, True),
        cells=entry,
        files=layout.describe_files(directory),
    )
    head = PrototypeHead(2, 3, 3)
    head.place_on(torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]))
    return Lens(directory, meta, head)


def predictions(indices, evidence, residual, bias, states, read, targets, activations=None):
    """Return predictions with these parts; prototypes are active where they have evidence."""
    activations = (evidence != 0).float() if activations is None else activations
    none = torch.zeros(len(states))
    return Predictions(
        Nearest(indices, activations, activations),
        Parts(evidence, evidence, residual, residual, bias, bias),
        lambda: Scores(none, none, targets),
        *(read, targets, states),
    )


def attributed(given, lens, method="evidence"):
    """Return the attribution of predictions of one text."""
    return attribute(carriers_of(given, lens, method), lens, method)
