"""The files that make a Hugging Face checkpoint a prismlm model directory.

``prismlm.json`` describes the head and its base; ``prototype_head.safetensors`` has ``prototypes``
[K, d] and ``scale``, the positive τ itself. The checkpoint is not changed.
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
# For heads with fitted weights, which readers of versions 1 and 2 would weigh differently.
FITTED_VERSION = 3
META_FILE = "prismlm.json"
HEAD_FILE = "prototype_head.safetensors"


@dataclass(frozen=True)
class Base:
    """The checkpoint a head was made for.

    Attributes:
        name: its name or path when the head was made; empty for the checkpoint in the directory.
        revision: its revision on the hub, if any.
        fingerprint: of W.
        bfloat16: fingerprint of W rounded to bfloat16; such a copy of the model is accepted too.
    """

    name: str
    revision: str | None
    fingerprint: str
    bfloat16: str | None = None


@dataclass(frozen=True)
class Sidecar:
    """A prototype head with its base and provenance (recipe, corpus, steps, versions)."""

    head: PrototypeHead
    logit_map: LogitMap
    base: Base
    provenance: dict[str, Any] = field(default_factory=dict)


def base_of(model: nn.Module, weight: Tensor | None = None) -> Base:
    """Describe the checkpoint of a model; ``weight`` is the whole W of a sharded one."""
    config = getattr(model, "config", None)
    weight = weight_of(model) if weight is None else weight
    return Base(
        name=str(getattr(config, "name_or_path", "") or ""),
        revision=getattr(config, "_commit_hash", None),
        fingerprint=fingerprints.of_tensor(weight),
        bfloat16=fingerprints.of_tensor(weight.bfloat16()),
    )


def weight_of(model: nn.Module) -> Tensor:
    """Return W [V, d] in the dtype of the model."""
    weight = output_embedding(model).weight
    assert isinstance(weight, Tensor)
    return weight.detach()


def save_sidecar(directory: Path | str, sidecar: Sidecar) -> None:
    """Write the two files beside a checkpoint, the tensors first."""
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
    """Compare the weights of a model directory with the recorded fingerprints.

    Returns the number of compared files: 0 if an older prismlm wrote the directory. Raises
    FormatError for a file that has changed or is missing.
    """
    directory = Path(directory)
    recorded, now = read_json(directory / META_FILE).get("files", {}), _fingerprints(directory)
    for name, expected in recorded.items():
        if now.get(name) != expected:
            raise FormatError(
                f"{directory / name} is damaged, missing or another file: its fingerprint differs "
                "from the recorded one. Restore it, or train again."
            )
    return len(recorded)


def has_sidecar(directory: Path | str) -> bool:
    """Return whether a directory has a prototype head."""
    return (Path(directory) / META_FILE).is_file()


def load_sidecar(directory: Path | str, model: nn.Module | None = None) -> Sidecar:
    """Read the two files; with ``model``, check that the head was made for its weights.

    Raises FormatError for a file that is missing, damaged, of another version or another model.
    """
    directory = Path(directory)
    path, head_path = directory / META_FILE, directory / HEAD_FILE
    for file in (path, head_path):
        if not file.is_file():
            raise FormatError(
                f"{directory} has no {file.name}: expected a directory of `prismlm attach` (from "
                "a Hugging Face model), `prismlm train`, or `prismlm demo` (its folder model)."
            )
    meta = read_json(path)
    version = meta.get("format_version") if isinstance(meta, dict) else None
    if version not in (FORMAT_VERSION, FITTED_VERSION):
        raise FormatError(
            f"{path} has format version {version!r}; this prismlm reads {FORMAT_VERSION} and "
            f"{FITTED_VERSION}. Train again."
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
        check_belongs(sidecar, model, directory)
    return sidecar


def _read_head(path: Path, prototypes_per_token: int, weights: Weights) -> PrototypeHead:
    try:
        tensors = load_file(str(path))
        prototypes, scale = tensors["prototypes"], tensors["scale"].item()
        count, width = prototypes.shape
        if not torch.isfinite(prototypes).all() or not prototypes.any():
            raise ValueError("prototypes must be finite, and not all zero")
    except (KeyError, RuntimeError, ValueError, SafetensorError) as error:
        raise FormatError(f"the head {path} cannot be read: {error}. Attach again.") from error
    head = PrototypeHead(width, count, prototypes_per_token, scale=scale, weights=weights)
    with torch.no_grad():
        head.prototypes.copy_(prototypes)
    return head.eval().requires_grad_(False)


def check_belongs(sidecar: Sidecar, model: nn.Module, directory: Path) -> None:
    """Raise FormatError unless the head was made for the weights of a model."""
    base, weight = sidecar.base, weight_of(model)
    # The same values in a wider dtype, or a bfloat16 copy of a wider model.
    dtypes = (weight.dtype, torch.float32, torch.bfloat16, torch.float16)
    narrow = weight.dtype == torch.bfloat16 and fingerprints.of_tensor(weight) == base.bfloat16
    same = narrow or any(fingerprints.of_tensor(weight.to(t)) == base.fingerprint for t in dtypes)
    if not same or sidecar.head.width != weight.shape[1]:
        raise FormatError(
            f"the output embedding of the model in {directory}, {list(weight.shape)}, is not the "
            f"one its prototypes of width {sidecar.head.width} were trained with. Restore the "
            "original weights, or train the head again."
        )
