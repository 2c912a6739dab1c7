"""Reading and writing small files whole: a reader never sees half of one.

A file may come from anybody. So it is looked at before it is read (a device has no end, a pipe may never begin),
nothing is read beyond a limit, and what is parsed is neither deeper nor more ambiguous than what is written here.
"""

from __future__ import annotations

import json
import os
import platform
import re
import stat
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from haloc.errors import FileFormatError, shown

#: The most bytes that are read of a JSON file: a table of ninety thousand rows. It may unfold to thirty times as much.
MOST_JSON = 32 << 20
#: The most levels of lists and objects in each other; what is written here has a handful.
MOST_LEVELS = 64

#: How the name ends of a file that is being written, and the whole of it: whose, by which process, of which machine.
_TEMPORARY = ".part"
_WRITTEN_BY = re.compile(r"\..+\.(?P<process>[0-9]{1,12})-(?P<host>[A-Za-z0-9]*)\.[^.]+\.part", re.DOTALL)


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yields a temporary path beside ``path`` that takes its place when the block ends without an error."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep(path)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{_start(path)}{_owner()}.", suffix=_TEMPORARY)
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
    """Removes what processes left behind that were killed while they wrote this very file."""
    for name in os.listdir(path.parent):
        if name.startswith(_start(path)) and abandoned(name):
            with suppress(OSError):  # somebody else's, who may remove it
                (path.parent / name).unlink(missing_ok=True)


def is_leftover(name: str) -> bool:
    """Whether a file of that name is one that some process was, or is, writing."""
    return _WRITTEN_BY.fullmatch(name) is not None


def abandoned(name: str) -> bool:
    """Whether nobody goes on writing a file of that name: a process of this machine did, and is no more."""
    owner = _WRITTEN_BY.fullmatch(name)
    return owner is not None and owner["host"] == _host() and not alive(int(owner["process"]))


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


def _owner() -> str:
    """This process, among those of all machines that may see the file."""
    return f"{os.getpid()}-{_host()}"


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9]", "", platform.node())[:32]


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


def read_json(path: str | Path, most: int = MOST_JSON) -> Any:
    """Reads a JSON file of at most so many bytes, or says in one sentence why it cannot be read."""
    content = read_whole(path, most)
    try:
        return parse_json(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise FileFormatError(f"cannot read {path}: {error}") from error
    except FileFormatError as error:
        raise FileFormatError(f"{path} {error}") from error


def parse_json(content: bytes | str) -> Any:
    """The value that JSON text stands for; one that is too deep, or says a thing twice, is refused.

    What is wrong is said without its subject: "is not JSON: …".
    """
    try:
        text = content.decode("utf-8") if isinstance(content, bytes) else content
        value = json.loads(text, object_pairs_hook=_without_twins)
    except UnicodeDecodeError as error:
        raise FileFormatError(f"is not JSON: its text is not UTF-8 ({error.reason} at byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise FileFormatError(f"is not JSON: {error.msg} at line {error.lineno}") from error
    except RecursionError as error:
        raise FileFormatError(_TOO_DEEP) from error
    except FileFormatError:
        raise
    except ValueError as error:  # a number of more digits than Python reads
        raise FileFormatError(f"is not JSON that can be read: {error}") from error
    _check_levels(value)
    return value


_TOO_DEEP = f"has lists and objects more than {MOST_LEVELS} deep in each other; no file of haloc's is so deep"


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise FileFormatError(f"says {shown(twice)} twice in one object; leave one of them out")
    return found


def _check_levels(value: Any) -> None:
    """Level by level, so that no depth is too deep for the check itself."""
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise FileFormatError(_TOO_DEEP)


def read_whole(path: str | Path, most: int) -> bytes:
    """The bytes of a file of at most ``most`` bytes; devices, pipes and folders are refused before they are opened."""
    path = Path(path)
    try:
        check_regular(path, most)
        with path.open("rb") as file:
            # What a read may return is allocated first, so not the most that it may be.
            size = path.stat().st_size
            content = file.read(size + 1)
            if len(content) > size:  # it grows while it is read, or does not say how long it is
                content += file.read(max(most + 1 - len(content), 0))
    except FileNotFoundError as error:
        raise FileFormatError(f"there is no file {path}") from error
    except FileFormatError:
        raise
    except (OSError, ValueError) as error:  # a name with a null in it is a ValueError
        raise FileFormatError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if len(content) > most:  # it grew, or does not say how long it is
        raise FileFormatError(_too_long(path, most))
    return content


def check_regular(path: Path, most: int | None = None) -> None:
    """Refuses what is no plain file, or a longer one than ``most``; a link counts as what it leads to."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a device or a pipe"
        raise FileFormatError(f"cannot read {path}: it is {kind}, expected a file")
    if most is not None and found.st_size > most:
        raise FileFormatError(_too_long(path, most, found.st_size))


def _too_long(path: Path, most: int, size: int | None = None) -> str:
    has = "more" if size is None else f"{size / 2**20:,.0f} MiB"
    return f"{path} is too large: such a file may have {most / 2**20:,.0f} MiB, and it has {has}; is it another file?"


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
