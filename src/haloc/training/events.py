"""Event files for TensorBoard, written without it: only the few fields of its records that a curve needs."""

from __future__ import annotations

import math
import os
import re
import struct
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Self

from haloc.errors import FileFormatError

_PREFIX = "events.out.tfevents"
#: Protocol buffers' names for how a field is laid out.
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_SESSION_START = 1


class EventFile:
    """A new event file of its own. Every record is handed to the system at once, so a killed run keeps what it wrote.

    Attributes:
        path: The file.
    """

    def __init__(self, folder: Path, *, purge_step: int | None = None, clock: Callable[[], float] = time.time) -> None:
        """Makes the file.

        Args:
            folder: Where the run's event files are; it is made where it is missing.
            purge_step: TensorBoard forgets what earlier files in the folder have at this step and after it.
            clock: The time in seconds since 1970.
        """
        self._clock = clock
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.path = folder / _name(folder, int(clock()))
            self._file = self.path.open("xb")
        except OSError as error:
            raise FileFormatError(f"cannot write events to {folder}: {error.strerror or error}") from error
        self._write(_bytes(3, b"brain.Event:2"))
        if purge_step is not None:
            self._write(_int(2, purge_step) + _bytes(7, _int(1, _SESSION_START)))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes a point for each tag in ``values``."""
        summary = b"".join(_bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in values.items())
        self._write(_int(2, step) + _bytes(5, summary))

    def close(self) -> None:
        """Closes the file; nothing is lost without it."""
        with suppress(OSError):  # what a full disk did not take has been told
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, fields: bytes) -> None:
        try:
            self._file.write(_record(_double(1, self._clock()) + fields))
            self._file.flush()
        except OSError as error:
            raise FileFormatError(f"cannot write {self.path}: {error.strerror or error}") from error


def crc32c(data: bytes) -> int:
    """Returns the Castagnoli checksum of ``data``."""
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _name(folder: Path, now: int) -> str:
    """Returns a name that sorts after those in the folder, because TensorBoard reads files in the order of their names.

    Otherwise a run that is resumed within a second, or by a machine whose clock is behind, would be read before the
    run that it goes on from, and would purge nothing.
    """
    matches = (re.match(rf"{re.escape(_PREFIX)}\.([0-9]+)\.", name) for name in os.listdir(folder))
    stamp = max([now, *(int(match[1]) + 1 for match in matches if match)])
    return f"{_PREFIX}.{stamp:010d}.{uuid.uuid4().hex[:12]}.haloc"


def _record(data: bytes) -> bytes:
    """Frames data as TensorFlow's record files do."""
    length = struct.pack("<Q", len(data))
    return length + _masked_crc(length) + data + _masked_crc(data)


def _masked_crc(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


@cache
def _crc_table() -> tuple[int, ...]:
    return tuple(map(_crc_of_byte, range(256)))


def _crc_of_byte(crc: int) -> int:
    for _ in range(8):
        crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc


def _int(field: int, value: int) -> bytes:
    # A negative number is written as its two's complement of 64 bits.
    return _varint(field << 3 | _VARINT) + _varint(value & 0xFFFFFFFFFFFFFFFF)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | _FIXED64) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    key = _varint(field << 3 | _FIXED32)
    try:
        return key + struct.pack("<f", value)
    except OverflowError:
        # Finite, but not in 32 bits: a loss that has run away must not end the run.
        return key + struct.pack("<f", math.copysign(math.inf, value))


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | _LENGTH) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    """Writes seven bits to a byte, the lowest first; the eighth says that more follow."""
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
