"""The files of a lens directory: names, schemas and the record of what it was built from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from torch import nn

import prismlm
from prismlm import fingerprints
from prismlm.errors import FormatError, InputError, StaleLensError
from prismlm.files import read_json, write_json
from prismlm.layers import PrototypeHead
from prismlm.models.sidecar import weight_of

FORMAT_VERSION = 1
META_FILE = "meta.json"
INDEX_FILE = "index.parquet"
CONTEXTS_FILE = "contexts.safetensors"
MASS_FILE = "mass.parquet"
PROTOTYPES_FILE = "prototypes.parquet"
GROUP_COLUMNS = ("source", "domain", "license")

INDEX_SCHEMA = pa.schema(
    [
        ("prototype", pa.int32()),
        ("rank", pa.int32()),
        ("cosine", pa.float32()),
        ("activation", pa.float32()),
        ("routed", pa.bool_()),
        ("position", pa.int64()),
        ("doc_id", pa.string()),
        ("source", pa.string()),
        ("domain", pa.string()),
        ("license", pa.string()),
        ("title", pa.string()),
        ("url", pa.string()),
        ("before", pa.string()),
        ("token", pa.string()),
        ("after", pa.string()),
    ]
)
MASS_SCHEMA = pa.schema(
    [
        ("prototype", pa.int32()),
        ("source", pa.string()),
        ("domain", pa.string()),
        ("license", pa.string()),
        ("tokens", pa.int64()),
        ("activation_sum", pa.float64()),
    ]
)
PROTOTYPES_SCHEMA = pa.schema(
    [
        ("prototype", pa.int32()),
        ("name", pa.string()),
        ("description", pa.string()),
        ("category", pa.string()),
        ("role", pa.string()),
        ("tags", pa.list_(pa.string())),
        ("top_tokens", pa.list_(pa.string())),
        ("top_values", pa.list_(pa.float32())),
        ("usage", pa.float64()),
        ("nearest_cosine", pa.float32()),
        ("x", pa.float32()),
        ("y", pa.float32()),
        ("label_source", pa.string()),
        ("label_score", pa.float32()),
    ]
)
SCHEMAS = {
    INDEX_FILE: INDEX_SCHEMA,
    MASS_FILE: MASS_SCHEMA,
    PROTOTYPES_FILE: PROTOTYPES_SCHEMA,
}


@dataclass(frozen=True)
class LensMeta:
    """What a lens was built from, and how.

    Attributes:
        weight, prototypes, tokenizer, corpus: fingerprints.
        corpus_name, corpus_path: where the text was; the path may have moved since.
        split: which documents were read: train, heldout or all.
        trained_on: whether this corpus is the one the model was trained on, if that is known.
        window, stride: the grid that gave each token its hidden state, in tokens.
        contexts: places kept per prototype, L.
        documents, tokens: how much was read. Ends of documents predict nothing and do not count.
        with_text: whether the index holds text, or offsets only.
    """

    weight: str
    prototypes: str
    tokenizer: str
    corpus: str
    corpus_name: str
    corpus_path: str
    split: str
    trained_on: bool | None
    window: int
    stride: int
    contexts: int
    documents: int
    tokens: int
    with_text: bool


def prototypes_fingerprint(head: PrototypeHead) -> str:
    """Fingerprint everything that decides routing: the bank, k and τ."""
    return fingerprints.of_json(
        [
            fingerprints.of_tensor(head.prototypes.detach().float()),
            head.prototypes_per_token,
            round(float(head.scale.detach()), 6),
        ]
    )


def write_meta(directory: Path, meta: LensMeta) -> None:
    """Write ``meta.json``."""
    value = {"format_version": FORMAT_VERSION, "prismlm": prismlm.__version__, **asdict(meta)}
    write_json(directory / META_FILE, value)


def read_meta(directory: Path) -> LensMeta:
    """Read ``meta.json``.

    Raises:
        FormatError: not a lens, incomplete, or of another version.
    """
    for name in (META_FILE, INDEX_FILE, CONTEXTS_FILE, MASS_FILE, PROTOTYPES_FILE):
        if not (directory / name).is_file():
            raise FormatError(
                f"{directory} is not a lens: it has no {name}. Build one with `prismlm index`."
            )
    value: dict[str, Any] = read_json(directory / META_FILE)
    if value.pop("format_version", None) != FORMAT_VERSION:
        raise FormatError(
            f"{directory} was written in another lens format. Build it again with `prismlm index`."
        )
    value.pop("prismlm", None)
    try:
        return LensMeta(**value)
    except TypeError as error:
        raise FormatError(f"{directory / META_FILE} cannot be read: {error}.") from error


def lens_summary(directory: Path) -> dict[str, int]:
    """Return how much a lens holds: tokens and documents read, and prototypes.

    ``with_contexts`` prototypes have at least one kept place, ``in_use`` were routed at least once.
    """
    meta = read_meta(directory)
    prototypes = pq.read_table(directory / PROTOTYPES_FILE, columns=["usage"])["usage"]
    kept = pq.read_table(directory / INDEX_FILE, columns=["prototype"])["prototype"]
    return {
        "tokens": meta.tokens,
        "documents": meta.documents,
        "prototypes": len(prototypes),
        "with_contexts": len(kept.unique()),
        "in_use": int((prototypes.to_numpy() > 0).sum()),
    }


def check_fresh(meta: LensMeta, directory: Path, model: nn.Module, head: PrototypeHead) -> None:
    """Refuse a lens that was built for other weights.

    Raises:
        StaleLensError: the output embedding or the prototypes have changed since.
    """
    stale = [
        what
        for what, then, now in (
            ("output embedding", meta.weight, fingerprints.of_tensor(weight_of(model))),
            ("prototypes", meta.prototypes, prototypes_fingerprint(head)),
        )
        if then != now
    ]
    if stale:
        raise StaleLensError(
            f"the lens {directory} was built for another model: the {' and the '.join(stale)} "
            "changed since. Build it again with `prismlm index MODEL --corpus DIR --overwrite`."
        )


def find_lens(model_directory: Path, lens: Path | str | None) -> Path | None:
    """Return the lens directory to use: the one named, or the only one under ``lens/``.

    Raises:
        InputError: several lenses and none named, or the named one does not exist.
    """
    if lens is not None:
        for candidate in (Path(lens), model_directory / "lens" / str(lens)):
            if candidate.is_dir():
                return candidate
        raise InputError(f"there is no lens {lens}. Build it with `prismlm index`.")
    root = model_directory / "lens"
    # A name that starts with a dot is a lens still being written.
    found = (
        sorted(p for p in root.iterdir() if p.is_dir() and p.name[0] != ".")
        if root.is_dir()
        else []
    )
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise InputError(f"{model_directory} has several lenses ({names}): choose one with --lens.")
    return found[0] if found else None
