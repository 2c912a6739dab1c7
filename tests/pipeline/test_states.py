"""What was in the folder before, what the user changed, and what the figures are then of."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import haloc
from haloc.cost.table import Table
from haloc.cost.target import Target
from haloc.errors import FileFormatError, SpecError
from haloc.files import read_json
from haloc.plan import Plan
from tests.pipeline.small import Told, batches, compress

PROGRAM = {"formats": ["pt2"], "samples": 16}


def figures(report) -> dict:
    return {row["key"]: row for row in report.facts["figures"]}


def test_files_of_an_earlier_network_are_not_taken_for_this_one(tmp_path):
    compress(tmp_path / "run", export=PROGRAM)
    found = compress(tmp_path / "run", budget={"macs": "95%"})
    assert found.report.facts["exports"] == []
    assert not any("torch.export" in row["name"] for row in found.report.facts["variants"])


def test_a_folder_of_the_users_is_left_alone_whatever_lies_in_it(tmp_path):
    mine = tmp_path / "project"
    (mine / "model").mkdir(parents=True)
    (mine / "recipe.toml").write_text("# mine\n")
    (mine / "model/weights.bin").write_text("precious")
    with pytest.raises(FileFormatError, match="something else in it"):
        compress(mine)
    assert (mine / "recipe.toml").read_text() == "# mine\n"
    assert (mine / "model/weights.bin").exists()


def test_a_budget_of_bytes_is_of_bytes_moved(tmp_path):
    found = compress(tmp_path / "run", budget={"bytes": "90%"})
    (held,) = found.report.facts["verdict"]["budgets"]
    (spent,) = found.report.facts["search"]["budgets"]
    assert (held["name"], held["after"], held["budget"]) == ("bytes", spent["cost"], spent["budget"])


def test_other_test_data_are_looked_at_and_nothing_else_is_done(tmp_path):
    compress(tmp_path / "run")
    found = compress(tmp_path / "run", told := Told(), test=batches("val", limit=64))
    assert told.begun == ["evaluate", "report"]
    top1 = haloc.evaluate(found.model, batches("val", limit=64)).top1
    assert figures(found.report)["score"]["after"] == pytest.approx(100 * top1)


def test_a_score_can_be_mended_without_training_again(tmp_path):
    with pytest.raises(haloc.HalocError, match="no such thing"):
        compress(tmp_path / "run", score=_broken)
    compress(tmp_path / "run", told := Told(), score=_mended)
    assert told.begun == ["evaluate", "report"]


def _broken(model: nn.Module) -> float:
    raise KeyError("no such thing")


def _mended(model: nn.Module) -> float:
    return 1.0


def test_parameters_are_held_to_the_last_one(tmp_path):
    free = compress(tmp_path / "free", budget={"params": "60%"})
    exact = figures(free.report)["params"]["after"]
    found = compress(tmp_path / "run", budget={"params": exact})
    assert found.report.met
    assert figures(found.report)["params"]["after"] <= exact


def test_a_plan_may_be_edited_to_ranks_that_were_not_on_offer(tmp_path):
    compress(tmp_path / "run")
    Plan({"3": haloc.Tucker2(5, 7)}).save(tmp_path / "run/plan.json")
    found = compress(tmp_path / "run")
    assert [row["form"] for row in found.report.facts["layers"] if row["name"] == "3"] == ["tucker2 5/7"]
    spent = found.report.facts["search"]["budgets"][0]["cost"]
    assert spent == haloc.inspect(found.model, torch.zeros(1, 1, 8, 8)).macs


class _Fixed(nn.Module):
    """Takes four at a time and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.linear = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(1024, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.linear(self.conv(images.repeat(1, 16, 1, 1)).relu().reshape(4, 1024))


def test_a_network_that_fixes_its_batch(tmp_path):
    data = {"train": batches("train", 4, shuffle=True, limit=64), "test": batches("test", 4, limit=32), "val": None}
    found = haloc.compress(
        _Fixed(), torch.zeros(4, 1, 8, 8), budget={"macs": "60%"}, search="energy", space={"round_to": 4},
        finetune={"epochs": 1, "warmup_epochs": 0, "lr": 0.01}, recalibrate={"images": 8}, export=PROGRAM,
        folder=tmp_path / "run", **data,
    )  # fmt: skip
    (row,) = found.report.facts["exports"]
    assert row["dynamic_batch"] is False
    assert found.report.met


def test_a_table_and_a_target_that_contradict_each_other(tmp_path):
    Table(Target("cpu", batch_size=4), (), {}).save(tmp_path / "table.json")
    with pytest.raises(SpecError, match="leave one of them out"):
        compress(tmp_path / "run", target="cpu:b2", table={"table": str(tmp_path / "table.json")})


def test_a_run_in_python_says_that_it_was_one(tmp_path):
    compress(tmp_path / "run")
    assert "in Python" in read_json(tmp_path / "run/report.json")["reproduce"]
