"""What a network is made of, as plain values: one row per layer, and the sums. No torch here; `inspect` fills it in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from haloc.errors import FileFormatError, PlanError, nearest
from haloc.files import naming, read_json, write_json
from haloc.forms import Dense, Form, macs, misfit, params
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
            raise FileFormatError(f"layers format {value.get('format')!r} is not known; this version reads {FORMAT}")
        try:
            return cls(tuple(map(_row, value["layers"])), int(value["macs"]), int(value["params"]))
        except (KeyError, TypeError) as error:
            raise FileFormatError(f"a row of the layers is incomplete or malformed: {error}") from error

    def save(self, path: str | Path) -> None:
        """Writes the inventory as a JSON file, whole or not at all."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Inventory:
        """Reads an inventory file."""
        with naming(path):
            return cls.from_dict(read_json(path))


def _row(value: Any) -> LayerInfo:
    calls = tuple(map(shape_from_dict, value["calls"]))
    return LayerInfo(**value | {"calls": calls, "families": tuple(value["families"])})
