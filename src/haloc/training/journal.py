"""The log of a run: a file with a JSON object per line, each with the step that it belongs to."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from haloc.errors import FileFormatError
from haloc.files import parse_json, read_whole, replacing

#: The most bytes that are read of a log; a row has some hundred.
_MOST = 512 << 20


class Journal:
    """A log that is written row by row. A killed run loses at most the row that it was writing.

    Attributes:
        path: The file.
    """

    def __init__(self, path: Path, *, keep_until: int | None = None) -> None:
        """Opens the log.

        Args:
            path: The file; it is made where it is missing, and left alone if it is no such log.
            keep_until: The last step whose rows stay. Later ones were written after the checkpoint that the run goes
                on from, and will be written again. None starts afresh.
        """
        self.path = path
        # Read also for a fresh start: a file that is no log was meant for something else.
        rows = read_journal(path) if path.exists() else []
        kept = [] if keep_until is None else [row for row in rows if row["step"] <= keep_until]
        with replacing(path) as temporary:
            temporary.write_bytes(b"".join(map(_line, kept)))
        try:
            self._file = path.open("ab")
        except OSError as error:
            raise FileFormatError(f"cannot write {path}: {error.strerror or error}") from error

    def append(self, row: Mapping[str, Any]) -> None:
        """Writes a row and hands it to the system at once. JSON has no NaN and no infinity: both become null.

        Raises:
            ValueError: The row has no whole number as its ``step``, so it could not be read back.
        """
        if not _is_row(row):
            raise ValueError(f"a row of the log needs an int as its 'step', got {row!r}")
        line = _line(row)
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise FileFormatError(f"cannot write {self.path}: {error.strerror or error}") from error

    def close(self) -> None:
        """Closes the file; nothing is lost without it."""
        with suppress(OSError):  # what a full disk did not take has been told
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_journal(path: str | Path) -> list[dict[str, Any]]:
    """Reads a log, without the last line where a killed run left that unfinished."""
    *lines, rest = read_whole(path, _MOST).split(b"\n")
    if rest and not _is_torn(rest):
        lines.append(rest)
    return [_parsed(line, number, path) for number, line in enumerate(lines, start=1)]


def _parsed(line: bytes, number: int, path: str | Path) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except FileFormatError:
        row = None
    if not _is_row(row):
        raise FileFormatError(
            f"{path} is not the log of a run: line {number} is no JSON object with an int as its 'step'; "
            "move the file away or log to another one"
        )
    assert isinstance(row, dict)
    return row


def _is_torn(line: bytes) -> bool:
    """Whether a last line, which has no line break, can be the beginning of a row.

    Anything else there, such as the one line of a JSON file, is not ours to drop.
    """
    if not line.startswith(b"{"):
        return False
    try:
        parse_json(line)
    except FileFormatError:
        return True
    return False


def _is_row(value: Any) -> bool:
    # A bool is an int to isinstance.
    return isinstance(value, Mapping) and type(value.get("step")) is int


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(finite(row), allow_nan=False).encode() + b"\n"


def finite(value: Any) -> Any:
    """Returns a value with None in place of every float that JSON cannot write."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [finite(item) for item in value]
    return value
