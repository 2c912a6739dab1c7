"""Reading and writing small files whole: a reader never sees half of one."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from haloc.errors import FileFormatError


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yields a temporary path beside ``path`` that takes its place when the block ends without an error."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise FileFormatError(f"cannot write {path}: {error.strerror or error}") from error
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except OSError as error:
        raise FileFormatError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


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
