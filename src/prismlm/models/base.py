"""Finding the checkpoint that a head is attached to, and copying it into a model directory."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from prismlm.errors import FormatError, InputError, first_line
from prismlm.files import link_or_copy, read_json, room_to_write, share
from prismlm.hub import download
from prismlm.models.checkpoint import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    quiet_transformers,
    read_checkpoint,
    refuse_adapter_alone,
    refuse_pickles,
)
from prismlm.models.sidecar import HEAD_FILE, META_FILE

# Settings of an adapter that change the product B A.
NOT_MERGED = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
PREFIX, DOWN, UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
CONFIG_FILE = "config.json"
# Files of a head and its training run, which are not part of the base.
OURS = (META_FILE, HEAD_FILE, "training.json", "attach.json")
# Files of a checkpoint without custom code.
KINDS = (".safetensors", ".json", ".model", ".txt", ".jinja")
WAY_OUT = "Make room, or choose another --out."


@torch.no_grad()
def merge_adapter(model: nn.Module, directory: Path) -> None:
    """Merge an adapter saved by PEFT: W ← W + (α / r) · B A, in float64, rounded once.

    With A and B in bfloat16 the result is practically exact, and so the same on all machines.
    """
    for name, update in adapter_updates(model, directory):
        weight = model.get_parameter(name)
        weight.copy_(weight.double() + update)


def adapter_updates(model: nn.Module, directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each weight that an adapter changes and its change, float64."""
    config = read_json(directory / ADAPTER_CONFIG)
    path = directory / ADAPTER_WEIGHTS
    try:
        tensors = load_file(path)
        scale = config["lora_alpha"] / config["r"]
        pairs = {name: tensors[name.removesuffix(DOWN) + UP] for name in tensors if DOWN in name}
    except (OSError, SafetensorError, KeyError, TypeError, ArithmeticError) as error:
        raise FormatError(f"the adapter {path} is damaged ({error!r}).") from error
    modules = dict(model.named_modules())
    unsupported = [name for name in tensors if not name.endswith((DOWN, UP))]
    unsupported += [f"{key} in {ADAPTER_CONFIG}" for key in NOT_MERGED if config.get(key)]
    if unsupported:
        raise FormatError(
            f"the adapter {path} is not plain LoRA, and cannot be merged: {unsupported[0]}."
        )
    for name, up in pairs.items():
        place = name.removeprefix(PREFIX).removesuffix(DOWN)
        module = modules.get(place)
        weight = getattr(module, "weight", None)
        update = scale * (up.double() @ tensors[name].double())
        # GPT-2's layers have transposed weights.
        update = update.T if type(module).__name__ == "Conv1D" else update
        if not isinstance(weight, Tensor) or weight.shape != update.shape:
            raise FormatError(f"the adapter {path} is of another model: {name} fits no weight.")
        yield f"{place}.weight", update.to(weight.device)


@dataclass(frozen=True)
class BaseCheckpoint:
    """The name of a model, its directory or GGUF file, and its commit on the hub."""

    name: str
    path: Path
    revision: str | None = None

    @property
    def is_gguf(self) -> bool:
        """Whether it is a GGUF file, which must be converted."""
        return self.path.is_file()


def find_base(name: str, revision: str | None = None) -> BaseCheckpoint:
    """Find a checkpoint: a directory, a GGUF file, or a name on the hub, which is downloaded."""
    path = Path(name)
    if path.is_file():
        return BaseCheckpoint(name, path)
    patterns = [f"*{kind}" for kind in KINDS]
    directory = path if path.is_dir() else download(name, revision, patterns)
    refuse_adapter_alone(directory)
    refuse_pickles(directory)
    names = [file.name for file in _files_of(directory)]
    if CONFIG_FILE not in names or not any(name.endswith(".safetensors") for name in names):
        raise InputError(
            f"{directory} has no {CONFIG_FILE} or no weights: expected the directory of a Hugging "
            "Face checkpoint, with config.json and model.safetensors, a .gguf file, or a name on "
            "the hub."
        )
    return BaseCheckpoint(name, directory, None if directory == path else directory.name)


def put_base(base: BaseCheckpoint, out: Path) -> None:
    """Copy a checkpoint's files into ``out``, config.json last; nothing if it is there already.

    Weights are hard-linked if possible, since nothing writes to them again. A GGUF file is
    converted to float32.
    """
    if (out / CONFIG_FILE).is_file():
        return
    with _putting(f"the files of {base.name}", out) as directory:
        if base.is_gguf:
            model, tokenizer = _read_gguf(base.path)
            model.save_pretrained(directory)
            tokenizer.save_pretrained(directory)
            share(directory)
        else:
            _copy(_files_of(base.path), directory)


def put_adapted(base: Path, adapter: Path, out: Path) -> None:
    """Write a checkpoint with an adapter merged into its weights to ``out``; see put_base."""
    if (out / CONFIG_FILE).is_file():
        return
    model, _ = read_checkpoint(base)
    merge_adapter(model, adapter)
    with _putting("the fine-tuned model", out) as directory:
        model.save_pretrained(directory)
        share(directory)
        others = [path for path in _files_of(base) if "safetensors" not in path.name]
        _copy([path for path in others if not (directory / path.name).exists()], directory)


@contextmanager
def _putting(what: str, out: Path) -> Iterator[Path]:
    """Yield a directory, whose files are moved into ``out`` after the block, config.json last."""
    out.mkdir(parents=True, exist_ok=True)
    temporary = TemporaryDirectory(dir=out, prefix=".")
    with room_to_write(what, out, WAY_OUT), quiet_transformers(), temporary as directory:
        yield Path(directory)
        for file in _files_of(Path(directory)):
            os.replace(file, out / file.name)


def _files_of(directory: Path) -> list[Path]:
    """Return the files of a checkpoint, config.json last."""
    paths = [path for path in directory.iterdir() if path.suffix in KINDS and path.name not in OURS]
    return sorted(paths, key=lambda path: (path.name == CONFIG_FILE, path.name))


def _copy(files: list[Path], directory: Path) -> None:
    for file in files:
        put = link_or_copy if file.suffix == ".safetensors" else shutil.copy
        put(file, directory / file.name)


def _read_gguf(path: Path) -> tuple[Any, Any]:
    """Open a GGUF file as a float32 model, with its tokenizer."""
    where: dict[str, Any] = {"gguf_file": path.name}
    try:
        # Its progress bars, which cannot be disabled, go to stderr.
        with redirect_stderr(io.StringIO()):
            model: Any = AutoModelForCausalLM.from_pretrained(
                path.parent, **where, dtype=torch.float32
            )
            tokenizer = AutoTokenizer.from_pretrained(path.parent, **where)
    except Exception as error:  # the readers raise a dozen unrelated types here
        raise FormatError(
            f"the GGUF file {path} cannot be read ({first_line(error)}). Is it complete, and of a "
            "causal language model that transformers supports?"
        ) from error
    # A quantised model cannot be saved.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config._name_or_path = path.stem
    return model, tokenizer
