"""Where a run takes place, and in which precision."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from prismlm import __version__
from prismlm.errors import InputError
from prismlm.models.device import uses_bf16
from prismlm.training.recipe import Recipe


def device_of(recipe: Recipe) -> str:
    """Return the type of the device a recipe runs on here: cuda, mps or cpu.

    Raises:
        InputError: the recipe asks for a GPU, and torch finds none.
    """
    if recipe.device == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    if recipe.device == "cuda" and not torch.cuda.is_available():
        built = "" if torch.version.cuda else f" (torch {torch.__version__} is built without CUDA)"
        raise InputError(
            f"the recipe's device is cuda, and torch finds no CUDA GPU here{built}. Run it on a "
            "machine with one, or on this CPU with --set device=cpu."
        )
    return recipe.device


def resolved(recipe: Recipe) -> dict[str, str]:
    """Return what the settings that ask the machine come to here.

    Raises:
        InputError: bf16 is asked for on a GPU without it.
    """
    device = device_of(recipe) if recipe.device == "auto" else recipe.device
    precision = "bf16" if uses_bf16(recipe.precision, device) else "float32"
    return {"device": device, "precision": precision}


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python, of prismlm and of those packages that are installed."""
    found = {"prismlm": __version__, "python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # not installed, so not said
            continue
    return found
