from __future__ import annotations

import json
from dataclasses import replace

import pytest

from haloc.cost.model import Estimate, layers_cost
from haloc.cost.table import Row, Table
from haloc.cost.target import Target
from haloc.errors import CostError, FileFormatError, SpecError
from haloc.forms import Dense, Tucker2
from haloc.inventory import Inventory, LayerInfo

MACHINE = {"device": "a chip", "torch": "2"}


@pytest.fixture
def table(conv):
    rows = (Row(conv, Dense(), 2.0, 0.1, 9), Row(conv, Tucker2(4, 4), 1.0, 0.2, 9, noisy=True))
    return Table(Target(), rows, MACHINE)


def test_a_table_comes_back_from_its_file(table, tmp_path):
    table.save(tmp_path / "table.json")
    assert Table.load(tmp_path / "table.json") == table


def test_prices_have_an_error(table, conv):
    assert table.price(conv, Dense()) == Estimate(2.0, 0.05)
    assert (table.quantity, table.unit) == ("latency", "ms")


def test_a_layer_without_bias_is_the_same_layer_once_batchnorm_is_folded(table, conv):
    assert table.price(replace(conv, bias=False), Dense()).value == 2.0
    assert (replace(conv, bias=False), Tucker2(4, 4)) in table


def test_a_missing_price_is_never_zero(table, conv):
    with pytest.raises(CostError, match="has no row for tucker2 8/8"):
        table.price(conv, Tucker2(8, 8))
    with pytest.raises(CostError, match="has no energies"):
        table.of("energy").price(conv, Dense())
    with pytest.raises(SpecError, match="latency and energy, got 'energie'. Did you mean 'energy'?"):
        table.of("energie")


@pytest.mark.parametrize(
    ("low", "spread", "fastest"),
    [(1.0, 0.0, Tucker2(4, 4)), (2.5, 0.0, Dense()), (2.0, 0.0, Dense()), (1.9, 0.4, Dense())],
)
def test_dense_where_nothing_is_faster_by_more_than_the_noise(conv, low, spread, fastest):
    rows = (Row(conv, Dense(), 2.0), Row(conv, Tucker2(4, 4), low, spread))
    assert Table(Target(), rows, {}).fastest(conv) == fastest


def test_dense_alone_is_fastest(conv):
    assert Table(Target(), (Row(conv, Dense(), 2.0),), {}).fastest(conv) == Dense()


def test_tables_are_put_together(table, conv):
    newer = Table(Target(), (Row(conv, Dense(), 3.0), Row(conv, Tucker2(8, 8), 1.5)), MACHINE)
    merged = table.merged(newer)
    assert len(merged) == 3
    assert merged.price(conv, Dense()).value == 3.0
    assert merged.price(conv, Tucker2(4, 4)).value == 1.0


def test_tables_of_different_things_are_not(table):
    with pytest.raises(SpecError, match="different targets: cpu:eager:fp32:b1 and cpu:eager:fp32:b8"):
        table.merged(replace(table, target=Target(batch_size=8)))
    with pytest.raises(SpecError, match="different devices: 'a chip' and 'another'"):
        table.merged(replace(table, environment={"device": "another"}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "haloc-plan"}, "not a table"),
        ({"format": 2}, "table format 2 is not known"),
        ({"rows": {}}, '"rows" (a list)'),
        ({"target": {"device": "tpu"}}, "unknown device 'tpu'"),
    ],
)
def test_other_files_are_refused(table, tmp_path, change, said):
    (tmp_path / "table.json").write_text(json.dumps(table.to_dict() | change))
    with pytest.raises((FileFormatError, SpecError)) as raised:
        Table.load(tmp_path / "table.json")
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"latency_ms": 0}, "row 0: latency_ms is 0"),
        ({"latency_ms": -1.0}, "row 0: latency_ms must be a number not below 0"),
        ({"latency_ms": None}, "row 0: latency_ms must be"),
        ({"latency_ms": float("nan")}, "row 0: latency_ms must be"),
        ({"latency_ms": True}, "row 0: latency_ms must be"),
        ({"form": {"form": "tucker2", "rank_out": 99, "rank_in": 1}}, "rank_out 99 is outside 1..16"),
        ({"form": {"form": "svd", "rank": 2}}, "takes tucker2 or spatial, not svd"),
        ({"shape": {"type": "conv"}}, "not a conv shape"),
        ({"count": 0}, "count is 0"),
    ],
)
def test_rows_that_cannot_be_are_refused(table, change, said):
    value = table.to_dict()
    value["rows"][0] |= change
    with pytest.raises(FileFormatError) as raised:
        Table.from_dict(value)
    assert said in str(raised.value)


def test_a_network_is_the_sum_over_its_layers_and_calls(table, conv):
    twice = LayerInfo("a", "Conv2d", (conv, conv), conv.params, 2 * conv.macs, ("tucker2",))
    layers = Inventory((twice, replace(twice, name="b", calls=(conv,))), 0, 0)
    assert layers_cost(layers, {}, table).value == pytest.approx(6.0)
    low = layers_cost(layers, {"a": Tucker2(4, 4)}, table)
    assert low.value == pytest.approx(4.0)
    assert low.error == pytest.approx((0.1**2 * 2 + 0.05**2) ** 0.5)
