"""Reading a recipe from YAML, strictly: what is not understood is an error, never ignored."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

import yaml

from prismlm.errors import InputError
from prismlm.files import read_text
from prismlm.training.recipe import Recipe
from prismlm.training.recipe_values import describe, recipe_from
from prismlm.training.search.space import check_space


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
            f"{file} holds {describe(settings)}; expected keys such as corpus, out, model, steps."
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
    origin = origin or {}
    recipe = recipe_from(settings, source, origin)
    if "search" in recipe.model_fields_set:
        where = next((o for k, o in origin.items() if k.startswith("search.")), source)
        check_space(recipe, where)
    return recipe


class _StrictLoader(yaml.SafeLoader):
    """YAML without its traps: keys given twice, 1e-3 read as a text, aliases that multiply."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(
                None, None, "aliases (*name) are not read: write the value again", mark
            )
        return super().compose_node(parent, index)

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
    # Among values: a date that is none, a number of too many digits.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
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
