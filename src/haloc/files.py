"""Reading and writing small files whole: a reader never sees half of one."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from haloc.errors import FileFormatError

#: How the name ends of a file that is being written.
_TEMPORARY = ".part"


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yields a temporary path beside ``path`` that takes its place when the block ends without an error."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep(path)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{_start(path)}{os.getpid()}.", suffix=_TEMPORARY)
    except OSError as error:
        raise FileFormatError(f"cannot write {path}: {error.strerror or error}") from error
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        flushed(temporary)
        temporary.replace(path)
    except OSError as error:
        raise FileFormatError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        # Where a disk turns read-only the file stays, and what went wrong first is what is told.
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def flushed(path: Path) -> None:
    """Hands a file to the disk: a power cut must not leave its new name with no content."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sweep(path: Path) -> None:
    """Removes what processes left behind that were killed while they wrote this very file.

    A process that is alive may still be writing: its number is in the name.
    """
    for name in os.listdir(path.parent):
        owner = name.removeprefix(_start(path)).partition(".")[0]
        if name.startswith(_start(path)) and name.endswith(_TEMPORARY) and owner.isdecimal() and not alive(int(owner)):
            (path.parent / name).unlink(missing_ok=True)


def is_leftover(name: str) -> bool:
    """Whether a file of that name is one that a killed process was writing."""
    return name.startswith(".") and name.endswith(_TEMPORARY)


def alive(process: int) -> bool:
    """Whether there is a process of that number on this machine."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # somebody else's; or a number that no process has
        return True
    return True


def _start(path: Path) -> str:
    return f".{path.name}."


def write_json(path: str | Path, value: Any) -> None:
    """Writes ``value`` as indented JSON, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_json_rows(path: str | Path, header: dict[str, Any], rows: Iterable[Any]) -> None:
    """Writes ``header`` with a list of ``rows`` in it, a line each, so that long lists stay small and readable."""
    lines = ",\n    ".join(json.dumps(row) for row in rows)
    head = json.dumps(header, indent=2).removesuffix("\n}")
    with replacing(path) as temporary:
        temporary.write_text(f'{head},\n  "rows": [\n    {lines}\n  ]\n}}\n', encoding="utf-8")


def read_json(path: str | Path) -> Any:
    """Reads a JSON file, or says in one sentence why it cannot be read."""
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileFormatError(f"there is no file {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"cannot read {path}: {error}") from error
    except json.JSONDecodeError as error:
        raise FileFormatError(f"{path} is not JSON: {error.msg} at line {error.lineno}") from error


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Adds the file's name to what is wrong with its content."""
    try:
        yield
    except FileFormatError as error:
        if str(path) in str(error):
            raise
        raise FileFormatError(f"{path}: {error}") from error


def _umask() -> int:
    """Returns the process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
