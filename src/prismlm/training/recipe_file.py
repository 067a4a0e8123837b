"""A recipe from YAML or plain values: what is not understood is an error, never ignored."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from prismlm.errors import InputError, suggest
from prismlm.files import read_text
from prismlm.training.recipe import Range, Recipe

# The tokenizer decides these.
FROM_CORPUS = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
# The tag of YAML's key <<.
MERGE = "tag:yaml.org,2002:merge"


def load_recipe(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe, with single values replaced by ``a.b=value`` overrides, parsed as YAML.

    Raises:
        InputError: no such file, not YAML, a key twice, an unknown or missing key, a value of
            another type or out of range. It names the file, the dotted key and what is allowed.
    """
    file = Path(path)
    settings = _parse(read_text(file), str(file))
    if not isinstance(settings, dict):
        raise InputError(
            f"{file} holds {settings!r}; expected keys such as corpus, out, model, steps."
        )
    for override in overrides:
        _override(settings, override)
    return build_recipe(settings, str(file))


def build_recipe(settings: dict[str, Any], source: str = "recipe") -> Recipe:
    """Build a recipe from plain values; errors name ``source`` and the dotted key.

    Raises:
        InputError: as :func:`load_recipe`.
    """
    try:
        recipe = Recipe.model_validate(settings)
    except ValidationError as error:
        messages = [f"{source}: {_explain(item)}" for item in error.errors()]
        raise InputError("\n".join(dict.fromkeys(messages))) from None
    _check_model(recipe, source)
    return recipe


def _explain(item: Any) -> str:
    """Turn one of pydantic's findings into a sentence that names key and remedy."""
    location = [str(part) for part in item["loc"]]
    key = ".".join(location)
    known = list(section_of(location[:-1]).model_fields)
    if item["type"] == "extra_forbidden":
        return (
            f"there is no setting {key!r}.{suggest(location[-1], known)} "
            f"Known there: {', '.join(known)}."
        )
    if item["type"] == "value_error":
        return f"{key + ': ' if key else ''}{item['ctx']['error']}."
    described = ""
    for depth, name in enumerate(location):
        # Of the innermost part that says what it is for.
        field = section_of(location[:depth]).model_fields.get(name)
        described = " ".join(((field and field.description) or described).split())
    meaning = f" ({described})" if described else ""
    if item["type"] == "missing":
        return f"{key} is missing{meaning}. Add it."
    wanted = item["msg"].replace("Input should be", "expected")
    return f"{key} is {item['input']!r}; {wanted}{meaning}."


def section_of(path: Sequence[str]) -> type[BaseModel]:
    """Return the innermost section on the path to a key, one that may be left out too."""
    section: type[BaseModel] = Recipe
    for name in path:
        field = section.model_fields.get(name)
        kinds = () if field is None else (field.annotation, *get_args(field.annotation))
        inner = (k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel))
        # Pydantic names which form an entry of search.space has.
        section = Range if name == "range" else next(inner, section)
    return section


def flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values with the path of each as its key: ``a.b``."""
    values: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            values |= flat(item, f"{prefix}{key}.")
        else:
            values[prefix + key] = item
    return values


def _check_model(recipe: Recipe, source: str) -> None:
    """Build the model without weights, so that a wrong key fails now and not after packing."""
    import torch

    from prismlm.models.presets import build_config, build_model

    for key in FROM_CORPUS:
        if key in recipe.model:
            raise InputError(
                f"{source}: model.{key} comes from the corpus's tokenizer. Leave it out."
            )
    try:
        config = build_config(dict(recipe.model), vocab_size=64, eos_token_id=0)
        with torch.device("meta"):
            build_model(config)
    except InputError as error:
        raise InputError(f"{source}: {error}") from error
    except Exception as error:
        # Configuration classes of other families raise whatever they like, of whatever key.
        raise InputError(f"{source}: model cannot be built from {recipe.model}: {error}") from error
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and recipe.data.length > positions:
        raise InputError(
            f"{source}: data.length is {recipe.data.length}, and the model has positions for "
            f"{positions} tokens. Lower it, or raise model.max_position_embeddings."
        )


class _StrictLoader(yaml.SafeLoader):
    """YAML without two traps: keys given twice, and 1e-3 read as a text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names: list[Any] = []
        for key, _ in node.value:
            if key.tag == MERGE:
                # What it brings in may be replaced.
                continue
            name = self.construct_object(key, deep=True)
            wrong = "is not a name" if not isinstance(name, str) else "is given twice"
            if not isinstance(name, str) or name in names:
                raise yaml.MarkedYAMLError(None, None, f"the key {name!r} {wrong}", key.start_mark)
            names.append(name)
        return super().construct_mapping(node, deep)


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d[\d_]*[eE][-+]?\d+$"), list("-+0123456789")
)


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _StrictLoader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InputError(f"{source}{line}: {error.problem or error}.") from error
    # Among values: a date that is none, a number of too many digits.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{source} is not readable as YAML: {error}.") from error


def _override(settings: dict[str, Any], override: str) -> None:
    """Put ``a.b=value`` into the settings."""
    key, separator, text = override.partition("=")
    *sections, name = key.strip().split(".")
    if not separator or not all([*sections, name]):
        raise InputError(f"--set {override}: expected KEY=VALUE, such as head.prototypes=512.")
    here: Any = settings
    for section in sections:
        here = here.setdefault(section, {})
        if not isinstance(here, dict):
            raise InputError(f"--set {override}: {section} is a single value, not a section.")
    here[name] = _parse(text, f"--set {override}")
