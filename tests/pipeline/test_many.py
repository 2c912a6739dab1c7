"""Teachers, given plans, held-out images, affordable ranks, seeds and comparisons."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import nn

import haloc
from haloc.cost.count import Count
from haloc.errors import FileFormatError, ModelError, PlanError, SpecError
from haloc.files import read_json
from haloc.methods.budget import affordable, limits_of
from haloc.methods.solve import least_sum
from haloc.pipeline import many
from haloc.pipeline.beside import Crowd, side_by_side
from haloc.pipeline.job import job_from
from haloc.pipeline.many import Order, comparison, compress_many, with_seeds
from haloc.pipeline.recipe import Recipe
from haloc.plan import Plan
from tests.pipeline.small import OPTIONS, Told, compress, decided, make, trained

CPU = torch.device("cpu")
RECIPE = {
    "model": {"name": "tests.pipeline.small:trained"},
    "data": {"name": "digits", "batch_size": 64, "images": 256, "test_images": 100},
    **OPTIONS,
}


def recipe(**changes):
    return Recipe.from_dict(RECIPE | changes)


def space_of(model, **options):
    return haloc.rank_space(haloc.inspect(model, torch.zeros(1, 1, 8, 8)), round_to=2, **options)


# a given plan


def test_a_given_plan_is_taken_as_it_is(tmp_path):
    first = compress(tmp_path / "first")
    told = Told()
    again = compress(tmp_path / "again", told, search=OPTIONS["search"] | {"plan": str(tmp_path / "first/plan.json")})
    assert Plan.load(tmp_path / "again/plan.json") == Plan.load(tmp_path / "first/plan.json")
    assert decided(tmp_path / "again") == decided(tmp_path / "first")
    assert again.report.facts["search"]["method"] == "a given plan"
    assert again.report.facts["search"]["budgets"] == first.report.facts["search"]["budgets"]
    assert again.report.facts["pareto"] is None
    assert not (tmp_path / "again/search").exists()


def test_the_plan_of_the_run_itself_is_not_taken_away(tmp_path):
    compress(tmp_path / "run")
    kept = (tmp_path / "run/plan.json").read_bytes()
    with pytest.raises(SpecError, match="the plan of this very run"):
        compress(tmp_path / "run", search={"plan": str(tmp_path / "run/plan.json")})
    assert (tmp_path / "run/plan.json").read_bytes() == kept


def test_a_plan_that_is_missing_is_told_before_anything_is_done(tmp_path):
    with pytest.raises(FileFormatError, match="nowhere"):
        compress(tmp_path / "run", search={"plan": str(tmp_path / "nowhere.json")})
    assert not (tmp_path / "run/layers.json").exists()


def test_another_plan_is_noticed(tmp_path):
    given = tmp_path / "plan.json"
    plan = compress(tmp_path / "first") and Plan.load(tmp_path / "first/plan.json")
    plan.save(given)
    options = {"search": OPTIONS["search"] | {"plan": str(given)}}
    compress(tmp_path / "run", **options)
    Plan(dict(list(plan.items())[:1])).save(given)
    told = Told()
    compress(tmp_path / "run", told, **options, budget={"macs": "99%"})
    assert {"search", "apply", "finetune"} <= set(told.begun)
    Plan({"nothing": next(iter(plan.values()))}).save(given)
    with pytest.raises(PlanError, match="nothing"):
        compress(tmp_path / "run", **options)


def test_a_plan_over_the_budget_is_told(tmp_path):
    compress(tmp_path / "first", budget={"macs": "80%"})
    found = compress(tmp_path / "run", search={"plan": str(tmp_path / "first/plan.json")}, budget={"macs": "20%"})
    assert not found.report.met


# teachers


class Constant(nn.Module):
    """Says the same whatever it sees."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.said = nn.Parameter(5.0 * (torch.arange(classes) == 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.said.expand(len(x), -1)


def test_another_teacher_is_learned_from(tmp_path):
    alone = {"cross_entropy": 0.0, "distillation": 1.0, "epochs": 6, "lr": 0.05, "warmup_epochs": 0}
    found = compress(tmp_path / "run", teacher=Constant(), finetune=alone)
    assert found.report.facts["figures"][0]["after"] < 30, "nearly everything is taken for a three"
    told = Told()
    compress(tmp_path / "run", told, finetune=alone)
    assert told.begun == ["finetune", "evaluate", "report"], "who teaches decides the fine-tuning alone"


def test_a_report_says_who_taught_and_on_what(tmp_path):
    orders = [Order("r", recipe(teacher={"name": "tests.pipeline.small:trained"},
                                data=RECIPE["data"] | {"whole": True}), tmp_path / "run")]  # fmt: skip
    ((_, found),) = compress_many(orders)
    notes = " ".join(found.report.facts["notes"])
    assert "learned from tests.pipeline.small:trained" in notes
    assert "fine-tuned on the held-out images too" in notes


def test_what_is_no_teacher_is_refused(tmp_path):
    with pytest.raises(SpecError, match="a teacher is a torch.nn.Module, got a str"):
        compress(tmp_path / "run", teacher="resnet20")
    with pytest.raises(ModelError, match="the teacher cannot be asked"):
        compress(tmp_path / "run", teacher=nn.Linear(3, 3))


def test_feature_maps_of_another_width_are_not_compared(tmp_path):
    """Another network may have layers of the same names."""
    wide = make()
    wide[0], wide[1], wide[3] = nn.Conv2d(1, 24, 3, padding=1), nn.BatchNorm2d(24), nn.Conv2d(24, 16, 3, padding=1)
    told = OPTIONS["finetune"] | {"features": 0.1, "epochs": 1}
    found = compress(tmp_path / "run", teacher=wide, finetune=told)
    assert found.report.facts["finetune"]["history"][-1]["features"] > 0


def test_a_teacher_of_something_else_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"the teacher answers with .*7.* and the model with .*10"):
        compress(tmp_path / "run", teacher=Constant(7))


def test_teachers_are_named_in_recipes(tmp_path):
    assert job_from(recipe()).teacher is None
    job = job_from(recipe(teacher={"name": "tests.pipeline.small:make"}))
    assert job.teacher is not None
    assert job.teaching != job_from(recipe(teacher={"name": "tests.pipeline.small:trained"})).teaching
    with pytest.raises(SpecError, match=r"teacher\.name"):
        job_from(recipe(teacher={"weights": "weights.safetensors"}))
    with pytest.raises(SpecError, match=r"'resnet20' alone has random weights.*teacher\.weights = \"pretrained\""):
        job_from(recipe(teacher={"name": "resnet20"}))


# held-out images


def test_the_whole_is_more_than_a_part():
    part, whole = job_from(recipe()), job_from(recipe(data=RECIPE["data"] | {"images": None, "whole": True}))
    assert part.lessons is None
    assert whole.lessons.identity["images"] == whole.labels["data"]["train"] + whole.labels["data"]["val"]
    with pytest.raises(SpecError, match="data.whole is for data sets by name"):
        job_from(recipe(data={"loaders": "tests.pipeline.small:data", "whole": True}))


def test_squares_are_cut_out_of_training_images_alone():
    plain, cut = job_from(recipe()), job_from(recipe(data=RECIPE["data"] | {"whole": True, "cutout": 3}))
    assert "cutout=3" in cut.train.identity["augment"]
    assert "cutout=3" in cut.lessons.identity["augment"]
    assert "cutout=0" in plain.train.identity["augment"]
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(plain.val, cut.val, strict=True))
    with pytest.raises(SpecError, match="data.cutout is for data sets by name"):
        job_from(recipe(data={"loaders": "tests.pipeline.small:data", "cutout": 3}))
    with pytest.raises(SpecError, match="data.cutout must be 0 or more, got -1"):
        recipe(data=RECIPE["data"] | {"cutout": -1})


def test_the_whole_concerns_fine_tuning_alone(tmp_path):
    def run(told, **data):
        order = Order("r", recipe(data=RECIPE["data"] | data), tmp_path / "run")
        return list(compress_many([order], told))

    run(Told())
    told = Told()
    ((_, found),) = run(told, whole=True)
    assert told.begun == ["finetune", "evaluate", "report"]
    assert not any("val_top1" in row for row in found.report.facts["finetune"]["history"])


# affordable ranks


def test_what_cannot_be_afforded_is_left_out_and_nothing_else():
    space = space_of(make(), forms=("tucker2", "spatial", "svd"))
    limits = limits_of(space, {"macs": "40%", "params": "40%"})
    small = affordable(space, limits)
    assert 1 < small.size < space.size
    for name, offer in space.open_layers.items():
        for form in offer:
            prices = {other: [0.0] * len(row) for other, row in limits[0].prices.forms.items()}
            prices[name] = [0.0 if one == form else float("inf") for one in offer]
            try:
                reachable = bool(least_sum(prices, limits))
            except haloc.BudgetError:
                reachable = False
            if reachable:
                assert form in small.layers[name], "within the budget, and left out"
        alone = [[limit.prices.prices[name][i] - min(limit.prices.prices[name]) for limit in limits]
                 for i, form in enumerate(offer) if form in small.layers[name]]  # fmt: skip
        rooms = [limit.budget - limit.prices.cheapest for limit in limits]
        assert all(cost <= room for row in alone for cost, room in zip(row, rooms, strict=True))


def test_a_narrow_space_gives_the_same_plan(tmp_path):
    wide = compress(tmp_path / "wide", search={"method": "uniform"})
    narrow = compress(tmp_path / "narrow", search={"method": "uniform"}, space=OPTIONS["space"] | {"affordable": True})
    assert len(read_json(tmp_path / "narrow/space.json")["layers"][0]["forms"]) <= len(
        read_json(tmp_path / "wide/space.json")["layers"][0]["forms"]
    )
    assert Plan.load(narrow.report.folder / "plan.json") == Plan.load(wide.report.folder / "plan.json")


# biases between factors


@pytest.mark.parametrize("norms", [True, False])
def test_a_budget_of_parameters_holds_for_the_network_that_comes_back(tmp_path, norms):
    found = compress(
        tmp_path / "run",
        budget={"params": "50%"},
        space={"round_to": 1, "forms": ["tucker2", "spatial", "svd"]},
        finetune=OPTIONS["finetune"] | {"epochs": 1, "norm_between": norms},
    )
    assert found.report.met
    built = sum(parameter.numel() for parameter in found.model.parameters())
    priced = {row["name"]: row for row in found.report.facts["search"]["budgets"]}["params"]
    plain = haloc.inspect(trained(), torch.zeros(1, 1, 8, 8)).params_of(Plan.load(tmp_path / "run/plan.json"))
    assert plain <= built <= priced["cost"] <= priced["budget"]
    assert (built > plain) == norms


def test_biases_are_counted_by_hand():
    (layer,) = [one for one in haloc.inspect(make(), torch.zeros(1, 1, 8, 8)) if one.name == "3"]
    form = haloc.Tucker2(4, 6)
    plain, biased = (Count("params", biased=b).price(layer.shape, form).value for b in (False, True))
    assert plain == 16 * 6 + 6 * 4 * 9 + 4 * 16 + 16
    assert biased == plain + 6 + 4
    assert Count("params", biased=True).price(layer.shape, haloc.Dense()).value == 16 * 16 * 9 + 16


# seeds and comparisons


def test_seeds_share_a_plan_and_nothing_else(tmp_path):
    orders = with_seeds("digits", recipe(run={"seed": 5}), tmp_path, 3)
    assert [order.folder.name for order in orders] == ["seed-5", "seed-6", "seed-7"]
    found = list(compress_many(orders, at_once=2))
    plans = [Plan.load(order.folder / "plan.json") for order, _ in found]
    assert plans[0] == plans[1] == plans[2]
    digests = {decided(order.folder)["finetuned/weights.safetensors"] for order, _ in found}
    assert len(digests) == 3
    (row,) = comparison(found)
    values = [result.report.facts["figures"][0]["after"] for _, result in found]
    assert row["seeds"] == [5, 6, 7]
    assert row["figures"]["score"]["values"] == values
    assert row["figures"]["score"]["after"] == pytest.approx(sum(values) / 3)
    assert row["figures"]["macs"]["spread"] == 0


def test_one_seed_is_the_recipe_itself(tmp_path):
    (order,) = with_seeds("digits", recipe(), tmp_path, 1)
    assert order == Order("digits", recipe(), tmp_path)
    assert comparison(compress_many([order]))[0]["seeds"] == [0]
    with pytest.raises(SpecError, match="1 seed or more, got 0"):
        with_seeds("digits", recipe(), tmp_path, 0)


def test_many_come_to_the_same_as_one_by_one(tmp_path):
    """Whatever is trained beside it."""
    methods = {name: recipe(search={"method": name}) for name in ("energy", "uniform")}
    orders = [Order(name, one, tmp_path / "many" / name) for name, one in methods.items()]
    assert len(comparison(compress_many(orders))) == 2
    for name, one in methods.items():
        haloc.pipeline.flow.compress_recipe(one, tmp_path / "one" / name)
        assert decided(tmp_path / "one" / name) == decided(tmp_path / "many" / name)


def test_networks_that_draw_at_random_are_known():
    job = job_from(recipe())
    assert not many.draws(job)
    dropping = replace(job, model=nn.Sequential(job.model, nn.Dropout(0.1)))
    assert many.draws(dropping)
    assert not many.draws(replace(job, model=nn.Sequential(job.model, nn.Dropout(0.0))))

    class Functional(nn.Module):
        def forward(self, x):
            return nn.functional.dropout(x.flatten(1), 0.2, self.training)

    assert many.draws(replace(job, model=nn.Sequential(Functional(), nn.Linear(64, 10))))
    assert many.draws(replace(job, model=nn.Sequential(nn.Linear(3, 3)))), "one that does not run is not trusted"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_side_by_side_on_a_gpu_is_as_one_by_one(tmp_path):
    one = recipe(run={"device": "cuda"})
    for name, at_once in (("alone", 1), ("together", 3)):
        list(compress_many(with_seeds("r", one, tmp_path / name, 3), at_once=at_once))
    for seed in range(3):
        score = [decided(tmp_path / name / f"seed-{seed}")["score"]["after"] for name in ("alone", "together")]
        assert score[0] == pytest.approx(score[1], abs=2.0), "kernels may add up in another order"


class _Device:
    """Stands in for CUDA, so that the threads themselves can be tested without one."""

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def synchronize(self):
        pass


@pytest.fixture
def pretended(monkeypatch):
    for name in ("device", "stream", "Stream"):
        monkeypatch.setattr(torch.cuda, name, _Device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_stream", _Device)


@pytest.fixture
def workers():
    with ThreadPoolExecutor(3) as pool:
        yield pool


def test_the_next_begins_once_the_one_before_is_under_way(pretended, workers):
    crowd, events = Crowd(Told(), 2), []
    together = threading.Barrier(2, timeout=20)

    def task(name, seat):
        events.append(f"{name} begins")
        with seat.working("training") as (_, training):
            seat_progress(training)
            together.wait()  # both are at it at the same time, or this fails
        events.append(f"{name} ends")

    def seat_progress(training):
        events.append("under way")
        training(None)

    seats = [crowd.seat(), crowd.seat()]
    side_by_side([lambda s=seat, n=n: task(n, s) for n, seat in enumerate(seats)], crowd, CPU, workers=workers)
    assert events[:4] == ["0 begins", "under way", "1 begins", "under way"]
    assert sorted(events[4:]) == ["0 ends", "1 ends"]


def test_nobody_trains_before_all_are_ready(pretended, workers):
    """A start waits for the device, which takes long where somebody trains on it."""
    crowd, trained_on = Crowd(Told(), 2), []

    def task(name, seat):
        with seat.working("training") as (_, training):
            training(None)
            trained_on.append((name, crowd.seats[1].under_way.is_set()))

    seats = [crowd.seat(), crowd.seat()]
    side_by_side([lambda s=seat, n=n: task(n, s) for n, seat in enumerate(seats)], crowd, CPU, workers=workers)
    assert sorted(trained_on) == [(0, True), (1, True)]


def test_one_that_fails_does_not_take_the_others_along(pretended, workers):
    crowd, done = Crowd(Told(), 3), []

    def fails():
        raise ModelError("it broke")

    for _ in range(3):
        crowd.seat()
    errors = side_by_side([lambda: done.append(0), fails, lambda: done.append(2)], crowd, CPU, workers=workers)
    assert [type(error) for error in errors] == [type(None), ModelError, type(None)]
    assert done == [0, 2]


def test_a_run_that_fails_leaves_the_others_alone(tmp_path):
    bad = Order("bad", recipe(budget={"macs": "0.01%"}), tmp_path / "bad")
    worse = Order("worse", recipe(finetune={"epochs": 1, "lr": 1e30, "warmup_epochs": 0}), tmp_path / "worse")
    good = Order("good", recipe(), tmp_path / "good")
    found = list(compress_many([bad, worse, good]))
    assert {order.name: type(result).__name__ for order, result in found} == {
        "bad": "BudgetError", "worse": "TrainError", "good": "Compressed"
    }  # fmt: skip
    assert [row["name"] for row in comparison(found)] == ["good"]


def test_threads_are_the_same_from_wave_to_wave(pretended, workers):
    """What a thread learnt of kernels is lost with it."""

    def wave():
        crowd, seen = Crowd(Told(), 2), []
        for _ in range(2):
            crowd.seat()

        def task(seat):
            seen.append(threading.get_ident())
            with seat.working("training") as (_, training):
                training(None)

        side_by_side([lambda s=seat: task(s) for seat in crowd.seats], crowd, CPU, workers=workers)
        return set(seen)

    first = wave()
    assert len(first) == 2
    assert wave() == first


def test_an_interruption_reaches_all_of_them(pretended, workers):
    crowd = Crowd(Told(), 1)
    seat = crowd.seat()
    crowd.stop.set()  # as when Ctrl-C is pressed while others wait

    def task():
        with seat.working("training") as (_, training):
            training(None)

    with pytest.raises(KeyboardInterrupt):
        side_by_side([task], crowd, CPU, workers=workers)


def test_recipes_are_checked_before_the_first_begins(tmp_path):
    good = Order("good", recipe(), tmp_path / "good")
    bad = replace(good, name="bad", recipe=recipe(budget={}))
    with pytest.raises(SpecError, match="budget"):
        list(compress_many([good, bad]))
    assert not (tmp_path / "good").exists()
