"""The files that make a Hugging Face checkpoint a prismlm model directory.

``prismlm.json`` says what the head belongs to; ``prototype_head.safetensors`` holds ``prototypes``
[K, d] and ``scale``, the positive τ itself. The checkpoint beside them is not touched.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from prismlm import fingerprints
from prismlm.errors import FormatError
from prismlm.files import atomic_file, check_json, from_json, read_json, write_json
from prismlm.layers import PrototypeHead
from prismlm.layers.prototype_head import Weights
from prismlm.models.seam import LogitMap, output_embedding

FORMAT_VERSION = 1
# Of a head whose weights are fitted: what reads version 1 alone would weigh by cosines, and what
# reads version 2 would fit them to the nearest prototypes.
FITTED_VERSION = 3
META_FILE = "prismlm.json"
HEAD_FILE = "prototype_head.safetensors"


@dataclass(frozen=True)
class Base:
    """The checkpoint a head was made for.

    Attributes:
        name: its name or path when the head was made; empty for the checkpoint in the directory.
        revision: the hub revision, if it came from one.
        fingerprint: of its output embedding's weight.
        bfloat16: of the same rounded to it, in which a copy of the model belongs to the head too.
    """

    name: str
    revision: str | None
    fingerprint: str
    bfloat16: str | None = None


@dataclass(frozen=True)
class Sidecar:
    """A head with what it belongs to.

    Attributes:
        head: the prototype head, on the CPU, in evaluation mode.
        logit_map: what the base does after its output embedding.
        base: the checkpoint it was made for.
        provenance: how it was made: recipe, corpus, steps, versions.
    """

    head: PrototypeHead
    logit_map: LogitMap
    base: Base
    provenance: dict[str, Any] = field(default_factory=dict)


def base_of(model: nn.Module) -> Base:
    """Describe the checkpoint that ``model`` was loaded from or will be saved as."""
    config = getattr(model, "config", None)
    return Base(
        name=str(getattr(config, "name_or_path", "") or ""),
        revision=getattr(config, "_commit_hash", None),
        fingerprint=fingerprints.of_tensor(weight_of(model)),
        bfloat16=fingerprints.of_tensor(weight_of(model).bfloat16()),
    )


def weight_of(model: nn.Module) -> Tensor:
    """Return W [V, d], as the model stores it."""
    weight = output_embedding(model).weight
    assert isinstance(weight, Tensor)
    return weight.detach()


def save_sidecar(directory: Path | str, sidecar: Sidecar) -> None:
    """Write the two files beside a checkpoint, the tensors before the file that names them."""
    directory = Path(directory)
    head = sidecar.head
    tensors = {
        "prototypes": head.prototypes.detach().float().cpu().contiguous(),
        "scale": head.scale.detach().float().cpu().reshape(()),
    }
    with atomic_file(directory / HEAD_FILE) as temporary:
        save_file(tensors, str(temporary), metadata={"format": "pt"})
    meta = {
        "format_version": FITTED_VERSION if head.weights == "fitted" else FORMAT_VERSION,
        "base": asdict(sidecar.base),
        "prototypes_per_token": head.prototypes_per_token,
        "weights": head.weights,
        "logit_map": asdict(sidecar.logit_map),
        "provenance": sidecar.provenance,
        "files": _fingerprints(directory),
    }
    write_json(directory / META_FILE, meta)


def _fingerprints(directory: Path) -> dict[str, str]:
    weights = sorted(directory.glob("*.safetensors"))
    return {path.name: fingerprints.of_file(path) for path in weights}


def verify_weights(directory: Path | str) -> int:
    """Read the weights of a model directory and compare them with what was written.

    Returns:
        How many files were compared: 0 for a directory that an older prismlm wrote.

    Raises:
        FormatError: a file has changed since, or is missing.
    """
    directory = Path(directory)
    meta = read_json(directory / META_FILE)
    written = meta.get("files", {}) if isinstance(meta, dict) else {}
    found = _fingerprints(directory)
    for name, expected in written.items():
        if found.get(name) != expected:
            raise FormatError(
                f"{directory / name} is damaged, missing or another file: it does not hold what "
                "was written. Put it back from where the model came, or train again."
            )
    return len(written)


def has_sidecar(directory: Path | str) -> bool:
    """Say whether a directory holds a prototype head."""
    return (Path(directory) / META_FILE).is_file()


def load_sidecar(directory: Path | str, model: nn.Module | None = None) -> Sidecar:
    """Read the two files; with ``model``, check that the head was made for its weights.

    Raises:
        FormatError: a file is missing, damaged, of a newer version, or made for other weights.
    """
    directory = Path(directory)
    path, head_path = directory / META_FILE, directory / HEAD_FILE
    for file in (path, head_path):
        if not file.is_file():
            raise FormatError(
                f"{directory} has no {file.name}, so it is not a prismlm model directory. "
                "Train one with `prismlm train` or make one with `prismlm demo`."
            )
    meta = read_json(path)
    version = meta.get("format_version") if isinstance(meta, dict) else None
    if version not in (FORMAT_VERSION, FITTED_VERSION):
        raise FormatError(
            f"{path} has format version {version!r}; this prismlm reads {FORMAT_VERSION} and "
            f"{FITTED_VERSION}. Use the prismlm that wrote it, or train again."
        )
    meta = {"provenance": {}, "base": None, "logit_map": None, "weights": "cosine"} | meta
    types = {"prototypes_per_token": int, "provenance": dict[str, Any], "weights": Weights}
    check_json(meta, types, str(path))
    sidecar = Sidecar(
        _read_head(head_path, meta["prototypes_per_token"], meta["weights"]),
        from_json(LogitMap, meta["logit_map"], f"{path}: logit_map"),
        from_json(Base, meta["base"], f"{path}: base"),
        meta["provenance"],
    )
    if model is not None:
        _check_belongs(sidecar, weight_of(model), directory)
    return sidecar


def _read_head(path: Path, prototypes_per_token: int, weights: Weights) -> PrototypeHead:
    try:
        tensors = load_file(str(path))
        prototypes, scale = tensors["prototypes"], tensors["scale"].item()
    except (KeyError, RuntimeError, SafetensorError) as error:
        raise FormatError(f"the head {path} cannot be read: {error}.") from error
    if prototypes.ndim != 2 or not torch.isfinite(prototypes).all() or not prototypes.any():
        raise FormatError(f"{path} must hold finite prototypes [K, d], not all zero. Attach again.")
    count, width = prototypes.shape
    head = PrototypeHead(width, count, prototypes_per_token, scale=scale, weights=weights)
    with torch.no_grad():
        head.prototypes.copy_(prototypes)
    return head.eval().requires_grad_(False)


def _check_belongs(sidecar: Sidecar, weight: Tensor, directory: Path) -> None:
    base = sidecar.base
    # The same numbers in a wider type, or those in bfloat16 where the head was made for wider ones.
    types = (weight.dtype, torch.float32, torch.bfloat16, torch.float16)
    narrow = weight.dtype == torch.bfloat16 and fingerprints.of_tensor(weight) == base.bfloat16
    same = narrow or any(fingerprints.of_tensor(weight.to(t)) == base.fingerprint for t in types)
    if not same or sidecar.head.width != weight.shape[1]:
        raise FormatError(
            f"the output embedding of the model in {directory}, {list(weight.shape)}, is not the "
            f"one its prototypes of width {sidecar.head.width} were trained with. Put the original "
            "weights back, or train the head again."
        )
