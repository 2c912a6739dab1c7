from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from haloc.cost import sampling
from haloc.cost.network import NetworkTimings
from haloc.cost.table import Table
from haloc.forms import Dense, Svd, Tucker2
from haloc.plan import Plan

#: These tests are about what is written and said.
pytestmark = pytest.mark.usefixtures("hurried")


@pytest.fixture
def table(tmp_path):
    return tmp_path / "table.json"


def test_a_table_and_whole_networks(haloc, table):
    ran = haloc("measure", "resnet20", "--target", "cpu:t1", "--output", table, "--round-to", 8, "--networks", 5)
    assert ran.code == 0, ran.err
    assert "cpu:eager:fp32:b1:t1 on" in ran.out
    assert "conv1" in ran.out
    assert "whole network, dense:" in ran.err
    assert "(held out)" in ran.err
    loaded = Table.load(table)
    assert f"wrote {table}: {len(loaded)} rows" in ran.err
    assert len(NetworkTimings.load(table.with_suffix(".network.json")).timings) == 5


def test_the_second_run_measures_what_is_missing(haloc, table):
    arguments = ("measure", "resnet20", "--output", table, "--networks", 0, "--layer", "layer1.0.conv1")
    assert haloc(*arguments, "--round-to", 8).code == 0
    before = Table.load(table)
    ran = haloc(*arguments, "--round-to", 4, "--json")
    found = Table.from_dict(json.loads(ran.out))
    assert len(before) < len(found)
    assert set(before.rows) <= set(found.rows)


def test_an_interrupted_run_says_that_nothing_is_lost(haloc, table, monkeypatch):
    real, visits = sampling.visit, []

    def interrupted(*arguments):
        visits.append(1)
        if len(visits) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    arguments = ("measure", "resnet20", "--output", table, "--networks", 0, "--layer", "linear")
    monkeypatch.setattr(sampling, "visit", interrupted)
    ran = haloc(*arguments)
    assert ran.code != 0
    assert f"what was measured is kept beside {table}" in " ".join(ran.err.split())
    assert not table.exists()
    assert table.with_name("table.json.rows").read_text().count("key") == 2
    assert haloc(*arguments).code == 0
    assert len(visits) == 3 + 3 * len(Table.load(table)) - 2


def test_some_of_the_rows_and_a_predictor(haloc, table):
    ran = haloc("measure", "resnet20", "--output", table, "--rows", "20%", "--networks", 0, "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert len(found["rows"]) == found["predictor"]["rows"] < 20
    assert found["predictor"]["held_out_error"] > 0
    assert json.loads(table.with_suffix(".predictor.json").read_text()) == found["predictor"]


def test_a_kit_is_written_and_its_table_merged(haloc, tmp_path, table):
    kit = tmp_path / "kit"
    arguments = ("measure", "resnet20", "--layer", "linear", "--target", "cpu:t1")
    ran = haloc(*arguments, "--kit", kit)
    assert ran.code == 0, ran.err
    assert f"haloc measure --merge {kit}" in ran.err
    subprocess.run([sys.executable, kit / "measure.py"], check=True, capture_output=True)
    ran = haloc("measure", "--merge", kit, "--output", table)
    assert ran.code == 0, ran.err
    assert f"wrote {table}: 3 rows for cpu:eager:fp32:b1:t1" in ran.err
    assert {row.form for row in Table.load(table).rows} == {Dense(), Svd(4), Svd(8)}


@pytest.mark.parametrize("unequal", [True, False])
def test_a_figure_of_one_layer(haloc, tmp_path, table, unequal):
    pytest.importorskip("matplotlib")
    options = ("--unequal",) if unequal else ()
    arguments = ("--layer", "layer1.0.conv1", "--figure", tmp_path / "layer.svg", "--round-to", 4, *options)
    ran = haloc("measure", "resnet20", "--output", table, *arguments)
    assert ran.code == 0, ran.err
    assert "<svg" in (tmp_path / "layer.svg").read_text()


def test_eyeriss(haloc, table):
    arguments = ("measure", "resnet20", "--target", "eyeriss", "--engine", "bound", "--output", table)
    ran = haloc(*arguments, "--hardware", "clock_mhz=400", "--json")
    assert ran.code == 0, ran.err
    assert all(row["energy_mj"] > 0 for row in json.loads(ran.out)["rows"])
    Plan({"layer1.0.conv1": Table.load(table).fastest(Table.load(table).rows[1].shape)}).save(
        table.parent / "plan.json"
    )
    ran = haloc("predict", "resnet20", "--plan", table.parent / "plan.json", "--table", table)
    assert ran.code == 0, ran.err
    assert "energy, predicted (mJ)" in ran.out


def test_predicted_and_measured(haloc, tmp_path, table):
    plan = tmp_path / "plan.json"
    plan.write_text(
        json.dumps(
            {
                "kind": "haloc-plan",
                "format": 1,
                "layers": {"layer1.0.conv1": {"form": "tucker2", "rank_out": 4, "rank_in": 4}},
            }
        )
    )
    assert haloc("measure", "resnet20", "--output", table, "--round-to", 8, "--networks", 5).code == 0
    ran = haloc("predict", "resnet20", "--plan", plan, "--table", table, "--measure", "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found["latency_ms"]["plan"][0] > 0 < found["latency_ms"]["plan"][1]
    assert found["measured_ms"]["dense"][0] > 0
    pace = found["measured_ms"]["dense"][0] / found["then_ms"]
    assert found["paced_ms"]["plan"] == pytest.approx([pace * value for value in found["latency_ms"]["plan"]])
    assert found["macs"]["plan"] < found["macs"]["dense"]
    ran = haloc("predict", "resnet20", "--plan", plan, "--table", table)
    assert "latency, predicted (ms)" in ran.out
    assert "pace" not in ran.out
    table.with_suffix(".network.json").unlink()
    ran = haloc("predict", "resnet20", "--plan", plan, "--table", table)
    assert "sum of the layers only" in ran.err


def test_a_machine_that_has_become_slower(haloc, tmp_path, table):
    """The same network, timed in half the time then: what is said is scaled, and the reader told."""
    plan = tmp_path / "plan.json"
    Plan({"layer1.0.conv1": Tucker2(4, 4)}).save(plan)
    assert haloc("measure", "resnet20", "--plan", plan, "--output", table, "--networks", 4).code == 0
    networks = NetworkTimings.load(table.with_suffix(".network.json"))
    faster = tuple(replace(timing, latency_ms=timing.latency_ms / 2) for timing in networks.timings)
    replace(networks, timings=faster).save(table.with_suffix(".network.json"))
    ran = haloc("predict", "resnet20", "--plan", plan, "--table", table, "--measure")
    assert "at the machine's pace now" in ran.out
    assert "more than when the table was measured: the machine is slower now" in ran.err


#: What is written about a plan's table: three layers of three sizes.
FINAL = Plan({"layer1.0.conv1": Tucker2(6, 6), "layer2.1.conv1": Tucker2(12, 12), "layer3.2.conv2": Tucker2(20, 20)})


@pytest.fixture
def final(tmp_path):
    FINAL.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def forms_in(table):
    """How often the table has which form."""
    return Counter(str(row.form) for row in Table.load(table).rows)


def test_one_plan_alone(haloc, table, final):
    ran = haloc("measure", "resnet20", "--plan", final, "--target", "cpu:b1", "--output", table, "--networks", 4)
    assert ran.code == 0, ran.err
    assert "a plan of these rows can be predicted to within" in ran.err
    assert "held out" not in ran.err
    assert not table.with_suffix(".predictor.json").exists()
    # Seven shapes: the first convolution, those of three sizes of blocks, two ways into the next size, the last layer.
    assert forms_in(table) == {"dense": 7, "tucker2 6/6": 1, "tucker2 12/12": 1, "tucker2 20/20": 1}
    timed = [timing.plan for timing in NetworkTimings.load(table.with_suffix(".network.json")).timings]
    assert [len(each) for each in timed] == [0, 1, 2, 2]
    assert FINAL not in timed
    ran = haloc("predict", "resnet20", "--plan", final, "--table", table, "--measure", "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert not any("predicted" in note for note in found["notes"])
    assert found["latency_ms"]["plan"][0] > 0 < found["measured_ms"]["plan"][0]


def test_several_plans_share_a_table(haloc, table, final):
    other = final.with_name("other.json")
    Plan({"layer1.0.conv1": Tucker2(8, 8), "linear": Svd(5), "conv1": Dense()}).save(other)
    plans = ("--plan", final, "--plan", other)
    ran = haloc("measure", "resnet20", *plans, "--output", table, "--networks", 5)
    assert ran.code == 0, ran.err
    assert forms_in(table) == {
        "dense": 7, "tucker2 6/6": 1, "tucker2 8/8": 1, "tucker2 12/12": 1, "tucker2 20/20": 1, "svd 5": 1,
    }  # fmt: skip
    for plan in (final, other):
        assert haloc("predict", "resnet20", "--plan", plan, "--table", table).code == 0


def test_networks_with_rows_that_were_not_measured_are_left_aside(haloc, table, final):
    """A table of some of the rows, and random networks; then a plan's own rows and networks into the same files."""
    assert haloc("measure", "resnet20", "--output", table, "--rows", "30%", "--networks", 5).code == 0
    assert haloc("measure", "resnet20", "--plan", final, "--output", table, "--networks", 4).code == 0
    together = json.loads(haloc("predict", "resnet20", "--plan", final, "--table", table, "--json").out)
    networks = NetworkTimings.load(table.with_suffix(".network.json"))
    own = tuple(timing for timing in networks.timings if timing.plan.items() <= FINAL.items())
    assert (len(networks.timings), len(own)) == (8, 4)
    replace(networks, timings=own).save(table.with_suffix(".network.json"))
    alone = json.loads(haloc("predict", "resnet20", "--plan", final, "--table", table, "--json").out)
    assert together == alone


def test_a_kit_for_one_plan(haloc, tmp_path, final):
    ran = haloc("measure", "resnet20", "--plan", final, "--kit", tmp_path / "kit")
    assert ran.code == 0, ran.err
    assert len(json.loads((tmp_path / "kit" / "rows.json").read_text())["rows"]) == 10


def test_a_plan_on_eyeriss(haloc, table, final):
    ran = haloc("measure", "resnet20", "--plan", final, "--target", "eyeriss", "--engine", "bound", "--output", table)
    assert ran.code == 0, ran.err
    assert len(Table.load(table)) == 10
    ran = haloc("predict", "resnet20", "--plan", final, "--table", table)
    assert ran.code == 0, ran.err
    assert "energy, predicted (mJ)" in ran.out


@pytest.mark.parametrize(
    "given",
    [
        ("--forms", "tucker2,svd"),
        ("--round-to", "8"),
        ("--unequal",),
        ("--rows", "20%"),
        ("--layer", "conv1"),
        ("--figure", "x.svg"),
        ("--merge", "kit"),
    ],
)
def test_a_plan_goes_with_nothing_that_chooses_rows(refused, final, given, monkeypatch):
    monkeypatch.chdir(final.parent)
    said = refused("measure", "resnet20", "--plan", final, *given, code=2)
    assert f"leave {given[0]} out" in said
    assert [file.name for file in final.parent.iterdir()] == ["plan.json"]


def test_all_that_does_not_go_with_a_plan_is_named_at_once(refused, final):
    said = refused("measure", "resnet20", "--plan", final, "--rows", "20%", "--forms", "svd", code=2)
    assert "leave --forms and --rows out" in said


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), 2, "which model? Name one"),
        (("resnet20", "--target", "cpu:onnxruntim"), 2, "Did you mean 'onnxruntime'?"),
        (("resnet20", "--layer", "layer1.0.conv"), 2, "Did you mean"),
        (("resnet20", "--forms", "tucker"), 2, "Did you mean 'tucker2'?"),
        (("resnet20", "--round-to", "often"), 2, "round_to"),
        (("resnet20", "--rows", "many"), 2, "expected a share of the rows"),
        (("resnet20", "--figure", "x.svg"), 2, "a figure shows one layer"),
        (("resnet20", "--hardware", "rows=2"), 2, "use --target eyeriss"),
        (("resnet20", "--target", "eyeriss", "--hardware", "clok_mhz=2"), 2, "Did you mean 'clock_mhz'?"),
        (("resnet20", "--target", "eyeriss", "--hardware", "rows=many"), 2, "rows takes a whole number, got 'many'"),
        (("resnet20", "--target", "eyeriss", "--engine", "zigzac"), 2, "zigzag"),
        (("resnet20", "--merge", "x.json"), 2, "takes no model"),
        (("--merge", "nowhere.json"), 1, "there is no file nowhere.json"),
        (("resnet20", "--target", "eyeriss", "--kit", "k"), 2, "needs no kit"),
    ],
)
def test_mistakes_are_answered_in_one_sentence(refused, arguments, code, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said in refused("measure", *arguments, code=code)
    assert list(tmp_path.iterdir()) == []


def test_a_plan_that_does_not_fit(refused, haloc, tmp_path, table):
    Plan({"nonsense": Dense()}).save(tmp_path / "plan.json")
    assert haloc("measure", "resnet20", "--output", table, "--layer", "linear").code == 0
    (tmp_path / "bad.json").write_text("{}")
    said = refused("predict", "resnet20", "--plan", tmp_path / "bad.json", "--table", table, code=1)
    assert "not a plan" in said
    said = refused("predict", "resnet20", "--plan", tmp_path / "plan.json", "--table", tmp_path / "no.json", code=1)
    assert "there is no file" in said
