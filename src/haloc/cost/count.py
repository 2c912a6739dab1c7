"""Costs that follow from shapes alone: multiply-adds, parameters, activations, bytes moved. Nothing is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from haloc.cost.model import Estimate
from haloc.errors import SpecError, nearest
from haloc.forms import Form, stages
from haloc.shapes import ConvShape, LinearShape, Shape


def elements_read(stage: Shape) -> int:
    """Numbers in the input of one example."""
    if isinstance(stage, LinearShape):
        return stage.positions * stage.in_features
    return stage.images * stage.in_channels * prod(stage.input_size)


def elements_written(stage: Shape) -> int:
    """Numbers in the output of one example."""
    if isinstance(stage, LinearShape):
        return stage.positions * stage.out_features
    return stage.images * stage.out_channels * prod(stage.output_size)


def _macs(stage: Shape, batch_size: int, element_bytes: int) -> int:
    return batch_size * stage.macs


def _params(stage: Shape, batch_size: int, element_bytes: int) -> int:
    return stage.params


def _activations(stage: Shape, batch_size: int, element_bytes: int) -> int:
    return element_bytes * batch_size * elements_written(stage)


def _bytes(stage: Shape, batch_size: int, element_bytes: int) -> int:
    """Every stage reads its input and its weights once and writes its output: no cache, no fusion."""
    return element_bytes * (batch_size * (elements_read(stage) + elements_written(stage)) + stage.params)


#: What can be counted: for one plain layer, the batch and the bytes of a number.
COUNTS: dict[str, Callable[[Shape, int, int], int]] = {
    "macs": _macs,
    "params": _params,
    "activations": _activations,
    "bytes": _bytes,
}
_BYTES = ("activations", "bytes")


@dataclass(frozen=True)
class Count:
    """A cost model that counts, over the plain layers a form consists of; its prices are exact.

    Attributes:
        quantity: macs, params, activations (bytes that the layers write) or bytes (all that they read and write).
        batch_size: Examples per run; parameters do not depend on it.
        element_bytes: Bytes of one number.
        biased: Of params: every factor but the last has a bias besides, as BatchNorms between the factors of a
            convolution leave them when they are multiplied in. Some of these move on into the layer's own bias, so a
            network has as many at the most.
    """

    quantity: str
    batch_size: int = 1
    element_bytes: int = 4
    biased: bool = False

    def __post_init__(self) -> None:
        if self.quantity not in COUNTS:
            raise SpecError(
                f"{self.quantity!r} cannot be counted, expected one of {', '.join(COUNTS)}."
                f"{nearest(self.quantity, COUNTS)}"
            )
        for name in ("batch_size", "element_bytes"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise SpecError(f"{name} must be a whole number above 0, got {getattr(self, name)!r}")

    @property
    def unit(self) -> str:
        """B for bytes, nothing for plain counts."""
        return "B" if self.quantity in _BYTES else ""

    def price(self, shape: Shape, form: Form) -> Estimate:
        """The sum over the layers that ``shape`` becomes."""
        count, parts = COUNTS[self.quantity], stages(shape, form)
        total = sum(count(stage, self.batch_size, self.element_bytes) for stage in parts)
        return Estimate(total + self._biases(parts))

    def _biases(self, parts: Sequence[Shape]) -> int:
        if not self.biased or self.quantity != "params":
            return 0
        return sum(part.out_channels for part in parts[:-1] if isinstance(part, ConvShape))
