"""Widths chosen by a clock: what they cost, how that is measured, and how stairs are dealt with."""

from __future__ import annotations

import itertools
import random
from math import ceil, inf

import pytest
import torch
from torch import nn

import haloc
from haloc.cost import sampling
from haloc.errors import BudgetError, CostError, FileFormatError, SpecError
from haloc.files import read_json
from haloc.forms import Dense
from haloc.narrowing import hidden_channels, kept_widths, measure_widths, narrow, narrowed_of, resized
from haloc.narrowing.choose import choose_widths
from haloc.narrowing.hidden import Narrowed, Sizes, extents, offered_widths, touched_shapes, with_extents
from haloc.narrowing.latency import WidthCost, WidthTiming, WidthTimings, sample_widths, width_rows
from haloc.shapes import ConvShape, LinearShape, as_deployed
from tests.narrowing.test_narrow import EXAMPLE, inputs, network

CPU = haloc.Target.parse("cpu:b1")


def chain(*widths: int) -> nn.Module:
    """1×1 layers one after the other, with so many channels between them."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(before, after, 1) for before, after in itertools.pairwise(widths)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU()))).eval()


class Stairs:
    """A microsecond per multiply-add, channels in whole blocks, and a little per layer; known to one percent."""

    quantity, unit = "latency", "ms"

    def __init__(self, block: int = 1) -> None:
        self.block = block

    def price(self, shape, form):
        assert form == Dense()
        before, after = (self.block * ceil(width / self.block) for width in extents(shape))
        value = with_extents(as_deployed(shape), before, after).macs / 1000 + 0.01
        return haloc.Estimate(value, value / 100)


def cost_of(model: nn.Module, rows=None, **more) -> WidthCost:
    layers = haloc.inspect(model, EXAMPLE)
    return WidthCost(layers, hidden_channels(model, EXAMPLE), Stairs() if rows is None else rows, **more)


# --- what widths cost -----------------------------------------------------------------------------------------------


def test_it_is_the_sum_over_the_layers_in_their_narrower_shapes():
    cost = cost_of(chain(3, 16, 24, 5))  # on 8 by 8 pictures
    assert cost.of({}).value == pytest.approx(64 * (3 * 16 + 16 * 24 + 24 * 5) / 1000 + 0.03)
    assert cost.of({"2": 8, "4": 12}).value == pytest.approx(64 * (3 * 8 + 8 * 12 + 12 * 5) / 1000 + 0.03)
    assert cost.of({"4": 12}).value == pytest.approx(64 * (3 * 16 + 16 * 12 + 12 * 5) / 1000 + 0.03)
    assert 0 < cost.of({}).error < 0.01 * cost.of({}).value, "errors of layers are independent"


def test_it_is_what_the_built_networks_layers_cost():
    model = network()  # with depthwise layers, and some that nothing touches
    cost = cost_of(model)
    widths = {"one.back": 16, "two.back": 8, "head": 20}
    built = resized(model, [Narrowed(group, widths[group.consumer]) for group in cost.hidden])
    expected = haloc.layers_cost(haloc.inspect(built, EXAMPLE), {}, Stairs())
    assert cost.of(widths).value == pytest.approx(expected.value)
    assert cost.of(widths).error == pytest.approx(expected.error)
    assert cost.of(kept_widths(narrowed_of(built))) == cost.of(widths)


@pytest.mark.parametrize(("rest", "slope"), [(0.0, 1.0), (2.0, 1.1), (1.0, 0.9)])
def test_the_rest_and_the_slope_are_learnt_from_whole_networks(rest, slope):
    plain = cost_of(chain(3, 16, 24, 5))
    drawn = sample_widths(plain.hidden, 4, 9)
    timings = tuple(WidthTiming(widths, rest + slope * plain.of(widths).value) for widths in drawn)
    cost = cost_of(chain(3, 16, 24, 5), timings=timings)
    for widths in ({}, {"2": 12, "4": 20}, {"2": 4}):
        found, expected = cost.of(widths), rest + slope * plain.of(widths).value
        assert found.value == pytest.approx(expected, rel=0.02)
        assert abs(found.value - expected) <= found.error
    noisy = tuple(WidthTiming(t.widths, t.latency_ms * (1.2 if i % 2 else 0.8)) for i, t in enumerate(timings))
    assert cost_of(chain(3, 16, 24, 5), timings=noisy).error > 4 * cost.error


def test_drawn_widths_go_from_wide_to_narrow_and_no_two_are_alike():
    groups = hidden_channels(network(), EXAMPLE)
    drawn = sample_widths(groups, 4, 9)
    assert drawn == sample_widths(groups, 4, 9)
    assert drawn[0] == {group.consumer: group.width for group in groups}
    assert len(drawn) == len({tuple(widths.items()) for widths in drawn}) == 9
    sums = [sum(widths.values()) for widths in drawn]
    assert sums[-1] < 0.5 * sums[0]
    assert all(w in offered_widths(group.width, 4) for group in groups for w in [d[group.consumer] for d in drawn])
    assert len(sample_widths(groups, 1000, 9)) == 1, "there is nothing to draw"
    assert sample_widths(groups, 4, 0) == ()


def test_widths_on_offer():
    assert offered_widths(20, 8) == (20, 16, 8)
    assert offered_widths(16, 8) == (16, 8)
    assert offered_widths(6, 8) == (6,)


def test_rows_are_few_and_tell_of_all_layers():
    model = haloc.create("resnet18").eval()
    example = torch.zeros(1, 3, 64, 64)
    layers, groups = haloc.inspect(model, example), hidden_channels(model, example)
    rows = width_rows(layers, groups, 8)
    assert len(rows) < 60
    assert {as_deployed(call) for layer in layers for call in layer.calls} <= {shape for shape, _ in rows}
    touched = touched_shapes(layers, groups)["layer3.0.conv1"]
    of_it = {as_deployed(with_extents(touched, 128, width)): width for width in range(1, 257)}
    assert {of_it[shape] for shape, _ in rows if shape in of_it} == {256, 192, 128, 64}
    middle = haloc.inspect(chain(3, 32, 64, 5), EXAMPLE)
    pairs = {extents(shape) for shape, _ in width_rows(middle, hidden_channels(chain(3, 32, 64, 5), EXAMPLE), 8)}
    assert {(32, 64), (24, 48), (16, 32), (8, 16), (32, 32), (16, 64)} <= pairs
    only = chain(3, 64, 3)
    assert len(width_rows(haloc.inspect(only, EXAMPLE), hidden_channels(only, EXAMPLE), 8)) >= 8


# --- choosing -------------------------------------------------------------------------------------------------------


def bent(widths: dict[str, int], factors: dict[str, float]) -> dict[str, list[float]]:
    return {name: [factors[name] * gone**2 / width for gone in range(width)] for name, width in widths.items()}


def whole(groups) -> dict[str, int]:
    return {group.consumer: group.width for group in groups}


def test_the_edge_of_a_stair_is_chosen():
    cost = cost_of(chain(3, 64, 3), Stairs(32))
    losses = bent(whole(cost.hidden), {"2": 1.0})
    assert choose_widths(cost.layers, cost.hidden, losses, {"latency": 0.9 * cost.of({}).value}, 4, cost) == {"2": 32}
    two = cost_of(chain(3, 64, 3, 48, 3), Stairs(16))
    groups = [group for group in two.hidden if group.width > 3]
    two = WidthCost(two.layers, tuple(groups), Stairs(16))
    losses = bent(whole(groups), {"2": 1.0, "6": 1.0})
    found = choose_widths(two.layers, groups, losses, {"latency": 0.7 * two.of({}).value}, 4, two)
    assert two.of(found).value <= 0.7 * two.of({}).value
    assert all(width % 16 == 0 for width in found.values())


def everything(groups, round_to: int) -> list[dict[str, int]]:
    offered = [offered_widths(group.width, round_to) for group in groups]
    return [dict(zip(whole(groups), widths, strict=True)) for widths in itertools.product(*offered)]


@pytest.mark.parametrize("block", [1, 8, 12])
@pytest.mark.parametrize("share", [0.85, 0.6, 0.4])
def test_steps_come_close_to_what_trying_everything_finds(block, share):
    cost = cost_of(chain(3, 24, 32, 40, 3), Stairs(block))  # all groups share layers
    losses = bent(whole(cost.hidden), {"2": 1.0, "4": 3.0, "6": 0.5})
    limit = share * cost.of({}).value
    found = choose_widths(cost.layers, cost.hidden, losses, {"latency": limit}, 4, cost)
    assert cost.of(found).value <= limit

    def loss(widths):
        return sum(losses[name][whole(cost.hidden)[name] - width] for name, width in widths.items())

    best = min(loss(widths) for widths in everything(cost.hidden, 4) if cost.of(widths).value <= limit)
    assert loss(found) <= 1.15 * best


def small_steps_alone(layers, groups, losses, limits, round_to) -> dict[str, int]:
    """What widths were chosen by before any but the next one was looked at."""
    widths, sizes = whole(groups), Sizes(layers, groups)
    found = sizes.counts(widths)
    while over := {name: limit for name, limit in limits.items() if found[name] > limit}:
        best = (inf, "", 0, found)
        for name, width in widths.items():
            for smaller in offered_widths(whole(groups)[name], round_to):
                if smaller < width:
                    then = sizes.counts({**widths, name: smaller})
                    saved = sum((found[each] - then[each]) / (found[each] - limit) for each, limit in over.items())
                    gone = whole(groups)[name] - width
                    rate = (losses[name][gone + width - smaller] - losses[name][gone]) / saved
                    best = (rate, name, smaller, then) if rate < best[0] else best
                    break
        _, name, smaller, found = best
        widths[name] = smaller
    return widths


@pytest.mark.parametrize("seed", range(8))
def test_counts_are_kept_to_with_no_more_loss_than_by_small_steps_alone(seed):
    draw = random.Random(seed)
    model = chain(3, 24, 32, 40, 3)
    layers, groups = haloc.inspect(model, EXAMPLE), hidden_channels(model, EXAMPLE)
    losses = {g.consumer: [0.0, *itertools.accumulate(draw.random() for _ in range(g.width - 1))] for g in groups}
    limits = {"macs": draw.uniform(0.3, 0.9) * layers.macs, "params": draw.uniform(0.3, 0.9) * layers.params}

    def loss(widths):
        return sum(losses[name][whole(groups)[name] - width] for name, width in widths.items())

    found = choose_widths(layers, groups, losses, limits, 2)
    assert all(Sizes(layers, groups).counts(found)[name] <= limit for name, limit in limits.items())
    assert loss(found) <= loss(small_steps_alone(layers, groups, losses, limits, 2))


def test_all_budgets_hold_together():
    cost = cost_of(chain(3, 24, 32, 40, 3), Stairs(8))
    losses = bent(whole(cost.hidden), {"2": 1.0, "4": 3.0, "6": 0.5})
    limits = {"latency": 0.7 * cost.of({}).value, "params": 0.5 * cost.layers.params}
    found = choose_widths(cost.layers, cost.hidden, losses, limits, 4, cost)
    assert cost.of(found).value <= limits["latency"]
    assert Sizes(cost.layers, cost.hidden).counts(found)["params"] <= limits["params"]


def test_what_the_clock_cannot_reach_is_said_in_milliseconds_and_as_a_share():
    cost = cost_of(chain(3, 64, 3))
    losses = bent(whole(cost.hidden), {"2": 1.0})
    with pytest.raises(
        BudgetError, match=r"reach 2\.0% of the latency \(0\.492 ms\): .* 12\.6% .* \(3\.09 ms\)"
    ) as raised:
        choose_widths(cost.layers, cost.hidden, losses, {"latency": 0.02 * cost.of({}).value}, 8, cost)
    assert raised.value.reachable["latency"] == pytest.approx(cost.of({"2": 8}).value)


# --- measuring ------------------------------------------------------------------------------------------------------


def measured(model: nn.Module, target=CPU, **options) -> WidthCost:
    told = {"round_to": 8, "networks": 4} | options
    return measure_widths(model, EXAMPLE, hidden_channels(model, EXAMPLE), target, **told)


@pytest.mark.usefixtures("hurried")
def test_widths_are_measured_and_networks_timed(tmp_path):
    seen: list[tuple[int, int]] = []
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    cost = measured(model, path=tmp_path / "t.json", on_progress=lambda done, total: seen.append((done, total)))
    rows = width_rows(cost.layers, cost.hidden, 8)
    assert {(row.shape, row.form) for row in haloc.Table.load(tmp_path / "t.json").rows} == set(rows)
    kept = WidthTimings.load(tmp_path / "t.network.json")
    assert kept.timings == cost.timings
    assert [timing.widths for timing in kept.timings] == list(sample_widths(cost.hidden, 8, 4))
    assert [done for done, _ in seen] == list(range(1, len(seen) + 1)), "one count for both"
    assert seen[-1][0] == seen[-1][1] >= 2 * (len(rows) + 4)
    assert cost.of({"one.back": 24}).value > 0, "between what was measured"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not (tmp_path / "t.network.json.rows").exists()
    again = measured(model, path=tmp_path / "t.json", on_progress=lambda *_: pytest.fail("nothing is left to measure"))
    assert again.of({}).value == pytest.approx(cost.of({}).value, rel=1e-4), "files have six digits"
    assert measured(model, path=tmp_path / "t.json", networks=5).timings[0] == kept.timings[0]


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("where", [0.3, 0.9])
def test_stopped_in_the_middle_it_goes_on_from_there(tmp_path, where):
    class StopError(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done >= where * total:
            raise StopError

    with pytest.raises(StopError):
        measured(network(), path=tmp_path / "t.json", on_progress=stop)
    seen: list[int] = []
    cost = measured(network(), path=tmp_path / "t.json", on_progress=lambda done, total: seen.append(total - done))
    rounds = next(iter(sampling.SCHEDULES.values())).rounds
    visits = rounds * (len(width_rows(cost.layers, cost.hidden, 8)) + 4)
    assert len(seen) < (1.2 - where) * visits


@pytest.mark.usefixtures("hurried")
def test_times_of_another_network_are_not_taken_for_its_own(tmp_path):
    first = measured(chain(3, 16, 24, 5), path=tmp_path / "t.json")
    other = measured(chain(3, 16, 32, 5), path=tmp_path / "t.json")
    assert other.timings[0].widths == {"2": 16, "4": 32}
    assert WidthTimings.load(tmp_path / "t.network.json").timings == other.timings != first.timings
    with pytest.raises(SpecError, match="is a table for cpu.*, not for"):
        measured(chain(3, 16, 32, 5), haloc.Target.parse("cpu:b2"), path=tmp_path / "t.json")


@pytest.mark.usefixtures("hurried")
def test_a_chip_that_is_modelled_has_no_clock(tmp_path):
    cost = measured(chain(3, 16, 24, 5), haloc.Target.parse("eyeriss"), path=tmp_path / "t.json")
    assert cost.timings == ()
    assert not (tmp_path / "t.network.json").exists()
    shapes = [with_extents(touched_shapes(cost.layers, cost.hidden)[name], *pair)
              for name, pair in {"0": (3, 8), "2": (8, 16), "4": (16, 5)}.items()]  # fmt: skip
    table = haloc.measure([(shape, Dense()) for shape in shapes], haloc.Target.parse("eyeriss"))
    expected = sum(table.price(shape, Dense()).value for shape in shapes)
    assert cost.of({"2": 8, "4": 16}).value == pytest.approx(expected, rel=0.1)


def test_a_target_that_is_not_here_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(SpecError, match="needs a CUDA device"):
        measured(chain(3, 16, 5), haloc.Target.parse("cuda:fp16:b128"))


@pytest.mark.parametrize(
    "broken",
    [
        [],
        {"format": 7},
        {"environment": None},
        {"network": 3},
        {"timings": [3]},
        {"timings": [{"widths": {"a": 0}, "latency_ms": 1.0}]},
        {"timings": [{"widths": {"a": 4}, "latency_ms": -1.0}]},
        {"timings": [{"widths": {"a": 4}, "latency_ms": 0.0}]},
        {"timings": [{"widths": {"a": 4}, "other": 1}]},
    ],
)
def test_files_of_timings(tmp_path, broken):
    timings = WidthTimings(CPU, "abc", (WidthTiming({"a": 4}, 1.5, 0.1, 9, True),), {"device": "this"})
    timings.save(tmp_path / "t.json")
    assert WidthTimings.load(tmp_path / "t.json") == timings
    value = read_json(tmp_path / "t.json")
    with pytest.raises(FileFormatError):
        WidthTimings.from_dict(value | broken if isinstance(broken, dict) else broken)


# --- the network ----------------------------------------------------------------------------------------------------


def test_a_network_is_narrowed_to_a_latency():
    model = network()
    cost = cost_of(model, Stairs(8))
    small = narrow(model, EXAMPLE, inputs(), budget={"latency": "70%", "params": "90%"}, cost=cost)
    found = cost.of(kept_widths(narrowed_of(small))).value
    assert 0.5 * cost.of({}).value < found <= 0.7 * cost.of({}).value
    assert haloc.inspect(small, EXAMPLE).params <= 0.9 * cost.layers.params
    amount = f"{0.7 * cost.of({}).value} ms"
    same = narrow(model, EXAMPLE, inputs(), budget={"latency": amount, "params": "90%"}, cost=cost)
    assert narrowed_of(same) == narrowed_of(small)


def test_mistakes_are_told():
    model, pictures = network(), inputs()
    cost = cost_of(model)
    with pytest.raises(SpecError, match=r"a budget of latency needs cost=measure_widths"):
        narrow(model, EXAMPLE, pictures, budget={"latency": "50%"})
    with pytest.raises(SpecError, match="a cost of latency and no budget for it, only for macs"):
        narrow(model, EXAMPLE, pictures, budget={"macs": "50%"}, cost=cost)
    with pytest.raises(SpecError, match="of another network"):
        narrow(model, EXAMPLE, pictures, budget={"latency": "50%"}, cost=cost_of(chain(3, 16, 5)))
    with pytest.raises(SpecError, match="'4 s' cannot be, latency is in ms"):
        narrow(model, EXAMPLE, pictures, budget={"latency": "4 s"}, cost=cost)
    with pytest.raises(BudgetError, match=r"of the latency \(.* ms\)"):
        narrow(model, EXAMPLE, pictures, budget={"latency": "1%"}, cost=cost)
    bare = haloc.Table(CPU, (), {})
    with pytest.raises(CostError, match="no row for dense"):
        narrow(model, EXAMPLE, pictures, budget={"latency": "50%"}, cost=cost_of(model, bare))


def test_shapes_with_other_channels():
    depthwise = ConvShape(8, 8, (3, 3), (6, 6), (1, 1), (1, 1), (1, 1), groups=8)
    assert with_extents(depthwise, 4, 4) == ConvShape(4, 4, (3, 3), (6, 6), (1, 1), (1, 1), (1, 1), groups=4)
    assert with_extents(LinearShape(8, 6), 4, 6) == LinearShape(4, 6)
