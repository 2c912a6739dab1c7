from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import haloc
from haloc.cost.count import Count
from haloc.cost.model import Estimate, layers_cost
from haloc.cost.network import (
    NetworkCost,
    NetworkTimings,
    Timing,
    fitted_times,
    left_out_error,
    sample_plans,
    time_models,
    time_networks,
)
from haloc.cost.target import Target
from haloc.errors import CostError, FileFormatError, SpecError
from haloc.forms import Dense, Tucker2
from haloc.plan import Plan


@pytest.fixture(scope="module")
def layers():
    return haloc.inspect(haloc.create("resnet20"), torch.randn(1, 3, 32, 32))


@pytest.fixture(scope="module")
def space(layers):
    return haloc.rank_space(layers)


class Rows:
    """A millisecond per million MACs, known to one percent."""

    quantity, unit = "latency", "ms"

    def price(self, shape, form):
        value = Count("macs").price(shape, form).value / 1e6
        return Estimate(value, value / 100)


def timings_of(layers, plans, rest, slope, wobble=0.0):
    times = [rest + slope * layers_cost(layers, plan, Rows()).value for plan in plans]
    return tuple(
        Timing(plan, time * (1 + wobble * (-1) ** number))
        for number, (plan, time) in enumerate(zip(plans, times, strict=True))
    )


@pytest.mark.parametrize(("rest", "slope"), [(0.0, 1.0), (5.0, 1.0), (5.0, 1.1), (2.0, 0.85)])
def test_the_rest_and_the_slope_are_learnt(layers, space, rest, slope):
    plans = list(sample_plans(space, 18).values())
    known, held_out = timings_of(layers, plans[:9], rest, slope), timings_of(layers, plans[9:], rest, slope)
    cost = NetworkCost(layers, Rows(), known)
    for timing in held_out:
        predicted = cost.of(timing.plan)
        assert predicted.value == pytest.approx(timing.latency_ms, rel=0.02)
        assert abs(predicted.value - timing.latency_ms) <= predicted.error


def test_one_timing_gives_rows_plus_a_constant(layers, space):
    plans = list(sample_plans(space, 4).values())
    cost = NetworkCost(layers, Rows(), timings_of(layers, plans[:1], 3.0, 1.0))
    for plan in plans:
        assert cost.of(plan).value == pytest.approx(3.0 + layers_cost(layers, plan, Rows()).value, rel=0.01)


def test_the_error_bar_grows_with_the_noise(layers, space):
    plans = list(sample_plans(space, 9).values())
    bars = [NetworkCost(layers, Rows(), timings_of(layers, plans, 3.0, 1.0, wobble)).error for wobble in (0, 0.03, 0.1)]
    assert bars == sorted(bars)
    assert bars[0] == pytest.approx(0.02)
    assert 0.06 < bars[1] < 0.12


def test_the_numbers_stay_as_they_are(layers, space):
    """Written down before the least squares became a function of their own."""
    plans = list(sample_plans(space, 9).values())
    cost = NetworkCost(layers, Rows(), timings_of(layers, plans, 3.0, 1.1, 0.03))
    assert cost.error == pytest.approx(0.06862439948907365, rel=1e-9)
    assert cost.of(plans[3]).value == pytest.approx(42.179224378812826, rel=1e-9)
    assert cost.of(plans[3]).error == pytest.approx(2.895828782432556, rel=1e-9)


def test_what_is_fitted_is_relative_and_held_close_to_the_rows():
    features = np.array([[1.0, 10.0, 20.0], [1.0, 8.0, 30.0], [1.0, 4.0, 40.0]])
    times = np.array([13.0, 11.5, 7.0])
    kernels = float(np.mean(features[:, 2] / times))
    pulls = np.array([0.0, 0.02 / 0.15, 0.02 / 0.05 * kernels])
    weighted = features / times[:, None]
    normal = weighted.T @ weighted + np.diag(pulls**2)
    expected = np.linalg.solve(normal, weighted.sum(axis=0) + pulls**2 * np.array([0.0, 1.0, 0.0]))
    assert fitted_times(features, times) == pytest.approx(expected, rel=1e-9)


def test_the_error_bar_is_that_of_networks_left_out():
    rows = np.array([10.0, 8.0, 6.0, 4.0])
    features = np.stack([np.ones(4), rows, np.full(4, 20.0)], axis=1)
    assert left_out_error(features, rows + 2) == 0.02
    assert left_out_error(features[:3], rows[:3] + 2) == 0.15
    times = np.array([12.0, 11.0, 8.0, 6.0])
    apart = [
        features[n] @ fitted_times(np.delete(features, n, 0), np.delete(times, n)) / times[n] - 1
        for n in range(len(times))
    ]
    assert left_out_error(features, times) == pytest.approx(2 * np.mean(np.square(apart)) ** 0.5)


def test_a_network_cost_needs_a_timing(layers):
    with pytest.raises(CostError, match="at least one whole network"):
        NetworkCost(layers, Rows(), ())


def test_sampled_plans_reach_from_dense_to_small(layers, space):
    plans = sample_plans(space, 9)
    shares = [layers.macs_of(plan) / layers.macs for plan in plans.values()]
    assert plans == sample_plans(space, 9)
    assert shares[0] == 1.0
    assert min(shares) < 0.45
    assert max(shares[1:]) > 0.65


def test_timings_come_back_from_their_file(tmp_path):
    timings = NetworkTimings(Target(), (Timing(Plan({"a": Tucker2(2, 3)}), 1.5, 0.1, 7, True),), {"device": "chip"})
    timings.save(tmp_path / "network.json")
    assert NetworkTimings.load(tmp_path / "network.json") == timings


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "haloc-table"}, "not timings of networks"),
        ({"format": 9}, "timings format 9 is not known"),
        ({"timings": [{"latency_ms": 1.0}]}, "incomplete or malformed"),
        ({"timings": [{"plan": {}, "latency_ms": 1.0}]}, "incomplete or malformed"),
        ({"timings": [7]}, "incomplete or malformed"),
        ({"timings": [{"plan": Plan({}).to_dict(), "latency_ms": 0}]}, "latency_ms must be above 0"),
        ({"environment": None}, "incomplete or malformed"),
    ],
)
def test_other_files_are_refused(tmp_path, change, said):
    value = NetworkTimings(Target(), (), {}).to_dict() | change
    (tmp_path / "network.json").write_text(json.dumps(value))
    with pytest.raises(FileFormatError, match=said):
        NetworkTimings.load(tmp_path / "network.json")


def test_networks_are_timed_and_kept(tmp_path, hurried):
    model, x = haloc.create("resnet20"), torch.randn(1, 3, 32, 32)
    plans = {"dense": Plan({}), "low": Plan({"layer1.0.conv1": Tucker2(4, 4), "conv1": Dense()})}
    path = tmp_path / "network.json"
    first = time_networks(model, x, plans, Target(batch_size=2), path=path)
    assert [timing.plan for timing in first.timings] == list(plans.values())
    assert all(timing.latency_ms > 0 for timing in first.timings)
    again = time_networks(model, x, plans, Target(batch_size=2), path=path)
    assert again.timings == first.timings
    assert [file.name for file in tmp_path.iterdir()] == ["network.json"]
    with pytest.raises(SpecError, match="holds timings for cpu:eager:fp32:b2, not for cpu:eager:fp32:b1"):
        time_networks(model, x, plans, Target(), path=path)


def test_models_are_timed_against_each_other(hurried):
    large, small = torch.nn.Linear(2000, 2000), torch.nn.Linear(2000, 20)
    times = time_models({"large": large, "small": small}, torch.randn(64, 2000), Target(batch_size=64))
    assert times["large"].value > times["small"].value > 0


def test_a_network_that_does_not_run_is_said(hurried):
    with pytest.raises(CostError, match="the network does not run on cpu:eager:bf16:b1"):
        time_models({"odd": Float32Only()}, torch.randn(1, 3), Target(dtype="bfloat16"))


class Float32Only(torch.nn.Module):
    def forward(self, x):
        return x @ torch.eye(3)
