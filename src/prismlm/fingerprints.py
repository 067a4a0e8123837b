"""Short content hashes that tie a lens to the weights, tokenizer and corpus it was built from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prismlm.files import json_text

if TYPE_CHECKING:
    import torch
    from torch import nn

LENGTH = 32
# Where it was read and by what.
NOT_OF_A_MODEL = ("_name_or_path", "transformers_version")


def of_bytes(*parts: bytes | memoryview) -> str:
    """Return the first 32 hexadecimal digits of the SHA-256 of the length-prefixed parts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:LENGTH]


def of_json(value: Any) -> str:
    """Fingerprint a JSON-serialisable value, independent of key order."""
    # Half a surrogate pair, which JSON can spell, is no text of UTF-8.
    return of_bytes(json_text(value, sort_keys=True).encode(errors="surrogatepass"))


def of_file(path: Path) -> str:
    """Fingerprint what a file holds; half a gigabyte a second."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:LENGTH]


def of_tensor(tensor: torch.Tensor) -> str:
    """Fingerprint a tensor's dtype, shape and bytes (device and strides do not matter)."""
    import torch

    # A copy: memory lent to numpy can never be resized again, which sharded models live by.
    plain = tensor.detach().cpu().contiguous().clone()
    header = f"{plain.dtype}{tuple(plain.shape)}".encode()
    return of_bytes(header, plain.view(-1).view(torch.uint8).numpy().data)


def of_model(module: nn.Module) -> str:
    """Fingerprint a model by every byte of its weights and by its configuration.

    Half a gigabyte a second. It tells what was computed with one model from what was computed with
    another; the same weights in another type are another model here.
    """
    config: Any = getattr(module, "config", None)
    settings = {} if config is None else config.to_dict()
    named = module.named_parameters()
    held = {part: of_tensor(one) for n, v in named for part, one in _held(n, v.detach())}
    kept = {key: str(value) for key, value in settings.items() if key not in NOT_OF_A_MODEL}
    return of_json([held, kept])


def _held(name: str, tensor: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a tensor with its name, or those that a quantised one holds: it has no elements."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor
        return
    for part in tensor.__tensor_flatten__()[0]:
        yield from _held(f"{name}.{part}", getattr(tensor, part))
