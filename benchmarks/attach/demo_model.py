"""What ships for the demo's model: an adapter, a head and a lens for SmolLM2, in one archive.

    python -m benchmarks.attach.demo_model --work DIR [--from MODEL]

fetches SmolLM2-135M-Instruct, teaches it the question-answer pairs and some texts of the bundled
sample (``prismlm/demo/texts.py``), attaches a head, lays its prototypes out and writes
``src/prismlm/demo/shipped/smollm2.zip``. Stopped, it goes on where it was. Two CPU cores take some
90 minutes. ``--from`` the demo's model of before, its adapter is taught on and its prototypes are
where the fit begins, so that most names still hold. Names that were given to the prototypes of
WORK/model since, by ``prismlm label``, are packed when it is run again.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import prismlm
import prismlm.demo
import prismlm.training.fit as fitting
from benchmarks.attach.demo_lessons import OPTIONS as LESSONS
from benchmarks.attach.demo_lessons import PLAIN, Lessons, lines_of, teach
from benchmarks.shared.options import script_options
from prismlm.cli.output import ConsoleReporter
from prismlm.corpus import Corpus
from prismlm.demo.fetched import ADAPTER, LENS, SHIPPED, fetch
from prismlm.demo.texts import pairs_path, plain_texts
from prismlm.files import read_json
from prismlm.layers import PrototypeHead
from prismlm.lens import layout
from prismlm.lens.labels.map import map_lens
from prismlm.models.sidecar import HEAD_FILE, META_FILE
from prismlm.training import AttachOptions, FitOptions, LoraOptions, attach, tuning

WINDOW = 512
OPTIONS = AttachOptions(
    fit=FitOptions(prototypes=2048, prototypes_per_token=16, epochs=4.0, weights="fitted"),
    window=WINDOW,
    contexts=4,
    codes="pq12",
    heldout_tokens=3_000,
    keep_states=True,
    lora=LESSONS,
)
# From a model of before.
ON_FROM = replace(
    OPTIONS,
    fit=replace(OPTIONS.fit, epochs=2.0),
    lora=replace(LESSONS, epochs=12, learning_rate=8e-4),
)
# The time of every member, so that the same files make the same archive.
STAMP = (2026, 1, 1, 0, 0, 0)


def main() -> None:
    """Make the archive."""
    parser = script_options(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="where everything is built")
    parser.add_argument("--from", type=Path, dest="former", help="the demo's model of before")
    args = parser.parse_args()
    former: Path | None = args.former and args.former.resolve()
    target = Path(prismlm.demo.__file__).parent / "shipped" / SHIPPED
    args.work.mkdir(parents=True, exist_ok=True)
    # Names that are noted are then without a path.
    os.chdir(args.work)
    gguf = fetch(Path(), progress=ConsoleReporter())
    # Between fine-tuning and the head; attach has no name for that.
    tuning.adapt = partial(taught, former)
    if former is not None:
        fitting.init_prototypes = partial(begin_at, former)
    texts = [pairs_path(), plain_texts(Path("plain.parquet"))]
    options = OPTIONS if former is None else ON_FROM
    result = attach(str(gguf), texts, Path("model"), options, progress=ConsoleReporter())
    lm = prismlm.load(result.directory)
    assert lm.lens is not None
    if lm.lens.meta.map is None:
        map_lens(lm.lens, lm.head, progress=ConsoleReporter())
    pack(result.directory, result.lens, target)
    print(result.quality)
    print(f"{target}: {target.stat().st_size / 1e6:.1f} MB")


def begin_at(former: Path, head: PrototypeHead, *_: object) -> None:
    """Begin the fit of a head at the prototypes of the head of before."""
    before = load_file(former / HEAD_FILE)
    with torch.no_grad():
        head.prototypes.copy_(before["prototypes"].float())


def taught(
    former: Path | None,
    model: PreTrainedModel,
    corpus: Corpus,
    options: LoraOptions,
    out: Path,
    **how: Any,
) -> list[dict[str, float]]:
    """Teach the pairs where ``attach`` would fine-tune on the corpus."""
    pairs = [row for row in pq.read_table(pairs_path()).to_pylist() if row["split"] == "train"]
    texts = pq.read_table("plain.parquet")["text"].to_pylist()
    lessons = Lessons(pairs, lines_of(PLAIN), texts, corpus.tokenizer, LESSONS.length or WINDOW)
    adapter = former and former / ADAPTER
    return teach(model, lessons, out, base=how["base"], options=options, former=adapter)


def pack(model: Path, lens: Path, target: Path) -> None:
    """Put what is not fetched into one archive, the head in bfloat16."""
    head = load_file(model / HEAD_FILE)
    half = head["prototypes"].bfloat16()
    assert torch.equal(half.float(), head["prototypes"]), "the fit rounds its prototypes"
    small = model / f".{HEAD_FILE}"
    save_file(head | {"prototypes": half}, small, metadata={"format": "pt"})
    members = {HEAD_FILE: small, META_FILE: model / META_FILE}
    members |= {f"{ADAPTER}/{path.name}": path for path in (model / ADAPTER).iterdir()}
    members |= {f"{LENS}/{path.name}": path for path in lens.iterdir()}
    target.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(target, "w") as archive:
        for name in sorted(members):
            archive.writestr(
                zipfile.ZipInfo(name, STAMP), _content(members[name]), zipfile.ZIP_LZMA
            )
    small.unlink()


def _content(path: Path) -> bytes:
    """Return a file's bytes; a table's without compression, which the archive does better.

    Of the lens's note, without where its corpus lay here: the demo puts in where it lies there.
    """
    if path.name == layout.META_FILE:
        return json.dumps(read_json(path) | {"corpus_path": ""}).encode()
    if path.suffix != ".parquet":
        return path.read_bytes()
    written = io.BytesIO()
    pq.write_table(pq.read_table(path), written, compression="none", write_page_checksum=True)
    return written.getvalue()


if __name__ == "__main__":
    main()
