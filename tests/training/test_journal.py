from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from haloc.errors import FileFormatError
from haloc.training.journal import Journal, read_journal

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
ROWS = st.builds(lambda step, row: {**row, "step": step}, st.integers(), st.dictionaries(st.text(), VALUES, max_size=3))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "log.jsonl"


def write(path, *rows):
    with Journal(path) as journal:
        for row in rows:
            journal.append(row)


@given(rows=st.lists(ROWS, max_size=4))
def test_rows_come_back_as_they_were(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("log") / "new" / "log.jsonl"
    with Journal(path) as journal:
        for row in rows:
            journal.append(row)
        assert read_journal(journal.path) == rows
    assert read_journal(path) == rows
    assert path.read_text().splitlines() == [json.dumps(row) for row in rows]


@pytest.mark.parametrize(("keep", "steps"), [(0, []), (1, [1]), (2, [1, 2, 2]), (3, [1, 2, 2, 3]), (9, [1, 2, 2, 3])])
def test_work_that_will_be_done_again_is_dropped(path, keep, steps):
    write(path, *({"step": step, "loss": 0.1} for step in (1, 2, 2, 3)))
    with Journal(path, keep_until=keep) as journal:
        assert read_journal(journal.path) == [{"step": step, "loss": 0.1} for step in steps]
        journal.append({"step": 7})
    assert [row["step"] for row in read_journal(path)] == [*steps, 7]


def test_a_log_without_a_step_to_keep_starts_afresh(path):
    write(path, {"step": 1})
    write(path, {"step": 2})
    assert read_journal(path) == [{"step": 2}]


def test_a_resumed_log_may_not_be_there_yet(path):
    with Journal(path, keep_until=5) as journal:
        assert read_journal(journal.path) == []
    assert path.read_bytes() == b""


@pytest.mark.parametrize("torn", [b"{", b'{"step": 3', b'{"step": 3, "name": "\xc3'])
def test_a_torn_last_line_is_dropped(path, torn):
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + torn)
    assert read_journal(path) == [{"step": 1}, {"step": 2}]
    with Journal(path, keep_until=9) as journal:
        journal.append({"step": 3})
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_a_row_that_lost_only_its_line_break_is_kept(path):
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    with Journal(path, keep_until=9) as journal:
        journal.append({"step": 3})
    assert read_journal(path) == [{"step": 1}, {"step": 2}, {"step": 3}]


@given(rows=st.lists(ROWS, min_size=1, max_size=4), data=st.data())
def test_a_cut_at_any_byte_loses_at_most_the_row_that_it_hits(tmp_path_factory, rows, data):
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    write(path, *rows)
    whole = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    # A row is there from its last brace on, the line break or not.
    expected = rows[: sum(end - 1 <= cut for end in ends)]
    assert read_journal(path) == expected
    with Journal(path, keep_until=max(row["step"] for row in rows)) as journal:
        journal.append({"step": 1})
    assert read_journal(path) == [*expected, {"step": 1}]


@pytest.mark.parametrize("keep", [None, 5])
@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b'{\n  "step": 1\n}\n', 1),
        (b'{"step": 1}\nhello\n{"step": 2}\n', 2),
        (b'{"step": 1}\n\n{"step": 2}\n', 2),
        (b'{"step": 1}\n{"step": 2.0}\n{"step": 3}\n', 2),
        (b'{"step": true}\n{"step": 3}\n', 1),
        (b"[1]\n[2]\n", 1),
        (b"\xff\xfe\x00\n\x80\n", 1),
        # One line only, and it was not cut short by us.
        (b'{"model": "resnet18"}', 1),
        (b'{"model": "resnet18"}\n', 1),
        (b"hello", 1),
        (b'{"step": 1}\nhello', 2),
        (b'{"step": 1}\n{"step": \n', 2),
    ],
)
def test_a_file_that_is_no_log_is_refused_and_left_as_it_is(path, content, line, keep):
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match=f"log.jsonl is not the log of a run: line {line} "):
        Journal(path, keep_until=keep)
    assert path.read_bytes() == content
    assert os.listdir(path.parent) == ["log.jsonl"]


def test_what_is_no_number_is_written_as_null(path):
    write(path, {"step": 1, "loss": math.nan, "more": {"a": [math.inf, 1.5, (-math.inf,)], "text": "NaN"}})
    row = {"step": 1, "loss": None, "more": {"a": [None, 1.5, [None]], "text": "NaN"}}
    assert path.read_text() == json.dumps(row) + "\n"
    assert read_journal(path) == [row]


@pytest.mark.parametrize("row", [{}, {"step": "1"}, {"step": 1.0}, {"step": True}, {"step": None}])
def test_a_row_that_could_not_be_read_back_is_not_written(path, row):
    with Journal(path) as journal:
        with pytest.raises(ValueError, match="needs an int as its 'step'"):
            journal.append(row)
        with pytest.raises(TypeError):
            journal.append({"step": 1, "object": object()})
        journal.append({"step": 2})
    assert read_journal(path) == [{"step": 2}]


def test_a_failed_rewrite_keeps_the_old_log(path, monkeypatch):
    write(path, {"step": 1}, {"step": 2})
    before = path.read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", fail)
    with pytest.raises(FileFormatError, match="cannot write .*log.jsonl: No space left"):
        Journal(path, keep_until=1)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["log.jsonl"]


def test_a_killed_run_leaves_all_its_rows(path):
    script = """
import os, pathlib, signal, sys
from haloc.training.journal import Journal
journal = Journal(pathlib.Path(sys.argv[1]))
for step in range(50):
    journal.append({"step": step})
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert read_journal(path) == [{"step": step} for step in range(50)]


def test_a_log_that_is_not_there_or_cannot_be_read_is_named(path):
    with pytest.raises(FileFormatError, match="there is no file .*log.jsonl"):
        read_journal(path)
    path.mkdir()
    with pytest.raises(FileFormatError, match="cannot read .*log.jsonl"):
        Journal(path)
