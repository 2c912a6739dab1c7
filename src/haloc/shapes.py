"""Layer shapes and what a dense layer of that shape costs. Pure arithmetic, no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

from haloc.errors import FileFormatError, SpecError, shown

#: No layer that a machine could hold has an extent beyond this.
MOST = 2**31 - 1
#: Nor more axes.
_MOST_AXES = 8


@dataclass(frozen=True)
class ConvShape:
    """A convolution as one example meets it.

    Attributes:
        in_channels: C, channels of the input.
        out_channels: F, channels of the output.
        kernel: One extent per spatial axis (K1, K2 for Conv2d).
        input_size: The input's spatial extents.
        stride: Step per axis.
        padding: Padding on both sides of every axis, or "same".
        dilation: Spacing of the kernel's taps per axis.
        groups: Number of groups.
        bias: Whether a bias is added.
        padding_mode: How the border is filled: zeros, reflect, replicate or circular.
        images: How many images of this size one example sends through (more than 1 when frames share a layer).
    """

    in_channels: int
    out_channels: int
    kernel: tuple[int, ...]
    input_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int = 1
    bias: bool = True
    padding_mode: str = "zeros"
    images: int = 1

    def __post_init__(self) -> None:
        for name in ("kernel", "input_size", "stride", "padding", "dilation"):
            value = getattr(self, name)
            if not isinstance(value, str):
                object.__setattr__(self, name, tuple(value))
        axes = {len(v) for v in (self.kernel, self.input_size, self.stride, self.dilation)}
        if len(axes) != 1 or (self.padding != "same" and len(self.padding) not in axes):
            raise SpecError(f"a convolution's kernel, sizes and steps must have equally many axes, got {self}")
        if self.groups < 1 or self.in_channels % self.groups or self.out_channels % self.groups:
            raise SpecError(
                f"{self.groups} groups do not divide {self.in_channels} input and {self.out_channels} output channels"
            )

    @property
    def group_in(self) -> int:
        """Input channels of one group."""
        return self.in_channels // self.groups

    @property
    def group_out(self) -> int:
        """Output channels of one group."""
        return self.out_channels // self.groups

    @property
    def pointwise(self) -> bool:
        """Whether every kernel extent is 1, so that the layer is a matrix applied at each position."""
        return prod(self.kernel) == 1

    @property
    def depthwise(self) -> bool:
        """Whether every group reads a single channel, so that there is no channel mixing to factorise."""
        return self.groups > 1 and self.group_in == 1

    @property
    def output_size(self) -> tuple[int, ...]:
        """The output's spatial extents."""
        return tuple(map(_output_extent, self.input_size, self.kernel, self.stride, self._pads(), self.dilation))

    @property
    def params(self) -> int:
        """Weights and biases."""
        return self.out_channels * self.group_in * prod(self.kernel) + self.out_channels * self.bias

    @property
    def macs(self) -> int:
        """Multiply-adds of one example."""
        return self.images * prod(self.output_size) * self.out_channels * self.group_in * prod(self.kernel)

    def _pads(self) -> tuple[int, ...]:
        """Total padding (both sides together) per axis."""
        if isinstance(self.padding, str):
            return tuple(d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True))
        return tuple(2 * p for p in self.padding)


@dataclass(frozen=True)
class LinearShape:
    """A fully connected layer, applied at ``positions`` places of one example (tokens, say)."""

    in_features: int
    out_features: int
    bias: bool = True
    positions: int = 1

    @property
    def params(self) -> int:
        """Weights and biases."""
        return self.out_features * (self.in_features + self.bias)

    @property
    def macs(self) -> int:
        """Multiply-adds of one example."""
        return self.positions * self.in_features * self.out_features


Shape = ConvShape | LinearShape


def as_deployed(shape: Shape) -> Shape:
    """The layer as it runs once BatchNorm has been folded into it: with a bias, whether it had one or not."""
    return shape if shape.bias else replace(shape, bias=True)


def shape_to_dict(shape: Shape) -> dict[str, Any]:
    """Writes a shape as plain JSON values."""
    return {"type": "conv" if isinstance(shape, ConvShape) else "linear", **asdict(shape)}


def shape_from_dict(value: Any) -> Shape:
    """Reads what `shape_to_dict` wrote, or says what is wrong with it."""
    kinds: dict[str, Callable[..., Shape]] = {"conv": ConvShape, "linear": LinearShape}
    if not isinstance(value, dict) or value.get("type") not in tuple(kinds):
        raise FileFormatError(f'expected a shape of type "conv" or "linear", got {shown(value)}')
    given = {key: item for key, item in value.items() if key != "type"}
    for key, item in given.items():
        if key in _KINDS and not _KINDS[key](item):
            raise FileFormatError(f"not a {value['type']} shape: {key} cannot be {shown(item)}")
    try:
        return kinds[value["type"]](**given)
    except (TypeError, SpecError) as error:
        raise FileFormatError(f"not a {value['type']} shape: {error}") from error


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MOST


def _are_counts(value: Any, least: int = 1) -> bool:
    listed = isinstance(value, list | tuple) and 1 <= len(value) <= _MOST_AXES
    return listed and all(type(item) is int and least <= item <= MOST for item in value)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


#: What the attributes of shapes may be in a file.
_KINDS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("in_channels", "out_channels", "in_features", "out_features", "groups", "images"), _is_count),
    **dict.fromkeys(("kernel", "input_size", "stride", "dilation"), _are_counts),
    "positions": _is_count,
    "padding": lambda value: value == "same" or _are_counts(value, least=0),
    "padding_mode": lambda value: value in ("zeros", "reflect", "replicate", "circular"),
    "bias": _is_bool,
}


def _output_extent(size: int, kernel: int, stride: int, pad: int, dilation: int) -> int:
    """Extent of a convolution's output along one axis."""
    return (size + pad - dilation * (kernel - 1) - 1) // stride + 1
