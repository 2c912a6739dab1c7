"""The whole network: what a plan's rows add up to, plus the rest, corrected by a few timings of whole networks.

The rows leave out what lies between the layers (pooling, additions, activations) and what a runtime does across them
(fusing, keeping layouts, hiding launches). Both show when a handful of plans is timed as whole networks: one small
linear model, held close to "rows plus a constant", learns them, and says by leaving each timing out in turn how far off
it is.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from math import hypot
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from haloc.cost.machine import environment, identity
from haloc.cost.measure import Progress, check_available, same_machine, visit_counter
from haloc.cost.model import CostModel, Estimate, layers_cost
from haloc.cost.runtimes import torch_settings
from haloc.cost.sampling import Journal, measure_rows, schedule_of
from haloc.cost.table import target_in
from haloc.cost.target import Target
from haloc.errors import CostError, FileFormatError, SpecError, shown
from haloc.files import naming, read_json, write_json
from haloc.forms import Dense, Form, stages
from haloc.inventory import Inventory
from haloc.locks import file_at_work
from haloc.plan import Plan
from haloc.space import RankSpace, random_plan

if TYPE_CHECKING:
    from torch import nn

KIND = "haloc-network"
FORMAT = 1

#: Plans that are timed as whole networks unless told otherwise, the dense one among them.
PLANS = 9
#: How noisy a timing is expected to be, and how far the correction is expected to stray: the rows' slope from 1, and
#: the cost of all stages from none, both as parts of the network's time. They weigh the data against "rows plus rest".
NOISE, SLOPE_PRIOR, STAGE_PRIOR = 0.02, 0.15, 0.05
#: The error bar where fewer networks were timed than it takes to tell.
UNKNOWN_ERROR, LEAST_TIMED = 0.15, 4
#: No error bar is narrower than this part of the value: timings of one network differ by as much from day to day.
LEAST_ERROR = 0.02


@dataclass(frozen=True)
class Timing:
    """The measured time of one whole network."""

    plan: Plan
    latency_ms: float
    iqr_ms: float = 0.0
    count: int = 1
    noisy: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.latency_ms, bool) or not self.latency_ms > 0:
            raise SpecError(f"a timing's latency_ms must be above 0, got {self.latency_ms!r}")


@dataclass(frozen=True)
class NetworkTimings:
    """Whole networks timed on one target; goes to and from a JSON file.

    Attributes:
        target: Where they ran.
        timings: One per plan.
        environment: Device name, driver, library versions and clocks.
    """

    target: Target
    timings: tuple[Timing, ...]
    environment: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Writes the timings as plain JSON values."""
        timings = [asdict(timing) | {"plan": timing.plan.to_dict()} for timing in self.timings]
        header = {"kind": KIND, "format": FORMAT, "target": self.target.to_dict()}
        return header | {"environment": dict(self.environment), "timings": timings}

    @classmethod
    def from_dict(cls, value: Any) -> NetworkTimings:
        """Reads what `to_dict` wrote; anything else is refused with the reason."""
        if not isinstance(value, dict) or value.get("kind") != KIND or not isinstance(value.get("timings"), list):
            raise FileFormatError(f'not timings of networks: expected a JSON object with "kind": "{KIND}"')
        if value.get("format") != FORMAT:
            found = shown(value.get("format"))
            raise FileFormatError(f"timings format {found} is not known; this version reads {FORMAT}")
        try:
            if not isinstance(value.get("environment"), dict):
                raise FileFormatError('timings of networks need an "environment" (an object)')
            return cls(target_in(value), tuple(map(_timing, value["timings"])), value["environment"])
        except (FileFormatError, SpecError) as error:
            raise FileFormatError(f"a timing is incomplete or malformed: {error}") from error

    def save(self, path: str | Path) -> None:
        """Writes the timings as a JSON file, whole or not at all."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> NetworkTimings:
        """Reads a file of timings."""
        with naming(path):
            return cls.from_dict(read_json(path))


#: In milliseconds: nobody waits so long, and sums and squares of it are still numbers.
_LARGEST = 1e30


def _timing(value: Any) -> Timing:
    """Reads one timing; what is no measurement is refused."""
    if not isinstance(value, dict) or not set(value) <= {field.name for field in fields(Timing)}:
        raise FileFormatError(f"expected a timing, got {shown(value)}")
    return Timing(Plan.from_dict(value.get("plan")), **clocked(value))


def clocked(value: Mapping[str, Any]) -> dict[str, Any]:
    """What a clock said of one network, from plain values."""
    times = {name: value.get(name, 0.0) for name in ("latency_ms", "iqr_ms")}
    for name, found in times.items():
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found <= _LARGEST:
            raise FileFormatError(f"{name} must be a number not below 0, got {shown(found)}")
    count, noisy = value.get("count", 1), value.get("noisy", False)
    if type(count) is not int or not 0 < count <= 2**31 or not isinstance(noisy, bool):
        raise FileFormatError("count is a whole number above 0, and noisy true or false")
    return {**times, "count": count, "noisy": noisy}


@dataclass(frozen=True)
class NetworkCost:
    """The latency of a network under any plan, with an error bar.

    Attributes:
        layers: The network.
        rows: Prices of its layers: a table, or a predictor fitted on one.
        timings: Whole networks that were timed.
    """

    layers: Inventory
    rows: CostModel
    timings: tuple[Timing, ...]

    def __post_init__(self) -> None:
        if not self.timings:
            raise CostError("a network's cost needs the timing of at least one whole network")

    @property
    def unit(self) -> str:
        """The unit of its values."""
        return self.rows.unit

    def of(self, plan: Mapping[str, Form]) -> Estimate:
        """What the network takes under ``plan``; the error is the range that about 95% of plans fall into."""
        value = float(self._features(plan) @ self._coefficients)
        rows = layers_cost(self.layers, plan, self.rows)
        return Estimate(value, hypot(self.error * value, rows.error))

    @cached_property
    def error(self) -> float:
        """The relative error bar: twice the root mean square of the errors at timings that were left out."""
        return left_out_error(*self._known)

    @cached_property
    def _coefficients(self) -> np.ndarray:
        return fitted_times(*self._known)

    @cached_property
    def _known(self) -> tuple[np.ndarray, np.ndarray]:
        features = np.array([self._features(timing.plan) for timing in self.timings])
        return features, np.array([timing.latency_ms for timing in self.timings])

    def _features(self, plan: Mapping[str, Form]) -> np.ndarray:
        """One for the rest, the sum of the rows, and how many layers run one after the other."""
        rows = layers_cost(self.layers, plan, self.rows).value
        return np.array([1.0, rows, _kernels(self.layers, plan)])


def fitted_times(features: np.ndarray, times: np.ndarray) -> np.ndarray:
    """What the times of whole networks are made of: least squares in relative errors, held close to "rows plus a rest".

    Args:
        features: One line per network: one, for the rest; what its rows add up to, whose slope is held close to one;
            and any others, which are held close to costing nothing.
        times: What each of them took.

    Returns:
        One factor per column.
    """
    weighted = features / times[:, None]
    others = weighted[:, 2:].mean(axis=0)
    prior = np.diag([0.0, NOISE / SLOPE_PRIOR, *(NOISE / STAGE_PRIOR * others)])
    wanted = np.array([0.0, NOISE / SLOPE_PRIOR, *np.zeros(len(others))])
    left, right = np.vstack([weighted, prior]), np.concatenate([np.ones(len(times)), wanted])
    return np.asarray(np.linalg.lstsq(left, right, rcond=None)[0])


def left_out_error(features: np.ndarray, times: np.ndarray) -> float:
    """How far off `fitted_times` is, relatively: twice the root mean square over networks left out of it in turn."""
    if len(times) < LEAST_TIMED:
        return UNKNOWN_ERROR
    squares = []
    for number in range(len(times)):
        others = np.arange(len(times)) != number
        predicted = features[number] @ fitted_times(features[others], times[others])
        squares.append((predicted / times[number] - 1) ** 2)
    return float(max(LEAST_ERROR, 2 * np.mean(squares) ** 0.5))


def _kernels(layers: Inventory, plan: Mapping[str, Form]) -> int:
    return sum(len(stages(call, plan.get(layer.name, Dense()))) for layer in layers for call in layer.calls)


def sample_plans(space: RankSpace, count: int = PLANS, seed: int = 0) -> dict[str, Plan]:
    """The dense network and random plans of the space, from large to small, by name."""
    drawn = {f"random-{number}": random_plan(space, seed + number) for number in range(count - 1)}
    return {"dense": Plan({})} | drawn


def time_networks(
    model: nn.Module,
    example_inputs: Any,
    plans: Mapping[str, Plan],
    target: Target,
    *,
    path: str | Path | None = None,
    on_progress: Progress | None = None,
) -> NetworkTimings:
    """Times whole networks, as deployed, under several plans; weights are random, since times do not depend on them.

    Args:
        model: The dense network.
        example_inputs: What `inspect` takes; repeated or cut to the target's batch size.
        plans: Plans by name.
        target: Where they run.
        path: A file of timings; what it holds already is not timed again, and a killed run goes on where it was.
        on_progress: Called with the visits done and to be done.
    """
    check_available(target)
    with nullcontext() if path is None else file_at_work(Path(path)):
        return _all_timed(model, example_inputs, plans, target, path, on_progress)


def _all_timed(
    model: nn.Module,
    example_inputs: Any,
    plans: Mapping[str, Plan],
    target: Target,
    path: str | Path | None,
    on_progress: Progress | None,
) -> NetworkTimings:
    from haloc.cost.deploy import fold_batchnorm, sketch

    machine = environment(target.to_dict())
    known = _known(path, target, machine)
    # By what they are: another space has other plans under the same names, and a killed run leaves times of these.
    missing = {_label(plan): plan for plan in plans.values() if plan not in [timing.plan for timing in known]}
    folded = fold_batchnorm(model, example_inputs) if missing else model
    results = take_turns(
        list(missing), lambda key: sketch(folded, missing[key]), example_inputs, target, machine, path, on_progress
    )
    timings = tuple(Timing(plan, **results[key]) for key, plan in missing.items())
    found = NetworkTimings(target, (*known, *timings), machine)
    if path:
        found.save(path)
        Path(f"{path}.rows").unlink(missing_ok=True)
    return NetworkTimings(target, tuple(_of_plan(found.timings, plan) for plan in plans.values()), machine)


def _label(plan: Plan) -> str:
    return hashlib.sha256(json.dumps(plan.to_dict(), sort_keys=True).encode()).hexdigest()[:16]


def time_models(models: Mapping[str, nn.Module], example_inputs: Any, target: Target) -> dict[str, Estimate]:
    """Times networks against each other, as deployed, taking turns; returns milliseconds and half the spread."""
    from haloc.cost.deploy import fold_batchnorm

    check_available(target)
    folded = {name: fold_batchnorm(model, example_inputs) for name, model in models.items()}
    machine = environment(target.to_dict())
    results = take_turns(list(models), folded.__getitem__, example_inputs, target, machine, None, None)
    return {name: Estimate(result["latency_ms"], result["iqr_ms"] / 2) for name, result in results.items()}


def take_turns(
    names: list[str],
    build: Callable[[str], nn.Module],
    example_inputs: Any,
    target: Target,
    machine: dict[str, Any],
    path: str | Path | None,
    on_progress: Progress | None,
) -> dict[str, dict[str, Any]]:
    """Times networks as deployed, taking turns.

    Args:
        names: What they are called.
        build: Makes the network of a name, BatchNorm folded.
        example_inputs: What it takes.
        target: Where it runs.
        machine: What `environment` says of it.
        path: Samples are kept beside this file as they come, to go on from.
        on_progress: Called with the visits done and to be done.

    Returns:
        For each name latency_ms, iqr_ms, count and noisy.
    """
    from haloc.cost.deploy import Networks

    rows = [{"key": name, "group": "network"} for name in names]
    schedule = schedule_of(target.to_dict(), networks=True)
    with tempfile.TemporaryDirectory() as scratch, torch_settings(target.to_dict()):
        journal = Journal(f"{path}.rows" if path else f"{scratch}/rows", identity(target.to_dict(), machine))
        counter = visit_counter(len(rows), schedule.rounds, journal, on_progress)
        networks = Networks(build, example_inputs, target, Path(scratch))
        results, failures = measure_rows(
            rows,
            target.to_dict(),
            journal,
            lambda row, _: networks.open(row["key"]),
            on_visit=counter,
            schedule=schedule,
        )
    if failures:
        raise CostError(f"the network does not run on {target}: {next(iter(failures.values()))}")
    return results


def _known(path: str | Path | None, target: Target, machine: dict[str, Any]) -> tuple[Timing, ...]:
    if path is None or not Path(path).exists():
        return ()
    found = NetworkTimings.load(path)
    if found.target != target:
        raise SpecError(f"{path} holds timings for {found.target}, not for {target}; choose another file")
    same_machine(path, found.environment, machine)
    return found.timings


def _of_plan(timings: Sequence[Timing], plan: Plan) -> Timing:
    return next(timing for timing in timings if timing.plan == plan)
