from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from haloc.cost import asic
from haloc.cost.accelerators import OwnAccelerator
from haloc.cost.asic import asic_costs
from haloc.cost.eyeriss import EYERISS, Eyeriss, Unrolling, bound, unrollings
from haloc.cost.loop_orders import loop_orders
from haloc.cost.nest import nest_of
from haloc.cost.zigzag_description import zigzag_description
from haloc.errors import CostError, FileFormatError, MissingExtraError, SpecError
from haloc.forms import Dense, Svd, Tucker2
from haloc.shapes import LinearShape
from tests.test_shapes import conv

SMALL = conv(in_channels=16, out_channels=24, input_size=(14, 14))
DEPTHWISE = conv(in_channels=32, out_channels=32, groups=32, stride=(1, 1), input_size=(14, 14))
POINTWISE = conv(in_channels=16, kernel=(1, 1), padding=(0, 0), input_size=(14, 14))
LINEAR = LinearShape(512, 1000)
WIDE = conv(in_channels=2, out_channels=2, kernel=(1, 15), padding=(0, 7), stride=(1, 1), input_size=(5, 20))
SHAPES = [SMALL, DEPTHWISE, POINTWISE, LINEAR, WIDE, conv(in_channels=7, out_channels=11, input_size=(13, 17))]
ROWS = [(SMALL, Dense()), (SMALL, Tucker2(8, 8)), (POINTWISE, Svd(4)), (LINEAR, Dense()), (SMALL, Dense())]


class Counting:
    """An engine that counts what it is asked for."""

    def __init__(self) -> None:
        self.nests: list = []

    def price(self, nest):
        self.nests.append(nest)
        return bound(nest)


@pytest.fixture
def counting(monkeypatch) -> Counting:
    engine = Counting()
    monkeypatch.setattr(asic, "_opened", lambda *_: engine)
    return engine


# --- what an accelerator sees of a layer


def test_words_worked_out_by_hand():
    nest = nest_of(conv())
    assert nest.extents == (1, 1, 128, 64, 28, 28, 3, 3)
    assert (nest.weights, nest.outputs, nest.macs) == (128 * 64 * 9, 128 * 28 * 28, conv().macs)
    assert nest.inputs == 64 * 56 * 56
    assert nest_of(POINTWISE).inputs == 16 * 7 * 7, "a strided 1×1 reads every other row and column"
    assert nest_of(LinearShape(8, 4, positions=5)).extents == (1, 1, 4, 8, 5, 1, 1, 1)


def test_layers_that_cost_the_same_are_the_same():
    assert nest_of(conv(bias=True)) == nest_of(conv(padding_mode="reflect")) == nest_of(conv())
    assert nest_of(conv(groups=4)).loops | {"K": 0, "C": 0} == nest_of(conv()).loops | {"G": 4, "K": 0, "C": 0}
    assert nest_of(conv(images=8)).macs == conv(images=8).macs


def test_a_conv1d_has_height_one():
    one = conv(kernel=(5,), input_size=(100,), stride=(2,), padding=(2,), dilation=(1,))
    assert nest_of(one).loops["OY"] == nest_of(one).loops["FY"] == 1
    assert nest_of(one).macs == one.macs


def test_a_conv3d_is_refused_by_name():
    cube = conv(kernel=(3,) * 3, input_size=(8,) * 3, stride=(1,) * 3, padding=(1,) * 3, dilation=(1,) * 3)
    with pytest.raises(SpecError, match="not a convolution with kernel 3×3×3 \\(64→128\\)"):
        asic_costs([(cube, Dense())], engine="bound")


# --- the array and the closed form


def test_bounds_worked_out_by_hand():
    # Three kernel rows and four channels down, fourteen output rows across: all 168 PEs work.
    plain = bound(conv(out_channels=64, stride=(1, 1)))
    assert plain.cycles == (56 / 14) * 56 * 64 * (64 / 4) * 3 == plain.bound_cycles
    # Seven kernel rows leave no room for a second channel among twelve rows.
    first = conv(in_channels=3, out_channels=64, kernel=(7, 7), input_size=(224, 224), padding=(3, 3))
    assert bound(first).cycles == (112 / 14) * 112 * 64 * 3 * 7
    # A linear layer has to read its weights: eight words of sixteen bits per cycle.
    words = 512 * 1000 + 512 + 1000
    assert bound(LINEAR).cycles == words / 8
    assert bound(LINEAR).dram_bits == words * 16
    assert bound(LINEAR).energy_pj == pytest.approx(512_000 * 2.2 + words * 128 + 2 * 1512 * 18.8)


def test_settings_change_the_bound():
    assert bound(LINEAR, Eyeriss(dram_bits_per_cycle=64)).cycles == 2 * bound(LINEAR).cycles
    wide = Eyeriss(columns=28)
    assert bound(conv(stride=(1, 1)), wide).cycles == bound(conv(stride=(1, 1))).cycles / 2


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unrollings_are_row_stationary_and_fit(shape):
    nest = nest_of(shape)
    ways = unrollings(nest)
    assert [way.cycles(nest) for way in ways] == sorted(way.cycles(nest) for way in ways)
    for way in ways:
        assert prod(way.columns.values()) <= 14
        assert prod(way.rows.values()) <= 12
        assert way.rows["FY"] == min(nest.loops["FY"], 12)
        assert {"FX", "OX", "B"}.isdisjoint(way.columns | way.rows)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_orders_run_every_loop_as_often_as_it_must(shape):
    nest = nest_of(shape)
    remaining = unrollings(nest)[0].remaining(nest)
    orders = loop_orders(nest, remaining, EYERISS)
    assert len(orders) == len(set(orders))
    assert bool(orders) == (shape != WIDE), "fifteen kernel columns do not fit into twelve words"
    for order in orders:
        assert {loop: prod(n for name, n in order if name == loop) for loop in remaining} == remaining


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"rows": 0}, "positive number as rows, got 0"),
        ({"word_bits": 16.5}, "whole number as word_bits, got 16.5"),
        ({"clock_mhz": "fast"}, "positive number as clock_mhz, got 'fast'"),
        ({"filter_buffer_kb": 108}, "108 must be less than 108"),
    ],
)
def test_wrong_settings_are_refused(settings, text):
    with pytest.raises(SpecError, match=text):
        Eyeriss(**settings)


def test_the_digest_is_that_of_all_settings():
    digests = {
        Eyeriss(**{name: value}).digest for name, value in (("rows", 13), ("clock_mhz", 250.0), ("dram_pj", 1.0))
    }
    assert len(digests | {EYERISS.digest}) == 4
    assert Eyeriss().digest == EYERISS.digest


def test_weights_go_past_the_shared_buffer():
    memories = zigzag_description(EYERISS)["memories"]
    assert memories["global_buffer"]["operands"] == ["I1", "O"]
    assert memories["global_buffer"]["size"] == 100 * 1024 * 8
    assert memories["dram"]["operands"] == ["I1", "I2", "O"]


# --- rows, processes and the file of prices


def test_a_row_is_the_sum_of_its_stages():
    whole, parts = asic_costs([(SMALL, Dense()), (SMALL, Tucker2(8, 8))], engine="bound")
    one = {"kernel": (1, 1), "padding": (0, 0), "stride": (1, 1)}
    chain = [
        conv(in_channels=16, out_channels=8, input_size=(14, 14), **one),
        conv(in_channels=8, out_channels=8, input_size=(14, 14)),
        conv(in_channels=8, out_channels=24, input_size=(7, 7), **one),
    ]
    assert parts.cycles == sum(bound(stage).cycles for stage in chain)
    assert parts.energy_mj == pytest.approx(sum(bound(stage).energy_pj for stage in chain) * 1e-9)
    assert whole.latency_ms == whole.bound_ms == bound(SMALL).cycles / 200e3
    assert (
        asic_costs([(SMALL, Dense())], Eyeriss(clock_mhz=400.0), engine="bound")[0].latency_ms == whole.latency_ms / 2
    )
    assert whole.engine == "bound"


def test_equal_stages_are_priced_once_and_rows_reported_as_they_come(counting):
    seen = {}
    costs = asic_costs([*ROWS, (replace(LINEAR, bias=False), Dense())], engine="bound", jobs=1, on_row=seen.__setitem__)
    assert len(counting.nests) == len(set(counting.nests)) == 1 + 3 + 2 + 1
    assert [seen[index] for index in range(len(costs))] == costs
    assert (costs[0], costs[3]) == (costs[4], costs[5])
    assert asic_costs([], engine="bound") == []


def test_prices_are_kept(counting, tmp_path):
    file = tmp_path / "folder" / "prices.jsonl"
    first = asic_costs(ROWS, engine="bound", jobs=1, cache=file)
    priced = len(counting.nests)
    assert asic_costs(ROWS, engine="bound", jobs=1, cache=file) == first
    assert len(counting.nests) == priced
    asic_costs(ROWS, Eyeriss(dram_bits_per_cycle=64), engine="bound", jobs=1, cache=file)
    assert len(counting.nests) == 2 * priced, "prices of another description do not count"


def test_a_file_that_was_cut_short_is_gone_on_with(counting, tmp_path):
    file = tmp_path / "prices.jsonl"
    first = asic_costs(ROWS, engine="bound", jobs=1, cache=file)
    priced = len(counting.nests)
    whole = file.read_text()
    file.write_text(whole[:-20] + '\n"nonsense"\n[]\n' + whole[:40])
    assert asic_costs(ROWS, engine="bound", jobs=1, cache=file) == first
    assert len(counting.nests) == priced + 1
    assert asic_costs(ROWS, engine="bound", jobs=1, cache=file) == first
    assert len(counting.nests) == priced + 1


def test_a_run_that_is_stopped_keeps_what_it_has(counting, tmp_path):
    file = tmp_path / "prices.jsonl"

    def stop(index, cost):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asic_costs(ROWS, engine="bound", jobs=1, cache=file, on_row=stop)
    assert len(file.read_text().splitlines()) == len(counting.nests) == 1
    asic_costs(ROWS, engine="bound", jobs=1, cache=file)
    assert len(counting.nests) == len(set(counting.nests))


def test_a_file_that_cannot_be_used_is_named(tmp_path):
    with pytest.raises(FileFormatError, match=f"cannot read the prices in {tmp_path}"):
        asic_costs(ROWS, engine="bound", cache=tmp_path)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"engine": "zagzig"}, "unknown engine 'zagzig', expected one of auto, zigzag, timeloop, bound. Did you mean"),
        ({"engine": "bound", "jobs": 0}, "jobs must be at least 1, got 0"),
        ({"engine": "bound", "hardware": Path("own.yaml")}, "the closed form is there for Eyeriss only"),
    ],
)
def test_wrong_options_are_refused(options, text):
    with pytest.raises(SpecError, match=text):
        asic_costs(ROWS, **options)


@pytest.mark.parametrize("engine", ["auto", "zigzag"])
def test_a_missing_engine_is_said_with_what_to_install(engine, monkeypatch):
    for name in [*sys.modules, "zigzag"]:
        if name.split(".")[0] == "zigzag":
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "haloc.cost.zigzag", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingExtraError, match=r"'zigzag-dse'.*pip install 'haloc\[asic\]'"):
        asic_costs(ROWS, engine=engine)


# --- ZigZag


@pytest.fixture(scope="module")
def zigzag():
    pytest.importorskip("zigzag")
    from haloc.cost import zigzag

    return zigzag


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_zigzag_keeps_to_the_bounds(zigzag, shape):
    cost, least = zigzag.ZigZag(EYERISS).price(nest_of(shape)), bound(shape)
    assert least.cycles == cost.bound_cycles <= cost.cycles < 2 * least.cycles
    assert cost.cycles >= cost.dram_bits / EYERISS.dram_bits_per_cycle
    assert least.energy_pj < cost.energy_pj * 1.01
    assert least.dram_bits < cost.dram_bits * 1.01


def test_a_latency_below_the_traffic_is_put_right(zigzag):
    """ZigZag lets this layer finish before its weights can have been read."""
    assert zigzag.ZigZag(Eyeriss(dram_bits_per_cycle=64)).price(nest_of(LINEAR)).cycles == bound(LINEAR).cycles * 2


def test_processes_agree(zigzag, tmp_path):
    """Each has its own hash seed, and with it its own order of sets."""
    here = asic_costs(ROWS, jobs=1)
    assert asic_costs(ROWS, jobs=1) == here
    assert asic_costs(ROWS, jobs=2, cache=tmp_path / "prices.jsonl") == here
    assert asic_costs(ROWS, cache=tmp_path / "prices.jsonl") == here
    assert here[0].engine.startswith("zigzag 3")


def test_a_mapping_that_does_not_work_out_does_not_lose_the_layer(zigzag, monkeypatch):
    nest, engine = nest_of(SMALL), zigzag.ZigZag(EYERISS)
    price, ways = engine.price(nest), unrollings(nest)
    bad = [Unrolling({"OY": 7, "K": 24}, {"FY": 3, "C": 16}), Unrolling({"X": 2}, {"FY": 3})]
    monkeypatch.setattr(zigzag, "unrollings", lambda *_: [ways[0], *bad, *ways[1 : zigzag.MOST_UNROLLINGS - 2]])
    assert engine.price(nest) == price

    def infeasible(_):
        raise AssertionError("no such mapping")

    monkeypatch.setattr(zigzag.MemoryAllocator, "run", infeasible)
    with pytest.raises(CostError, match="no way to run a layer with the loops K24 C16 OY7 OX7 FY3 FX3 on Eyeriss"):
        engine.price(nest)


def test_nothing_is_logged_or_printed(zigzag, caplog, capfd):
    caplog.set_level("INFO")
    asic_costs(ROWS[:1], jobs=1)
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def test_an_accelerator_of_ones_own(zigzag, tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text(json.dumps(zigzag_description(EYERISS)))  # JSON is YAML
    [own] = asic_costs([(POINTWISE, Dense())], OwnAccelerator(file, word_bits=16), jobs=1)
    [ours] = asic_costs([(POINTWISE, Dense())], jobs=1)
    assert own.bound_ms == POINTWISE.macs / 168 / 200e3
    assert own.bound_ms <= own.latency_ms < 2 * ours.latency_ms
    mapping = tmp_path / "mapping.yaml"
    entry = {"name": "default", "spatial_mapping": {"D1": ["OY, 7"], "D2": ["C, 12"]}}
    mapping.write_text(json.dumps([entry]))
    [given] = asic_costs([(POINTWISE, Dense())], OwnAccelerator(file, mapping, word_bits=16), jobs=1)
    assert given.cycles >= 128 * 2 * 7, "128 filters, 16 channels in twelves, 7 columns"
    [short] = asic_costs([(LINEAR, Dense())], file, jobs=1)
    assert short.cycles > 0.99 * (512_000 + 1512) * 8 / 128, "words of eight bits"


@pytest.mark.parametrize(("content", "text"), [("name: x", "is not a ZigZag description"), ("[", "not a ZigZag desc")])
def test_descriptions_that_are_none_are_refused(zigzag, tmp_path, content, text):
    file = tmp_path / "own.yaml"
    file.write_text(content)
    with pytest.raises(FileFormatError, match=text):
        asic_costs(ROWS, file, jobs=2)
    with pytest.raises(FileFormatError, match="cannot read the accelerator"):
        asic_costs(ROWS, tmp_path / "none.yaml", jobs=1)
    file.write_text(json.dumps(zigzag_description(EYERISS)))
    (tmp_path / "mapping.yaml").write_text(content)
    with pytest.raises(FileFormatError, match="is not a ZigZag mapping"):
        asic_costs(ROWS, OwnAccelerator(file, tmp_path / "mapping.yaml"), jobs=1)


# --- Timeloop, of which there is only a stand-in here

STAND_IN = """#!{python}
import json, sys
config, folder = json.load(open(sys.argv[1])), sys.argv[sys.argv.index("-o") + 1]
extents = config["problem"]["instance"]
if extents["K"] == 24:
    sys.exit("no mapping satisfies the constraints")
assert config["arch"]["storage"][-1]["name"] == "DRAM" and config["mapper"]["num_threads"] == 1
with open(folder + "/timeloop-mapper.stats.txt", "w") as file:
    cycles = 10 * extents["K"] * extents["C"]
    file.write(f"Summary Stats\\n-----\\nUtilization: 0.9\\nCycles: {{cycles}}\\nEnergy: 1.5 uJ\\nEDP(J*cycle): 1\\n")
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    binary = tmp_path / "timeloop-mapper"
    binary.write_text(STAND_IN.format(python=sys.executable))
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])


def test_timeloop_is_run_and_read(stand_in):
    costs = asic_costs([(LINEAR, Dense()), (LINEAR, Svd(8))], engine="timeloop", jobs=2)
    assert [cost.cycles for cost in costs] == [10 * 512_000, 10 * 8 * 1512]
    assert costs[1].energy_mj == pytest.approx(2 * 1.5e-3)
    assert costs[0].engine.startswith("timeloop ")
    [tiny] = asic_costs([(conv(stride=(1, 1)), Dense())], engine="timeloop")
    assert tiny.latency_ms == tiny.bound_ms, "no less than the closed form"


def test_timeloops_own_words_are_passed_on(stand_in):
    with pytest.raises(CostError, match="no way to run .*: no mapping satisfies the constraints"):
        asic_costs([(SMALL, Dense())], engine="timeloop")
    with pytest.raises(SpecError, match="Timeloop runs on Eyeriss only"):
        asic_costs([(SMALL, Dense())], Path(__file__), engine="timeloop")


def test_timeloop_has_to_be_there(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SpecError, match="there is no timeloop-mapper on the PATH"):
        asic_costs(ROWS, engine="timeloop")
