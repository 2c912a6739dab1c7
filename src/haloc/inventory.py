"""What a network is made of, as plain values: one row per layer, and the sums. No torch here; `inspect` fills it in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from haloc.errors import FileFormatError, PlanError, nearest, shown
from haloc.files import naming, read_json, write_json
from haloc.forms import FORMS, Dense, Form, macs, misfit, params
from haloc.shapes import Shape, shape_from_dict, shape_to_dict

KIND = "haloc-layers"
FORMAT = 1


@dataclass(frozen=True)
class LayerInfo:
    """One convolution or linear layer of a network.

    Attributes:
        name: Where it is, as in ``model.get_submodule(name)``.
        kind: Its class, such as Conv2d.
        calls: The shape of every call in one forward pass, in order; empty if it was not called or is transposed.
        params: Weights and biases.
        macs: Multiply-adds per example, over all calls.
        families: Names of the forms open to it; empty where it is left alone.
        reason: Why it is left alone, or None.
    """

    name: str
    kind: str
    calls: tuple[Shape, ...]
    params: int
    macs: int
    families: tuple[str, ...] = ()
    reason: str | None = None

    @property
    def shape(self) -> Shape:
        """The shape of its first call."""
        if not self.calls:
            raise ValueError(f"layer {self.name!r} has no shape: {self.reason}")
        return self.calls[0]

    def macs_as(self, form: Form) -> int:
        """Multiply-adds per example if it were written in ``form``."""
        return self.macs if isinstance(form, Dense) else sum(macs(shape, form) for shape in self.calls)

    def params_as(self, form: Form) -> int:
        """Weights and biases if it were written in ``form``."""
        return self.params if isinstance(form, Dense) else params(self.shape, form)

    def check(self, form: Form) -> None:
        """Raises a `PlanError` that names the layer and the difference if ``form`` does not fit it."""
        problem = self.reason if self.reason else misfit(self.shape, form)
        if problem:
            raise PlanError(f"the plan does not fit at layer {self.name!r}: {form} cannot be applied, {problem}")


@dataclass(frozen=True)
class Inventory:
    """All layers of a network in the order of its modules, and what the whole costs.

    Attributes:
        layers: The rows.
        macs: Multiply-adds per example of the whole network, with those outside of the rows (attention, say).
        params: All of its parameters.
    """

    layers: tuple[LayerInfo, ...]
    macs: int
    params: int

    def __iter__(self) -> Iterator[LayerInfo]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, name: str) -> LayerInfo:
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise PlanError(f"the model has no layer {name!r}.{nearest(name, (layer.name for layer in self.layers))}")

    @property
    def open_layers(self) -> tuple[LayerInfo, ...]:
        """The layers that some form is open to."""
        return tuple(layer for layer in self.layers if layer.families)

    @property
    def open_share(self) -> float:
        """The share of the network's multiply-adds that lies in layers open to some form."""
        return sum(layer.macs for layer in self.open_layers) / max(1, self.macs)

    def macs_of(self, plan: Mapping[str, Form]) -> int:
        """Multiply-adds per example of the whole network under ``plan``."""
        return self.macs + sum(layer.macs_as(form) - layer.macs for layer, form in self._changed(plan))

    def params_of(self, plan: Mapping[str, Form]) -> int:
        """Parameters of the whole network under ``plan``."""
        return self.params + sum(layer.params_as(form) - layer.params for layer, form in self._changed(plan))

    def check(self, plan: Mapping[str, Form]) -> None:
        """Raises a `PlanError` naming the first layer that does not fit."""
        for layer, form in self._changed(plan):
            layer.check(form)

    def _changed(self, plan: Mapping[str, Form]) -> list[tuple[LayerInfo, Form]]:
        return [(self[name], form) for name, form in plan.items() if not isinstance(form, Dense)]

    def to_dict(self) -> dict[str, Any]:
        """Writes the inventory as plain JSON values."""
        rows = [asdict(layer) | {"calls": [shape_to_dict(call) for call in layer.calls]} for layer in self.layers]
        return {"kind": KIND, "format": FORMAT, "macs": self.macs, "params": self.params, "layers": rows}

    @classmethod
    def from_dict(cls, value: Any) -> Inventory:
        """Reads what `to_dict` wrote; anything else is refused with the reason."""
        if not isinstance(value, dict) or value.get("kind") != KIND:
            raise FileFormatError(f'not a list of layers: expected a JSON object with "kind": "{KIND}"')
        if value.get("format") != FORMAT:
            found = shown(value.get("format"))
            raise FileFormatError(f"layers format {found} is not known; this version reads {FORMAT}")
        if not isinstance(value.get("layers"), list):
            raise FileFormatError(f'it is malformed: "layers" must be a list of rows, got {shown(value.get("layers"))}')
        rows = tuple(map(_row, value["layers"]))
        if len({row.name for row in rows}) < len(rows):
            raise FileFormatError("two of the layers have the same name")
        return cls(rows, _count(value, "macs"), _count(value, "params"))

    def save(self, path: str | Path) -> None:
        """Writes the inventory as a JSON file, whole or not at all."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Inventory:
        """Reads an inventory file."""
        with naming(path):
            return cls.from_dict(read_json(path))


def _row(value: Any) -> LayerInfo:
    """One layer; what is wrong with it is said with its name."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise FileFormatError(f"a row of the layers is malformed: it needs a name, got {shown(value)}")
    try:
        return _checked_row(value)
    except FileFormatError as error:
        raise FileFormatError(f"layer {shown(value['name'])} is malformed: {error}") from error


def _checked_row(value: dict[str, Any]) -> LayerInfo:
    calls, families, reason = value.get("calls"), value.get("families"), value.get("reason")
    if not isinstance(calls, list) or not isinstance(value.get("kind"), str):
        raise FileFormatError('it needs a "kind" (a text) and "calls" (a list of shapes)')
    if not isinstance(families, list) or not all(isinstance(name, str) and name in FORMS for name in families):
        raise FileFormatError(f'"families" are names of forms ({", ".join(FORMS)}), got {shown(families)}')
    if not (reason is None or isinstance(reason, str)) or (families and not calls):
        raise FileFormatError('"reason" is a text or null, and a layer with forms open to it has a shape')
    unknown = set(value) - {field.name for field in fields(LayerInfo)}
    if unknown:
        raise FileFormatError(f"it has {shown(min(unknown))}, which no layer has")
    shapes = tuple(map(shape_from_dict, calls))
    counts = {name: _count(value, name) for name in ("params", "macs")}
    return LayerInfo(value["name"], value["kind"], shapes, **counts, families=tuple(families), reason=reason)


#: More than any network will ever have, and still a number that can be worked with.
_MOST_COUNT = 2**80


def _count(value: dict[str, Any], name: str) -> int:
    found = value.get(name)
    if type(found) is not int or not 0 <= found <= _MOST_COUNT:
        raise FileFormatError(f'it is malformed: "{name}" must be a whole number from 0, got {shown(found)}')
    return found
