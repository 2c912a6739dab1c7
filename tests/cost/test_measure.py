from __future__ import annotations

import json
import sys
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch

import haloc
from haloc.cost import measure as measuring
from haloc.cost import sampling
from haloc.cost.measure import bench_row, check_available, label, measure
from haloc.cost.table import Table
from haloc.cost.target import Target
from haloc.errors import CostError, MissingExtraError, SpecError
from haloc.forms import Svd, Tucker2
from haloc.shapes import LinearShape
from tests.processes import FORKED


def test_every_row_of_a_space_is_measured_once(hurried):
    layers = haloc.inspect(haloc.create("resnet20"), torch.randn(1, 3, 32, 32))
    space = haloc.rank_space(layers, round_to=16)
    table = measure(space, Target())
    assert {(row.shape, row.form) for row in table.rows} == set(space.rows())
    assert len(table) < sum(len(choices) for choices in space.layers.values())
    assert all(row.latency_ms > 0 and row.count >= 4 for row in table.rows)
    assert table.environment["torch"] == torch.__version__.split("-")[0]
    assert table.environment["device"]


def test_rows_that_are_there_are_kept(rows, tmp_path, hurried):
    path = tmp_path / "table.json"
    measure(rows[:2], Target(), path=path)
    before = path.read_text()
    seen = []
    measure(rows[:2], Target(), path=path, on_progress=lambda done, total: seen.append((done, total)))
    assert (path.read_text(), seen) == (before, [])
    table = measure(rows, Target(), path=path, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert len(table) == 3
    assert Table.load(path).rows[:2] == Table.from_dict(json.loads(before)).rows
    assert [file.name for file in tmp_path.iterdir()] == ["table.json"]


def measured_slowly(path: Path, begun: Event) -> None:
    sampling.SCHEDULES["torch"] = sampling.Schedule(3, 3, 0.0, 0.02)
    begun.set()
    measure([(LinearShape(64, 64), Svd(rank)) for rank in range(1, 30)], Target(threads=1), path=path)


def test_a_run_killed_without_warning_loses_the_visit_in_flight_only(tmp_path):
    path = tmp_path / "table.json"
    kills, kept = 0, ""
    while not path.exists():
        begun = FORKED.Event()
        worker = FORKED.Process(target=measured_slowly, args=(path, begun))
        worker.start()
        assert begun.wait(60)
        worker.join(0.25 + 0.1 * kills)
        assert worker.exitcode in (None, 0), "it fell over by itself"
        worker.kill()
        worker.join()
        kills += 1
        journal = tmp_path / "table.json.rows"
        if journal.exists():
            assert journal.read_text().startswith(kept), "what an earlier process had measured is gone"
            kept = journal.read_text()
    assert kills > 1, "it was never killed half-way"
    assert kept.count('"key"') > 1
    assert len(Table.load(path)) == 29


def test_a_table_of_something_else_is_not_added_to(rows, tmp_path, hurried):
    path = tmp_path / "table.json"
    table = measure(rows[:1], Target(), path=path)
    with pytest.raises(SpecError, match="is a table for cpu:eager:fp32:b1, not for cpu:eager:fp32:b8"):
        measure(rows, Target(batch_size=8), path=path)
    replace(table, environment=dict(table.environment) | {"torch": "1.0"}).save(path)
    with pytest.raises(SpecError, match="measured with torch '1.0', here it is"):
        measure(rows, Target(), path=path)


def test_rows_that_cannot_run_are_left_out_and_said(rows, monkeypatch, caplog, hurried):
    real = measuring.measure_rows

    def failing(benched, target, journal, **keywords):
        results, _ = real(benched[1:], target, journal, **keywords)
        return results, {benched[0]["key"]: "OutOfMemoryError: too large"}

    monkeypatch.setattr(measuring, "measure_rows", failing)
    table = measure(rows, Target())
    assert len(table) == 2
    assert "OutOfMemoryError: too large" in caplog.text
    with pytest.raises(CostError, match="not one of 1 rows could be run on cpu:eager:fp32:b1: OutOfMemoryError"):
        measure(rows[:1], Target())


def test_what_this_machine_lacks_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'haloc\[openvino\]'"):
        check_available(Target("cpu", "openvino"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SpecError, match="needs a CUDA device, and there is none here; write a kit"):
        check_available(Target("cuda"))


def test_different_rows_have_different_keys(conv):
    shapes = [conv, replace(conv, stride=(2, 2)), replace(conv, groups=2), replace(conv, images=2)]
    shapes += [replace(conv, padding="same"), replace(conv, padding_mode="reflect"), replace(conv, bias=False)]
    shapes += [LinearShape(3, 4), LinearShape(3, 4, bias=False), LinearShape(3, 4, positions=2)]
    assert len({label(shape) for shape in shapes}) == len(shapes)
    assert bench_row(conv, Tucker2(4, 4))["key"] == "conv8-16-k3x3-s1x1-p1x1-d1x1-@10x10 tucker2 4/4"


def test_the_accelerator_is_priced_with_energy(rows, tmp_path):
    path = tmp_path / "table.json"
    table = measure(rows[:2], Target.parse("eyeriss"), path=path, engine="bound")
    assert all(row.energy_mj > 0 and row.latency_ms > 0 for row in table.rows)
    assert table.of("energy").price(*rows[0]).value == table.rows[0].energy_mj
    assert len(measure(rows, Target.parse("eyeriss"), path=path, engine="bound")) == 3
    assert [file.name for file in tmp_path.iterdir()] == ["table.json"]


def test_the_accelerator_is_part_of_what_a_table_is_of(rows, tmp_path):
    path = tmp_path / "table.json"
    measure(rows[:2], Target.parse("eyeriss"), path=path, engine="bound")
    with pytest.raises(SpecError, match="measured with device 'Eyeriss with 12×14 PEs'"):
        measure(rows, Target.parse("eyeriss"), path=path, engine="bound", hardware=haloc.Eyeriss(rows=24))
