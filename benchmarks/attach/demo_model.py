"""What ships for the demo's model: an adapter, a head and a lens for SmolLM2, in one archive.

    python -m benchmarks.attach.demo_model --work DIR

fetches SmolLM2-135M-Instruct, fine-tunes it on one in six documents of the bundled sample, attaches
a head and writes ``src/prismlm/demo/shipped/smollm2.zip``, and the lens's probe beside it. Stopped,
it goes on where it was. Two CPU cores take some two hours; ``--device cuda`` takes a GPU. With
``--probe DIR``, a directory that ``prismlm demo`` has made, the probe alone is made anew.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import zipfile
from pathlib import Path

import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file

import prismlm.demo
from prismlm.cli.progress import ConsoleReporter
from prismlm.corpus import Corpus
from prismlm.demo.fetch import fetch
from prismlm.demo.fetched import ADAPTER, EVERY, LENS, PROBE, SHIPPED
from prismlm.demo.prompts import documents
from prismlm.files import read_json
from prismlm.index import layout
from prismlm.index.probe import PROBE_FILE, Probe
from prismlm.index.suffixes import CHECKSUMS_FILE
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.sidecar import HEAD_FILE, META_FILE
from prismlm.training import AttachOptions, FitOptions, LoraOptions, attach

WINDOW = 512
OPTIONS = AttachOptions(
    fit=FitOptions(prototypes=8192, prototypes_per_token=64, epochs=2.0, weights="fitted"),
    window=WINDOW,
    contexts=4,
    codes="pq12",
    keep_states=True,
    lora=LoraOptions(),
)
# The time of every member, so that the same files make the same archive.
STAMP = (2026, 1, 1, 0, 0, 0)
# Made anew where it is unpacked, from the cells.
LEFT_OUT = (layout.CONTEXTS_FILE, CHECKSUMS_FILE, PROBE_FILE)


def main() -> None:
    """Make the archive."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--work", type=Path, help="where everything is built")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--probe", type=Path, help="a directory that prismlm demo made")
    given = parser.parse_args()
    target = Path(prismlm.demo.__file__).parent / "shipped" / SHIPPED
    if given.probe is not None:
        write_probe(given.probe, target.with_name(PROBE))
        return
    given.work.mkdir(parents=True, exist_ok=True)
    # Names that are noted are then without a path.
    os.chdir(given.work)
    gguf = fetch(Path(), progress=ConsoleReporter())
    sample = documents(Path("sample.parquet"), EVERY)
    options = AttachOptions(**{**vars(OPTIONS), "device": given.device})
    result = attach(str(gguf), [sample], Path("model"), options, progress=ConsoleReporter())
    pack(result.directory, result.lens, target)
    shutil.copyfile(result.lens / PROBE_FILE, target.with_name(PROBE))
    print(result.quality)
    print(f"{target}: {target.stat().st_size / 1e6:.1f} MB")


def pack(model: Path, lens: Path, target: Path) -> None:
    """Put what is not fetched into one archive, the head in bfloat16."""
    head = load_file(model / HEAD_FILE)
    half = head["prototypes"].bfloat16()
    assert torch.equal(half.float(), head["prototypes"]), "the fit rounds its prototypes"
    small = model / f".{HEAD_FILE}"
    save_file(head | {"prototypes": half}, small, metadata={"format": "pt"})
    members = {HEAD_FILE: small, META_FILE: model / META_FILE}
    members |= {f"{ADAPTER}/{path.name}": path for path in (model / ADAPTER).iterdir()}
    members |= {f"{LENS}/{path.name}": path for path in lens.iterdir() if path.name not in LEFT_OUT}
    target.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(target, "w") as archive:
        for name in sorted(members):
            archive.writestr(
                zipfile.ZipInfo(name, STAMP), _content(members[name]), zipfile.ZIP_LZMA
            )
    small.unlink()


def write_probe(demo: Path, target: Path) -> None:
    """Write the probe of a demo that is there, as an index of it would."""
    model, _ = read_checkpoint(demo / "model")
    probe = Probe.of(model, Corpus.open(demo / "corpus"), "train", WINDOW)
    probe.save(target.parent)
    (target.parent / PROBE_FILE).replace(target)


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
