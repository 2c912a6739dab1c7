from __future__ import annotations

import pytest

from haloc.pipeline.deliver import STAGES
from haloc.pipeline.flow import compress_recipe
from haloc.pipeline.outlook import outlook
from haloc.pipeline.recipe import Recipe
from tests.pipeline.small import trained

RECIPE = {
    "model": {"name": "tests.pipeline.small:trained"},
    "data": {"name": "digits", "batch_size": 64, "test_images": 100, "images": 256},
    "budget": {"macs": "50%"},
    "space": {"round_to": 4},
    "search": {"method": "energy", "activations": 64},
    "finetune": {"epochs": 1, "warmup_epochs": 0},
    "export": {"formats": []},
}


@pytest.fixture
def steady(monkeypatch) -> None:
    """Two outlooks that are compared are of one machine at one pace: a step that is timed twice differs by more."""
    monkeypatch.setattr("haloc.pipeline.outlook._timed_step", lambda job: 1e-4)


def states(recipe: dict, folder) -> dict[str, str]:
    return {stage.name: stage.state for stage in outlook(Recipe.from_dict(recipe), folder)}


def test_what_would_be_done_is_told_and_nothing_is_written(tmp_path):
    found = outlook(Recipe.from_dict(RECIPE), tmp_path / "run")
    assert [stage.name for stage in found] == [stage.name for stage in STAGES]
    by = {stage.name: stage for stage in found}
    assert by["table"].why == "no target is named"
    assert by["export"].state == "not needed"
    assert by["finetune"].seconds > 0
    assert not (tmp_path / "run").exists()
    assert all(not stage.known for stage in found)


@pytest.mark.usefixtures("steady")
def test_more_work_takes_longer(tmp_path):
    longer = RECIPE | {"finetune": {"epochs": 50, "warmup_epochs": 0}}
    short, long = (
        next(stage.seconds for stage in outlook(Recipe.from_dict(recipe), tmp_path) if stage.name == "finetune")
        for recipe in (RECIPE, longer)
    )
    assert long > 5 * short


@pytest.mark.parametrize("method", ["haloc", "sensitivity"])
def test_searches_that_look_at_data_are_estimated(tmp_path, method):
    found = outlook(Recipe.from_dict(RECIPE | {"search": {"method": method}}), tmp_path / "run")
    assert next(stage.seconds for stage in found if stage.name == "search") > 0


@pytest.mark.usefixtures("steady")
def test_finalists_take_their_time(tmp_path):
    short, long = (
        next(
            stage.seconds
            for stage in outlook(Recipe.from_dict(RECIPE | {"search": {"method": "haloc", "settings": told}}), tmp_path)
            if stage.name == "search"
        )
        for told in ({}, {"finalists": 100, "nominees": ["uniform"], "moves": 100, "trial_epochs": 50})
    )
    assert long > 5 * short


def test_what_is_done_is_kept_and_what_follows_an_edit_is_not(tmp_path):
    compress_recipe(Recipe.from_dict(RECIPE), tmp_path / "run")
    assert set(states(RECIPE, tmp_path / "run").values()) == {"kept", "not needed"}
    edited = states(RECIPE | {"recalibrate": {"images": 100}}, tmp_path / "run")
    assert edited["apply"] == "kept"
    assert {edited[name] for name in ("recalibrate", "finetune", "evaluate", "report")} == {"to do"}
    found = outlook(Recipe.from_dict(RECIPE | {"recalibrate": {"images": 100}}), tmp_path / "run")
    assert next(stage for stage in found if stage.name == "finetune").known, "it took so long before"


def test_a_table_is_estimated(tmp_path):
    found = outlook(Recipe.from_dict(RECIPE | {"target": {"name": "cpu:b2"}}), tmp_path / "run")
    assert next(stage.seconds for stage in found if stage.name == "table") > 0


@pytest.mark.usefixtures("steady")
def test_widths_that_are_measured_take_their_time(tmp_path):
    counted = RECIPE | {"target": {"name": "cpu:b2"}, "narrow": {"macs": "80%"}}
    clocked = counted | {"narrow": {"macs": "80%", "latency": "80%"}}
    short, long = (
        next(stage.seconds for stage in outlook(Recipe.from_dict(recipe), tmp_path) if stage.name == "narrow")
        for recipe in (counted, clocked)
    )
    assert long > short


def test_the_network_is_as_it_was():
    model = trained()
    assert all(parameter.grad is None for parameter in model.parameters())
