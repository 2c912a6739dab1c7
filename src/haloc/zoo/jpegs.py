"""Small JPEGs of one size, read by several processes: threads that decode many wait for each other's interpreter lock.

Run by its path, this file is one of these processes. It imports nothing of haloc, so none of them waits for torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack, suppress
from io import BytesIO
from pathlib import Path
from typing import IO

from PIL import Image

#: Fewer pictures than this are not worth the start of processes.
FEW = 2000
_MOST_READERS = 16
#: What a reader writes first. Its interpreter may print something of its own before, which must not pass for pixels.
_BEGUN = b"pictures:"


class OtherSizeError(ValueError):
    """A picture of another size than expected."""


def planes(path: str | Path, side: int) -> bytes:
    """The reds of a square picture row by row, then its greens, then its blues."""
    with Image.open(path, formats=("JPEG",)) as picture:
        if picture.size != (side, side):  # told before anything is decoded
            raise OtherSizeError(f"{picture.width}×{picture.height}")
        return b"".join(plane.tobytes() for plane in picture.convert("RGB").split())


def read_many(paths: Sequence[Path], side: int) -> Generator[bytes | None, None, None]:
    """Yields the planes of each picture in turn; None for one that is left to the caller, who can say what is wrong."""
    length = 3 * side * side
    with ExitStack() as stack:
        readers: list[subprocess.Popen[bytes]] = []
        with suppress(OSError):  # as many as can be started; with none of them all is left to the caller
            for _ in range(_wanted(len(paths))):
                readers.append(_started(side, stack))
        answers = [_asked(reader, paths[first :: len(readers)]) for first, reader in enumerate(readers)] or [BytesIO()]
        for number in range(len(paths)):
            found = answers[number % len(answers)].read(length)
            yield found if len(found) == length else None


def _wanted(pictures: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST_READERS) if pictures >= FEW and cores > 1 else 0


def _started(side: int, stack: ExitStack) -> subprocess.Popen[bytes]:
    """A process that ends with the stack at the latest."""
    # Not by multiprocessing: a fork may hold locks of threads that it does not have, and its other ways run the user's
    # script once more, which may have no guard against that. An interpreter that is given this file does neither.
    command = [sys.executable or "", "-P", __file__, str(side)]
    reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    stack.enter_context(reader)
    stack.callback(reader.kill)
    return reader


def _asked(reader: subprocess.Popen[bytes], paths: Sequence[Path]) -> IO[bytes]:
    """Tells a process what to read; returns where the pixels come from, nothing of one that does not work."""
    assert reader.stdin is not None
    assert reader.stdout is not None
    with suppress(BrokenPipeError), reader.stdin as told:
        told.write(b"\0".join(map(os.fsencode, paths)))
    return reader.stdout if reader.stdout.read(len(_BEGUN)) == _BEGUN else BytesIO()


def _read_here(side: int) -> None:
    """What such a process does: it writes the pixels of one picture after the other; a damaged one ends it."""
    paths = sys.stdin.buffer.read().split(b"\0")
    sys.stdout.buffer.write(_BEGUN)
    for path in map(os.fsdecode, paths):
        if not os.path.isfile(path):  # a pipe may never begin
            return
        sys.stdout.buffer.write(planes(path, side))


if __name__ == "__main__":
    _read_here(int(sys.argv[1]))
