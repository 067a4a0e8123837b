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
# Configuration that does not affect what a model computes.
IGNORED_CONFIG = ("_name_or_path", "transformers_version")


def of_bytes(*parts: bytes | memoryview) -> str:
    """Return the first 32 hexadecimal digits of the SHA-256 of the length-prefixed parts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:LENGTH]


def of_json(value: Any) -> str:
    """Fingerprint a JSON-serialisable value, independent of key order."""
    # JSON can contain lone surrogates, which UTF-8 cannot encode.
    return of_bytes(json_text(value, sort_keys=True).encode(errors="surrogatepass"))


def of_file(path: Path) -> str:
    """Fingerprint the contents of a file; half a gigabyte a second."""
    with path.open("rb") as file:
        return of_stream(file)


def of_stream(file: Any) -> str:
    """Fingerprint the rest of an open file."""
    return hashlib.file_digest(file, "sha256").hexdigest()[:LENGTH]


def of_tensor(tensor: torch.Tensor) -> str:
    """Fingerprint a tensor's dtype, shape and bytes, regardless of device and strides."""
    import torch

    # A copy: memory shared with numpy can never be resized again, which sharded models need.
    plain = tensor.detach().cpu().contiguous().clone()
    header = f"{plain.dtype}{tuple(plain.shape)}".encode()
    return of_bytes(header, plain.view(-1).view(torch.uint8).numpy().data)


def of_model(module: nn.Module) -> str:
    """Fingerprint a model by all bytes of its weights and its configuration.

    Half a gigabyte a second. The same weights in another dtype are another model.
    """
    config: Any = getattr(module, "config", None)
    settings = {} if config is None else config.to_dict()
    weights = {
        part: of_tensor(tensor)
        for name, parameter in module.named_parameters()
        for part, tensor in _plain_tensors(name, _in_memory(module, name, parameter).detach())
    }
    config = {key: str(value) for key, value in settings.items() if key not in IGNORED_CONFIG}
    return of_json([weights, config])


def _in_memory(module: nn.Module, name: str, parameter: torch.Tensor) -> torch.Tensor:
    """Return a weight, read anew if accelerate has left it on disk."""
    if not parameter.is_meta:
        return parameter
    from accelerate.utils import align_module_device

    path, _, own = name.rpartition(".")
    part = module.get_submodule(path)
    with align_module_device(part):
        return getattr(part, own).detach().clone()


def _plain_tensors(name: str, tensor: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a tensor with its name, or the tensors that a quantised one consists of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor
        return
    for part in tensor.__tensor_flatten__()[0]:
        yield from _plain_tensors(f"{name}.{part}", getattr(tensor, part))
