"""Checkpoints: all that it takes to go on, written whole or not at all, and never the only good one overwritten."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from haloc.errors import FileFormatError, SpecError, shown
from haloc.files import flushed, read_json, write_json

_LOG = logging.getLogger(__name__)
KIND, FORMAT = "haloc-checkpoint", 1
_TENSORS, _FACTS = "state.safetensors", "state.json"
_PREFIX, _UNFINISHED = "step-", ".unfinished-"
_DIVERGED = "diverged.json"
_KEPT = 2


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run between two steps.

    Attributes:
        step: steps taken since the start.
        tensors: weights, averages, the optimisers' state and random states, by name.
        facts: everything else, as JSON; ``config`` in it decides whether a run may go on from here.
    """

    step: int
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]


class Store:
    """The checkpoints in a folder: the last two, so that a damaged one is no loss."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def save(self, checkpoint: Checkpoint) -> None:
        """Writes a checkpoint beside its final place, moves it there, and removes the oldest."""
        final = self.folder / f"{_PREFIX}{checkpoint.step:010d}"
        unfinished = self.folder / f"{_UNFINISHED}{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            _write(unfinished, checkpoint)
            shutil.rmtree(final, ignore_errors=True)  # of a run that went on from further back
            unfinished.replace(final)
        except (OSError, SafetensorError) as error:  # a full disk is the latter to safetensors
            reason = getattr(error, "strerror", None) or error
            raise FileFormatError(f"cannot write the checkpoint {final}: {reason}") from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        (self.folder / _DIVERGED).unlink(missing_ok=True)
        self._remove_old(checkpoint.step)

    def note_divergence(self, what: str) -> None:
        """Notes that the run could not go on as it was told to: it may go on more gently."""
        write_json(self.folder / _DIVERGED, {"kind": "haloc-divergence", "what": what})

    def drop(self, step: int) -> None:
        """Removes a checkpoint that a run cannot go on from."""
        shutil.rmtree(self.folder / f"{_PREFIX}{step:010d}", ignore_errors=True)

    @property
    def diverged(self) -> bool:
        """Whether what came after the newest checkpoint was not finite."""
        return (self.folder / _DIVERGED).is_file()

    def newest(
        self, config: Mapping[str, Any], free: tuple[str, ...] = (), gentler: tuple[str, ...] = ()
    ) -> Checkpoint | None:
        """The newest checkpoint that is whole and of this very run, or None where there is none at all.

        Args:
            config: What the run is told now.
            free: What of it may differ.
            gentler: What may differ besides where the run has diverged.

        Raises:
            FileFormatError: there are checkpoints, and none of them can be used.
            SpecError: they are of a run with other settings.
        """
        found = self._all()
        for folder in found:
            try:
                checkpoint = _read(folder)
            except FileFormatError as error:
                _LOG.warning("a checkpoint is not used: %s", error)
                continue
            may_differ = (*free, *gentler) if self.diverged else free
            _require_same(checkpoint.facts["config"], config, may_differ, self.folder)
            return checkpoint
        if found:
            raise FileFormatError(
                f"no checkpoint in {self.folder} can be used; start afresh without resuming, or choose another folder"
            )
        return None

    def clear(self) -> None:
        """Removes all checkpoints, for a run that starts afresh."""
        for folder in self._all():
            shutil.rmtree(folder, ignore_errors=True)
        (self.folder / _DIVERGED).unlink(missing_ok=True)

    @property
    def last_step(self) -> int | None:
        """The step at which the newest checkpoint was written, readable or not; None where there is none."""
        return next((_step(folder) for folder in self._all()), None)

    def _all(self) -> list[Path]:
        """Newest first; what a user put beside them under another name is none."""
        found = self.folder.glob(f"{_PREFIX}*")
        return sorted((path for path in found if path.name.removeprefix(_PREFIX).isdecimal()), reverse=True)

    def _remove_old(self, step: int) -> None:
        """Keeps the newest ones, and none of later steps: they belong to a past that was not resumed."""
        names = [folder for folder in self._all() if _step(folder) <= step]
        for folder in set(self._all()) - set(names[:_KEPT]):
            shutil.rmtree(folder, ignore_errors=True)
        for folder in self.folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(folder, ignore_errors=True)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix(_PREFIX))


def random_states() -> dict[str, Tensor]:
    """The states of all random number generators that a step may draw from."""
    _, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, next_gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "numpy_more": torch.tensor([float(place), float(has_gauss), float(gauss)], dtype=torch.float64),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([] if next_gauss is None else [next_gauss], dtype=torch.float64),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: Mapping[str, Tensor]) -> None:
    """Puts the generators back where `random_states` found them."""
    torch.set_rng_state(states["torch"])
    place, has_gauss, gauss = states["numpy_more"].tolist()
    np.random.set_state(("MT19937", states["numpy"].numpy().astype(np.uint32), int(place), int(has_gauss), gauss))
    version, *words = states["python"].tolist()
    random.setstate((version, tuple(words), next(iter(states["python_gauss"].tolist()), None)))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with ``prefix/``, without it."""
    start = f"{prefix}/"
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in checkpoint.tensors.items()}
    save_file(tensors, folder / _TENSORS)
    facts = {"kind": KIND, "format": FORMAT, "step": checkpoint.step, **checkpoint.facts}
    facts["sha256"] = _digest(folder / _TENSORS)
    (folder / _FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    flushed(folder / _TENSORS)
    flushed(folder / _FACTS)


def _read(folder: Path) -> Checkpoint:
    facts = read_json(folder / _FACTS)
    if not isinstance(facts, dict) or facts.get("kind") != KIND or not isinstance(facts.get("config"), dict):
        raise FileFormatError(f"{folder / _FACTS} does not describe a checkpoint of haloc")
    if facts.get("format") != FORMAT:
        raise FileFormatError(f"{folder} has format {shown(facts.get('format'))}, expected {FORMAT}; update haloc")
    if type(facts.get("step")) is not int or not 0 <= facts["step"] < 2**63:
        raise FileFormatError(f"{folder / _FACTS} has no step to go on from: {shown(facts.get('step'))}")
    path = folder / _TENSORS
    if not path.is_file() or _digest(path) != facts.get("sha256"):
        raise FileFormatError(f"{path} is cut off or changed: it is not what {_FACTS} beside it describes")
    try:
        return Checkpoint(facts["step"], load_file(path), facts)
    except Exception as error:  # the header may be a stranger's: what is wrong with it decides what is raised
        raise FileFormatError(f"{path} is no readable safetensors file") from error


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise FileFormatError(f"cannot read {path}: {error.strerror or error}") from error


def _require_same(found: Mapping[str, Any], wanted: Mapping[str, Any], free: tuple[str, ...], folder: Path) -> None:
    """Refuses to go on from a run that was told something else."""
    old, new = dict(_flat(found)), dict(_flat(json.loads(json.dumps(wanted))))
    for name in sorted(old.keys() | new.keys()):
        if name.split(".")[-1] not in free and old.get(name) != new.get(name):
            before, now = _said(old.get(name)), _said(new.get(name))
            raise SpecError(
                f"{folder} holds a run with {name[:200]} = {before}, and now it is {now}; go on with the same "
                "settings, start afresh without resuming, or choose another folder"
            )


def _said(value: Any) -> str:
    """A setting as it is, unless it is too long for a message."""
    return shown(value) if isinstance(value, int) or len(str(value)) > 200 else str(value)


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        if isinstance(item, Mapping):
            yield from _flat(item, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", item
