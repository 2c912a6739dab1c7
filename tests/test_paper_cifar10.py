"""The paper's CIFAR-10 table: its recipes, what the benchmark says of results, and the plans that are committed."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from haloc.cost.count import Count
from haloc.factor.inspect import inspect
from haloc.files import read_json
from haloc.forms import Dense, ranks
from haloc.methods.budget import limits_of
from haloc.methods.evidence import Evidence
from haloc.methods.search import METHODS
from haloc.pipeline.flow import check_recipe
from haloc.pipeline.recipe import SearchPart
from haloc.pipeline.recipe_file import read_recipe
from haloc.plan import Plan
from haloc.zoo import create

FOLDER = Path(__file__).parents[1] / "benchmarks" / "paper_cifar10"
FIGURES = Path(__file__).parents[1] / "docs" / "figures"
MODELS = {"resnet20": "resnet20", "vgg16": "vgg16_bn_cifar"}
RECIPES = sorted(FOLDER.glob("*.toml"))
#: A recipe for every row of the table; the others have a budget of latency.
ROWS = [path for path in RECIPES if "latency" not in path.stem]
TARGET = "cuda:graph:fp16:b{}:nhwc"


SCRIPTS = ("bars", "sheets", "words", "show", "figures", "keep", "common")


@pytest.fixture(scope="module")
def scripts():
    """Imports a script by its name; nothing is left behind of how scripts find each other."""
    path = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module
    sys.path[:] = path
    for name in SCRIPTS:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def judge(scripts):
    """What says whether results are good enough."""
    return scripts("bars")


@pytest.fixture(scope="module")
def sheets(scripts):
    return scripts("sheets")


@pytest.fixture(scope="module")
def show(scripts):
    return scripts("show")


# --- recipes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_can_be_run(path):
    recipe = read_recipe(path)
    check_recipe(recipe)
    assert recipe.model.name == MODELS[path.stem.split("-")[0]]


@pytest.mark.parametrize("path", ROWS, ids=lambda path: path.stem)
def test_rows_are_named_after_their_method_and_have_the_budgets_of_the_paper(path, judge):
    recipe, (network, method) = read_recipe(path), path.stem.split("-")
    assert recipe.search.method == method
    assert method in METHODS
    left = {name: float(amount.removesuffix("%")) for name, amount in recipe.budget.items()}
    goal = judge.GOALS[network]
    assert left == pytest.approx({"macs": 100 - goal.macs, "params": 100 - goal.params})
    assert judge.PAPER[network]["HALOC"][1:] == (goal.macs, goal.params)


@pytest.mark.parametrize("network", MODELS)
def test_rows_of_a_network_differ_in_the_search_alone(network):
    recipes = {path: read_recipe(path) for path in ROWS if path.stem.startswith(network)}
    assert {recipe.search.method for recipe in recipes.values()} == set(METHODS), "one for every method"
    assert len({repr(replace(recipe, search=SearchPart())) for recipe in recipes.values()}) == 1


# --- what is said of results --------------------------------------------------------------------------------------


def comparison(macs: float, params: float, **scores: list[float]) -> dict:
    """As `haloc compress --seeds` writes it, of a network of 1,000 multiply-adds and parameters."""

    def row(name: str, values: list[float]) -> dict:
        sizes = {"macs": macs, "params": params}
        figures = {key: {"before": 1000, "values": [1000 * left] * len(values)} for key, left in sizes.items()}
        return {"name": name, "method": name, "figures": figures | {"score": {"before": 93.0, "values": values}}}

    return {"kind": "haloc-comparison", "format": 1, "rows": [row(name, values) for name, values in scores.items()]}


def latency(network: str, batch: int, **plans: tuple[float, float]) -> list[dict]:
    head = {"network": network, "target": TARGET.format(batch), "error_ms": 0.01, "macs": 0.3, "params": 0.2}
    return [head | {"plan": name, "latency_ms": ms, "top1": top1} for name, (ms, top1) in plans.items()]


def write(folder: Path, **files: dict) -> Path:
    (folder / "results").mkdir(parents=True)
    for name, value in files.items():
        (folder / "results" / f"{name.replace('_', '-')}.json").write_text(json.dumps(value))
    return folder


@pytest.fixture
def good(tmp_path):
    """Everything is met."""
    times = {"dense": (2.0, 0.93), "macs": (1.5, 0.92), "latency": (1.2, 0.92)}
    rows = [row for network in MODELS for batch in (128, 1) for row in latency(network, batch, **times)]
    return write(
        tmp_path / "good",
        resnet20=comparison(0.278, 0.239, **{"resnet20-haloc": [91.8, 91.9, 91.7]}),
        vgg16=comparison(0.1356, 0.0144, **{"vgg16-haloc": [93.9, 94.0, 93.95]}),
        resnet20_methods=comparison(0.27, 0.23, haloc=[91.5, 91.6, 91.7], alds=[91.4, 91.5, 91.6]) | {"epochs": 24},
        vgg16_methods=comparison(0.13, 0.014, haloc=[93.7, 93.8, 93.9], lc=[93.0, 93.1, 93.2]) | {"epochs": 24},
        flow={"resnet20": {"stages": {"search": 100.0, "finetune": 260.0}}, "vgg16": {"stages": {"search": 500.0}}},
        latency={"rows": rows},
        bases={
            "resnet20": {"name": "resnet20", "top1": 0.9271},
            "teacher": {"name": "resnet18_cifar", "top1": 0.9462, "epochs": 60},
        },
    )


@pytest.fixture
def bad(tmp_path):
    """Nothing is met."""
    slow = {"macs": (1.0, 0.92), "latency": (1.2, 0.93)}
    worse = {"macs": (1.5, 0.92), "latency": (1.2, 0.91)}
    rows = [row for network in MODELS for row in (*latency(network, 128, **slow), *latency(network, 1, **worse))]
    return write(
        tmp_path / "bad",
        resnet20=comparison(0.2781, 0.2391, haloc=[91.3, 91.3, 91.4]),
        vgg16=comparison(0.1357, 0.0145, haloc=[93.1, 93.2, 93.2]),
        resnet20_methods=comparison(0.27, 0.23, haloc=[91.5, 91.6, 91.7], alds=[91.7, 91.6, 91.5], lc=[90.0] * 3),
        vgg16_methods=comparison(0.13, 0.014, haloc=[93.0] * 3, lc=[93.1] * 3),
        flow={"resnet20": {"stages": {"search": 100.0, "finetune": 260.1}}},
        latency={"rows": rows},
    )


def test_bars_that_are_met(judge, good):
    bars = judge.bars_of(good)
    assert len(bars) == 15
    assert all(bar.held is True for bar in bars), [bar for bar in bars if bar.held is not True]


def test_bars_that_are_missed(judge, bad):
    bars = judge.bars_of(bad)
    assert len(bars) == 15
    assert all(bar.held is False for bar in bars), [bar for bar in bars if bar.held is not False]


def test_bars_that_nothing_is_known_of(judge, tmp_path):
    assert {bar.held for bar in judge.bars_of(tmp_path)} == {None}


def test_above_the_floor_is_not_above_the_bar(judge):
    bars = judge.accuracy_bars(judge.GOALS["resnet20"], judge.Run("haloc", (91.4, 91.5, 91.6), 0.27, 0.23))
    assert [bar.held for bar in bars] == [False, True, True, True]
    assert bars[0].figure == "91.50 ± 0.10%"


def test_fewer_than_three_seeds_say_nothing_of_three(judge):
    bars = judge.accuracy_bars(judge.GOALS["resnet20"], judge.Run("haloc", (92.0, 92.0), 0.27, 0.23))
    assert [bar.held for bar in bars] == [None, None, True, True]
    assert "of 2 seeds only" in bars[0].figure


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((91.4, 91.5, 91.6), "+0.10 ± 0.08 points, not more than seeds explain"),
        ((91.0, 91.1, 91.2), "+0.50 ± 0.08 points, more than seeds explain"),
        ((91.8,), "-0.20 points, one seed"),
    ],
)
def test_a_lead_says_whether_seeds_explain_it(values, said, judge):
    own = judge.Run("haloc", (91.5, 91.6, 91.7), 0.27, 0.23)
    assert judge.lead_of(own, replace(own, values=values)) == said


def test_haloc_is_not_a_rival_of_its_own(judge):
    runs = {name: judge.Run(name, (top1,) * 3, 0.2, 0.2) for name, top1 in {"haloc": 91.5, "haloc-b": 92.0}.items()}
    assert judge.ahead_bar(judge.GOALS["resnet20"], runs).held is None
    bar = judge.ahead_bar(judge.GOALS["resnet20"], runs | {"lc": judge.Run("lc", (91.0,) * 3, 0.2, 0.2)})
    assert bar.held is True


@pytest.mark.parametrize("changed", [0, 3])
def test_the_dense_network_in_place_of_a_plan_does_not_count(changed, judge):
    rows = latency("vgg16", 1, macs=(1.5, 0.92), latency=(1.495, 0.93))
    (bar,) = judge.latency_bars("vgg16", 1, [row | {"changed": changed} for row in rows])
    assert bar.held is (changed > 0)
    assert "within the errors" in bar.figure
    assert ("it is the dense network" in bar.figure) is (changed == 0)


@pytest.mark.parametrize("folder", ["good", "bad"])
def test_all_tables_are_printed(folder, show, request, capsys):
    show.main(["--folder", str(request.getfixturevalue(folder))])
    said = capsys.readouterr().out
    assert ("MISSED" in said) is (folder == "bad")
    assert ("│ held" in said) is (folder == "good")
    assert "98.56" in said, "the paper's figures beside ours"


def test_what_is_not_measured_is_said_to_be(sheets, scripts, tmp_path):
    found = sheets.sheets_of(tmp_path)
    for name in ("resnet20-methods", "vgg16-methods", "vgg16-screen", "latency", "searches", "plans"):
        assert found[name].markdown.splitlines()[-1].startswith("| not measured yet |")
    assert found["resnet20"].markdown.count("not measured yet") == 2, "the uncompressed network and the compressed one"
    words = scripts("words")
    known = words.done(tmp_path)
    assert [what for what, is_known in known.items() if is_known] == [next(key for key in known if "earlier" in key)]
    assert "15 are open" in words.status(tmp_path)


def test_what_is_measured_is_said_to_be(sheets, scripts, good):
    found, words = sheets.sheets_of(good), scripts("words")
    ours = [cell.strip() for cell in found["resnet20"].markdown.splitlines()[-1].split("|")[1:-1]]
    assert ours == ["HALOC", "here", "91.80 ± 0.10", "72.20", "76.10", "91.80, 91.90, 91.70"]
    assert "15 are held, 0 are missed and 0 are open" in words.status(good)
    assert "The mean of 3 seeds is -0.91 points" in words.remark(good, "resnet20")


def test_the_earlier_comparison_is_that_of_the_methods(judge):
    runs, epochs = judge.earlier()
    assert (runs["haloc"].said, runs["alds"].said, epochs) == ("91.73 ± 0.06%", "91.68 ± 0.23%", 60)
    assert runs["lc"].values == pytest.approx((91.46,))


# --- the page -----------------------------------------------------------------------------------------------------


def test_the_page_is_what_the_script_writes(show):
    page = show.PAGE.read_text(encoding="utf-8")
    assert page == show.filled(page, FOLDER), "run: python benchmarks/paper_cifar10/show.py --write"


def test_the_page_has_a_place_for_everything(show, sheets, scripts):
    page = show.PAGE.read_text(encoding="utf-8")
    places = {f"table: {name}" for name in sheets.sheets_of(FOLDER)}
    places |= {f"words: {name}" for name in scripts("words").words_of(FOLDER)}
    for place in places:
        assert page.count(f"<!-- {place} -->") == 1, place
    assert page.count("<!-- end -->") == len(places)


def test_a_page_is_filled_and_filled_again(show, tmp_path, good):
    page = tmp_path / "page.md"
    page.write_text("before\n\n<!-- table: flow -->\nold\n<!-- end -->\n\nafter\n")
    for _ in range(2):
        show.main(["--folder", str(good), "--write", "--page", str(page)])
        text = page.read_text()
        assert text.startswith(
            "before\n\n<!-- table: flow -->\n\n| stage | ResNet-20 | VGG-16 |\n| --- | --: | --: |\n"
        )
        assert text.endswith("| all | 360.0 | 500.0 |\n\n<!-- end -->\n\nafter\n")
    page.write_text("<!-- table: nonsense -->\n<!-- end -->\n")
    with pytest.raises(SystemExit, match="nonsense"):
        show.main(["--folder", str(good), "--write", "--page", str(page)])


# --- what is committed --------------------------------------------------------------------------------------------


def committed(folder: str, network: str) -> list[Path]:
    return sorted((FOLDER / folder).glob(f"{network}-*.json"))


@pytest.mark.parametrize("network", MODELS)
def test_plans_fit_their_network_and_keep_the_budgets(network, sheets, judge):
    layers, goal = sheets.layers_of(network), judge.GOALS[network]
    for path in committed("plans", network):
        plan = Plan.load(path)
        layers.check(plan)
        if "latency" not in path.stem:
            macs, params = sheets.shares_of(plan, layers)
            assert macs <= 1 - goal.macs / 100, path.stem
            assert params <= 1 - goal.params / 100, path.stem


def test_of_every_plan_it_is_known_how_it_was_made(sheets):
    made = sheets.made_of(FOLDER)
    assert {path.stem for network in MODELS for path in committed("plans", network)} == made.keys()
    assert all(row["search"]["method"] == name.split("-")[1] for name, row in made.items() if "latency" not in name)


@pytest.mark.parametrize("network", MODELS)
def test_searches_are_of_their_network_and_have_a_history(network, sheets):
    for path in committed("search", network):
        evidence = Evidence.load(path)
        assert set(evidence.space.layers) == {layer.name for layer in sheets.layers_of(network)}
        assert all("probabilities" in row for row in evidence.history)
        assert path.stat().st_size < 250_000


@pytest.mark.parametrize("network", MODELS)
def test_plans_follow_from_their_searches(network, judge):
    goal = judge.GOALS[network]
    budget = {"macs": f"{100 - goal.macs:.2f}%", "params": f"{100 - goal.params:.2f}%"}
    for path in committed("search", network):
        evidence = Evidence.load(path)
        limits = limits_of(evidence.space, budget, {"params": Count("params", biased=True)})
        found, kept = evidence.plan(limits), Plan.load(FOLDER / "plans" / path.name)
        # The last larger rank that a budget pays is as good in one layer as in another; which one has it is a draw.
        assert Counter(found.values()) == Counter(kept.values())
        assert all(limit.holds(kept) for limit in limits)


def test_the_uncompressed_networks_are_those_of_the_other_benchmark(sheets):
    bases = read_json(FOLDER / "results" / "bases.json")
    trained = read_json(FOLDER.parent / "training" / "bases.json")["rows"]
    for network, model in MODELS.items():
        assert bases[network]["top1"] == trained[model]["top1"]
    for row in bases.values():
        layers = inspect(create(row["name"]), torch.zeros(1, 3, 32, 32))
        assert (row["params"], row["macs"]) == (layers.params, layers.macs)


def test_the_log_of_the_teacher_is_of_all_its_epochs():
    lines = (FOLDER / "logs" / "resnet18_cifar.log.jsonl").read_text().splitlines()
    bases = read_json(FOLDER / "results" / "bases.json")
    assert json.loads(lines[-1])["epoch"] == len(lines) == bases["teacher"]["epochs"]


def run_folder(folder: Path, *, done: bool) -> Path:
    """As much of a run as is kept, made from what is committed."""
    (folder / "search").mkdir(parents=True)
    shutil.copyfile(FOLDER / "plans" / "resnet20-haloc.json", folder / "plan.json")
    shutil.copyfile(FOLDER / "search" / "resnet20-haloc.json", folder / "search" / "search.json")
    shutil.copyfile(FOLDER / "resnet20-haloc.toml", folder / "recipe.toml")
    (folder / "recipe.toml").write_text(read_recipe(folder / "recipe.toml").to_toml())
    stages = {name: {"seconds": 12.34, "done": done or name == "search"} for name in ("search", "finetune")}
    (folder / "stages.json").write_text(json.dumps({"stages": stages}))
    return folder


def test_what_is_kept_of_a_run(scripts, sheets, tmp_path):
    run, kept = run_folder(tmp_path / "run", done=True), tmp_path / "kept"
    scripts("keep").main([str(run), "resnet20-haloc", "--folder", str(kept), "--beside", "2", "--flow"])
    search = kept / "search" / "resnet20-haloc.json"
    assert search.read_bytes() == (FOLDER / "search" / "resnet20-haloc.json").read_bytes(), "kept once, it stays so"
    assert read_json(kept / "results" / "flow.json") == {"resnet20": {"stages": {"search": 12.3, "finetune": 12.3}}}
    (row,) = sheets.searches_sheet(kept).rows
    assert row[-2:] == ("12.3, 2 other networks trained beside it", "as it is now")


def test_the_time_of_half_a_run_is_not_kept(scripts, tmp_path):
    run = run_folder(tmp_path / "run", done=False)
    with pytest.raises(SystemExit, match="finetune"):
        scripts("keep").main([str(run), "resnet20-haloc", "--folder", str(tmp_path), "--flow"])


def test_figures_are_drawn_where_there_is_something_to_draw(scripts, tmp_path):
    figures = scripts("figures")
    found = figures.figures_of(tmp_path)
    assert [name for name, draw in found.items() if draw is not None] == ["paper_fig3.svg", "paper_fig4a.svg"]
    figures.main(["--folder", str(tmp_path), "--output", str(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["paper_fig3.svg", "paper_fig4a.svg"]


def test_committed_figures_are_those_of_the_committed_files(scripts):
    """Not to the byte: fonts are those of the machine."""
    for name, draw in scripts("figures").figures_of(FOLDER).items():
        assert (draw is not None) is (FIGURES / name).is_file(), name
        assert draw is None or draw().axes


@pytest.mark.parametrize("network", MODELS)
def test_ranks_are_drawn_with_the_full_ones(network, scripts):
    draw = scripts("figures").figures_of(FOLDER)[f"paper_fig4c_{network}.svg"]
    plan = Plan.load(FOLDER / "plans" / f"{network}-haloc.json")
    texts = [text.get_text() for text in draw().axes[0].texts]
    expected = [rank for form in plan.values() for rank in (("dense",) if isinstance(form, Dense) else ranks(form))]
    assert sorted(text.split(" of ")[0] for text in texts) == sorted(map(str, expected))
    assert all(int(text.split(" of ")[0]) <= int(text.split(" of ")[1]) for text in texts if text != "dense")


def test_figures_are_small():
    assert all(path.stat().st_size < 100_000 for path in FIGURES.glob("paper_*"))
