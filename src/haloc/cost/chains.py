"""A layer in some form as something that runs: a chain of plain stages as torch functions or as an ONNX file.

Part of the measuring kit (see `kit`): plain Python 3.8, rows and targets are dicts, packages are imported where used.
"""

from __future__ import annotations

import itertools
import types
from math import prod
from typing import Any, Callable, ClassVar, Dict

#: A stage is a shape as `shape_to_dict` writes it.
Stage = Dict[str, Any]


def weight_shape(stage: Stage) -> tuple[int, ...]:
    """The extents of a stage's weight."""
    if stage["type"] == "linear":
        return (stage["out_features"], stage["in_features"])
    return (stage["out_channels"], stage["in_channels"] // stage["groups"], *stage["kernel"])


def input_shape(stage: Stage, batch: int) -> tuple[int, ...]:
    """The extents of a stage's input."""
    if stage["type"] == "linear":
        return (batch * stage["positions"], stage["in_features"])
    return (batch * stage["images"], stage["in_channels"], *stage["input_size"])


def has_activation(stages: list[Stage]) -> bool:
    """Convolutions are deployed with their activation; linear layers are mostly last."""
    return bool(stages[-1]["type"] == "conv")


def _pads(stage: Stage) -> list[tuple[int, int]]:
    """(before, after) per axis."""
    if stage["padding"] == "same":
        totals = [d * (k - 1) for d, k in zip(stage["dilation"], stage["kernel"])]
        return [(total // 2, total - total // 2) for total in totals]
    return [(pad, pad) for pad in stage["padding"]]


def torch_row(stages: list[Stage]) -> Callable[..., Any]:
    """A function (x, weights) that runs a chain of stages; ``weights`` holds a (weight, bias) pair for each."""
    import torch.nn.functional as F

    convs: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
    activation = has_activation(stages)

    def row(x: Any, weights: Any) -> Any:
        for stage, (weight, bias) in zip(stages, weights):
            if stage["type"] == "linear":
                x = F.linear(x, weight, bias)
                continue
            padding = stage["padding"]
            if stage["padding_mode"] != "zeros":
                around = [amount for pad in reversed(_pads(stage)) for amount in pad]
                x, padding = F.pad(x, around, mode=stage["padding_mode"]), 0
            conv = convs[len(stage["kernel"])]
            x = conv(x, weight, bias, stage["stride"], padding, stage["dilation"], stage["groups"])
        return F.relu_(x) if activation else x

    # A code object of its own: torch.compile keeps what it compiled by code object, and gives up after a few shapes.
    return types.FunctionType(row.__code__.replace(), row.__globals__, row.__name__, None, row.__closure__)


def onnx_row(stages: list[Stage], batch: int, copies: int, dtype: str, random: Any, pooled: bool = True) -> bytes:
    """An ONNX model that runs ``copies`` of a layer, each with its own weights, on one input.

    The runtimes keep activations in layouts of their own between layers, and a model of a single layer would time the
    conversions. Here all copies share them, and of each copy's output only one position goes on.

    Args:
        stages: The layer, as a chain.
        batch: Examples.
        copies: How often it is there.
        dtype: Of weights and activations.
        random: numpy's generator.
        pooled: Whether a pooling takes that position, or a convolution to a few channels. onnxruntime pools in its own
            layout only where channels fill whole blocks of 16, and converts the whole output otherwise: 88 channels
            seemed to take a quarter longer than 96. OpenVINO hands the stride of a convolution on to the one before,
            which then computes that one position alone.
    """
    graph = OnnxGraph()
    convs = has_activation(stages)
    total, seen = "", _SEEN if convs and not pooled else weight_shape(stages[-1])[0]
    for _ in range(copies):
        x = "x"
        for stage in stages:
            x = _onnx_stage(graph, x, stage, dtype, random)
        if convs:
            x = _onnx_position(graph, graph.node("Relu", x), stages[-1], pooled, dtype, random)
        total = graph.node("Add", total, x) if total else x
    inputs = input_shape(stages[0], batch)
    return graph.model(total, inputs, (inputs[0], seen, *([1] * len(stages[0].get("kernel", ())))), dtype)


#: Channels that a convolution makes of one position.
_SEEN = 16


def _onnx_position(graph: OnnxGraph, x: str, stage: Stage, pooled: bool, dtype: str, random: Any) -> str:
    """Adds what takes one position of a layer's output; returns its name."""
    ones = [1] * len(stage["kernel"])
    arguments = []
    if not pooled:
        shape = (_SEEN, weight_shape(stage)[0], *ones)
        arguments.append(graph.constant((random.standard_normal(shape) / shape[1] ** 0.5).astype(dtype)))
    operator = "MaxPool" if pooled else "Conv"
    return graph.node(operator, x, *arguments, kernel_shape=ones, strides=[1 << 16 for _ in ones])


def _onnx_stage(graph: OnnxGraph, x: str, stage: Stage, dtype: str, random: Any) -> str:
    """Adds one layer with random weights of a sensible size; returns the name of its output."""
    shape = weight_shape(stage)
    arguments = [graph.constant((random.standard_normal(shape) / prod(shape[1:]) ** 0.5).astype(dtype))]
    if stage["bias"]:
        arguments.append(graph.constant(random.standard_normal(shape[0]).astype(dtype)))
    if stage["type"] == "linear":
        return graph.node("Gemm", x, *arguments, transB=1)
    pads = _pads(stage)
    ends = [before for before, _ in pads] + [after for _, after in pads]
    if stage["padding_mode"] != "zeros":
        modes = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}
        around = [0, 0, *ends[: len(pads)], 0, 0, *ends[len(pads) :]]
        x = graph.node("Pad", x, graph.integers(around), mode=modes[stage["padding_mode"]])
        ends = [0] * len(ends)
    steps = {"strides": stage["stride"], "dilations": stage["dilation"], "kernel_shape": stage["kernel"]}
    return graph.node("Conv", x, *arguments, pads=ends, group=stage["groups"], **steps)


class OnnxGraph:
    """Writes an ONNX file without the onnx package: the few protobuf messages that a chain of layers needs."""

    #: TensorProto's numbers for element types.
    ELEMENTS: ClassVar[dict[str, int]] = {"float32": 1, "int64": 7, "float16": 10}

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._names = itertools.count()

    def constant(self, array: Any) -> str:
        """Adds an initialiser; returns its name."""
        name = f"w{next(self._names)}"
        dims = b"".join(_field(1, extent) for extent in array.shape)
        element = _field(2, self.ELEMENTS[str(array.dtype)])
        self._parts.append(_field(5, dims + element + _field(8, name) + _field(9, array.tobytes())))
        return name

    def integers(self, values: list[int]) -> str:
        """Adds a constant list of whole numbers; returns its name."""
        import numpy

        return self.constant(numpy.array(values, "int64"))

    def node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Adds an operator; returns the name of its output."""
        name = f"t{next(self._names)}"
        self._add_node(kind, inputs, name, attributes)
        return name

    def model(self, output: str, inputs: tuple[int, ...], outputs: tuple[int, ...], dtype: str) -> bytes:
        """The whole file: input x, output y, opset 19."""
        self._add_node("Identity", (output,), "y", {})
        values = self._value(11, "x", inputs, dtype) + self._value(12, "y", outputs, dtype)
        graph = b"".join(self._parts) + _field(2, "row") + values
        return _field(1, 9) + _field(7, graph) + _field(8, _field(1, "") + _field(2, 19))

    def _add_node(self, kind: str, inputs: tuple[str, ...], output: str, attributes: dict[str, Any]) -> None:
        parts = [_field(1, name) for name in inputs] + [_field(2, output), _field(4, kind)]
        parts += [_field(5, _field(1, name) + _attribute(value)) for name, value in attributes.items()]
        self._parts.append(_field(1, b"".join(parts)))

    def _value(self, field: int, name: str, shape: tuple[int, ...], dtype: str) -> bytes:
        dims = b"".join(_field(1, _field(1, extent)) for extent in shape)
        tensor = _field(1, self.ELEMENTS[dtype]) + _field(2, dims)
        return _field(field, _field(1, name) + _field(2, _field(1, tensor)))


def _attribute(value: Any) -> bytes:
    """AttributeProto's value and type: a word, a whole number or a list of them."""
    if isinstance(value, str):
        return _field(4, value) + _field(20, 3)
    if isinstance(value, int):
        return _field(3, value) + _field(20, 2)
    return b"".join(_field(8, item) for item in value) + _field(20, 7)


def _field(number: int, value: Any) -> bytes:
    """One protobuf field: a whole number, or bytes (words and nested messages alike)."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    content = value.encode() if isinstance(value, str) else value
    return b"".join((_varint(number << 3 | 2), _varint(len(content)), content))


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])
