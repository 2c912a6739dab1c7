"""Recipes as files: read, and changed on the way."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from haloc.errors import FileFormatError, SpecError
from haloc.files import read_whole
from haloc.pipeline.recipe import LABELLED, Recipe, SearchPart

#: What `--quick` changes: a try of the whole flow in little time, not a result to go by.
QUICK: Mapping[str, Any] = {
    "data.images": 2000,
    "data.test_images": 1000,
    "target.networks": 4,
    "search.activations": 500,
    "search.training.epochs": 1,
    "finetune.epochs": 1,
}


#: The most bytes of a recipe; one with every key explained has a few thousand.
_MOST = 1 << 20
#: What `--no-train` changes besides: blocks are reconstructed in place of fine-tuning.
_RECONSTRUCT_EPOCHS = 10


def read_recipe(
    path: str | Path,
    changes: Iterable[str] = (),
    *,
    quick: bool = False,
    no_train: bool = False,
    no_code: bool = False,
) -> Recipe:
    """Reads a recipe file.

    Args:
        path: The TOML file.
        changes: What is to be otherwise, as ``section.key=value``.
        quick: Whether `QUICK` is laid over it.
        no_train: Whether nothing is trained: no labels are used, and blocks are reconstructed instead.
        no_code: Whether a recipe is refused that names ``package.module:callable``, which a run imports and calls.
    """
    values = _parsed(Path(path))
    if no_train:
        put(values, "finetune.epochs", 0)
        _switch_on(values)
    if quick:
        _hurry(values)
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or not key.strip():
            raise SpecError(f"a change is written section.key=value, as in finetune.epochs=3, got {change!r}")
        put(values, key.strip(), _value_of(text.strip()))
    if no_train and _section(values, "finetune").get("epochs") != 0:
        raise SpecError("--no-train does without fine-tuning; leave it out, or finetune.epochs")
    try:
        recipe = Recipe.from_dict(values)
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from error
    if no_train and recipe.search.plan is None and recipe.search.method in LABELLED:
        raise SpecError(f"method {recipe.search.method!r} looks at labels; for --no-train take 'sensitivity'")
    if no_code:
        _refuse_code(recipe, path)
    return recipe


def code_in(recipe: Recipe) -> dict[str, str]:
    """What a recipe names that would be imported and called, by key."""
    named = {
        "model.name": recipe.model.name,
        "teacher.name": recipe.teacher.name,
        "data.loaders": recipe.data.loaders,
        "task.loss": recipe.task.loss,
        "task.score": recipe.task.score,
        "task.inputs": recipe.task.inputs,
    }
    return {key: name for key, name in named.items() if name and ":" in name and not _listed(key, name)}


def _listed(key: str, name: str) -> bool:
    """Whether it names a network of a library's own list; what else is named like that is imported as it is."""
    return key.endswith(".name") and name.split(":")[0] in _LIBRARIES


#: What stands before the colon of networks that are looked up in a library's own list.
_LIBRARIES = ("torchvision", "timm")


def _refuse_code(recipe: Recipe, path: str | Path) -> None:
    for key, name in code_in(recipe).items():
        raise SpecError(
            f"{path} names code that a run would import and call, {key} = {name!r}; read it, and leave --no-code out "
            "if you trust it"
        )


def _switch_on(values: dict[str, Any]) -> None:
    """Blocks are reconstructed, and ranks chosen without labels, unless the recipe says otherwise."""
    if isinstance(values.get("reconstruct", {}), dict) and _epochs(values) is None:
        put(values, "reconstruct.epochs", _RECONSTRUCT_EPOCHS)
    if isinstance(values.get("search", {}), dict) and "method" not in values.get("search", {}):
        put(values, "search.method", "sensitivity")


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section; empty where it is missing, or no section, which is said when the recipe is read."""
    found = values.get(name)
    return found if isinstance(found, Mapping) else {}


def _epochs(values: Mapping[str, Any]) -> Any:
    return _section(values, "reconstruct").get("epochs")


def _hurry(values: dict[str, Any]) -> None:
    """Lays `QUICK` over a recipe."""
    trained = _section(values, "finetune").get("epochs") != 0
    for key, value in QUICK.items():
        if trained or key != "finetune.epochs":
            put(values, key, value)
    if _epochs(values):
        put(values, "reconstruct.epochs", 1)
    if _section(values, "search").get("method", SearchPart.method) == "haloc":
        put(values, "search.settings.warmup_epochs", 0)  # there is but one epoch


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Sets what a dotted key names, making the sections on the way."""
    *sections, last = key.split(".")
    for name in sections:
        inner = values.setdefault(name, {})
        if not isinstance(inner, dict):
            raise SpecError(f"{key!r} cannot be set: {name!r} is a value and not a section")
        values = inner
    values[last] = value


def _parsed(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise FileFormatError(f"there is no recipe {path}; write one with: haloc compress --new {path}")
    try:
        return tomllib.loads(read_whole(path, _MOST).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise FileFormatError(f"cannot read {path}: {error}") from error
    except RecursionError as error:
        raise FileFormatError(f"{path} is not a recipe: its lists lie too deep in each other") from error
    except FileFormatError:
        raise
    except ValueError as error:  # what is no TOML, and numbers of more digits than Python reads
        raise FileFormatError(f"{path} is not TOML: {error}") from error


def _value_of(text: str) -> Any:
    """A TOML value where it is one, else the text itself, so that names need no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, KeyError, RecursionError):
        return text
