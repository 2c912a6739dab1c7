from __future__ import annotations

import json
import os
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from typer.models import OptionInfo

from haloc.cli import main
from haloc.cli import methods as panels
from haloc.cost.network import NetworkTimings, Timing
from haloc.cost.table import Row, Table
from haloc.cost.target import Target
from haloc.forms import Dense, macs
from haloc.methods.evidence import Evidence
from haloc.methods.prices import PriceList
from haloc.methods.search import METHODS, method_of
from haloc.methods.task import Task
from haloc.plan import Plan
from haloc.training.baseline import WEIGHTS, train
from haloc.training.settings import TrainSettings
from haloc.zoo import load_data
from tests.cli.conftest import TINY
from tests.processes import two_of

THERE = [name for name in METHODS if find_spec(f"haloc.methods.{name}")]
ALONE = [name for name in THERE if not method_of(name).needs]
LOOKING = [name for name in THERE if method_of(name).needs]

BASE = ("search", "tiny_models:make", "--weights", "dense.safetensors")
BLIND = (*BASE, "--input", "1x1x8x8", "--method", "energy")
DATA = (*BASE, "--data", "digits", "--batch-size", 128, "--activations", 200)
BRIEF = ("--epochs", 1, "--warmup-epochs", 0, "--lr", 0.01)
HALOC = (*DATA, *BRIEF, "--haloc-warmup-epochs", 0, "--haloc-alpha-lr", 0.1, "--epochs", 2)


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> bytes:
    """The weights of a tiny model that knows its digits."""
    space: dict = {}
    exec(TINY, space)
    digits, folder = load_data("digits"), tmp_path_factory.mktemp("dense")
    batches = digits.train.batches(128, normalisation=digits.normalisation, augment=True, shuffle=True)
    torch.manual_seed(0)
    train(space["make"](), batches, settings=TrainSettings(epochs=8, warmup_epochs=1), folder=folder)
    return (folder / WEIGHTS).read_bytes()


@pytest.fixture
def folder(tiny, dense):
    (tiny / "dense.safetensors").write_bytes(dense)
    return tiny


@pytest.fixture
def search(haloc, folder):
    def run(*arguments, base=BLIND, output="run", code=0):
        ran = haloc(*base, *arguments, "--output", output)
        assert ran.code == code, ran.err
        return ran

    return run


def found(path: str = "run") -> Evidence:
    return Evidence.load(f"{path}/search.json")


def latencies(space, us_per_mac: float = 0.1) -> Table:
    """A table of everything that a space has on offer, for a machine whose time goes by multiply-adds."""
    rows = (Row(shape, form, macs(shape, form) * us_per_mac / 1000, 0.0, 9) for shape, form in space.rows())
    return Table(Target.parse("cpu:b1:t1"), tuple(rows), {"device": "made up"})


@pytest.mark.parametrize("method", ALONE)
def test_methods_that_need_no_data(search, method):
    ran = search("--method", method, "--budget", "60%", "--json")
    result = json.loads(ran.out)
    assert result == json.loads(Path("run/result.json").read_text())
    assert (result["method"], result["finished"], result["data"]) == (method, True, None)
    (budget,) = result["budgets"]
    assert budget["cost"] <= budget["budget"] == pytest.approx(0.6 * budget["dense"])
    assert budget["remains"] == pytest.approx(1 - budget["saved"]) == pytest.approx(budget["cost"] / budget["dense"])
    plan, evidence = Plan.load("run/plan.json"), found()
    assert evidence.method == method
    assert set(plan) == set(evidence.space.open_layers) == set(result["layers"])
    assert plan.changes()
    for name, layer in result["layers"].items():
        assert (layer["remains"]["macs"] == 1) == (plan[name] == Dense())


@pytest.mark.parametrize("method", LOOKING)
def test_methods_that_look_at_images(search, method):
    own = {
        "haloc": ("--haloc-warmup-epochs", 0),
        "genetic": ("--genetic-generations", 2, "--genetic-population", 4, "--genetic-images", 32),
        "sensitivity": ("--sensitivity-images", 32),
    }.get(method, ())
    training = BRIEF if method_of(method).trains else ()
    ran = search("--method", method, "--budget", "60%", *own, *training, base=DATA)
    assert "calibrating on training images: 200" in ran.err
    assert found().method == method
    assert Plan.load("run/plan.json").changes()


def test_a_table_for_people(search):
    ran = search("--budget", "macs=60%", "--budget", "params=0.5")
    assert "macs left" in ran.out
    assert "params left" in ran.out
    (line,) = [line for line in ran.out.splitlines() if "│ params │" in line]
    share = json.loads(Path("run/result.json").read_text())["budgets"][1]["remains"]
    assert share <= 0.5
    assert f"{share:.1%} remain, {1 - share:.1%} saved" in line
    assert "wrote plan.json and search.json to run" in ran.err


@pytest.mark.parametrize("text", ["60%", "0.6", "macs=60%", "macs=0.6"])
def test_the_ways_to_say_one_budget(search, text):
    result = json.loads(search("--budget", text, "--json").out)
    assert result["budgets"][0]["budget"] == pytest.approx(0.6 * result["budgets"][0]["dense"])


def test_an_amount_is_no_share(search):
    assert json.loads(search("--budget", "10k", "--json").out)["budgets"][0]["budget"] == 10_000


def test_ranks_on_offer(search):
    search("--budget", "90%", "--forms", "spatial", "--round-to", 3, "--layer", "3")
    (offer,) = found().space.open_layers.values()
    assert {str(form) for form in offer} == {"dense", "spatial 3", "spatial 6", "spatial 9"}
    every = ("--budget", "90%", "--round-to", 1, "--layer", "3")
    search(*every, output="all")
    search(*every, "--ratio", 0.3, output="near")
    assert len(found("near").space.open_layers["3"]) < len(found("all").space.open_layers["3"])


def test_one_search_and_many_budgets(search, haloc):
    search("--budget", "macs=60%", "--budget", "params=60%", base=HALOC)
    for share in ("50%", "75%"):
        ran = haloc("search", "--from", "run/search.json", "--budget", share, "-o", "plan.json", "--json")
        assert ran.code == 0, ran.err
        result = json.loads(ran.out)
        assert (result["search"], result["plan"]) == ("run/search.json", "plan.json")
        assert Plan.load("plan.json").changes()
        assert result["budgets"][0]["remains"] <= float(share[:-1]) / 100
    assert "ranks from run/search.json" in haloc("search", "--from", "run/search.json", "-b", "60%", "-o", "p.json").out


def test_a_stopped_search_goes_on_to_the_same_end(search):
    search("--budget", "60%", base=HALOC, output="whole")
    ran = search("--budget", "60%", "--minutes", 1e-6, base=HALOC)
    assert "the time is up; the same command with more --minutes" in ran.err
    assert not found().finished
    on = search("--budget", "60%", base=HALOC)
    assert "going on from epoch 1 of 2 in run" in on.err
    assert found().losses == found("whole").losses
    assert [row["epoch"] for row in found().history] == [1, 2]
    assert Plan.load("run/plan.json") == Plan.load("whole/plan.json")


def test_an_interrupted_method_that_does_not_train_goes_on(search, monkeypatch):
    arguments = ("--method", "sensitivity", "--sensitivity-images", 64, "--budget", "60%")
    search(*arguments, base=DATA, output="whole")
    real, steps = Task.step, []

    def interrupted(task, done, total):
        steps.append(done)
        if done == total:
            raise KeyboardInterrupt
        real(task, done, total)

    with monkeypatch.context() as patched:
        patched.setattr(Task, "step", interrupted)
        stopped = search(*arguments, base=DATA, code=130)
    assert "interrupted; run the same command again to go on" in stopped.err
    assert not Path("run/search.json").exists()
    noted = len(Path("run/sensitivity.jsonl").read_text().splitlines())
    assert noted > 1
    search(*arguments, base=DATA)
    assert found().losses == found("whole").losses
    assert len(Path("run/sensitivity.jsonl").read_text().splitlines()) > noted


def test_what_is_left_of_another_search_is_taken_away(search, monkeypatch):
    search("--budget", "60%")
    monkeypatch.setattr("haloc.methods.search.search", lambda *arguments, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        search("--budget", "70%", "--no-resume")
    assert [path.name for path in Path("run").iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("budget", "change", "text"),
    [
        ("90%", (), "budget = 80%, and now it is 90%; for other budgets there is haloc search --from run/search.json"),
        ("80%", ("--forms", "spatial,svd"), "space.forms = tucker2,svd, and now it is spatial,svd"),
        ("80%", ("--method", "uniform"), "method = energy, and now it is uniform"),
    ],
)
def test_another_search_is_not_gone_on_with(search, refused, budget, change, text):
    search("--budget", "80%")
    before = Path("run/search.json").read_text()
    assert text in refused(*BLIND, *change, "--budget", budget, "-o", "run", code=2)
    assert Path("run/search.json").read_text() == before
    search(*change, "--budget", budget, "--no-resume")


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--budget", "1%"), 3, "macs 5048 (48.0%)"),
        (("--budget", "macs=60%", "--budget", "params=1%"), 3, "for macs and"),
        ((), 2, "how small is it to become? Give a budget, such as --budget 60%"),
        (("--budget", "small"), 2, "a budget is a share such as '60%'"),
        (("--budget", "4 ms"), 2, "macs is a count, such as '12M'"),
        (("--budget", "60%", "--budget", "50%"), 2, "of several budgets each needs a name of its own"),
        (("--budget", "macs=60%", "--budget", "macs=50%"), 2, "of several budgets each needs a name of its own"),
        (("--budget", "latenz=60%"), 2, "there is no cost for the budget of 'latenz'"),
        (("--budget", "60%", "--method", "halo"), 2, "Did you mean 'haloc'?"),
        (("--budget", "60%", "--method", "haloc"), 2, "method 'haloc' looks at images; say which with --data"),
        (("--budget", "60%", "--lc-mu", 1), 2, "--lc-mu is a setting of method 'lc', not of 'energy'"),
        (("--budget", "60%", "--epochs", 3), 2, "--epochs has no meaning with method 'energy', which does not train"),
        (("--budget", "60%", "--activations", 9), 2, "--activations has no meaning with a search without --data"),
        (("--budget", "60%", "--forms", "tucker"), 2, "Did you mean 'tucker2'?"),
        (("--budget", "60%", "--round-to", "auto"), 2, "--round-to auto takes the ranks from a table"),
        (("--budget", "60%", "--layer", "33"), 2, "33"),
        (("--budget", "60%", "--cost", "none.json"), 1, "there is no file none.json"),
        (("--budget", "60%", "--cost", "a.json", "--cost", "b.json"), 2, "there are two costs called 'latency'"),
        (("--budget", "60%", "--cost", "a=a.json", "--cost", "b=b.json"), 1, "there is no file a.json"),
        (("--budget", "60%", "--weights", "none.safetensors"), 1, "none.safetensors does not exist"),
        (("--budget", "60%", "--pareto"), 2, "--budget has no meaning with --pareto"),
        (("--budget", "60%", "--points", 3), 2, "--points has no meaning with a new search"),
    ],
)
def test_mistakes_leave_no_folder_behind(refused, folder, arguments, code, text):
    assert text in refused(*BLIND, *arguments, "-o", "run", code=code)
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--haloc-theta", -1), "theta must be 0 or more, got -1.0"),
        (("--haloc-gradient", "none"), "gradient must be one of all, pair, single, mixture"),
        (("--haloc-warmup-epochs", 2), "warmup_epochs must be below the 2 epochs"),
        (("--ema", 0.9), "ema must be 0"),
        (("--data", "cifar11"), "Did you mean 'cifar10'?"),
    ],
)
def test_mistakes_of_a_search_that_trains_leave_no_folder_behind(refused, folder, arguments, text):
    assert text in refused(*HALOC, "--budget", "60%", *arguments, "-o", "run", code=2)
    assert not Path("run").exists()


def test_a_model_of_the_zoo_needs_its_weights_where_they_are_looked_at(search, refused, folder):
    answer = refused("search", "resnet20", "--method", "energy", "--budget", "50%", "-o", "run", code=2)
    assert "say where its trained ones are, with --weights pretrained" in answer
    search("--budget", "50%", base=("search", "resnet20", "--method", "uniform"))


def test_without_a_model(refused, folder):
    assert "which model? Name one" in refused("search", "--budget", "60%", "-o", "run", code=2)


def test_other_folders_are_left_alone(search, refused, haloc):
    haloc("train", "tiny_models:make", "--data", "digits", "--epochs", 1, "--output", "trained")
    assert "holds a run of `haloc train`" in refused(*BLIND, "-b", "60%", "-o", "trained", code=2)
    Path("mine").mkdir()
    Path("mine/letter.txt").touch()
    assert "something else in it than a run of haloc" in refused(*BLIND, "-b", "60%", "-o", "mine", code=1)
    assert "is a file" in refused(*BLIND, "-b", "60%", "-o", "dense.safetensors", code=1)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--from", "run/search.json", "-o", "p.json"), 2, "Give a budget"),
        (("--from", "run/search.json", "-b", "1%", "-o", "p.json"), 3, "macs 5048 (48.0%)"),
        (("--from", "run/plan.json", "-b", "50%", "-o", "p.json"), 1, "run/plan.json: not what a search found"),
        (("--from", "none.json", "-b", "50%", "-o", "p.json"), 1, "there is no file none.json"),
        (("resnet20", "--from", "run/search.json", "-b", "50%", "-o", "p.json"), 2, "leave 'resnet20' out"),
        (("--from", "run/search.json", "-b", "50%", "--method", "lc", "-o", "p.json"), 2, "--method has no meaning"),
        (("--from", "run/search.json", "-b", "50%", "--epochs", "3", "-o", "p.json"), 2, "--epochs has no meaning"),
        (("--pareto", "-o", "p.json"), 2, "--pareto needs what a search found"),
        (("resnet20", "--from", "run/search.json", "--pareto", "-o", "p.json"), 2, "give both, the model and --data"),
        (("--from", "run/search.json", "--pareto", "--over", "latency", "-o", "p.json"), 2, "cannot be counted"),
        (("--from", "run/search.json", "--pareto", "-o", "dense.safetensors"), 1, "is a file, expected a folder"),
    ],
)
def test_mistakes_of_choosing_again_write_nothing(search, refused, arguments, code, text):
    search("--budget", "60%")
    assert text in refused("search", *arguments, code=code)
    assert not Path("p.json").exists()


def test_latency_is_budgeted_by_a_table(search, haloc):
    search("--budget", "60%", output="first")
    space = found("first").space
    latencies(space).save("table.json")
    result = json.loads(search("--budget", "80%", "--cost", "table.json", "--json").out)
    (row,) = result["budgets"]
    assert (row["name"], row["unit"]) == ("latency", "ms")
    assert row["dense"] == pytest.approx(sum(own.latency_ms for own in latencies(space).rows if own.form == Dense()))
    again = ("search", "--from", "run/search.json", "--cost", "table.json", "-o", "plan.json", "--json")
    both = json.loads(haloc(*again, "--budget", f"latency={row['budget']} ms", "--budget", "params=90%").out)
    assert [entry["name"] for entry in both["budgets"]] == ["latency", "params"]
    assert both["budgets"][0]["budget"] == pytest.approx(row["budget"])


def test_two_targets_at_once(search):
    search("--budget", "60%", output="first")
    for name, scale in (("phone", 0.9), ("desk", 0.1)):
        latencies(found("first").space, scale).save(f"{name}.json")
    costs = ("--cost", "phone=phone.json", "--cost", "desk=desk.json")
    result = json.loads(search("--budget", "phone=80%", "--budget", "desk=90%", *costs, "--json").out)
    assert [row["name"] for row in result["budgets"]] == ["phone", "desk"]
    assert result["budgets"][0]["dense"] == pytest.approx(9 * result["budgets"][1]["dense"])
    assert "several costs; give each a budget by its name" in search("-b", "80%", *costs, output="x", code=2).err


def test_whole_networks_beside_a_table_are_used(search):
    search("--budget", "60%", output="first")
    space = found("first").space
    latencies(space).save("table.json")
    rows = PriceList.of(space, latencies(space))
    smallest = Plan({name: list(offer)[1] for name, offer in space.open_layers.items()})
    timings = tuple(Timing(plan, 3 + rows.cost_of(plan)) for plan in (Plan({}), smallest))
    NetworkTimings(Target.parse("cpu:b1:t1"), timings, {"device": "made up"}).save("table.network.json")
    ran = search("--budget", "95%", "--cost", "table.json", "--json")
    assert "latencies are those of whole networks, from table.json and table.network.json" in ran.err
    assert json.loads(ran.out)["budgets"][0]["dense"] == pytest.approx(3 + rows.dense, rel=1e-3)
    assert Plan.load("run/plan.json").changes()


def test_accelerators_have_energies(search, haloc):
    search("--budget", "60%", output="first")
    rows = [
        Row(r.shape, r.form, r.latency_ms, energy_mj=r.latency_ms * 2) for r in latencies(found("first").space).rows
    ]
    Table(Target.parse("eyeriss"), tuple(rows), {"device": "made up"}).save("asic.json")
    ran = search("--budget", "energy=80%", "--cost", "asic.json", "--json")
    assert (json.loads(ran.out)["budgets"][0]["name"], json.loads(ran.out)["budgets"][0]["unit"]) == ("energy", "mJ")
    curve = haloc(
        "search", "--from", "run/search.json", "--pareto", "--cost", "asic.json", "--over", "energy", "-o", "p"
    )
    assert json.loads(Path("p/pareto.json").read_text())["quantity"] == "energy", curve.err


def test_a_curve_over_many_budgets(search, haloc):
    pytest.importorskip("matplotlib")
    search("--budget", "60%")
    ran = haloc("search", "--from", "run/search.json", "--pareto", "--points", 5, "-o", "curve")
    assert ran.code == 0, ran.err
    assert "macs and what they buy" in ran.out
    curve = json.loads(Path("curve/pareto.json").read_text())
    shares = [point["share"] for point in curve["points"]]
    losses = [point["loss"] for point in curve["points"]]
    assert len(shares) > 2
    assert shares == sorted(shares)
    assert losses == sorted(losses, reverse=True)
    assert all(point["cost"] <= point["budget"] for point in curve["points"])
    assert all(Plan.from_dict(point["plan"]) for point in curve["points"])
    assert curve["points"][0]["top1"] is None
    assert Path("curve/pareto.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in Path("curve/pareto.svg").read_text()


def test_a_curve_of_accuracies(search, haloc):
    pytest.importorskip("matplotlib")
    search("--budget", "60%")
    evaluated = ("--pareto", "--points", 6, "--data", "digits", "--activations", 200, "--json")
    ran = haloc(*BASE, "--from", "run/search.json", *evaluated, "-o", "curve")
    assert ran.code == 0, ran.err
    curve = json.loads(ran.out)
    assert curve == json.loads(Path("curve/pareto.json").read_text())
    assert curve["images"] == "val images of digits"
    accuracies = [point["top1"] for point in curve["points"]]
    assert 0.1 < accuracies[0] < accuracies[-1] == curve["dense"]["top1"]
    assert f"evaluating {len(accuracies)} networks on val images of digits" in ran.err


def test_figures(search):
    pytest.importorskip("matplotlib")
    search("--budget", "60%", "--figures", base=HALOC)
    assert {path.stem for path in Path("run").glob("*.svg")} == {"loss", "parameters", "probabilities", "ranks"}
    search("--budget", "60%", "--figures", output="short")
    assert {path.stem for path in Path("short").glob("*.svg")} == {"ranks"}


def test_figures_without_matplotlib(search, refused, monkeypatch):
    search("--budget", "60%")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for arguments in ((*BLIND, "-b", "60%", "--figures"), ("search", "--from", "run/search.json", "--pareto")):
        assert "pip install 'haloc[plot]'" in refused(*arguments, "-o", "new", code=1)
    assert not Path("new").exists()


def typed(arguments: list[str], folder: Path) -> None:
    """The command line, in one of two processes."""
    os.chdir(folder)
    sys.argv = ["haloc", *arguments]
    main()


def test_two_processes_find_what_one_does(search, folder):
    search("--budget", "60%", base=HALOC, output="one")
    arguments = [*map(str, HALOC), "--budget", "60%", "--output", "two", "--json"]
    (out, err), other = two_of(typed, arguments, folder, folder=folder)
    assert json.loads(out)["finished"]
    assert err.count("epoch 2/2") == 1
    assert other == ("", "")
    for name, row in found("one").losses.items():
        assert found("two").losses[name] == pytest.approx(row, rel=1e-3)


@pytest.mark.parametrize("method", THERE)
def test_every_setting_of_a_method_is_an_option_with_its_default(method):
    settings, options = method_of(method).settings, panels.PANELS.get(method)
    if settings is None:
        assert options is None
        return
    hints = get_type_hints(options, include_extras=True)
    names = [field.name.removeprefix(f"{method}_") for field in fields(options)]
    assert [panels.DENIED.get(name, name) for name in names] == [field.name for field in fields(settings)]
    for field, hint in zip(fields(settings), hints.values(), strict=True):
        said = next(extra for extra in hint.__metadata__ if isinstance(extra, OptionInfo)).show_default
        assert not said or said == as_typed(field.default)


def as_typed(default: object) -> str:
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    return "as it is" if default is None else str(default)
