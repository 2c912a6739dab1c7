"""Prices that were measured: one row per layer shape and form, with the target and machine they belong to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from haloc.cost.model import Estimate
from haloc.cost.target import Target
from haloc.errors import CostError, FileFormatError, SpecError, nearest, shown
from haloc.files import naming, read_json, write_json_rows
from haloc.forms import Dense, Form, form_from_dict, form_to_dict, misfit
from haloc.shapes import Shape, as_deployed, shape_from_dict, shape_to_dict

KIND = "haloc-table"
FORMAT = 1
UNITS = {"latency": "ms", "energy": "mJ"}
#: The most rows that are read; every rank of every layer of a large network are some ten thousand.
MOST_ROWS = 100_000
#: Bytes of a file of them; a row has some four hundred.
MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Row:
    """What one layer in one form costs.

    Attributes:
        shape: The layer as deployed, per example.
        form: How it is written.
        latency_ms: Median time of one run over the target's whole batch.
        iqr_ms: Interquartile range of the samples; 0 where nothing was sampled.
        count: How many samples were taken.
        noisy: Whether the samples still disagreed after all repeats.
        energy_mj: Energy of one run, where the target can tell.
    """

    shape: Shape
    form: Form
    latency_ms: float
    iqr_ms: float = 0.0
    count: int = 1
    noisy: bool = False
    energy_mj: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Writes the row as plain JSON values."""
        times = {"latency_ms": float(f"{self.latency_ms:.6g}"), "iqr_ms": float(f"{self.iqr_ms:.3g}")}
        measured = times | {"count": self.count, "noisy": self.noisy}
        energy = {} if self.energy_mj is None else {"energy_mj": self.energy_mj}
        return {"shape": shape_to_dict(self.shape), "form": form_to_dict(self.form)} | measured | energy

    @classmethod
    def from_dict(cls, value: Any, shape: Shape | None = None) -> Row:
        """Reads what `to_dict` wrote; a row that is incomplete or impossible is refused.

        Args:
            value: The plain values.
            shape: Its shape, where that has been read already: rows of one layer come one after the other.
        """
        if not isinstance(value, dict):
            raise FileFormatError(f"expected a row, got {shown(value)}")
        shape = shape_from_dict(value.get("shape")) if shape is None else shape
        form = form_from_dict(value.get("form"))
        problem = misfit(shape, form)
        if problem:
            raise FileFormatError(f"{form} does not fit: {problem}")
        energy = value.get("energy_mj")
        numbers = {
            "latency_ms": _positive(value.get("latency_ms"), "latency_ms"),
            "iqr_ms": _number(value.get("iqr_ms", 0.0), "iqr_ms"),
            "count": int(_positive(value.get("count", 1), "count")),
            "energy_mj": None if energy is None else _positive(energy, "energy_mj"),
        }
        return cls(shape=as_deployed(shape), form=form, noisy=value.get("noisy") is True, **numbers)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Table:
    """Measured rows of one target; a `CostModel` over the rows it has.

    Attributes:
        target: What was measured.
        rows: The rows.
        environment: Device name, driver, library versions and clocks, as they were found.
        quantity: Which column `price` reads: latency or energy.
    """

    target: Target
    rows: tuple[Row, ...]
    environment: Mapping[str, Any]
    quantity: str = "latency"

    def __post_init__(self) -> None:
        if self.quantity not in UNITS:
            raise SpecError(f"a table has {' and '.join(UNITS)}, got {self.quantity!r}.{nearest(self.quantity, UNITS)}")

    @property
    def unit(self) -> str:
        """The unit of `price`."""
        return UNITS[self.quantity]

    @cached_property
    def _index(self) -> dict[tuple[Shape, Form], Row]:
        return {(row.shape, row.form): row for row in self.rows}

    def __len__(self) -> int:
        return len(self.rows)

    def __contains__(self, key: tuple[Shape, Form]) -> bool:
        shape, form = key
        return (as_deployed(shape), form) in self._index

    def row(self, shape: Shape, form: Form) -> Row:
        """The row of a layer in a form, or a `CostError` that says what is missing."""
        row = self._index.get((as_deployed(shape), form))
        if row is None:
            raise CostError(
                f"the table for {self.target} has no row for {form} of {shape}; measure it "
                "(haloc measure adds what is missing to a table) or fit a predictor"
            )
        return row

    def price(self, shape: Shape, form: Form) -> Estimate:
        """The median of the row and half its interquartile range."""
        row = self.row(shape, form)
        if self.quantity == "energy":
            if row.energy_mj is None:
                raise CostError(f"the table for {self.target} has no energies; only tables of accelerators have them")
            return Estimate(row.energy_mj)
        return Estimate(row.latency_ms, row.iqr_ms / 2)

    def of(self, quantity: str) -> Table:
        """The same rows, priced by latency or by energy."""
        return Table(self.target, self.rows, self.environment, quantity)

    def forms_of(self, shape: Shape) -> dict[Form, Row]:
        """All rows of one layer, by form."""
        wanted = as_deployed(shape)
        return {row.form: row for row in self.rows if row.shape == wanted}

    def fastest(self, shape: Shape) -> Form:
        """The form that costs least; dense where nothing measured is below it by more than the noise."""
        rows = self.forms_of(shape)
        dense = self.price(shape, Dense())
        prices = {form: self.price(shape, form) for form in rows if form != Dense()}
        best = min(prices, key=lambda form: prices[form].value, default=None)
        if best is None or prices[best].value + prices[best].error >= dense.value - dense.error:
            return Dense()
        return best

    def merged(self, other: Table) -> Table:
        """The rows of both; where both have one, that of ``other``."""
        if other.target != self.target:
            raise SpecError(f"the tables are of different targets: {self.target} and {other.target}")
        ours, theirs = self.environment.get("device"), other.environment.get("device")
        if self.rows and other.rows and ours != theirs:
            raise SpecError(f"the tables are of different devices: {ours!r} and {theirs!r}")
        return Table(self.target, tuple((self._index | other._index).values()), other.environment, self.quantity)

    def to_dict(self) -> dict[str, Any]:
        """Writes the table as plain JSON values."""
        return {
            "kind": KIND,
            "format": FORMAT,
            "target": self.target.to_dict(),
            "environment": dict(self.environment),
            "rows": [row.to_dict() for row in self.rows],
        }

    @classmethod
    def from_dict(cls, value: Any) -> Table:
        """Reads what `to_dict` wrote; anything else is refused with the reason."""
        if not isinstance(value, dict) or value.get("kind") != KIND:
            raise FileFormatError(f'not a table: expected a JSON object with "kind": "{KIND}"')
        if value.get("format") != FORMAT:
            found = shown(value.get("format"))
            raise FileFormatError(f"table format {found} is not known; this version reads {FORMAT}")
        rows, environment = value.get("rows"), value.get("environment")
        if not isinstance(rows, list) or not isinstance(environment, dict):
            raise FileFormatError('a table needs "rows" (a list) and "environment" (an object)')
        if len(rows) > MOST_ROWS:
            raise FileFormatError(f"a table may have {MOST_ROWS:,} rows, this one has {len(rows):,}; measure fewer")
        return cls(target_in(value), tuple(_rows(rows)), environment)

    def save(self, path: str | Path) -> None:
        """Writes the table as a JSON file, whole or not at all."""
        value = self.to_dict()
        write_json_rows(path, value, value.pop("rows"))

    @classmethod
    def load(cls, path: str | Path) -> Table:
        """Reads a table file."""
        with naming(path):
            return cls.from_dict(read_json(path, MOST_BYTES))


def target_in(value: Mapping[str, Any]) -> Target:
    """The target that a file says it is of."""
    try:
        return Target.from_dict(value.get("target"))
    except SpecError as error:
        raise FileFormatError(str(error)) from error


def _rows(values: Iterable[Any]) -> Iterable[Row]:
    before, shape = None, None  # the shape of the row before, as it is written and as it was read
    for number, value in enumerate(values):
        try:
            written = value.get("shape") if isinstance(value, dict) else None
            row = Row.from_dict(value, shape if written == before else None)
            before, shape = written, row.shape
            yield row
        except (FileFormatError, SpecError) as error:
            raise FileFormatError(f"row {number}: {error}") from error


#: In whatever unit: nobody waits so long, and sums and squares of it are still numbers.
_LARGEST = 1e30


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _LARGEST:
        raise FileFormatError(f"{name} must be a number not below 0, got {shown(value)}")
    return float(value)


def _positive(value: Any, name: str) -> float:
    number = _number(value, name)
    if number == 0:
        raise FileFormatError(f"{name} is 0; nothing costs nothing, so the row is not a measurement")
    return number
