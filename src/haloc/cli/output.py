"""How the verbs speak: results on stdout, everything else on stderr.

Of several processes that ``torchrun`` started only the first speaks; the others say what went wrong and nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from haloc.training.run import Progress as Training

#: Wide enough for a row when the output goes to a file or a pipe, where there is no window to fit.
PLAIN_WIDTH = 160
#: Without a terminal a line about progress comes this often.
LINE_SECONDS = 10.0
#: And in the middle of a long epoch this often.
LONG_SECONDS = 60.0


def speaks() -> bool:
    """Whether this process is the one that speaks: the only one, or the first that ``torchrun`` started."""
    return int(os.environ.get("WORLD_SIZE", "1")) <= 1 or os.environ.get("RANK", "0") == "0"


class _Console(Console):
    """A console that takes every text for a text: names come out of files, and may look like anything."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """The text with all its brackets, and without signs that would steer the terminal."""
        return super().render_str(printable(text), **options)


def printable(text: str) -> str:
    """The text with what no terminal should be sent (escapes, other control signs, half characters) spelled out."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else repr(sign)[1:-1] for sign in text)


def print_table(table: Table) -> None:
    """Prints a table on stdout, as wide as the window or, without one, as wide as it needs."""
    if speaks():
        console = _Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
        console.print(table)


def print_json(value: Any) -> None:
    """Prints a value on stdout for another program to read."""
    if speaks():
        sys.stdout.write(json.dumps(value, indent=2) + "\n")


def note(message: str) -> None:
    """Says on stderr what is going on."""
    if speaks():
        _Console(stderr=True, soft_wrap=True, highlight=False).print(message)


def fail(message: str) -> None:
    """Says on stderr what went wrong, on one line."""
    sys.stderr.write(f"haloc: {printable(' '.join(message.split()))}\n")


@contextmanager
def warnings_noted() -> Iterator[None]:
    """Inside the block, what the library warns of comes to stderr as a line each."""
    logger, handler = logging.getLogger("haloc"), _Notes(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(f"warning: {' '.join(record.getMessage().split())}")


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr; the function it yields takes how many more are done. Without a terminal, only a line."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = _Console(stderr=True)
    if not console.is_terminal:
        note(f"{what}: {total:,}")
    with Progress(*columns, console=console, transient=True, disable=not _shows_bars(console)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


@contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr for work that says how much is done of how much; without a terminal a line now and then."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = _Console(stderr=True)
    started, last = time.monotonic(), time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not _shows_bars(console)) as bar:
        task = bar.add_task(what, total=None)
        if not console.is_terminal:
            note(what)
        first: int | None = None

        def show(done: int, total: int) -> None:
            nonlocal last, first
            bar.update(task, completed=done, total=total)
            first = done if first is None else first
            now = time.monotonic()
            if not console.is_terminal and now - last >= LINE_SECONDS and done > first:
                last, left = now, (now - started) / (done - first) * (total - done)
                note(f"{what}: {done} of {total}, {left:.0f} s left")

        yield show


@contextmanager
def training_progress(what: str) -> Iterator[Callable[[Training], None]]:
    """A bar on stderr that shows how training goes; without a terminal a line for an epoch, but not too often."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[state]}", markup=False),
    )
    console = _Console(stderr=True)
    lines = _Lines(silent=console.is_terminal)
    if not console.is_terminal:
        note(what)
    with Progress(*columns, console=console, transient=True, disable=not _shows_bars(console)) as bar:
        task = bar.add_task(what, total=None, state="")

        def show(training: Training) -> None:
            lines.take(training)
            bar.update(task, completed=training.epoch, total=training.epochs, state=lines.latest)

        try:
            yield show
        finally:
            lines.end()


class _Lines:
    """Says how training goes: the first and the last time always, between them now and then."""

    def __init__(self, silent: bool) -> None:
        self.latest = ""
        self._silent, self._said, self._said_at = silent, "", -float("inf")
        self._val: float | None = None

    def take(self, training: Training) -> None:
        """Takes where training stands, and says it when it is time."""
        self._val = training.figures.get("val_top1", self._val)
        self.latest = _state(training, self._val)
        if time.monotonic() - self._said_at >= (LINE_SECONDS if training.ended else LONG_SECONDS):
            self._say()

    def end(self) -> None:
        """Says the last of it, if that has not been said."""
        if self._said != self.latest:
            self._say()

    def _say(self) -> None:
        self._said, self._said_at = self.latest, time.monotonic()
        if not self._silent:
            note(self.latest)


def _state(training: Training, val: float | None) -> str:
    """``epoch 12/60  loss 0.412  accuracy 88.1%  val 90.31%  51,200 images/s  3 min left``."""
    figures = training.figures
    parts = [f"epoch {training.epoch:.{0 if training.ended else 1}f}/{training.epochs}"]
    parts += [f"loss {figures['loss']:.3f}"] if "loss" in figures else []
    parts += [f"accuracy {figures['accuracy']:.1%}"] if "accuracy" in figures else []
    parts += [f"val {val:.2%}"] if val is not None else []
    return "  ".join([*parts, f"{training.images_per_s:,.0f} images/s", f"{duration(training.seconds_left)} left"])


def _shows_bars(console: Console) -> bool:
    return console.is_terminal and speaks()


class Tracked:
    """Batches that report how many examples have gone by; they can be gone through again."""

    def __init__(self, batches: Iterable[tuple[Any, Any]], advance: Callable[[int], None]) -> None:
        self._batches, self._advance = batches, advance

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for inputs, labels in self._batches:
            yield inputs, labels
            self._advance(len(labels))


def count(number: int) -> str:
    """A large number as people read it: 1.81 G, 40.6 M, 269.7 k."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.{2 if number < 10 * size else 1}f} {unit}"
    return str(number)


def duration(seconds: float) -> str:
    """A time as people say it: 45 s, 3 min, 2 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
