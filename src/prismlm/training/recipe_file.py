"""A recipe from YAML or plain values: what is not understood is an error, never ignored."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from prismlm.errors import InputError, suggest
from prismlm.files import read_text
from prismlm.training.recipe import Range, Recipe, Scalar

# The tokenizer decides these.
FROM_CORPUS = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
# Why a key cannot be searched over.
FIXED = {
    "corpus": "all trials read one corpus",
    "out": "the search chooses where trials are written",
    "seed": "search.seeds says how many seeds each trial is averaged over",
    "device": "it is no hyper-parameter",
    "parallel": "it is no hyper-parameter",
    "data.length": "held-out text is measured in windows of it, so trials would not compare",
    "search": "it is the search itself",
    "evaluation": "trials are compared by what it measures",
    "checkpoint": "it is no hyper-parameter",
    "logging": "it is no hyper-parameter",
}
# Counted in steps; they keep their share of a run where a trial has more or fewer.
IN_STEPS = (
    "steps",
    "head.initialise_at_step",
    "head.revive_every",
    "evaluation.every",
    "checkpoint.every",
)


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
    origin = origin or {}
    recipe = _recipe_from(settings, source, origin)
    if "search" in recipe.model_fields_set:
        where = next((o for k, o in origin.items() if k.startswith("search.")), source)
        check_space(recipe, where)
    return recipe


def _recipe_from(settings: dict[str, Any], source: str, origin: dict[str, str]) -> Recipe:
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
    section = _section_of(location[:-1])
    known = list(section.model_fields)
    if item["type"] == "extra_forbidden":
        inside = f" in {'.'.join(location[:-1])}" if location[1:] else ""
        return (
            f"{where}: there is no setting {key!r}.{suggest(location[-1], known)} "
            f"Known{inside}: {', '.join(known)}."
        )
    field = section.model_fields.get(location[-1]) if location else None
    described = " ".join(((field and field.description) or "").split())
    meaning = f" ({described})" if described else ""
    if item["type"] == "missing":
        return f"{where}: {key} is missing{meaning}. Add it."
    if item["type"] == "value_error":
        return f"{where}: {key + ': ' if key else ''}{str(item['ctx']['error']).rstrip('.')}."
    wanted = item["msg"].replace("Input should be", "expected")
    return f"{where}: {key} is {_describe(item['input'])}; {wanted}{meaning}."


def _section_of(path: Sequence[str]) -> type[BaseModel]:
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
    values: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            values |= flat(item, f"{prefix}{key}.")
        else:
            values[prefix + key] = item
    return values


def _describe(value: Any) -> str:
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
            wrong = "is not a name" if not isinstance(key, str) else "is given twice"
            if not isinstance(key, str) or key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} {wrong}", key_node.start_mark
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


def check_space(recipe: Recipe, source: str = "recipe") -> None:
    """Check that every key of a recipe's search space is one, and takes every choice and end."""
    where = f"{source}: search.space"
    known = [key for key in flat(recipe.to_dict()) if not key.startswith("model.")]
    known = sorted(key for key in known if _why_fixed(key) is None)
    for key, dimension in recipe.search.dimensions().items():
        if why := _why_fixed(key):
            raise InputError(f"{where}: {key} cannot be searched over: {why}. Leave it out.")
        # Those of the model are its own, which building it checks.
        of_the_model = key.startswith("model.") and key.count(".") == 1
        if not of_the_model and key not in known:
            raise InputError(
                f"{where}: there is no recipe key {key!r}.{suggest(key, known)} Known: "
                f"{', '.join(known)}, and model.NAME for the model's own."
            )
        ends = (dimension.low, dimension.high) if isinstance(dimension, Range) else dimension
        for value in ends:
            recipe_with(recipe, {key: value}, source=where)


def recipe_with(
    recipe: Recipe,
    values: Mapping[str, Scalar],
    *,
    seed: int | None = None,
    out: Path | None = None,
    source: str = "search.space",
) -> Recipe:
    """Return a recipe with other values, as long as the given one in positions trained on.

    Where a step takes more or fewer positions than before, all that is counted in steps is scaled,
    unless ``steps`` is among the values: every trial sees as much text.
    """
    settings = recipe.to_dict()
    for key, value in values.items():
        _put(settings, key, value)
    settings["seed"] = recipe.seed if seed is None else seed
    settings["out"] = str(recipe.out if out is None else out)
    changed = _recipe_from(settings, source, {})
    ratio = recipe.positions_per_step / changed.positions_per_step
    if "steps" in values or ratio == 1:
        return changed
    for key, count in flat(settings).items():
        if key in IN_STEPS and count:
            _put(settings, key, max(1, round(count * ratio)))
    head = settings["head"]
    if head["initialise_at_step"] is not None and settings["steps"]:
        # Rounding may have put it at the end of a very short run.
        head["initialise_at_step"] = min(head["initialise_at_step"], settings["steps"] - 1)
    return _recipe_from(settings, source, {})


def takes_whole_numbers(recipe: Recipe, key: str, dimension: Range) -> bool:
    """Say whether a range holds whole numbers only: by its ends, unless the key takes others."""
    if key.startswith("model."):
        return dimension.whole
    *sections, name = key.split(".")
    annotation = _section_of(sections).model_fields[name].annotation
    return dimension.whole and float not in (annotation, *get_args(annotation))


def _why_fixed(key: str) -> str | None:
    return next((why for fixed, why in FIXED.items() if f"{key}.".startswith(f"{fixed}.")), None)


def _put(settings: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for part in sections:
        settings = settings[part]
    settings[name] = value
