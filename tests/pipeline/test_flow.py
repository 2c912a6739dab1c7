from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import haloc
from haloc.errors import BudgetError, FileFormatError, MissingExtraError, ModelError, PlanError, SpecError
from haloc.files import read_json, write_json
from haloc.pipeline import flow
from haloc.pipeline.deliver import STAGES
from haloc.pipeline.flow import at_work
from tests.pipeline.conftest import shorten
from tests.pipeline.small import DECIDED, Told, batches, compress, decided, make, trained
from tests.processes import FORKED

NAMES = [stage.name for stage in STAGES]
#: Without a target there is no table, and nothing is narrowed unless it is asked for.
NEEDED = [name for name in NAMES if name not in ("narrow", "table", "export")]
#: 99% is a step of one group, which the network hardly minds.
NARROW = {"macs": "99%", "images": 64, "tried": 32, "round_to": 4}
PROGRAM = {"formats": ["pt2"], "samples": 16}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    return compress(folder), folder


@pytest.fixture(scope="module")
def narrowed(tmp_path_factory):
    """Another, with fewer channels."""
    folder = tmp_path_factory.mktemp("narrowed") / "run"
    return compress(folder, narrow=NARROW), folder


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Another, with a file to hand over."""
    folder = tmp_path_factory.mktemp("exported") / "run"
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        return compress(folder, export=PROGRAM), folder


def test_a_network_comes_back_smaller_and_plain(finished):
    (model, report), folder = finished
    assert report.met
    assert report.folder == folder
    figures = {row["key"]: row for row in report.facts["figures"]}
    assert figures["macs"]["after"] <= 0.5 * figures["macs"]["before"]
    assert figures["params"]["after"] == sum(parameter.numel() for parameter in model.parameters())
    assert figures["macs"]["after"] == haloc.inspect(model, torch.zeros(1, 1, 8, 8)).macs
    assert figures["score"]["after"] == pytest.approx(100 * haloc.evaluate(model, batches("test", limit=200)).top1)
    assert figures["score"]["after"] > 85
    assert not model.training
    kinds = {type(module).__module__.partition(".")[0] for module in model.modules()}
    assert kinds == {"torch"}, "nothing of ours is in it"


def test_everything_is_in_the_folder(exported):
    (model, _), folder = exported
    for name in (*DECIDED, "recipe.toml", "report.html", "report.md", "report.json", "export/model.pt2"):
        assert (folder / name).is_file(), name
    again = haloc.load(folder / "model", make())
    example = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(again(example), model(example))
    program = haloc.open_exported(folder / "export/model.pt2", trust=True)
    assert torch.allclose(program(example), model(example), atol=1e-4)
    card = read_json(folder / "model/model.json")
    assert card["provenance"]["verdict"]["met"]
    assert not list(folder.rglob("*.tmp"))
    assert not list(folder.rglob(".*.json*"))


def test_the_model_given_is_as_it_was(tmp_path):
    model = trained()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    haloc.compress(model, torch.zeros(1, 1, 8, 8), budget={"macs": "50%"}, folder=tmp_path / "run",
                   search="energy", export={"formats": []})  # fmt: skip
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_without_data_the_weights_alone_are_looked_at(tmp_path):
    told = Told()
    found = haloc.compress(trained(), torch.zeros(1, 1, 8, 8), budget="60%", folder=tmp_path / "run", search="energy",
                           export={"formats": []}, listener=told)  # fmt: skip
    assert told.begun == ["inspect", "space", "search", "apply", "evaluate", "report"]
    assert "no training data" in told.left["finetune"]
    assert found.report.facts["finetune"] is None
    assert any("how good" in note for note in found.report.facts["notes"])


def test_a_second_run_does_nothing(finished):
    _, folder = finished
    told = Told()
    again = compress(folder, told)
    assert told.begun == []
    assert set(told.left) == set(NAMES)
    assert again.report.facts == read_json(folder / "report.json")


def test_only_what_an_edit_concerns_is_done_again(tmp_path):
    compress(tmp_path / "run")
    told = Told()
    compress(tmp_path / "run", told, finetune={"epochs": 1, "lr": 0.01, "warmup_epochs": 0})
    assert told.begun == ["finetune", "evaluate", "report"]
    told = Told()
    compress(tmp_path / "run", told, finetune={"epochs": 1, "lr": 0.01, "warmup_epochs": 0, "save_every_s": 5})
    assert told.begun == ["report"], "how often is saved decides nothing; the report quotes the recipe"
    told = Told()
    compress(tmp_path / "run", told, budget={"macs": "95%"})
    assert told.begun == [name for name in NEEDED if name != "inspect"]


def test_other_weights_are_another_run(tmp_path):
    told = Told()
    model = trained()
    compress(tmp_path / "run")
    with torch.no_grad():
        model[0].weight.mul_(1.01)
    options = {"budget": {"macs": "50%"}, "search": "energy", "export": {"formats": []}, "listener": told}
    haloc.compress(model, torch.zeros(1, 1, 8, 8), folder=tmp_path / "run", **options)
    assert "inspect" in told.begun
    assert "apply" in told.begun


def test_another_version_is_another_run(tmp_path, monkeypatch):
    compress(tmp_path / "run")
    monkeypatch.setattr(flow, "code_version", lambda: "0.0.0-other")
    told = Told()
    compress(tmp_path / "run", told)
    assert told.begun == NEEDED


def test_a_plan_edited_by_hand_is_gone_on_with(tmp_path):
    folder = tmp_path / "run"
    compress(folder)
    haloc.Plan({"3": haloc.Tucker2(4, 4)}).save(folder / "plan.json")
    told = Told()
    found = compress(folder, told)
    assert told.begun == ["apply", "recalibrate", "reconstruct", "finetune", "evaluate", "report"]
    assert any("plan.json was edited" in note for note in told.notes)
    assert haloc.inspect(found.model, torch.zeros(1, 1, 8, 8))["3.1"].shape.out_channels == 4
    compress(folder, told := Told())
    assert told.begun == []


def test_a_plan_edited_wrongly_is_refused_and_kept(tmp_path):
    folder = tmp_path / "run"
    compress(folder)
    haloc.Plan({"3": haloc.Tucker2(400, 4)}).save(folder / "plan.json")
    with pytest.raises(PlanError, match="'3'"):
        compress(folder)
    assert haloc.Plan.load(folder / "plan.json")["3"] == haloc.Tucker2(400, 4)


@pytest.mark.parametrize("name", ["applied/weights.safetensors", "export/model.pt2", "report.html", "figures.json"])
def test_what_is_damaged_or_gone_is_made_again(tmp_path, finished, exported, name):
    folder = tmp_path / "run"
    shutil.copytree(exported[1], folder)
    (folder / name).write_bytes((folder / name).read_bytes()[:100])
    compress(folder, told := Told(), export=PROGRAM)
    assert name in str(told.notes)
    (folder / name).unlink()
    compress(folder, export=PROGRAM)
    assert (folder / name).is_file()
    assert decided(folder) == decided(finished[1])


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", NAMES)
def test_interrupted_at_any_stage_it_comes_to_the_same(tmp_path, finished, narrowed, monkeypatch, name, when):
    """Before a stage's first file, and after its last one but before it is stamped."""
    folder = tmp_path / "run"
    options = {"target": "cpu:onnxruntime:b2", "table": {"networks": 2}} if name == "table" else {}
    options |= {"export": PROGRAM} if name == "export" else {"narrow": NARROW} if name == "narrow" else {}
    (stage,) = [stage for stage in STAGES if stage.name == name]

    def stopped(work):
        if when == "after":
            stage.run(work)
        raise KeyboardInterrupt

    cut = tuple(replace(each, run=stopped) if each.name == name else each for each in STAGES)
    with monkeypatch.context() as patch:
        patch.setattr(flow, "STAGES", cut)
        with pytest.raises(KeyboardInterrupt):
            compress(folder, **options)
    told = Told()
    compress(folder, told, **options)
    assert name in told.begun
    assert NAMES.index(told.begun[0]) == NAMES.index(name)
    assert decided(folder) == decided((narrowed if name == "narrow" else finished)[1])


def die_at(last: str, folder: Path) -> None:
    """Is killed as it is about to put the first file of a stage in place."""
    shorten(pytest.MonkeyPatch())
    gc.freeze()  # as in the tests themselves
    told, put = Told(), Path.replace

    def replacing(self: Path, target: Path) -> Path:
        if told.begun[-1:] == [last] and target.name != "stages.json":
            os.kill(os.getpid(), signal.SIGKILL)
        return put(self, target)

    Path.replace = replacing
    compress(folder, told, narrow=NARROW, target="cpu:onnxruntime:b2", table={"networks": 2}, export=PROGRAM)


def test_killed_at_every_stage_it_comes_to_the_same(tmp_path, narrowed):
    folder = tmp_path / "run"
    for name in [*NAMES, "none"]:
        process = FORKED.Process(target=die_at, args=(name, folder))
        process.start()
        process.join(120)
        assert process.exitcode == (0 if name == "none" else -signal.SIGKILL), name
    assert decided(folder) == decided(narrowed[1])


def test_one_at_a_time_in_a_folder(tmp_path):
    started, ending = threading.Event(), threading.Event()

    def hold() -> None:
        with at_work(tmp_path / "run"):
            started.set()
            ending.wait(30)

    other = threading.Thread(target=hold)
    other.start()
    started.wait(30)
    try:
        with pytest.raises(FileFormatError, match="another haloc is at work"):
            compress(tmp_path / "run")
    finally:
        ending.set()
        other.join()


def test_folders_that_are_not_ours_are_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("x")
    with pytest.raises(FileFormatError, match="something else in it"):
        compress(tmp_path / "mine")
    with pytest.raises(FileFormatError, match="is a file"):
        compress(tmp_path / "mine/thesis.txt")
    compress(tmp_path / "run")
    write_json(tmp_path / "run/stages.json", {"kind": "other"})
    with pytest.raises(FileFormatError, match=r"stages.json is not of a run"):
        compress(tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"budget": {}}, SpecError, "Give a budget"),
        ({"budget": {"latancy": "60%"}}, SpecError, "Did you mean 'latency'?"),
        ({"budget": {"latency": "60%"}}, SpecError, "needs a target"),
        ({"budget": {"macs": "1%"}}, BudgetError, "cannot be reached"),
        ({"budget": {"macs": "lots"}}, SpecError, "'60%'"),
        ({"target": "cpu:onnxrntime"}, SpecError, "Did you mean 'onnxruntime'?"),
        ({"search": {"method": "halok"}}, SpecError, "Did you mean 'haloc'?"),
        ({"search": {"method": "sensitivity", "settings": {"image": 3}}}, SpecError, "Did you mean 'images'?"),
        ({"search": {"method": "energy", "settings": {"image": 3}}}, SpecError, "has no settings"),
        ({"finetune": {"epoch": 3}}, SpecError, "Did you mean 'epochs'?"),
        ({"finetune": {"epochs": "many"}}, SpecError, "finetune.epochs must be a whole number, got 'many'"),
        ({"finetune": {"norm_between": "no"}}, SpecError, "finetune.norm_between must be true or false"),
        ({"search": {"method": "haloc", "training": {"epochs": 3}}}, SpecError, "warmup_epochs must be below"),
        ({"search": "haloc", "val": None}, SpecError, "needs data for val"),
        ({"test": 5}, SpecError, "test data must be batches"),
        ({"inputs": lambda batch: batch["none"]}, SpecError, "function inputs raised TypeError"),
        ({"recalibrate": {"images": -1}}, SpecError, "recalibrate.images must be 0 or more"),
        ({"space": {"layers": ["conv9"]}}, SpecError, "conv9"),
        ({"train": []}, haloc.HalocError, "no batch"),
        ({"loss": lambda model, batch: 1 / 0}, haloc.HalocError, "division by zero"),
        ({"score": lambda model: 1 / 0}, ModelError, "division by zero"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(tmp_path, changes, error, said):
    with pytest.raises(error, match=said) as told:
        compress(tmp_path / "run", **changes)
    assert "\n" not in str(told.value)


def test_a_missing_package_is_told_before_anything_is_done(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingExtraError, match=r"haloc\[onnx\]"):
        compress(tmp_path / "run", export={"formats": ["onnx"]})
    assert not (tmp_path / "run").exists()


def test_time_that_is_up_is_told_and_gone_on_from(tmp_path, finished):
    slow = {"epochs": 2, "lr": 0.01, "warmup_epochs": 0, "save_every_s": 0}
    with pytest.raises(haloc.HalocError, match="finetune.minutes"):
        compress(tmp_path / "run", finetune=slow | {"minutes": 1e-6})
    compress(tmp_path / "run", told := Told(), finetune=slow)
    assert told.begun[0] == "finetune"
    assert decided(tmp_path / "run") == decided(finished[1])


def test_a_full_disk_is_told_and_nothing_is_lost(tmp_path, finished, monkeypatch):
    folder, room = tmp_path / "run", 6
    replace = Path.replace

    def full(self, target):
        nonlocal room
        room -= 1
        if room < 0:
            raise OSError(28, "No space left on device")
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(FileFormatError, match="No space left on device"):
            compress(folder)
    compress(folder)
    assert decided(folder) == decided(finished[1])


def test_weights_are_those_that_were_trained(finished):
    folder = finished[1]
    before, after = (load_file(folder / name / "weights.safetensors") for name in ("recalibrated", "finetuned"))
    assert any(not torch.equal(before[name], after[name]) for name in before)
    model = load_file(folder / "model/weights.safetensors")
    assert all(torch.equal(model[name], after[name]) for name in after)
