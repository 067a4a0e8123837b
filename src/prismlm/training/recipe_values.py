"""A recipe from plain values; what is not understood is an error, never ignored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from prismlm.errors import InputError, suggest
from prismlm.training.recipe import Recipe

# The tokenizer decides these.
FROM_CORPUS = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")


def recipe_from(settings: dict[str, Any], source: str, origin: dict[str, str]) -> Recipe:
    """Build a recipe from plain values, without a look at what it may be searched over.

    Raises:
        InputError: an unknown or missing key, a value of another type or out of range.
    """
    try:
        recipe = Recipe.model_validate(settings)
    except ValidationError as error:
        messages = [_explain(item, source, origin) for item in error.errors()]
        raise InputError("\n".join(dict.fromkeys(messages))) from None
    _check_model(recipe, source, origin)
    return recipe


def _explain(item: Any, source: str, origin: dict[str, str]) -> str:
    """Turn one of pydantic's findings into a sentence that names file, key and remedy."""
    location = [str(part) for part in item["loc"]]
    key = ".".join(location)
    where = next((o for k, o in origin.items() if key == k or key.startswith(k + ".")), source)
    section = section_of(location[:-1])
    known = list(section.model_fields)
    if item["type"] == "extra_forbidden":
        inside = f" in {'.'.join(location[:-1])}" if location[1:] else ""
        return (
            f"{where}: there is no setting {key!r}.{suggest(location[-1], known)} "
            f"Known{inside}: {', '.join(known)}."
        )
    field = section.model_fields.get(location[-1]) if location else None
    meaning = f" ({field.description})" if field is not None and field.description else ""
    if item["type"] == "missing":
        return f"{where}: {key} is missing{meaning}. Add it."
    if item["type"] == "value_error":
        return f"{where}: {key + ': ' if key else ''}{str(item['ctx']['error']).rstrip('.')}."
    wanted = item["msg"].replace("Input should be", "expected")
    return f"{where}: {key} is {describe(item['input'])}; {wanted}{meaning}."


def section_of(path: Sequence[str]) -> type[BaseModel]:
    """Return the innermost section on the path to a key, one that may be left out too."""
    section: type[BaseModel] = Recipe
    for name in path:
        field = section.model_fields.get(name)
        kinds = () if field is None else (field.annotation, *get_args(field.annotation))
        inner = (k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel))
        section = next(inner, section)
    return section


def flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values with the path of each as its key: ``a.b``."""
    found: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            found |= flat(item, f"{prefix}{key}.")
        else:
            found[prefix + key] = item
    return found


def describe(value: Any) -> str:
    """Return a value as messages show it."""
    if isinstance(value, dict):
        return "a section"
    return "nothing" if value is None else repr(value)


def _check_model(recipe: Recipe, source: str, origin: dict[str, str]) -> None:
    """Build the model without weights, so that a wrong key fails now and not after packing."""
    import torch

    from prismlm.models.presets import build_config, build_model

    for key in FROM_CORPUS:
        if key in recipe.model:
            raise InputError(
                f"{origin.get(f'model.{key}', source)}: model.{key} comes from the corpus's "
                "tokenizer. Leave it out."
            )
    try:
        config = build_config(dict(recipe.model), vocab_size=64, eos_token_id=0)
        with torch.device("meta"):
            build_model(config)
    except InputError as error:
        named = next((o for k, o in origin.items() if repr(k) in str(error)), source)
        raise InputError(f"{named}: {error}") from error
    except Exception as error:
        # Configuration classes of other families raise whatever they like, of whatever key.
        given = [o for k, o in origin.items() if k.split(".")[0] == "model"]
        where = ", ".join(given) or source
        raise InputError(f"{where}: model cannot be built from {recipe.model}: {error}") from error
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and recipe.data.length > positions:
        raise InputError(
            f"{source}: data.length is {recipe.data.length}, and the model has positions for "
            f"{positions} tokens. Lower it, or raise model.max_position_embeddings."
        )
