from __future__ import annotations

import os

import pytest

from haloc.errors import FileFormatError
from haloc.files import read_json, replacing, write_json, write_json_rows


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_behind(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half of")
        raise RuntimeError("interrupted")
    assert read_json(path) == {"old": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_value_that_is_not_json_writes_nothing(tmp_path):
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", object())
    assert os.listdir(tmp_path) == []


def test_new_files_get_the_usual_permissions(tmp_path):
    before = os.umask(0o022)
    try:
        write_json(tmp_path / "a.json", 1)
    finally:
        os.umask(before)
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o644


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileFormatError, match="cannot write .*file/a.json"):
        write_json(tmp_path / "file" / "a.json", 1)


def test_rows_are_written_a_line_each(tmp_path):
    path = tmp_path / "rows.json"
    for rows in ([{"a": 1}, {"a": [2, "}"]}], []):
        write_json_rows(path, {"kind": "x", "nested": {"y": {}}}, rows)
        assert read_json(path) == {"kind": "x", "nested": {"y": {}}, "rows": rows}
        assert sum(line.strip().startswith('{"a"') for line in path.read_text().splitlines()) == len(rows)
