"""One process at a time: whoever works on a folder or a file keeps others away as long as it lives.

The lock is the kernel's own (a POSIX record lock): it ends with the process however that ends, it is not inherited by
processes that read data for it, and it does not hang on a process number, which may be somebody else's by now. The
number in the file is there to be told.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from haloc.errors import FileFormatError
from haloc.files import abandoned, is_leftover

#: The file in a folder that says who works there.
LOCK = ".lock"
_LOG = logging.getLogger(__name__)
#: What a file system answers that knows no locks.
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)

#: The kernel keeps other processes out, not this one's threads: the files that they hold, each with who and how often.
_ours: dict[Path, tuple[int, int]] = {}
_guard = threading.Lock()


@contextmanager
def folder_at_work(folder: Path) -> Iterator[None]:
    """Makes a folder and keeps others out of it; taken away again if nothing was put into it.

    Raises:
        FileFormatError: somebody else is at work there, or it cannot be written to.
    """
    with _made(folder), _held(folder / LOCK, folder):
        _sweep(folder)
        yield


@contextmanager
def file_at_work(path: Path) -> Iterator[None]:
    """Keeps others away from a file that is added to.

    Raises:
        FileFormatError: somebody else is at work on it, or its folder cannot be written to.
    """
    with _made(path.parent), _held(path.parent / f".{path.name}{LOCK}", path):
        yield


def only_traces(folder: Path) -> bool:
    """Whether a folder has nothing in it but what a process leaves that was killed before its first file was whole."""
    return all(path.name == LOCK or is_leftover(path.name) for path in folder.iterdir())


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Makes a folder and those above it; the new ones are taken away again if they are empty in the end."""
    missing = [path for path in (*reversed(folder.parents), folder) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileFormatError(f"cannot write to {folder}: {error.strerror or error}") from error
    try:
        yield
    finally:
        for path in reversed(missing):
            with suppress(OSError):  # there is something in it by now
                path.rmdir()


def _sweep(folder: Path) -> None:
    """Removes half-written files of processes that were killed; folders within may have runs of their own at work."""
    for path in folder.rglob(".*"):
        if abandoned(path.name):
            with suppress(OSError):
                path.unlink(missing_ok=True)


@contextmanager
def _held(lock: Path, what: Path) -> Iterator[None]:
    own, me = lock.absolute(), threading.get_ident()
    with _guard:
        owner, times = _ours.get(own, (me, 0))
        if owner != me:
            raise _refusal(what, f"{os.getpid()}, this very one")
        _ours[own] = me, times + 1
    try:
        if times:  # a stage within a stage: whoever has it may go on
            yield
        else:
            with _locked(lock, what):
                yield
    finally:
        with _guard:
            _ours.pop(own)
            if times:
                _ours[own] = me, times


@contextmanager
def _locked(lock: Path, what: Path) -> Iterator[None]:
    file = _taken(lock, what)
    try:
        yield
    finally:
        with suppress(OSError):
            lock.unlink(missing_ok=True)  # while it is still held, so that nobody takes hold of a file that is gone
        with suppress(OSError):
            file.close()


def _taken(lock: Path, what: Path) -> IO[str]:
    while True:
        try:
            file = lock.open("a+", encoding="utf-8")
        except OSError as error:
            raise FileFormatError(f"cannot write to {lock.parent}: {error.strerror or error}") from error
        try:
            _lock(file, what)
            if _is_at(lock, file):
                _sign(file)
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # whoever had it has just removed it


def _lock(file: IO[str], what: Path) -> None:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _WITHOUT_LOCKS:
            _LOG.warning("the file system of %s has no locks: nothing keeps a second run away from it", what)
            return
        file.seek(0)
        raise _refusal(what, file.read().strip() or "unknown") from error


def _is_at(lock: Path, file: IO[str]) -> bool:
    try:
        found = lock.stat()
    except OSError:
        return False
    mine = os.fstat(file.fileno())
    return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)


def _sign(file: IO[str]) -> None:
    """Writes who it is; on a full disk nobody is told, and the lock holds all the same."""
    with suppress(OSError):
        file.truncate(0)
        file.write(f"{os.getpid()} on {socket.gethostname()}\n")
        file.flush()


def _refusal(what: Path, who: str) -> FileFormatError:
    return FileFormatError(
        f"another haloc is at work in {what}: process {who}; wait for it to end, or choose another name"
    )
