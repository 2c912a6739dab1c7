"""A network as a folder of three files: weights, plan, and what is known about both. No pickle anywhere."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from haloc import __version__
from haloc.errors import FileFormatError, ModelError, SpecError, WeightsError
from haloc.factor.between import fold_norms, norms_between
from haloc.factor.forward import copied, module_at
from haloc.factor.holders import hidden_layers
from haloc.factor.surgery import plan_of
from haloc.files import naming, read_json, replacing
from haloc.forms import Form
from haloc.narrowing.hidden import narrowed_from
from haloc.narrowing.surgery import narrowed_of, resized
from haloc.plan import Plan
from haloc.zoo.factorised import restore

KIND, FORMAT = "haloc-model", 1
WEIGHTS, PLAN, CARD = "weights.safetensors", "plan.json", "model.json"


def save(
    folder: str | Path,
    model: nn.Module,
    *,
    plan: Mapping[str, Form] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> None:
    """Writes a network, factorised or not, as a folder that `load` reads: all of it, or nothing.

    Args:
        folder: Where ``weights.safetensors``, ``plan.json`` and ``model.json`` go; an older network there is replaced.
        model: The network. BatchNorms between its factors (from an unfinished fine-tuning) are saved folded.
        plan: The plan it was factorised by, which `apply_plan` leaves on it; only needed for one that lost it.
        provenance: What else is to be kept with it, in plain JSON values: the configuration, the budget, the target,
            measured figures.

    Raises:
        FileFormatError: the folder cannot be written to.
        WeightsError: the model's state holds something that is no tensor, or values that are not finite.
    """
    folder, model = Path(folder), _folded(bare(model))
    chosen = plan_of(model) if plan is None else Plan(plan)
    for name in chosen:
        module_at(model, name)
    known = _plain(provenance)
    state = _state(model)
    with ExitStack() as files:
        # All are written before the first takes its place, and the one that vouches for the others is the last.
        card, plan_file, weights = (files.enter_context(replacing(folder / name)) for name in (CARD, PLAN, WEIGHTS))
        _write_state(state, weights)
        plan_file.write_text(json.dumps(chosen.to_dict(), indent=2) + "\n", encoding="utf-8")
        sums = {WEIGHTS: _sha256(weights), PLAN: _sha256(plan_file)}
        card.write_text(json.dumps(_card(model, state, sums, known), indent=2) + "\n", encoding="utf-8")


def load(folder: str | Path, base: nn.Module) -> nn.Module:
    """Reads a network that `save` wrote.

    Args:
        folder: The folder it was saved in.
        base: The dense model it was made from, such as your model function returns it; its weights do not matter, and
            it is not changed.

    Returns:
        The network in eval mode, on the device and in the dtype of ``base``.

    Raises:
        FileFormatError: the folder holds no such network, not all of it, or parts of several.
        PlanError: ``base`` has other layers than the model it was made from.
        WeightsError: ``base`` has other weights than the model it was made from.
    """
    folder = Path(folder)
    card = read_card(folder)
    sums = card["sha256"]
    for name in (WEIGHTS, PLAN):
        _check_sum(folder / name, sums.get(name))
    return restore(_narrow_as(bare(base), card, folder), Plan.load(folder / PLAN), folder / WEIGHTS)


def _narrow_as(base: nn.Module, card: Mapping[str, Any], folder: Path) -> nn.Module:
    """The dense model, with as many channels as the saved network has."""
    with naming(folder / CARD):
        narrowed = narrowed_from(card.get("narrowed", []))
    return resized(base, narrowed) if narrowed else base


def read_card(folder: str | Path) -> dict[str, Any]:
    """What ``model.json`` says of a saved network: versions, when it was saved, its size, its provenance."""
    folder = Path(folder)
    path = folder / CARD
    if not folder.is_dir():
        kind = "is a file, expected a folder" if folder.exists() else "does not exist"
        raise FileFormatError(f"there is no saved network in {folder}: it {kind}")
    if not path.exists():
        raise FileFormatError(f"there is no saved network in {folder}: {CARD} is missing; save the model again")
    card = read_json(path)
    if not isinstance(card, dict) or card.get("kind") != KIND or not isinstance(card.get("sha256"), dict):
        raise FileFormatError(f'{path} is not of a saved network: expected a JSON object with "kind": "{KIND}"')
    if card.get("format") != FORMAT:
        raise FileFormatError(
            f"{path} has format {card.get('format')!r}, this version reads format {FORMAT}; upgrade haloc"
        )
    return card


def bare(model: nn.Module) -> nn.Module:
    """The model itself, out of what DataParallel and torch.compile put around it."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _folded(model: nn.Module) -> nn.Module:
    """The model, or a copy without the BatchNorms between its factors, which `load` would have no place for."""
    if not norms_between(model):
        return model
    try:
        model = copied(model)
    except Exception as error:
        raise ModelError(
            f"the model has BatchNorms between its factors and cannot be copied to fold them ({error}); "
            "call haloc.factor.between.fold_norms(model) first"
        ) from error
    fold_norms(model)
    return model


def _state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict on the CPU, checked for what could not be loaded again."""
    hidden = next(iter(hidden_layers(model)), None)
    if hidden is not None:
        raise WeightsError(
            f"the model cannot be saved: {hidden!r} is held outside of its modules, so that no state dict has its "
            "weights; keep it in an nn.ModuleList, or take it off the model first"
        )
    state: dict[str, Any] = model.state_dict()
    weights = dict(model.named_parameters(remove_duplicate=False))
    for name, value in state.items():
        if isinstance(value, Tensor) and value.is_meta:
            raise WeightsError(f"the model cannot be saved: {name!r} is on the meta device and has no values")
        if not isinstance(value, Tensor):
            raise WeightsError(f"the model cannot be saved: {name!r} in its state is a {type(value).__name__}")
        # A buffer may be infinite on purpose, as masks are; a weight never is.
        wrong = ~value.isfinite() if name in weights else value.isnan()
        if bool(wrong.any()):
            raise WeightsError(f"the model cannot be saved: {name!r} has values that are NaN or infinite")
    # Copies: safetensors refuses tensors that share their memory, as tied weights do.
    return {name: value.detach().cpu().clone().contiguous() for name, value in state.items()}


def _write_state(state: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(state, path)
    except SafetensorError as error:  # a full disk, say
        raise OSError(str(error)) from error


def _card(model: nn.Module, state: Mapping[str, Tensor], sums: dict[str, str], provenance: Any) -> dict[str, Any]:
    return {
        "kind": KIND,
        "format": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"haloc": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "model": type(model).__name__,
        "params": sum(parameter.numel() for parameter in model.parameters()),
        "dtypes": sorted({str(value.dtype).removeprefix("torch.") for value in state.values()}),
        "narrowed": [each.to_dict() for each in narrowed_of(model)],
        "sha256": sums,
        "provenance": provenance,
    }


def _plain(provenance: Mapping[str, Any] | None) -> Any:
    """The provenance as it comes back from JSON."""
    try:
        return json.loads(json.dumps(dict(provenance or {})))
    except (TypeError, ValueError) as error:
        raise SpecError(
            f"a provenance is made of plain values that JSON can hold, got one it cannot: {error}"
        ) from error


def _check_sum(path: Path, expected: Any) -> None:
    if not path.is_file():
        raise FileFormatError(f"the network saved in {path.parent} is incomplete: {path.name} is missing")
    found = _sha256(path)
    if found != expected:
        others = " and ".join(name for name in (WEIGHTS, PLAN, CARD) if name != path.name)
        raise FileFormatError(
            f"{path} is not the file that was saved with {others}: its SHA-256 is {found[:12]}…, expected "
            f"{str(expected)[:12]}…; save the model again"
        )


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise FileFormatError(f"cannot read {path}: {error.strerror}") from error
