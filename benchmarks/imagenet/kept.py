"""How `speed.py` and `clock.py` go through targets, and what they leave: rows in a file of `speed/`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from haloc.files import read_json, write_json

#: How often networks are timed; the median counts. Within minutes a CPU drifts by some percent.
REPEATS = {"cpu": 5, "cuda": 1}

Row = dict[str, Any]


def keep(path: Path, rows: Iterable[Row]) -> None:
    """Puts rows into a file, in the places of those of the same networks there; what else it has stays."""
    file = read_json(path) if path.exists() else {"rows": []}
    known = {_key(row): row for row in file["rows"]} | {_key(row): row for row in rows}
    write_json(path, {**file, "rows": list(known.values())})


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("network", "plan", "target", "size"))


def on_each(targets: Iterable[str], work: Callable[[str], None]) -> None:
    """Does the work for one target after the other; where it fails, the reason is printed and the others go on."""
    failed = 0
    for target in targets:
        try:
            work(target)
        except Exception as error:  # out of memory, a missing runtime, …: of whatever kind, the others may well run
            failed += 1
            reason = next(iter(str(error).splitlines()), "")
            print(f"{target} FAILED, nothing more is kept of it: {type(error).__name__}: {reason}", flush=True)
    if failed:
        raise SystemExit(1)
