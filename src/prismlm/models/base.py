"""The checkpoint that a head is attached to: found, and put into a directory of its own."""

from __future__ import annotations

import importlib.util
import io
import os
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from prismlm.errors import FormatError, InputError, first_line
from prismlm.files import atomic_directory, read_json, room_to_write, share, temporary_sibling
from prismlm.hub import silence
from prismlm.models.checkpoint import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    quiet_transformers,
    read_checkpoint,
    refuse_adapter_alone,
    refuse_pickles,
)
from prismlm.models.sidecar import HEAD_FILE, META_FILE

# Of an adapter's configuration: what changes the product.
NOT_MERGED = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
PREFIX, DOWN, UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
CONFIG_FILE = "config.json"
GGUF = ".gguf"
# Of the head that a model directory has already, and of the run that wrote it.
OURS = (META_FILE, HEAD_FILE, "training.json", "attach.json")
# What a checkpoint without code of its own consists of.
KINDS = (".safetensors", ".json", ".model", ".txt", ".jinja")
WAY_OUT = "Make room, or choose another --out."


@torch.no_grad()
def merge_adapter(model: nn.Module, directory: Path) -> None:
    """Add an adapter that PEFT saved to the float weights of the model it was trained on.

        W ← W + (α / r) · B A

    in float64, rounded once. A and B are kept in bfloat16: their products are exact then, and
    their sums as good as exact, so that weights are the same bits whoever merges them.

    Raises:
        FormatError: the adapter is damaged, or of another model.
    """
    config = read_json(directory / ADAPTER_CONFIG)
    path = directory / ADAPTER_WEIGHTS
    try:
        tensors = load_file(path)
        scale = config["lora_alpha"] / config["r"]
        pairs = {name: tensors[name.removesuffix(DOWN) + UP] for name in tensors if DOWN in name}
    except (OSError, SafetensorError, KeyError, TypeError, ArithmeticError) as error:
        raise FormatError(f"the adapter {path} is damaged or no adapter ({error!r}).") from error
    modules = dict(model.named_modules())
    left = [name for name in tensors if not name.endswith((DOWN, UP))]
    left += [f"{key} in {ADAPTER_CONFIG}" for key in NOT_MERGED if config.get(key)]
    if left:
        raise FormatError(f"the adapter {path} is more than plain LoRA, and not merged: {left[0]}.")
    for name, up in pairs.items():
        module = modules.get(name.removeprefix(PREFIX).removesuffix(DOWN))
        weight = getattr(module, "weight", None)
        added = scale * (up.double() @ tensors[name].double())
        # GPT-2's layers keep their weight the other way round.
        added = added.T if type(module).__name__ == "Conv1D" else added
        if not isinstance(weight, Tensor) or weight.shape != added.shape:
            raise FormatError(f"the adapter {path} is of another model: {name} fits no weight.")
        weight.copy_(weight.double() + added)


@dataclass(frozen=True)
class BaseCheckpoint:
    """Where a model is.

    Attributes:
        name: as it was asked for.
        path: a directory of checkpoint files, or a GGUF file.
        revision: the commit of a model from the hub.
    """

    name: str
    path: Path
    revision: str | None = None

    @property
    def is_gguf(self) -> bool:
        """Whether it is a GGUF file, which has to be converted."""
        return self.path.suffix == GGUF


def find_base(name: str, revision: str | None = None) -> BaseCheckpoint:
    """Return where the model ``name`` is; one of the hub is fetched unless its cache has it.

    Args:
        name: a directory, a GGUF file or a name on the Hugging Face hub.
        revision: a branch, tag or commit on the hub.

    Raises:
        InputError: there is none, none with weights that can be read, or a file of it is a link
            that leads out of its directory.
    """
    path = Path(name)
    if path.is_file():
        if path.suffix != GGUF:
            raise InputError(
                f"{name} is a file and no GGUF file: give a directory with config.json and "
                "safetensors, a .gguf file, or a name on the Hugging Face hub."
            )
        if importlib.util.find_spec("gguf") is None:
            raise InputError(f"{name} is a GGUF file: to read it, pip install 'prismlm[gguf]'.")
        return BaseCheckpoint(name, path)
    directory = path if path.is_dir() else _fetched(name, revision)
    refuse_adapter_alone(directory)
    if not (directory / CONFIG_FILE).is_file():
        raise InputError(
            f"{directory} has no {CONFIG_FILE}: expected the directory of a Hugging Face "
            "checkpoint, a .gguf file, or a name on the hub."
        )
    refuse_pickles(directory)
    if not any(file.suffix == ".safetensors" for file in _files_of(directory)):
        raise InputError(f"{directory} has no weights: expected model.safetensors.")
    return BaseCheckpoint(name, directory, None if directory == path else directory.name)


def _fetched(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [f"*{kind}" for kind in KINDS]
    silent = silence()
    # Of a hub that does not answer, what its cache has.
    options: dict[str, Any] = {"allow_patterns": patterns, "local_files_only": silent is not None}
    try:
        return Path(snapshot_download(name, revision=revision, **options))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise InputError(
            f"{name} is no directory or file here, and could not be fetched from the Hugging Face "
            f"hub ({silent or first_line(error)}). Check the name, such as "
            "HuggingFaceTB/SmolLM2-135M, and the network, or give a directory."
        ) from error


def put_base(base: BaseCheckpoint, out: Path) -> None:
    """Put a checkpoint's files into ``out``; config.json last, so that one is whole that has it.

    Weights of a directory are linked where the file system can, since nothing writes to them
    again, and all else is copied; a GGUF file is converted, its weights as they are read from it,
    in float32. What is there already stays.

    Raises:
        FormatError: the GGUF file cannot be read.
        PrismError: the disk is full.
    """
    if (out / CONFIG_FILE).is_file():
        return
    out.mkdir(parents=True, exist_ok=True)
    with room_to_write(f"the files of {base.name}", out, WAY_OUT):
        if base.is_gguf:
            model, tokenizer = _read_gguf(base.path)
            _save(out, model, lambda made: tokenizer.save_pretrained(made))
        else:
            _place(_files_of(base.path), out)


def put_adapted(base: Path, adapter: Path, out: Path) -> None:
    """Put a checkpoint with an adapter merged into its weights into ``out``; config.json last.

    Raises:
        FormatError: the adapter is damaged, or of another model.
        PrismError: the disk is full.
    """
    if (out / CONFIG_FILE).is_file():
        return
    model, _ = read_checkpoint(base)
    merge_adapter(model, adapter)

    def place_rest(made: Path) -> None:
        rest = [one for one in _files_of(base) if not (made / one.name).exists()]
        _place([one for one in rest if "safetensors" not in one.name], made)

    with room_to_write("the fine-tuned model", out, WAY_OUT):
        _save(out, model, place_rest)


def _save(out: Path, model: Any, beside: Callable[[Path], Any]) -> None:
    """Save a model, and what ``beside`` writes into its directory, into ``out``."""
    made = out / ".made"
    with quiet_transformers(), atomic_directory(made) as temporary:
        model.save_pretrained(temporary)
        beside(temporary)
        share(temporary)
    for file in _files_of(made):
        os.replace(file, out / file.name)
    shutil.rmtree(made)


def _files_of(directory: Path) -> list[Path]:
    """Return the files of a checkpoint, config.json last.

    A link may not lead out of the directory, nor out of its repository in the hub's cache, where
    ``snapshots/COMMIT/FILE`` links to ``blobs/HASH``.
    """
    root = directory.resolve()
    if root.parent.name == "snapshots" and (root.parent.parent / "blobs").is_dir():
        root = root.parent.parent
    paths = [
        path
        for path in sorted(directory.iterdir())
        if path.is_file() and path.suffix in KINDS and path.name not in OURS
    ]
    for path in paths:
        if not (target := path.resolve()).is_relative_to(root):
            raise InputError(
                f"{path} is a link to {target}, which is not in {root}: put the file itself there."
            )
    return sorted(paths, key=lambda path: path.name == CONFIG_FILE)


def _place(files: list[Path], out: Path) -> None:
    for file in files:
        hidden = temporary_sibling(out / file.name)
        try:
            if file.suffix == ".safetensors":
                with suppress(OSError):
                    os.link(file.resolve(), hidden)
            if not hidden.exists():
                # With its permissions: what was private stays so.
                shutil.copy(file, hidden)
            os.replace(hidden, out / file.name)
        finally:
            hidden.unlink(missing_ok=True)


def _read_gguf(path: Path) -> tuple[Any, Any]:
    """Open a GGUF file as a model of plain float32 weights, with its tokenizer."""
    where: dict[str, Any] = {"gguf_file": path.name}
    try:
        # Its own bars, which no setting of transformers turns off, go to stderr.
        with quiet_transformers(), redirect_stderr(io.StringIO()):
            model: Any = AutoModelForCausalLM.from_pretrained(
                path.parent, **where, dtype=torch.float32
            )
            tokenizer = AutoTokenizer.from_pretrained(path.parent, **where)
    except Exception as error:  # the readers raise a dozen unrelated types here
        raise FormatError(
            f"the GGUF file {path} cannot be read ({first_line(error)}). Is it whole, and of a "
            "causal language model that transformers knows?"
        ) from error
    # As a quantised model it would refuse to be saved.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config._name_or_path = path.stem
    return model, tokenizer
