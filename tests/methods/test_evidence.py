from __future__ import annotations

import copy
import json
from math import inf, log

import pytest

from haloc.cost.count import Count
from haloc.errors import BudgetError, FileFormatError
from haloc.forms import Dense, Spatial, Tucker2
from haloc.methods.budget import limits_of
from haloc.methods.evidence import Evidence
from haloc.methods.search import pareto, solve
from haloc.plan import Plan
from haloc.space import Grid, LayerChoices, RankSpace
from tests.test_shapes import conv

#: Two layers with three forms each, one of which has no dense on offer, and one with nothing to choose.
TUCKER = {"a": Grid.of("tucker2", [(2, 2), (4, 4)]), "b": Grid.of("tucker2", [(1, 1), (3, 2)])}
SPACE = RankSpace(
    {
        "a": LayerChoices((conv(),), (TUCKER["a"],)),
        "b": LayerChoices((conv(), conv()), (Grid.of("spatial", [(3,)]), TUCKER["b"]), dense=False),
        "c": LayerChoices((conv(),)),
    },
    {"macs": 1000, "params": 10},
)
LOSSES = {"a": (0.0, 3.0, 1.0), "b": (inf, 2.5, 0.5)}
SEEN = (
    (Plan({"a": Dense(), "b": Tucker2(3, 2)}), 0.1),
    (Plan({"a": Tucker2(4, 4), "b": Spatial(3)}), 0.2),
    (Plan({"a": Tucker2(2, 2), "b": Tucker2(1, 1)}), 0.9),
    (Plan({"a": Tucker2(2, 2), "b": Tucker2(3, 2)}), inf),
)
EVIDENCE = {
    "sum": Evidence("made up", SPACE, LOSSES, settings={"seed": 3}, history=[{"epoch": 1}], finished=False),
    "largest": Evidence("made up", SPACE, LOSSES, "largest"),
    "seen": Evidence("made up", SPACE, rule="seen", seen=SEEN),
}
BUDGETS = (*(f"{share}%" for share in range(20, 104, 4)), {"macs": "70%", "params": "60%"})
COSTS = (None, Count("params"), Count("bytes"))


def outcome(evidence: Evidence, budget, cost=None) -> Plan | dict[str, float]:
    """The plan, or what can be reached."""
    try:
        return solve(evidence, budget, cost).plan
    except BudgetError as error:
        return error.reachable


@pytest.mark.parametrize("rule", EVIDENCE)
def test_what_comes_back_from_the_file_gives_the_same_plans(rule, tmp_path):
    evidence = EVIDENCE[rule]
    evidence.save(tmp_path / "found.json")
    again = Evidence.load(tmp_path / "found.json")
    outcomes = {(str(budget), cost): outcome(again, budget, cost) for budget in BUDGETS for cost in COSTS}
    assert outcomes == {(str(budget), cost): outcome(evidence, budget, cost) for budget in BUDGETS for cost in COSTS}
    plans = {plan for plan in outcomes.values() if isinstance(plan, Plan)}
    assert len(plans) >= 3 or rule == "seen"
    assert len(plans) < len(outcomes)
    for name in ("method", "rule", "settings", "finished"):
        assert getattr(again, name) == getattr(evidence, name)
    assert [dict(row) for row in again.history] == [dict(row) for row in evidence.history]
    assert {name: tuple(row) for name, row in again.losses.items()} == dict(evidence.losses)
    assert {name: tuple(offer) for name, offer in again.space.layers.items()} == {
        name: tuple(offer) for name, offer in SPACE.layers.items()
    }
    assert again.to_dict() == evidence.to_dict()


@pytest.mark.parametrize("rule", EVIDENCE)
def test_the_file_is_plain_json_without_infinities(rule, tmp_path):
    EVIDENCE[rule].save(tmp_path / "found.json")

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    value = json.loads((tmp_path / "found.json").read_text(), parse_constant=refuse)
    assert value["kind"] == "haloc-search"
    written = value["losses"]["b"] if rule != "seen" else [row["loss"] for row in value["seen"]]
    assert written.count(None) == 1


def test_the_rules_differ():
    losses = {"a": (0.0, 2.0, 0.95), "b": (0.1, 1.0, 0.8)}
    cost = limits_of(SPACE, 1.0)[0].prices.cost_of
    budget = cost({"a": Dense(), "b": Tucker2(1, 1)})  # a dense, and next to nothing left for b
    assert solve(Evidence("made up", SPACE, losses, "sum"), budget).plan == {"a": Dense(), "b": Tucker2(1, 1)}
    # No layer above 0.95, and the other as low as that allows.
    even = solve(Evidence("made up", SPACE, losses, "largest"), budget).plan
    assert even == {"a": Tucker2(4, 4), "b": Spatial(3)}


def test_of_networks_that_were_seen_the_best_that_fits_is_taken():
    evidence = EVIDENCE["seen"]
    cost = limits_of(SPACE, 1.0)[0].prices.cost_of
    costs = [cost(plan) for plan, _ in SEEN]
    assert solve(evidence, "100%").plan == SEEN[0][0]
    assert solve(evidence, costs[0] - 1).plan == min((row for row in SEEN[1:] if cost(row[0]) < costs[0]), key=_loss)[0]
    assert solve(evidence, min(costs)).plan == SEEN[2][0]
    with pytest.raises(BudgetError, match="none of the 4 networks that method 'made up' has seen") as caught:
        solve(evidence, min(costs) - 1)
    assert caught.value.reachable == {"macs": min(costs)}


def test_many_budgets_at_once_leave_out_what_cannot_be_reached():
    results = pareto(EVIDENCE["sum"], ["1%", "30%", "60%", "100%"])
    assert 0 < len(results) < 4
    assert [result.spending[0].cost for result in results] == sorted(result.spending[0].cost for result in results)
    assert all(row.cost <= row.budget for result in results for row in result.spending)
    assert not results[0].finished


def test_losses_of_likelihoods_are_probabilities_again():
    evidence = Evidence("haloc", SPACE, {"a": (-log(0.5), -log(0.3), -log(0.2)), "b": (inf, 0.0, inf)})
    assert evidence.probabilities["a"] == pytest.approx([0.5, 0.3, 0.2])
    assert evidence.probabilities["b"] == [0.0, 1.0, 0.0]


def _loss(row: tuple[Plan, float]) -> float:
    return row[1]


def without(key: str):
    return lambda value: value.pop(key)


def setting(*path_and_value):
    *path, last, new = path_and_value

    def change(value) -> None:
        for key in path:
            value = value[key]
        value[last] = new

    return change


WRONG = {
    "of another kind": (setting("kind", "haloc-plan"), "not what a search found"),
    "of a later format": (setting("format", 2), "search format 2 is not known"),
    "without a kind": (without("kind"), "not what a search found"),
    **{f"without {key}": (without(key), "incomplete or malformed|not a rank space")
       for key in ("method", "space", "losses", "rule", "seen", "settings", "history", "finished")},
    "with an unknown rule": (setting("rule", "mean"), "unknown rule 'mean'"),
    "with a rule that is none": (setting("rule", ["sum"]), "unknown rule"),
    "without a layer's losses": (lambda value: value["losses"].pop("a"), "not those of the space"),
    "with losses of another layer": (setting("losses", "d", [1.0]), "not those of the space"),
    "with losses of a layer that has no choice": (setting("losses", "c", [1.0]), "not those of the space"),
    "with a loss too few": (lambda value: value["losses"]["a"].pop(), "not those of the space"),
    "with a loss too many": (lambda value: value["losses"]["a"].append(1.0), "not those of the space"),
    "with a word for a loss": (setting("losses", "a", 0, "low"), "'low'"),
    "with a loss that is no number": (setting("losses", "a", 0, float("nan")), "nan"),
    "with a loss that is true": (setting("losses", "a", 0, True), "True"),
    "with a loss that is a list": (setting("losses", "a", 0, [1.0]), r"\[1.0\]"),
    "with one loss for a layer": (setting("losses", "a", 1.0), "malformed"),
    "with a list of losses": (setting("losses", [[1.0]]), "malformed"),
    "with no losses": (setting("losses", None), "malformed"),
    "with a space that is none": (setting("space", []), "not a rank space"),
    "with a layer without calls": (lambda value: value["space"]["layers"][0].pop("calls"), "layer 'a'"),
    "with a form that does not fit": (
        setting("space", "layers", 0, "forms", 0, {"form": "tucker2", "rank_out": 9999, "rank_in": 1}), "layer 'a'"),
    "with settings that are a number": (setting("settings", 5), "malformed"),
    "with settings that are a word": (setting("settings", "low"), "malformed"),
    "with a history of numbers": (setting("history", [1]), "malformed"),
    "with a history of words": (setting("history", ["low"]), "malformed"),
    "that is seen without a plan": (setting("seen", [{"loss": 1.0}]), "malformed"),
    "that is seen without a loss": (setting("seen", [{"plan": Plan({}).to_dict()}]), "malformed"),
    "that is seen with a plan that is none": (setting("seen", [{"plan": {}, "loss": 1.0}]), "not a plan"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_file_that_is_wrong_is_refused_by_name(wrong, tmp_path):
    change, said = WRONG[wrong]
    value = copy.deepcopy(EVIDENCE["sum"].to_dict())
    change(value)
    path = tmp_path / "found.json"
    path.write_text(json.dumps(value))
    with pytest.raises(FileFormatError, match=said) as caught:
        Evidence.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "seen",
    [
        [],
        [{"plan": Plan({"a": Dense(), "b": Tucker2(3, 2), "d": Dense()}).to_dict(), "loss": 1.0}],
        [{"plan": Plan({"a": Tucker2(3, 3), "b": Tucker2(3, 2)}).to_dict(), "loss": 1.0}],
        [{"plan": Plan({"a": Dense()}).to_dict(), "loss": 1.0}],
    ],
    ids=["none", "of another layer", "in a form not on offer", "dense where dense is not on offer"],
)
def test_networks_that_are_not_of_the_space_are_refused(seen):
    with pytest.raises(FileFormatError, match="not those of the space"):
        Evidence.from_dict(EVIDENCE["seen"].to_dict() | {"seen": seen})


@pytest.mark.parametrize("value", [None, [], 5, "sum", {}])
def test_what_is_no_object_is_refused(value):
    with pytest.raises(FileFormatError, match="not what a search found"):
        Evidence.from_dict(value)


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(FileFormatError, match="no file"):
        Evidence.load(tmp_path / "none.json")
    (tmp_path / "half.json").write_text(json.dumps(EVIDENCE["sum"].to_dict())[:-40])
    with pytest.raises(FileFormatError, match="is not JSON"):
        Evidence.load(tmp_path / "half.json")
