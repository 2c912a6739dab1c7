"""The settings classes that a recipe's free sections stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from importlib import import_module
from typing import Any, get_type_hints

from haloc.errors import SpecError, nearest
from haloc.methods.haloc import check_settings
from haloc.methods.haloc_settings import SearchSettings
from haloc.methods.search import method_of
from haloc.methods.task import Method
from haloc.pipeline.recipe import Recipe, SearchPart, typed
from haloc.reconstruction import ReconstructionSettings
from haloc.training.settings import FINETUNING, FREE, OWN_LOSS, RecoverySettings, TrainSettings


def method_settings(part: SearchPart) -> Any:
    """What the method is told, or None where nothing is said."""
    method = method_of(part.method)
    if not part.settings:
        return None
    if method.settings is None:
        raise SpecError(f"method {part.method!r} has no settings; leave search.settings out")
    return _changed(method.settings(), part.settings, "search.settings")


def search_training(recipe: Recipe) -> TrainSettings | None:
    """How the method trains, if it does: as it likes to, but for what the recipe says."""
    part, method = recipe.search, method_of(recipe.search.method)
    check_names(part.training, _names(TrainSettings), "search.training")
    if not method.trains:
        return None
    found: TrainSettings = _changed(_liked_by(method), {"seed": recipe.run.seed, **part.training}, "search.training")
    return found


def finetuning(recipe: Recipe, own_loss: bool = False) -> tuple[TrainSettings, RecoverySettings] | None:
    """How accuracy is recovered, by a classifier's loss or by the user's own; None where nothing is to be trained."""
    own, goals = _names(TrainSettings), _names(RecoverySettings)
    check_names(recipe.finetune, [*own, *goals], "finetune")
    if recipe.finetune.get("epochs") == 0:
        return None
    told = {name: value for name, value in recipe.finetune.items() if name in own}
    training = _changed(FINETUNING, {"seed": recipe.run.seed, **told}, "finetune")
    wanted = {name: value for name, value in recipe.finetune.items() if name in goals}
    return training, _changed(OWN_LOSS if own_loss else RecoverySettings(), wanted, "finetune")


def reconstruction(recipe: Recipe) -> ReconstructionSettings | None:
    """How blocks are reconstructed; None where they are not: it takes a number of epochs."""
    told = _changed(ReconstructionSettings(), {"seed": recipe.run.seed, **recipe.reconstruct}, "reconstruct")
    return told if recipe.reconstruct.get("epochs") else None


def decisive(training: TrainSettings | None) -> dict[str, Any] | None:
    """How is trained, without what does not change what comes out."""
    if training is None:
        return None
    return {name: value for name, value in asdict(training).items() if name not in FREE}


def check_search(recipe: Recipe) -> None:
    """Refuses what the method would refuse, before anything long begins."""
    told, training = method_settings(recipe.search), search_training(recipe)
    if recipe.search.method == "haloc" and training is not None:
        check_settings(told or SearchSettings(), training)
        if told is not None and told.trial == "finetuned" and recipe.finetune.get("epochs") == 0:
            raise SpecError(
                'search.settings.trial = "finetuned" tries networks as they will be fine-tuned, but finetune.epochs is '
                '0; give epochs, or trial = "taught"'
            )


def check_names(given: Mapping[str, Any], known: list[str], where: str) -> None:
    """Refuses a key that means nothing."""
    for name in given:
        if name not in known:
            raise SpecError(f"a recipe has no {where}.{name}, only {', '.join(known)}.{nearest(name, known)}")


def _liked_by(method: Method) -> TrainSettings:
    found: TrainSettings | None = getattr(import_module(f"haloc.methods.{method.name}"), "TRAINING", None)
    return found or TrainSettings()


def _names(cls: type) -> list[str]:
    return [field.name for field in fields(cls)]


def _changed(value: Any, changes: Mapping[str, Any], where: str) -> Any:
    """The same settings but for these, each of the kind that it has to be."""
    check_names(changes, _names(type(value)), where)
    hints = get_type_hints(type(value))
    return replace(value, **{name: typed(hints[name], new, f"{where}.{name}") for name, new in changes.items()})
