"""A predictor: prices of rows that were not measured, learnt from those that were, and which rows those should be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from haloc.cost.model import Estimate
from haloc.cost.stagewise import Array, Chains, Settings, StageModel, find_settings, fit, kind, prior_covariance
from haloc.cost.table import Row, Table
from haloc.errors import CostError, SpecError
from haloc.files import write_json
from haloc.forms import Dense, Form, stages
from haloc.shapes import Shape, as_deployed

KIND = "haloc-predictor"

#: With fewer rows than this there is nothing to learn from and nothing to hold out.
LEAST_ROWS = 8

#: How many rows are learnt from at most, and how many the settings are found with: beyond that it is only slower.
MOST_ROWS, MOST_FOR_SETTINGS = 300, 80

#: For choosing rows: the noise of one measurement against the strength of what is to be learnt, and how much more it
#: matters to know dense, which everything is compared with, than one of the many other forms of a layer.
_NOISE, _DENSE_WEIGHT = 0.1, 3.0


@dataclass(frozen=True, eq=False)
class Predictor:
    """A `CostModel` that has the measured rows as they are and predicts all others.

    Attributes:
        table: The rows it was fitted on.
        held_out_error: Median relative error on rows that were left out of the fit, by repeated cross-validation.
        worst: The largest such error.
        count: How many rows the table has.
    """

    table: Table
    held_out_error: float
    worst: float
    count: int
    _model: StageModel
    _spread: float
    _kinds: frozenset[str]
    _asked: dict[tuple[Shape, Form], Estimate] = field(default_factory=dict)

    def __str__(self) -> str:
        """How far to trust it, in one sentence."""
        return (
            f"rows that are not in the table are predicted: half of them within {self.held_out_error:.1%}, "
            f"the worst off by {self.worst:.0%} (held out)"
        )

    @property
    def quantity(self) -> str:
        """What is priced: latency or energy."""
        return self.table.quantity

    @property
    def unit(self) -> str:
        """The unit of `price`."""
        return self.table.unit

    def price(self, shape: Shape, form: Form) -> Estimate:
        """The measured price, or a predicted one with the error that half of the held-out rows stayed within.

        The error grows with the distance from everything that was measured. A kind of layer of which no row was
        measured at all is refused.
        """
        if (shape, form) in self.table:
            return self.table.price(shape, form)
        # A search asks for the same few rows over and over.
        key = as_deployed(shape), form
        if key not in self._asked:
            self._asked[key] = self._predicted(*key)
        return self._asked[key]

    def _predicted(self, shape: Shape, form: Form) -> Estimate:
        unseen = [kind(stage) for stage in stages(shape, form) if kind(stage) not in self._kinds]
        if unseen:
            raise CostError(
                f"the predictor for {self.table.target} was fitted without any {unseen[0]}, so it cannot price {form} "
                f"of {shape}; measure some and fit it again"
            )
        (logarithm,), (deviation,) = self._model.predict(Chains.of([(shape, form)]))
        value = float(np.exp(logarithm))
        return Estimate(value, value * max(self._spread * float(deviation), self.held_out_error))

    def forms_of(self, shape: Shape) -> dict[Form, Row]:
        """The forms of one layer that were measured."""
        return self.table.forms_of(shape)

    def save(self, path: str | Path) -> None:
        """Writes what can be said about it as a JSON file, to lie beside the table that it is fitted on."""
        write_json(path, self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """What can be said about it, as plain JSON values; the table is all that is needed to fit it again."""
        return {
            "kind": KIND,
            "target": str(self.table.target),
            "quantity": self.quantity,
            "rows": self.count,
            "held_out_error": self.held_out_error,
            "worst": self.worst,
        }


def completed(table: Table) -> Table | Predictor:
    """The table, with the rows that it lacks predicted where there are enough to learn from."""
    return table if len(table) < LEAST_ROWS else fit_predictor(table)


def fit_predictor(table: Table) -> Predictor:
    """Fits a predictor to the rows of a table; the same rows give the same predictor."""
    if len(table) < LEAST_ROWS:
        raise CostError(f"a predictor needs at least {LEAST_ROWS} rows, the table for {table.target} has {len(table)}")
    rows = _evenly([(row.shape, row.form) for row in table.rows], MOST_ROWS)
    chains, estimates = Chains.of(rows), [table.price(*row) for row in rows]
    prices = np.array([estimate.value for estimate in estimates])
    # Samples that are far apart still have a median that is not as far off.
    doubts = np.array([estimate.error / estimate.value / 2 for estimate in estimates])
    few = np.array(_evenly(range(len(rows)), MOST_FOR_SETTINGS))
    settings = find_settings(chains.take(few), prices[few], doubts[few])
    errors, deviations = _held_out(chains, prices, doubts, settings)
    relative = np.abs(np.expm1(errors))
    kinds = frozenset(kind(stage) for row in table.rows for stage in stages(row.shape, row.form))
    return Predictor(
        table=table,
        held_out_error=float(np.median(relative)),
        worst=float(relative.max()),
        count=len(table),
        _model=fit(chains, prices, doubts, settings),
        _spread=float(np.median(np.abs(errors) / deviations)),
        _kinds=kinds,
    )


def choose_rows(rows: Sequence[tuple[Shape, Form]], share: str | int) -> tuple[tuple[Shape, Form], ...]:
    """Which rows to measure so that a predictor knows most about the others.

    Takes one row after the other: the one that, once measured, tells most about all rows and most of all about dense
    ones, as far as can be said before anything is measured (rows are alike where their stages are). Every layer has a
    row as long as there are enough.

    Args:
        rows: All rows, as `RankSpace.rows` lists them.
        share: How many: "20%" of them, or a number.

    Returns:
        The rows chosen, in the order of ``rows``; the same rows for the same input.
    """
    count = parse_share(str(share), len(rows))
    candidates = _evenly(rows, max(MOST_ROWS, count))
    covariance = prior_covariance(Chains.of(candidates))
    noise = _NOISE**2 * float(np.diag(covariance).mean())
    matters = np.array([_DENSE_WEIGHT if form == Dense() else 1.0 for _, form in candidates])
    chosen: list[int] = []
    for left in range(count, 0, -1):
        told = matters @ covariance**2 / (np.diag(covariance) + noise)
        told[_closed([shape for shape, _ in candidates], chosen, left)] = -1.0
        best = int(told.argmax())
        chosen.append(best)
        column = covariance[:, best]
        covariance = covariance - np.outer(column, column) / (column[best] + noise)
    return tuple(candidates[index] for index in sorted(chosen))


def parse_share(text: str, total: int) -> int:
    """How many of ``total`` a share is: "20%" of them rounded up, or a number as it is, and never more than all."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%|(\d+)", text.strip())
    if match is None:
        raise SpecError(f'expected a share of the rows such as "20%" or a number of rows such as 25, got {text!r}')
    if match[2] is not None:
        count = int(match[2])
    elif float(match[1]) > 100:
        raise SpecError(f"a share of the rows cannot be more than 100%, got {text!r}")
    else:
        count = int(np.ceil(float(match[1]) / 100 * total - 1e-9))
    if count < 1:
        raise SpecError(f"at least one row has to be measured, got {text!r} of {total}")
    return min(count, total)


def _closed(shapes: list[Shape], chosen: list[int], left: int) -> list[int]:
    """What may not be chosen: what was already, and rows of layers that have one once the rest is needed for others."""
    missing = set(shapes) - {shapes[index] for index in chosen}
    reserved = bool(missing) and left <= len(missing)
    return [index for index, shape in enumerate(shapes) if index in chosen or (reserved and shape not in missing)]


def _held_out(chains: Chains, prices: Array, doubts: Array, settings: Settings) -> tuple[Array, Array]:
    """Errors of the logarithm on held-out rows, and the deviations that were predicted for them."""
    from sklearn.model_selection import RepeatedKFold

    repeats = 4 if len(prices) <= MOST_ROWS / 2 else 1
    errors, deviations = [], []
    for kept, left in RepeatedKFold(n_splits=5, n_repeats=repeats, random_state=0).split(prices):
        found, deviation = fit(chains.take(kept), prices[kept], doubts[kept], settings).predict(chains.take(left))
        errors.append(found - np.log(prices[left]))
        deviations.append(deviation)
    return np.concatenate(errors), np.concatenate(deviations)


def _evenly(items: Sequence[Any], most: int) -> list[Any]:
    """All items, or ``most`` of them at even distances."""
    if len(items) <= most:
        return list(items)
    return [items[index] for index in np.linspace(0, len(items) - 1, most).round().astype(int)]
