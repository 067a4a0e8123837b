"""Reading a recipe from YAML, strictly: what is not understood is an error, never ignored."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from prismlm.errors import InputError, suggest
from prismlm.training.recipe import Recipe

# The tokenizer decides these.
FROM_CORPUS = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")


def load_recipe(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe, with single values replaced by ``a.b=value`` overrides, parsed as YAML.

    Raises:
        InputError: no such file, not YAML, a key twice, an unknown or missing key, a value of
            another type or out of range. It names the file, the dotted key and what is allowed.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the recipe {file}: {error}.") from error
    settings = _parse(text, str(file))
    if not isinstance(settings, dict):
        raise InputError(
            f"{file} holds {_describe(settings)}; expected keys such as corpus, out, model, steps."
        )
    origin: dict[str, str] = {}
    for override in overrides:
        origin[_override(settings, override)] = f"--set {override}"
    return build_recipe(settings, str(file), origin)


def build_recipe(
    settings: dict[str, Any], source: str = "recipe", origin: dict[str, str] | None = None
) -> Recipe:
    """Build a recipe from plain values; errors name ``source``, or ``origin`` of the dotted key.

    Raises:
        InputError: as :func:`load_recipe`.
    """
    try:
        recipe = Recipe.model_validate(settings)
    except ValidationError as error:
        messages = [_explain(item, source, origin or {}) for item in error.errors()]
        raise InputError("\n".join(dict.fromkeys(messages))) from None
    _check_model(recipe, source, origin or {})
    if "search" in recipe.model_fields_set:
        # It builds recipes of its own.
        from prismlm.training.hyperparameters.space import check_space

        where = next((o for k, o in (origin or {}).items() if k.startswith("search.")), source)
        check_space(recipe, where)
    return recipe


class _StrictLoader(yaml.SafeLoader):
    """YAML without its two traps: keys given twice, and 1e-3 read as a text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is not a name", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d[\d_]*[eE][-+]?\d+$"), list("-+0123456789")
)


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f", line {mark.line + 1}"
        raise InputError(f"{source}{where}: {error.problem or error}.") from error
    except yaml.YAMLError as error:
        raise InputError(f"{source} is not readable as YAML: {error}.") from error


def _override(settings: dict[str, Any], override: str) -> str:
    """Put ``a.b=value`` into the settings; return the dotted key."""
    key, separator, text = override.partition("=")
    key = key.strip()
    if not separator or not all(key.split(".")):
        raise InputError(f"--set {override}: expected KEY=VALUE, such as head.prototypes=512.")
    *sections, name = key.split(".")
    here: Any = settings
    for depth, section in enumerate(sections):
        here = here.setdefault(section, {})
        if not isinstance(here, dict):
            path = ".".join(sections[: depth + 1])
            raise InputError(f"--set {override}: {path} is a single value, not a section.")
    here[name] = _parse(text, f"--set {override}")
    return key


def _explain(item: Any, source: str, origin: dict[str, str]) -> str:
    """Turn one of pydantic's findings into a sentence that names file, key and remedy."""
    location = [str(part) for part in item["loc"]]
    key = ".".join(location)
    where = next((o for k, o in origin.items() if key == k or key.startswith(k + ".")), source)
    section = _section(location[:-1])
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
        return f"{where}: {key + ': ' if key else ''}{item['ctx']['error']}."
    wanted = item["msg"].replace("Input should be", "expected")
    return f"{where}: {key} is {_describe(item['input'])}; {wanted}{meaning}."


def _section(path: list[str]) -> type[BaseModel]:
    section: type[BaseModel] = Recipe
    for name in path:
        field = section.model_fields.get(name)
        annotation = None if field is None else field.annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        section = annotation
    return section


def _describe(value: Any) -> str:
    if isinstance(value, dict):
        return "a section"
    return "nothing" if value is None else repr(value)


def _check_model(recipe: Recipe, source: str, origin: dict[str, str]) -> None:
    """Build the model without weights, so that a wrong key fails now and not after packing."""
    import torch

    from prismlm.models.presets import build_config, build_model

    where = next((o for k, o in origin.items() if k.split(".")[0] == "model"), source)
    for key in FROM_CORPUS:
        if key in recipe.model:
            raise InputError(
                f"{where}: model.{key} comes from the corpus's tokenizer. Leave it out."
            )
    try:
        config = build_config(dict(recipe.model), vocab_size=64, eos_token_id=0)
        with torch.device("meta"):
            build_model(config)
    except InputError as error:
        raise InputError(f"{where}: model: {error}") from error
    except Exception as error:
        # Configuration classes of other families raise whatever they like.
        raise InputError(f"{where}: model cannot be built from {recipe.model}: {error}") from error
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and recipe.data.length > positions:
        raise InputError(
            f"{source}: data.length is {recipe.data.length}, and the model has positions for "
            f"{positions} tokens. Lower it, or raise model.max_position_embeddings."
        )
