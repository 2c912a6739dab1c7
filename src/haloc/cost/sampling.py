"""How a time comes about that can be trusted.

Rows take turns, several rounds of them, the competing forms of one layer one after the other. In each visit a row is
set up, warmed and timed many times. Whatever else a machine does (for minutes on end, where several tenants share one)
can only make a visit slower, so a row's figure is the median of its calmest visits. As long as these disagree the row
is visited again and, if they still do in the end, marked.

Part of the measuring kit (see `kit`): plain Python 3.8, rows and targets are dicts.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import time
from contextlib import contextmanager
from statistics import median
from typing import Any, Callable, Iterator, NamedTuple

from haloc.cost.runtimes import SESSIONS, TargetDict, open_row


class Schedule(NamedTuple):
    """How often rows are visited, and how long a visit takes.

    Attributes:
        rounds: Visits of every row.
        most_rounds: Visits of a row whose calmest visits disagree.
        warm_seconds: For how long a visit warms a row.
        seconds: For how long it times it.
        least_runs: How many runs it times at least.
    """

    rounds: int
    most_rounds: int
    warm_seconds: float
    seconds: float
    least_runs: int = 5


#: A GPU is ours alone. A CPU is shared with others: more and shorter visits there, so that some of them meet it calm;
#: most of all for torch, whose threads sleep between two operators and wake late on a machine that is busy. What is
#: said of whole networks rests on few of them, while errors of rows cancel: on two busy cores the ratio of two networks
#: scattered by 1 to 4% with 6 visits of each, and by 0.4 to 2% with 20.
SCHEDULES = {
    "gpu": Schedule(3, 8, 0.05, 0.12),
    "session": Schedule(6, 18, 0.03, 0.08),
    "torch": Schedule(10, 24, 0.03, 0.08, least_runs=3),
    "network": Schedule(20, 40, 0.03, 0.1, least_runs=3),
}
#: No visit takes more runs than this.
MOST_RUNS = 200
#: No run takes longer; what says so is no sample.
_LONGEST_MS = 1e12
#: Visits agree if their medians differ by at most this part.
AGREEMENT = 0.04

Clock = Callable[[], float]


def schedule_of(target: TargetDict, *, networks: bool = False) -> Schedule:
    """How rows are visited on a target, or whole networks."""
    if target["device"] == "cuda":
        return SCHEDULES["gpu"]
    if networks:
        return SCHEDULES["network"]
    return SCHEDULES["session" if target["runtime"] in SESSIONS else "torch"]


def visit(runner: Any, schedule: Schedule, clock: Clock = time.perf_counter) -> list[float]:
    """Warms a runner and times it; returns milliseconds per execution."""
    _run_for(runner, clock, schedule.warm_seconds, 1)
    runs = _run_for(runner, clock, schedule.seconds, schedule.least_runs)
    return [seconds * 1e3 / runner.executions for seconds in runs]


def _run_for(runner: Any, clock: Clock, seconds: float, least: int) -> list[float]:
    """Runs until both the time and the number are reached; returns the seconds of every run."""
    samples: list[float] = []
    collecting, start = gc.isenabled(), clock()
    gc.disable()
    try:
        while len(samples) < least or (clock() - start < seconds and len(samples) < MOST_RUNS):
            before = clock()
            runner.run()
            samples.append(clock() - before)
    finally:
        if collecting:
            gc.enable()
    return samples


def quartiles(samples: list[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile, by linear interpolation."""
    ordered = sorted(samples)

    def at(part: float) -> float:
        place = part * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    return at(0.25), at(0.5), at(0.75)


def calmest(visits: list[list[float]]) -> list[list[float]]:
    """The quarter of the visits that met the least of what else goes on, two at least if there are two."""
    return sorted(visits, key=median)[: max(2, len(visits) // 4)]


def agree(visits: list[list[float]]) -> bool:
    """Whether the calmest visits tell the same story."""
    medians = [median(samples) for samples in calmest(visits)]
    return max(medians) <= (1 + AGREEMENT) * min(medians)


def summary(visits: list[list[float]]) -> dict[str, Any]:
    """What a row's visits say: its time, the range of the runs, and whether to trust it."""
    samples = [sample for visit in calmest(visits) for sample in visit]
    low, latency, high = quartiles(samples)
    return {"latency_ms": latency, "iqr_ms": high - low, "count": len(samples), "noisy": not agree(visits)}


@contextmanager
def _quick_collections() -> Iterator[None]:
    """Garbage is looked for among new objects alone: among all of torch's it takes as long as the visit of a row."""
    ours = gc.get_freeze_count() == 0  # else somebody else has put his objects away, and would find them back
    if ours:
        gc.collect()
        gc.freeze()
    try:
        yield
    finally:
        if ours:
            gc.unfreeze()


def measure_rows(
    rows: list[dict[str, Any]],
    target: TargetDict,
    journal: Journal,
    opener: Callable[[dict[str, Any], TargetDict], Any] = open_row,
    clock: Clock = time.perf_counter,
    on_visit: Callable[[int], None] = lambda more: None,
    schedule: Schedule | None = None,
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Visits every row often enough; what the journal already holds is not timed again.

    Args:
        rows: Dicts with a ``key`` of their own, a ``group`` (the layer they are forms of) and what ``opener`` needs.
        target: Where they run.
        journal: Where the samples are kept as they come in.
        opener: Sets one row up.
        clock: Tells the time in seconds.
        on_visit: Called after every visit, for a progress bar, with how many more of the rows that disagree with
            themselves are to be visited again in this round; 0 in the rounds that all rows have.
        schedule: How often and how long; that of the target's rows, if not told.

    Returns:
        The summary of every row that could be run, by key; and for the others why not.
    """
    visits, failures, schedule = journal.read(), {}, schedule or schedule_of(target)
    with _quick_collections():
        for competing in _in_turns(rows, target):
            runners = Runners(target, opener)
            for number in range(schedule.most_rounds):
                due = [row for row in competing if row["key"] not in failures and _due(visits, row, number, schedule)]
                for place, row in enumerate(due, start=1):
                    try:
                        samples = runners.visit(row, schedule, clock)
                    except Exception as error:  # one row that cannot run here must not lose the others
                        failures[row["key"]] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                        continue
                    visits.setdefault(row["key"], []).append(samples)
                    journal.append(row["key"], samples)
                    on_visit(len(due) - place if number >= schedule.rounds else 0)
            runners.close()
    wanted = {row["key"] for row in rows} - set(failures)
    return {key: summary(found) for key, found in visits.items() if key in wanted}, failures


def _due(visits: dict[str, list[list[float]]], row: dict[str, Any], number: int, schedule: Schedule) -> bool:
    """Whether a row is to be visited in a round: it has not been, and its visits so far are too few or disagree."""
    done = visits.get(row["key"], [])
    return len(done) <= number and (number < schedule.rounds or not agree(done))


def _in_turns(rows: list[dict[str, Any]], target: TargetDict) -> list[list[dict[str, Any]]]:
    """Rows that take turns: all of them, so that their visits lie far apart; of those that are kept, one layer's."""
    if not _kept(target):
        return [rows]
    return [list(group) for _, group in itertools.groupby(rows, key=lambda row: row["group"])]


def _kept(target: TargetDict) -> bool:
    """Whether rows stay set up between their visits.

    On a CPU one is alive at a time: threads of several sessions fight each other, and a crowded heap slows all of them
    down. What was compiled or captured is kept, since that takes long and has neither problem.
    """
    return target["runtime"] == "compile" or (target["device"] == "cuda" and target["runtime"] not in SESSIONS)


class Runners:
    """The rows that take turns, set up and kept where the target allows it."""

    def __init__(self, target: TargetDict, opener: Callable[[dict[str, Any], TargetDict], Any]) -> None:
        self._target, self._opener = target, opener
        self._alive: dict[str, Any] = {}
        self._keep = _kept(target)

    def visit(self, row: dict[str, Any], schedule: Schedule, clock: Clock) -> list[float]:
        """Sets the row up if it is not, and times it."""
        runner = self._alive.pop(row["key"], None) or self._opener(row, self._target)
        samples = visit(runner, schedule, clock)
        if self._keep:
            self._alive[row["key"]] = runner
        else:
            runner.close()
        return samples

    def close(self) -> None:
        """Lets go of all of them."""
        while self._alive:
            self._alive.popitem()[1].close()


class Journal:
    """Samples as they come in, a line each, so that a killed run loses only the visit in flight.

    Args:
        path: The file; it need not be there yet.
        identity: What must be equal for samples to belong together: target, device, versions.
    """

    def __init__(self, path: str, identity: str) -> None:
        self._path, self._identity = path, identity

    def read(self) -> dict[str, list[list[float]]]:
        """All visits so far, by row."""
        visits: dict[str, list[list[float]]] = {}
        if not os.path.isfile(self._path):
            return visits
        with open(self._path, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    entry = json.loads(line)
                    known = entry["of"] == self._identity and isinstance(entry["key"], str)
                    if known and entry["ms"] and all(0 < float(ms) < _LONGEST_MS for ms in entry["ms"]):
                        visits.setdefault(entry["key"], []).append([float(ms) for ms in entry["ms"]])
                except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                    continue  # the line that was being written when the run was killed, or none of ours
        return visits

    def append(self, key: str, samples: list[float]) -> None:
        """Adds one visit; it is on disk when this returns."""
        entry = {"of": self._identity, "key": key, "ms": [float(f"{sample:.5g}") for sample in samples]}
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write("\n" + json.dumps(entry))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:  # a full disk does not say which file it has no room for
            raise OSError(error.errno, error.strerror, self._path) from error

    def visits(self, rounds: int) -> int:
        """How many of the rounds that all rows have it holds, over all rows."""
        return sum(min(rounds, len(visits)) for visits in self.read().values())

    def forget(self, keys: set[str]) -> None:
        """Takes out rows that a table has by now; those of a run that was killed, and wanted others, stay."""
        left = {key: visits for key, visits in self.read().items() if key not in keys}
        if os.path.exists(self._path) and not left:
            os.remove(self._path)
        elif left:
            lines = [json.dumps({"of": self._identity, "key": key, "ms": ms}) for key in left for ms in left[key]]
            with open(self._path + ".new", "w", encoding="utf-8") as file:
                file.write("\n" + "\n".join(lines))
            os.replace(self._path + ".new", self._path)
