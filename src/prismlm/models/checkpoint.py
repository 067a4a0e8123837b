"""Open a model directory: its Hugging Face model, tokenizer and prototype head.

Directories are not trusted: no code in them is run, and weights are read from safetensors only.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from prismlm.allocator import return_freed_memory
from prismlm.errors import (
    FormatError,
    InputError,
    check_path,
    check_text,
    first_line,
    no_panics,
    shown,
)
from prismlm.files import read_json
from prismlm.models.device import BALANCED, Placement, hold_embeddings
from prismlm.models.seam import lacks, output_embedding, sees_ahead, verify_logit_map
from prismlm.models.sidecar import HEAD_FILE, Sidecar, check_belongs, load_sidecar
from prismlm.models.uncertainty_feedback import UNCERTAINTY_FILE, has_uncertainty, load_uncertainty

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
KEYS_NAMED = 5


def read_checkpoint(
    path: Path | str, *, device: Placement = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Open a model in evaluation mode, and its tokenizer; a prototype head is ignored.

    An adapter in the directory is applied, and saved uncertainty feedback is attached.

    Raises:
        InputError: no such directory or device, a model that is not a decoder, weights in pickles
            only, or uncertainty feedback for a model that cannot use it.
        FormatError: the checkpoint is incomplete or damaged.
        ModuleNotFoundError: the model is to be spread over devices, without accelerate.
    """
    directory, spread = _check_directory(path), device == BALANCED or isinstance(device, Mapping)
    if spread:
        import accelerate  # noqa: F401

    torch_device = None if spread else _check_device(device)
    # Straight from the file to a GPU, without a copy of the whole model in memory.
    on_gpu = torch_device is not None and torch_device.type != "cpu"
    straight = on_gpu and importlib.util.find_spec("accelerate") is not None
    # For the process: cuDNN would plan attention for each cache length, slower than a token's rest.
    torch.backends.cuda.enable_cudnn_sdp(False)
    refuse_pickles(directory)
    has_adapter = _check_adapter(directory)
    if (directory / "config.json").is_file() and not any(map(any, map(directory.glob, TOKENIZERS))):
        raise FormatError(
            f"the model in {directory} has no tokenizer. Save the one it was trained with: "
            f"AutoTokenizer.from_pretrained(BASE).save_pretrained({str(directory)!r})."
        )
    with wrap_read_errors(directory):
        refuse_encoders(AutoConfig.from_pretrained(directory, trust_remote_code=False), directory)
        opened: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype="auto",
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            device_map=device if spread else {"": torch_device} if straight else None,
        )
        model, info = opened
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    _check_loaded(directory, model, info, has_adapter)
    if spread and hasattr(model, "hf_device_map"):
        hold_embeddings(model)
        return_freed_memory()
    elif torch_device is not None:
        model.to(torch_device)
    model.eval()
    if sees_ahead(model):
        raise _not_a_decoder(directory, model.config)
    if has_uncertainty(directory):
        load_uncertainty(directory, model)
    return model, tokenizer


class Checkpoint(NamedTuple):
    """A plain Hugging Face model in evaluation mode, with tokenizer and prototype head."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sidecar: Sidecar


def load_checkpoint(path: Path | str, *, device: Placement = "cpu") -> Checkpoint:
    """Open a model directory with its head, and check that the head belongs to the model.

    Raises:
        InputError: as :func:`read_checkpoint`.
        FormatError: no head, a damaged file, or files that do not belong together.
    """
    directory = _check_directory(path)
    sidecar = load_sidecar(directory)
    model, tokenizer = read_checkpoint(directory, device=device)
    check_belongs(sidecar, model, directory)
    verify_logit_map(model, sidecar.logit_map)
    sidecar.head.to(model.device)
    return Checkpoint(model, tokenizer, sidecar)


@contextmanager
def wrap_read_errors(directory: Path) -> Iterator[None]:
    """Turn errors of transformers in the block into a FormatError or InputError."""
    try:
        with quiet_transformers(), no_panics():
            yield
    except (InputError, MemoryError):
        raise
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"the model in {directory} does not fit into the memory of the GPU "
            f"({first_line(error)}): free it, choose another --device, or spread the model with "
            f"--device {BALANCED}."
        ) from error
    except Exception as error:  # transformers and tokenizers raise a dozen unrelated types here
        if "trust_remote_code" not in str(error):
            raise FormatError(f"the checkpoint in {directory} cannot be read: {error}") from error
        code = ", ".join(sorted(path.name for path in directory.glob("*.py")))
        raise InputError(
            f"the model in {directory} needs custom code ({code or 'from elsewhere'}), which "
            "prismlm does not run. Use a model that transformers has a class for."
        ) from error


def _check_directory(path: object) -> Path:
    directory = check_path("the model", path)
    if not directory.is_dir():
        raise InputError(f"{directory} is not a directory: `prismlm demo` makes a model.")
    refuse_adapter_alone(directory)
    return directory


def _check_device(name: object) -> torch.device:
    try:
        device = torch.device(check_text("the device", name))
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(
            f"the device {shown(name)} cannot be used ({first_line(error)}): expected cpu, cuda if "
            f"PyTorch finds a GPU, or {BALANCED} to spread the model over GPUs, CPU and disk."
        ) from error
    return device


def _check_loaded(directory: Path, model: Any, info: dict[str, Any], has_adapter: bool) -> None:
    """Raise FormatError unless all weights of model and adapter were loaded."""
    missing, unused = (sorted(info[f"{kind}_keys"]) for kind in ("missing", "unexpected"))
    if has_adapter:
        adapters = getattr(model, "peft_config", None)
        if unused or not adapters:
            raise FormatError(
                f"transformers does not apply the adapter in {directory} to "
                f"{type(model).__name__} ({', '.join(unused[:KEYS_NAMED]) or 'all of it'}): it is "
                f"for another model. Remove {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}."
            )
        # Then ``info`` covers only the adapter; transformers flags the weights that it loads, but
        # not always those that it quantises.
        stored = {key for file in directory.glob("*.safetensors") for key in _keys(file)}
        missing += [
            name
            for name, weight in model.named_parameters()
            if not hasattr(weight, "_is_hf_initialized")
            and name.replace(".base_layer.", ".") not in stored
            and not any(f".{adapter}." in f"{name}." for adapter in adapters)
        ]
    if missing:
        raise FormatError(
            f"the checkpoint in {directory} has no {', '.join(missing[:KEYS_NAMED])} for "
            f"{type(model).__name__}, which would be random. Save the whole model, with its "
            "language modelling head."
        )


def _keys(file: Path) -> list[str]:
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def refuse_adapter_alone(directory: Path) -> None:
    """Raise InputError for a directory with an adapter but without a model."""
    adapter = directory / ADAPTER_CONFIG
    if (directory / "config.json").is_file() or not adapter.is_file():
        return
    settings = read_json(adapter)
    base = settings.get("base_model_name_or_path") if isinstance(settings, dict) else None
    raise InputError(
        f"{directory} is a PEFT adapter of {base or 'an unnamed model'}, not a complete model: "
        "give the model that AutoPeftModelForCausalLM.from_pretrained(DIR).merge_and_unload() "
        "returns, saved with its tokenizer."
    )


def _check_adapter(directory: Path) -> bool:
    """Return whether the directory has an adapter; refuse one that transformers would ignore."""
    has_adapter = (directory / ADAPTER_CONFIG).is_file()
    if not has_adapter and (directory / ADAPTER_WEIGHTS).is_file():
        raise FormatError(
            f"{directory} has {ADAPTER_WEIGHTS} without {ADAPTER_CONFIG}: restore the latter, or "
            "remove the former."
        )
    if has_adapter and importlib.util.find_spec("peft") is None:
        raise InputError(f"{directory} has an adapter, {ADAPTER_CONFIG}: pip install peft.")
    return has_adapter


def refuse_pickles(directory: Path) -> None:
    """Raise InputError for weights in pickles only: loading a pickle can run any code."""
    pickles = [path.name for name in PICKLES for path in sorted(directory.glob(name))]
    safe = {path.name for path in directory.glob("*.safetensors")}
    if pickles and not safe - {ADAPTER_WEIGHTS, HEAD_FILE, UNCERTAINTY_FILE}:
        raise InputError(
            f"the weights in {directory} are in {pickles[0]}, a pickle, which can run any code "
            "when it is loaded. If you trust its source, convert it: AutoModelForCausalLM"
            f".from_pretrained({str(directory)!r}, use_safetensors=False).save_pretrained(OUT)."
        )


def refuse_encoders(config: PretrainedConfig, directory: Path) -> None:
    """Raise InputError unless transformers has a causal language model of this type."""
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise _not_a_decoder(directory, config)


def _not_a_decoder(directory: Path, config: PretrainedConfig) -> InputError:
    names = ", ".join(getattr(config, "architectures", None) or ["no architecture"])
    encoder_only = "encoder-only or not a language model"
    kind = "an encoder-decoder" if config.is_encoder_decoder else encoder_only
    return InputError(
        f"the model in {directory} is {kind}: {names}, model_type {config.model_type!r}. Expected "
        "a causal language model, such as a Llama."
    )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress the warnings and progress bars of transformers in the block."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def read_output_layer(directory: Path) -> Checkpoint:
    """Open a model directory with only the weights of final norm and output embedding.

    Directories with an adapter or uncertainty feedback are refused.
    """
    sidecar = load_sidecar(_check_directory(directory))
    if (directory / ADAPTER_CONFIG).is_file() or has_uncertainty(directory):
        raise InputError(
            f"{directory} has an adapter or uncertainty feedback, which change what the model "
            "computes: merge the adapter, or open the whole model with prismlm.load()."
        )
    refuse_pickles(directory)
    with wrap_read_errors(directory):
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        refuse_encoders(config, directory)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False).eval()
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        files = sorted(directory.glob("*.safetensors"))
        keys = {key: file for file in files for key in _keys(file)}
    for module in (output_embedding(model), _last_norm(model)):
        if module is not None:
            _fill(model, module, keys, directory)
    check_belongs(sidecar, model, directory)
    return Checkpoint(model.requires_grad_(False), tokenizer, sidecar)


def final_norm(model: PreTrainedModel) -> nn.Module:
    """Return the norm between the last layer and the output embedding."""
    norm = _last_norm(model)
    if norm is None:
        raise lacks(model, "recognisable final norm", "apply it, and pass normalised=True")
    return norm


def _last_norm(model: PreTrainedModel) -> nn.Module | None:
    """Return the last norm outside of the layers."""
    decoder: nn.Module = model.base_model
    while True:
        children = list(decoder.children())
        norms = [child for child in children if "norm" in type(child).__name__.lower()]
        if norms or len(children) != 1:
            return norms[-1] if norms else None
        decoder = children[0]


def _fill(
    model: PreTrainedModel, module: nn.Module, keys: dict[str, Path], directory: Path
) -> None:
    """Read the weights of one module from the files that have these ``keys``."""
    # A tied W is stored as the input embedding, and some checkpoints omit the decoder's prefix.
    tied = [model.get_input_embeddings()] if module is output_embedding(model) else []
    paths = [path for own in (module, *tied) for path, m in model.named_modules() if m is own]
    paths += [path.removeprefix(f"{model.base_model_prefix}.") for path in paths]
    state: dict[str, Tensor] = {}
    for key in module.state_dict():
        names = [f"{path}.{key}" for path in paths]
        name = next((name for name in names if name in keys), None)
        if name is None:
            raise FormatError(f"the checkpoint in {directory} has no {names[0]}.")
        with safe_open(keys[name], framework="pt") as file:
            state[key] = file.get_tensor(name)
    module.load_state_dict(state, assign=True)
