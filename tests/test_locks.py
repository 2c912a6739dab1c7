from __future__ import annotations

import errno
import fcntl
import os
import platform
import re
import threading
import time
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from haloc.errors import FileFormatError
from haloc.files import replacing
from haloc.locks import LOCK, file_at_work, folder_at_work, only_traces
from tests.processes import FORKED


def hold(path: Path, whole: bool, told: Connection, child: bool = False) -> None:
    with folder_at_work(path) if whole else file_at_work(path):
        if child and not os.fork():  # as processes that read data are
            time.sleep(60)
            os._exit(0)
        told.send("held")
        time.sleep(60)


@contextmanager
def held(path: Path, whole: bool = True, child: bool = False):
    """Another process at work; killed in the end, with what it started."""
    heard, told = FORKED.Pipe(duplex=False)
    process = FORKED.Process(target=hold, args=(path, whole, told, child), daemon=True)
    process.start()
    assert heard.poll(30)
    try:
        yield process
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("whole", [True, False])
def test_the_second_is_refused_with_the_number_of_the_first(tmp_path, whole):
    place = tmp_path / "run"
    enter = folder_at_work if whole else file_at_work
    with held(place, whole) as other:
        said = f"another haloc is at work in .*run: process {other.pid} on "
        with pytest.raises(FileFormatError, match=said), enter(place):
            pass
    with enter(place):
        pass  # the first was killed, and what it left keeps nobody out
    assert list(tmp_path.iterdir()) == ([place] if whole else [])
    assert not whole or only_traces(place)


def test_what_a_killed_process_started_does_not_keep_the_lock(tmp_path):
    with held(tmp_path / "run", child=True):
        pass
    with folder_at_work(tmp_path / "run"):
        pass


def test_a_number_that_is_somebody_elses_by_now_keeps_nobody_out(tmp_path):
    (tmp_path / LOCK).write_text(f"{os.getpid()} on another machine\n")
    with folder_at_work(tmp_path):
        assert re.match(rf"{os.getpid()} on \S+\n$", (tmp_path / LOCK).read_text())
    assert list(tmp_path.iterdir()) == []


def test_threads_keep_each_other_out_and_one_may_enter_twice(tmp_path):
    refused: list[str] = []

    def other() -> None:
        try:
            with folder_at_work(tmp_path):
                pass
        except FileFormatError as error:
            refused.append(str(error))

    with folder_at_work(tmp_path), folder_at_work(tmp_path):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert f"process {os.getpid()}, this very one" in refused[0]
    other()
    assert len(refused) == 1


def test_a_folder_in_which_nothing_was_done_is_taken_away(tmp_path):
    with folder_at_work(tmp_path / "a/b"):
        assert (tmp_path / "a/b").is_dir()
    assert list(tmp_path.iterdir()) == []
    with folder_at_work(tmp_path / "a/b"):
        (tmp_path / "a/b/c").write_text("")
    assert [path.name for path in (tmp_path / "a/b").iterdir()] == ["c"]


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_place_that_cannot_be_written_to(tmp_path, monkeypatch, code):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(FileFormatError, match=f"cannot write to .*: {os.strerror(code)}"), folder_at_work(tmp_path):
        pass


def test_a_file_system_without_locks_is_told_of_and_worked_on(tmp_path, monkeypatch, caplog):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with folder_at_work(tmp_path):
        pass
    assert "has no locks" in caplog.text


def test_what_killed_processes_left_is_swept_up(tmp_path):
    dead = FORKED.Process(target=int)
    dead.start()
    dead.join()
    host = re.sub(r"[^A-Za-z0-9]", "", platform.node())[:32]
    names = [
        f".a.json.{dead.pid}-{host}.x.part",
        f".a.json.{os.getpid()}-{host}.x.part",
        f".b.json.{dead.pid}-{host}.x.part",
        f".a.json.{dead.pid}-another.x.part",
        ".a.json",
        ".mine.part",
        "c.part",
    ]
    for name in names:
        (tmp_path / name).write_text("half")
    with replacing(tmp_path / "a.json") as temporary:
        temporary.write_text("whole")
    assert {path.name for path in tmp_path.iterdir()} == {*names[1:], "a.json"}, "those who live may still be writing"
    with folder_at_work(tmp_path):
        pass
    left = {names[1], *names[3:], "a.json"}
    assert {path.name for path in tmp_path.iterdir()} == left, "nor is what somebody else calls a part ours"
