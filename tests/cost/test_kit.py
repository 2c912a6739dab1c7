from __future__ import annotations

import ast
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from haloc.cost.kit import merge_tables, script, write_kit
from haloc.cost.table import Table
from haloc.cost.target import Target
from haloc.errors import FileFormatError, SpecError
from haloc.forms import Dense

ONNX = Target("cpu", "onnxruntime", threads=1)
#: What onnxruntime itself is made of; nothing else is on the other machine.
PACKAGES = ("onnxruntime", "numpy", "numpy.libs", "flatbuffers", "packaging", "google")


@pytest.fixture
def elsewhere(tmp_path):
    """Runs Python as on a machine that has onnxruntime and neither haloc nor torch nor onnx."""
    pytest.importorskip("onnxruntime")
    site = tmp_path / "site"
    site.mkdir()
    installed = Path(importlib.util.find_spec("onnxruntime").origin).parents[1]
    for name in PACKAGES:
        if (installed / name).exists():
            (site / name).symlink_to(installed / name)

    def command(*arguments):
        # -S leaves out the packages of this environment, and PYTHONPATH brings the few back.
        return [sys.executable, "-S", *map(str, arguments)], {"PYTHONPATH": str(site), "PATH": os.environ["PATH"]}

    return command


def run(command, environment, **keywords):
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, **keywords)


def test_the_other_machine_has_nothing_of_ours(elsewhere):
    for package in ("haloc", "torch", "onnx"):
        ran = run(*elsewhere("-c", f"import {package}"))
        assert "ModuleNotFoundError" in ran.stderr


def test_the_kit_measures_there_what_is_merged_here(elsewhere, rows, tmp_path):
    write_kit(rows, ONNX, tmp_path / "kit")
    assert sorted(path.name for path in (tmp_path / "kit").iterdir()) == ["measure.py", "rows.json"]
    ran = run(*elsewhere(tmp_path / "kit" / "measure.py"))
    assert ran.returncode == 0, ran.stderr
    assert "3 of 3 rows" in ran.stderr
    assert "s left" in ran.stderr
    table = merge_tables([tmp_path / "kit"])
    assert table == Table.load(tmp_path / "kit" / "table.json")
    assert {(row.shape, row.form) for row in table.rows} == set(rows)
    assert table.target == ONNX
    assert "onnxruntime" in table.environment


def test_a_killed_kit_goes_on_where_it_was(elsewhere, rows, tmp_path):
    write_kit(rows, ONNX, tmp_path / "kit")
    command, environment = elsewhere(tmp_path / "kit" / "measure.py")
    worker = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    journal = tmp_path / "kit" / "table.json.rows"
    while not (journal.exists() and "\n" in journal.read_text()) and worker.poll() is None:
        time.sleep(0.01)
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    first = journal.read_text().strip().splitlines()[0]
    ran = run(command, environment)
    assert ran.returncode == 0, ran.stderr
    assert len(merge_tables([tmp_path / "kit"])) == 3
    assert not journal.exists()
    assert f"of {6 * len(rows)} visits" in ran.stderr
    assert f"\r1 of {6 * len(rows)} visits" not in ran.stderr, first


def test_the_script_is_plain_python_38():
    for target in (ONNX, Target(), Target("cpu", "openvino")):
        text = script(target)
        tree = ast.parse(text, feature_version=(3, 8))
        imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = {(node.module if isinstance(node, ast.ImportFrom) else node.names[0].name) for node in imports}
        assert not any(name.split(".")[0] == "haloc" for name in names), names
        top = {node for node in tree.body if node in imports}
        known = sys.stdlib_module_names
        assert all((getattr(node, "module", None) or node.names[0].name).split(".")[0] in known for node in top)


def test_a_kit_without_its_row_list(elsewhere, rows, tmp_path):
    write_kit(rows, ONNX, tmp_path / "kit")
    (tmp_path / "kit" / "rows.json").write_text("{")
    ran = run(*elsewhere(tmp_path / "kit" / "measure.py"))
    assert ran.returncode == 1
    assert "is not a kit's row list" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_machine_without_the_package(elsewhere, rows, tmp_path):
    write_kit(rows, Target("cpu", "openvino"), tmp_path / "kit")
    ran = run(*elsewhere(tmp_path / "kit" / "measure.py"))
    assert ran.returncode == 1
    assert "measure: this needs the package 'openvino'; install it on this machine" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_the_row_list_is_complete(rows, tmp_path):
    write_kit(rows, Target(), tmp_path)
    content = json.loads((tmp_path / "rows.json").read_text())
    assert content["target"] == Target().to_dict()
    assert [len(row["stages"]) for row in content["rows"]] == [1, 3, 3]


def test_what_cannot_be_merged_or_made(conv, tmp_path):
    with pytest.raises(FileFormatError, match="there is no table.json in"):
        merge_tables([tmp_path])
    with pytest.raises(SpecError, match="nothing to merge"):
        merge_tables([])
    with pytest.raises(SpecError, match="it needs no kit"):
        write_kit([(conv, Dense())], Target.parse("eyeriss"), tmp_path)
