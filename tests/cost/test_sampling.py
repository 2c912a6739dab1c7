from __future__ import annotations

import gc
import json

import pytest

from haloc.cost.sampling import (
    MOST_RUNS,
    SCHEDULES,
    Journal,
    agree,
    calmest,
    measure_rows,
    quartiles,
    schedule_of,
    summary,
    visit,
)
from tests.cost.conftest import FakeOpener, FakeRunner

CPU = SCHEDULES["session"]
GRAPH = {"device": "cuda", "runtime": "graph"}
EAGER = {"device": "cpu", "runtime": "eager"}
SESSION = {"device": "cpu", "runtime": "onnxruntime"}


def rows_of(*keys, group="layer"):
    return [{"key": key, "group": group} for key in keys]


@pytest.fixture
def journal(tmp_path):
    return Journal(str(tmp_path / "rows"), "this machine")


def test_a_visit_warms_first_and_times_long_enough(clock):
    runner = FakeRunner(clock, seconds=0.001, executions=4)
    samples = visit(runner, CPU, clock)
    assert samples == pytest.approx([0.25] * len(samples))
    assert len(samples) == pytest.approx(CPU.seconds / 0.001, abs=1)
    assert runner.runs - len(samples) == pytest.approx(CPU.warm_seconds / 0.001, abs=1)


def test_a_slow_runner_is_still_run_several_times(clock):
    assert len(visit(FakeRunner(clock, seconds=3.0), CPU, clock)) == CPU.least_runs


def test_a_fast_runner_is_not_run_for_ever(clock):
    assert len(visit(FakeRunner(clock, seconds=1e-9), CPU, clock)) == MOST_RUNS


def test_quartiles_by_hand():
    assert quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == (2.0, 3.0, 4.0)
    assert quartiles([1.0, 2.0]) == (1.25, 1.5, 1.75)
    assert quartiles([7.0]) == (7.0, 7.0, 7.0)


def test_the_calmest_visits_count():
    visits = [[9.0, 9.0], [1.0, 1.0], [7.0, 7.0], [1.02, 1.02], [8.0, 8.0]]
    assert calmest(visits) == [[1.0, 1.0], [1.02, 1.02]]
    assert agree(visits)
    assert summary(visits) == {
        "latency_ms": pytest.approx(1.01),
        "iqr_ms": pytest.approx(0.02),
        "count": 4,
        "noisy": False,
    }


@pytest.mark.parametrize(("visits", "kept"), [(1, 1), (2, 2), (3, 2), (6, 2), (12, 3), (18, 4)])
def test_a_quarter_of_the_visits_is_kept_but_two_at_least(visits, kept):
    assert len(calmest([[1.0]] * visits)) == kept


def test_visits_that_disagree_are_marked():
    assert not agree([[1.0], [1.2], [1.4]])
    assert summary([[1.0], [1.2], [1.4]])["noisy"]


def test_competing_rows_take_turns(clock, journal):
    opener = FakeOpener(clock, {"dense": [0.01], "low": [0.005]})
    results, failures = measure_rows(rows_of("dense", "low"), SESSION, journal, opener, clock)
    assert opener.opened == ["dense", "low"] * CPU.rounds
    assert results["dense"]["latency_ms"] == pytest.approx(10.0)
    assert results["low"]["latency_ms"] == pytest.approx(5.0)
    assert failures == {}


@pytest.mark.parametrize("target", [SESSION, EAGER])
def test_one_is_alive_at_a_time_on_a_cpu(clock, journal, target):
    opener = FakeOpener(clock, {"a": [0.01], "b": [0.01]})

    def checked(row, target):
        assert all(runner.closed for runner in opener.runners)
        return opener(row, target)

    measure_rows(rows_of("a", "b"), target, journal, checked, clock)
    assert all(runner.closed for runner in opener.runners)


def test_captured_graphs_are_kept_while_their_layer_is_measured(clock, journal):
    opener = FakeOpener(clock, {"a": [0.01], "b": [0.01], "c": [0.01]})
    rows = [*rows_of("a", "b"), *rows_of("c", group="another layer")]
    measure_rows(rows, GRAPH, journal, opener, clock)
    assert opener.opened == ["a", "b", "c"]
    assert all(runner.closed for runner in opener.runners)


def test_only_a_noisy_row_is_visited_again(clock, journal):
    opener = FakeOpener(clock, {"calm": [0.01], "restless": [0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.01]})
    results, _ = measure_rows(rows_of("calm", "restless"), SESSION, journal, opener, clock)
    assert opener.opened.count("calm") == CPU.rounds
    assert opener.opened.count("restless") == CPU.rounds + 1
    assert results["restless"] == results["restless"] | {"latency_ms": pytest.approx(10.0), "noisy": False}


def test_rows_that_are_visited_again_are_counted_too(clock, journal):
    told = []
    opener = FakeOpener(clock, {"calm": [0.001], "noisy": [0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.007]})
    measure_rows(rows_of("calm", "noisy"), SESSION, journal, opener, clock, told.append)
    again = told[2 * CPU.rounds :]
    assert told[: 2 * CPU.rounds] == [0] * 2 * CPU.rounds
    assert again == [0] * len(again), "one row is left in each of these rounds, and none after it"
    assert len(again) >= 1


def test_whole_networks_are_visited_more_often_on_a_cpu(clock, journal):
    schedule = schedule_of(SESSION, networks=True)
    opener = FakeOpener(clock, {"dense": [0.01], "plan": [0.005]})
    measure_rows(rows_of("dense", "plan"), SESSION, journal, opener, clock, schedule=schedule)
    assert opener.opened == ["dense", "plan"] * schedule.rounds
    assert schedule.rounds > CPU.rounds
    assert schedule_of(GRAPH, networks=True) == schedule_of(GRAPH)


def test_a_row_that_stays_noisy_is_marked(clock, journal):
    opener = FakeOpener(clock, {"wild": [0.01 * 1.1**number for number in range(20)]})
    results, _ = measure_rows(rows_of("wild"), SESSION, journal, opener, clock)
    assert opener.opened.count("wild") == CPU.most_rounds
    assert results["wild"]["noisy"]


def test_a_row_that_cannot_run_does_not_lose_the_others(clock, journal):
    opener = FakeOpener(clock, {"good": [0.01]})
    results, failures = measure_rows(rows_of("bad", "good"), SESSION, journal, opener, clock)
    assert set(results) == {"good"}
    assert failures == {"bad": "KeyError: 'bad'"}


@pytest.mark.parametrize("survived", [0, 1, 4, 11])
def test_a_killed_run_goes_on_where_it_was(clock, journal, survived):
    seconds = {"a": [0.01], "b": [0.02]}
    first = FakeOpener(clock, seconds)

    def killed(row, target):
        if len(first.opened) == survived:
            raise KeyboardInterrupt
        return first(row, target)

    with pytest.raises(KeyboardInterrupt):
        measure_rows(rows_of("a", "b"), SESSION, journal, killed, clock)
    second = FakeOpener(clock, seconds)
    results, _ = measure_rows(rows_of("a", "b"), SESSION, journal, second, clock)
    assert len(first.opened) + len(second.opened) == 2 * CPU.rounds
    assert results["b"]["latency_ms"] == pytest.approx(20.0)


def test_a_half_written_line_is_passed_over(tmp_path, journal):
    journal.append("a", [1.0, 2.0])
    with open(tmp_path / "rows", "a") as file:
        file.write('\n{"of": "this machine", "key": "a", "ms": [1.0, 2')
    journal.append("a", [3.0])
    assert journal.read() == {"a": [[1.0, 2.0], [3.0]]}


@pytest.mark.parametrize("ms", [[], [0.0], [-1.0], "fast", None, [None]])
def test_samples_that_cannot_be_are_passed_over(tmp_path, journal, ms):
    (tmp_path / "rows").write_text(json.dumps({"of": "this machine", "key": "a", "ms": ms}))
    assert journal.read() == {}


def test_samples_of_another_machine_do_not_count(tmp_path, journal):
    Journal(str(tmp_path / "rows"), "another machine").append("a", [1.0])
    assert journal.read() == {}


def test_the_journal_is_gone_when_the_table_has_it_all(tmp_path, journal):
    journal.append("a", [1.0])
    journal.forget({"a", "b"})
    journal.forget({"a", "b"})
    assert list(tmp_path.iterdir()) == []


def test_garbage_is_looked_for_among_new_objects_alone(clock, journal, tmp_path):
    """To go through all of torch's objects takes as long as a visit."""
    fake, frozen = FakeOpener(clock, {"dense": [0.01]}), []

    def opener(row, target):
        frozen.append(gc.get_freeze_count())
        return fake(row, target)

    gc.unfreeze()
    measure_rows(rows_of("dense"), SESSION, journal, opener, clock)
    assert min(frozen) > 1000
    assert gc.get_freeze_count() == 0
    gc.freeze()  # as a server does to put its own objects away
    measure_rows(rows_of("dense"), SESSION, Journal(str(tmp_path / "other"), "this machine"), opener, clock)
    assert gc.get_freeze_count() > 0
