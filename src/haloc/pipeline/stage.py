"""What a stage is, and what all stages need."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from haloc.pipeline.stamps import file_digest
from haloc.pipeline.work import SAVED, Work

#: Budgets of what a target makes of the network; all others are counted.
MEASURED = ("latency", "energy")


@dataclass(frozen=True)
class Stage:
    """A step of the flow, over one public function.

    Attributes:
        name: What it is called.
        what: What it does, as it is said while it does it.
        inputs: All that decides its outcome, as plain values; another outcome is made only where these change.
        run: Does it.
        files: What it leaves.
        idle: Why there is nothing to do, or None.
        clear: Takes away what it left with other inputs.
        reread: Reads what may have been edited by hand; None where nothing is to be.
        shared: Whether all processes of a run take part; in other stages the first one works and the others wait.
    """

    name: str
    what: str
    inputs: Callable[[Work], Any]
    run: Callable[[Work], None]
    files: Callable[[Work], list[str]]
    idle: Callable[[Work], str | None] = lambda work: None
    clear: Callable[[Work], None] = lambda work: None
    reread: Callable[[Work], object] | None = None
    shared: Callable[[Work], bool] = lambda work: False


def digests(work: Work, *names: str) -> dict[str, str | None]:
    """The content of files, as part of what decides a stage; None where there is no such file."""
    return {name: file_digest(work.file(name)) if work.file(name).is_file() else None for name in names}


def saved(*folders: str) -> list[str]:
    """The files of saved networks."""
    return [f"{folder}/{name}" for folder in folders for name in SAVED]


def remove(work: Work, *names: str) -> None:
    """Takes files and folders of the run away."""
    for name in names:
        path = work.file(name)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
