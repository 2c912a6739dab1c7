"""A space as a value: the ranks of a layer in a grid, the choices of a layer, those of a network; to and from JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from haloc.errors import FileFormatError, SpecError, shown
from haloc.forms import FORMS, Dense, Form, form_from_dict, form_to_dict, misfit, ranks
from haloc.shapes import Shape, as_deployed, shape_from_dict, shape_to_dict


@dataclass(frozen=True)
class Grid:
    """Rank settings of one layer in one form.

    Attributes:
        family: The form's name.
        runs: The settings, in rising order, as runs in which only the last rank changes: the ranks before it and the
            values that it takes. A run may be a ``range``, so that even a grid of all ranks is small.
    """

    family: str
    runs: tuple[tuple[tuple[int, ...], Sequence[int]], ...]

    @classmethod
    def of(cls, family: str, settings: Iterable[Sequence[int]]) -> Grid:
        """The grid of exactly these settings."""
        heads: dict[tuple[int, ...], list[int]] = {}
        for *head, last in sorted(set(map(tuple, settings))):
            heads.setdefault(tuple(head), []).append(last)
        return cls(family, tuple((head, tuple(values)) for head, values in heads.items()))

    def __len__(self) -> int:
        return sum(len(values) for _, values in self.runs)

    def __iter__(self) -> Iterator[Form]:
        return (FORMS[self.family](*(*head, last)) for head, values in self.runs for last in values)

    def __contains__(self, form: object) -> bool:
        if not isinstance(form, FORMS[self.family]):
            return False
        *head, last = ranks(form)
        return any(before == tuple(head) and last in values for before, values in self.runs)

    def near(self, level: Callable[[], float]) -> Form:
        """A form whose place in the grid is, rank by rank, what ``level`` says: 0 for the smallest, 1 the largest."""
        head, values = self.runs[_place(level(), len(self.runs))]
        return FORMS[self.family](*(*head, values[_place(level(), len(values))]))


@dataclass(frozen=True)
class LayerChoices:
    """What one layer may become.

    Attributes:
        calls: The shape of every call in one forward pass.
        grids: The ranks on offer; no setting is in two of them.
        dense: Whether the layer may also stay as it is.
    """

    calls: tuple[Shape, ...]
    grids: tuple[Grid, ...] = ()
    dense: bool = True

    def __len__(self) -> int:
        return self.dense + sum(map(len, self.grids))

    def __iter__(self) -> Iterator[Form]:
        """All candidates, dense first."""
        if self.dense:
            yield Dense()
        for grid in self.grids:
            yield from grid

    def __contains__(self, form: object) -> bool:
        return (self.dense and form == Dense()) or any(form in grid for grid in self.grids)


@dataclass(frozen=True)
class RankSpace:
    """The settings of a network: one choice per layer.

    Attributes:
        layers: The layers that were called; those with nothing to choose are in it too, as dense ones.
        outside: What of the whole network is in none of them, "macs" (per example) and "params": attention, BatchNorm,
            layers that were not called. With it the layers add up to `Inventory.macs_of` and `Inventory.params_of`:
            multiply-adds over all calls of a layer, parameters once for each layer, however often it is called.
            Weights that layers share are counted by each of them and taken off here, so this may be below zero.
    """

    layers: Mapping[str, LayerChoices]
    outside: Mapping[str, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """How many different networks the space holds, as an exact integer."""
        return prod(map(len, self.layers.values()))

    @property
    def open_layers(self) -> dict[str, LayerChoices]:
        """The layers that have something else than dense on offer."""
        return {name: choices for name, choices in self.layers.items() if choices.grids}

    def rows(self) -> tuple[tuple[Shape, Form], ...]:
        """Everything that has to be priced: each distinct layer, as deployed, in each of its forms.

        The forms of one layer stand together with dense first: it is what all others are compared with, so it is there
        whether it may be chosen or not.
        """
        found: dict[Shape, dict[Form, None]] = {}
        for choices in self.layers.values():
            for shape in map(as_deployed, choices.calls):
                found.setdefault(shape, {Dense(): None}).update(dict.fromkeys(choices))
        return tuple((shape, form) for shape, forms in found.items() for form in forms)

    def to_dict(self) -> dict[str, Any]:
        """Writes the space as plain JSON values, form by form: one of all pairs of ranks takes a lot of room."""
        layers = [{"name": name, **_choices_to_dict(choices)} for name, choices in self.layers.items()]
        return {"layers": layers, "outside": dict(self.outside)}

    @classmethod
    def from_dict(cls, value: Any) -> RankSpace:
        """Reads what `to_dict` wrote: the same forms in the same order, though perhaps in other grids."""
        if not isinstance(value, dict) or not isinstance(value.get("layers"), list):
            raise FileFormatError('not a rank space: expected a JSON object with "layers" and "outside"')
        layers: dict[str, LayerChoices] = {}
        for row in value["layers"]:
            name = row.get("name") if isinstance(row, dict) else None
            if not isinstance(name, str) or name in layers:
                raise FileFormatError(f"every layer of a rank space has a name of its own, got {shown(name)}")
            layers[name] = _named_choices(name, row)
        return cls(layers, _checked_outside(value.get("outside")))


def _place(level: float, count: int) -> int:
    """The index in 0..count−1 at ``level`` of the way; what lies beyond is the first or the last."""
    return min(max(int(level * count), 0), count - 1)


def _choices_to_dict(choices: LayerChoices) -> dict[str, Any]:
    forms = [form_to_dict(form) for grid in choices.grids for form in grid]
    return {"calls": [shape_to_dict(call) for call in choices.calls], "forms": forms, "dense": choices.dense}


def _named_choices(name: str, row: dict[str, Any]) -> LayerChoices:
    """Reads the choices of one layer; what is wrong with them is said with its name."""
    try:
        return _choices_from_dict(row)
    except (KeyError, TypeError) as error:
        raise FileFormatError(f"layer {shown(name)} of the rank space is incomplete or malformed: {error}") from error
    except (FileFormatError, SpecError) as error:
        raise FileFormatError(f"layer {shown(name)} of the rank space: {error}") from error


def _choices_from_dict(row: dict[str, Any]) -> LayerChoices:
    calls = tuple(map(shape_from_dict, row["calls"]))
    forms = tuple(map(form_from_dict, row["forms"]))
    dense = row["dense"]
    if not isinstance(dense, bool) or not (dense or forms):
        raise FileFormatError(f"dense is true or false, and true where there is no form; got {shown(dense)}")
    if Dense() in forms or len(set(forms)) < len(forms):
        raise FileFormatError("a form is listed once, and dense is not listed")
    for problem in (misfit(call, form) for call in calls for form in forms):
        if problem:
            raise FileFormatError(problem)
    return LayerChoices(calls, _grids_in_order(forms), dense)


def _grids_in_order(forms: Iterable[Form]) -> tuple[Grid, ...]:
    """Grids that list the forms in this very order: a new one begins with a new form or where ranks do not rise."""
    parts: list[list[Form]] = []
    for form in forms:
        last = parts[-1][-1] if parts else Dense()
        if form.name == last.name and ranks(form) > ranks(last):
            parts[-1].append(form)
        else:
            parts.append([form])
    return tuple(Grid.of(part[0].name, map(ranks, part)) for part in parts)


#: More than any network has; still a number that can be worked with.
_MOST_OUTSIDE = 2**80


def _checked_outside(value: Any) -> dict[str, int]:
    if not isinstance(value, dict) or not all(type(x) is int and abs(x) <= _MOST_OUTSIDE for x in value.values()):
        raise FileFormatError(
            f'what lies outside of the layers is "macs" and "params" as whole numbers, got {shown(value)}'
        )
    return value
