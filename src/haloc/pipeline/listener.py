"""Whom a run tells how it goes; the one here says nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from haloc.training.run import Progress

Steps = Callable[[int, int], None]
Training = Callable[["Progress"], None]


class Listener:
    """Told of stages, of work in steps and of training; to be overridden where somebody wants to know."""

    def stage(self, name: str, what: str, place: str) -> None:
        """A stage begins, at a place such as "3/10"."""

    def kept(self, name: str, why: str, place: str) -> None:
        """A stage is not done again, or not needed."""

    def note(self, text: str) -> None:
        """Something is worth knowing."""

    @contextmanager
    def steps(self, what: str) -> Iterator[Steps]:
        """Work that says how much of it is done of how much."""
        yield _silent

    @contextmanager
    def working(self, what: str) -> Iterator[tuple[Steps, Training]]:
        """Work that is done in steps, or by training."""
        yield _silent, _silent


def _silent(*_: object) -> None:
    """What is said to nobody."""
