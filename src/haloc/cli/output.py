"""How the verbs speak: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

#: Wide enough for a row when the output goes to a file or a pipe, where there is no window to fit.
PLAIN_WIDTH = 160
#: Without a terminal a line about progress comes this often.
LINE_SECONDS = 10.0


def print_table(table: Table) -> None:
    """Prints a table on stdout, as wide as the window or, without one, as wide as it needs."""
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    console.print(table)


def print_json(value: Any) -> None:
    """Prints a value on stdout for another program to read."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def note(message: str) -> None:
    """Says on stderr what is going on."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(message, markup=False)


def fail(message: str) -> None:
    """Says on stderr what went wrong, on one line."""
    sys.stderr.write(f"haloc: {' '.join(message.split())}\n")


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr; the function it yields takes how many more are done. Without a terminal, only a line."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    if not console.is_terminal:
        note(f"{what}: {total:,}")
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


@contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr for work that says how much is done of how much; without a terminal a line now and then."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    started, last = time.monotonic(), time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
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
