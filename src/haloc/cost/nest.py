"""A plain layer as an accelerator sees it: eight nested loops over three tensors. Pure arithmetic, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from haloc.errors import SpecError
from haloc.shapes import ConvShape, LinearShape, Shape

#: The loops by their usual letters: images, groups, filters and channels of one group, output rows and columns, kernel
#: rows and columns.
LOOPS = ("B", "G", "K", "C", "OY", "OX", "FY", "FX")


@dataclass(frozen=True)
class Nest:
    """The loops of one layer. Bias, padding and how the border is filled are left out: they cost next to nothing.

    Attributes:
        extents: How often each of `LOOPS` runs.
        stride: Step along rows and columns.
        dilation: Spacing of the kernel's taps along rows and columns.
        input_size: Rows and columns of the input, without padding.
    """

    extents: tuple[int, ...]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    input_size: tuple[int, int]

    @property
    def loops(self) -> dict[str, int]:
        """The extents by letter."""
        return dict(zip(LOOPS, self.extents, strict=True))

    @property
    def macs(self) -> int:
        """Multiply-adds."""
        return prod(self.extents)

    @property
    def weights(self) -> int:
        """Words of weights."""
        return self._product("G", "K", "C", "FY", "FX")

    @property
    def outputs(self) -> int:
        """Words of outputs."""
        return self._product("B", "G", "K", "OY", "OX")

    @property
    def inputs(self) -> int:
        """Words of inputs that are used: a strided 1×1 skips most of them."""
        kernel, output = (self._extents("FY", "FX"), self._extents("OY", "OX"))
        rows, columns = map(touched, output, kernel, self.stride, self.dilation, self.input_size)
        return self._product("B", "G", "C") * rows * columns

    def _extents(self, *letters: str) -> tuple[int, ...]:
        return tuple(self.loops[letter] for letter in letters)

    def _product(self, *letters: str) -> int:
        return prod(self._extents(*letters))

    def __str__(self) -> str:
        loops = " ".join(f"{letter}{extent}" for letter, extent in self.loops.items() if extent > 1)
        return f"a layer with the loops {loops or 'of a single product'}"


@dataclass(frozen=True)
class StageCost:
    """What one plain layer costs on an accelerator, as an engine has it.

    Attributes:
        cycles: Clock cycles from the first word in to the last word out.
        energy_pj: Energy in picojoules.
        dram_bits: What goes over the memory bus, in both directions.
        bound_cycles: What it takes at least, in closed form.
    """

    cycles: float
    energy_pj: float
    dram_bits: float
    bound_cycles: float


def nest_of(shape: Shape) -> Nest:
    """The loops of a layer, batch 1; equal nests cost the same.

    A linear layer is a 1×1 convolution whose positions are rows, a Conv1d one of height 1.
    """
    if isinstance(shape, LinearShape):
        extents = (1, 1, shape.out_features, shape.in_features, shape.positions, 1, 1, 1)
        return Nest(extents, (1, 1), (1, 1), (shape.positions, 1))
    if len(shape.kernel) > 2:
        raise SpecError(
            f"the accelerator model knows one and two spatial axes, not a convolution with kernel "
            f"{'×'.join(map(str, shape.kernel))} ({shape.in_channels}→{shape.out_channels}); leave this layer out"
        )
    return _conv_nest(shape)


def touched(output: int, kernel: int, stride: int, dilation: int, size: int) -> int:
    """How many of an axis's ``size`` positions a convolution reads."""
    return min(size, len({stride * at + dilation * tap for at in range(output) for tap in range(kernel)}))


def _conv_nest(shape: ConvShape) -> Nest:
    kernel, output, size = map(_two_axes, (shape.kernel, shape.output_size, shape.input_size))
    # Along an axis where the kernel has a single tap, the positions between the strides are never fetched.
    stride, dilation = (
        tuple(step if taps > 1 else 1 for step, taps in zip(_two_axes(steps), kernel, strict=True))
        for steps in (shape.stride, shape.dilation)
    )
    seen = tuple(
        extent if taps > 1 else min(extent, used) for extent, taps, used in zip(size, kernel, output, strict=True)
    )
    extents = (shape.images, shape.groups, shape.group_out, shape.group_in, *output, *kernel)
    return Nest(extents, _pair(stride), _pair(dilation), _pair(seen))


def _two_axes(values: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns; a single axis is the columns of one row."""
    return _pair((1,) * (2 - len(values)) + tuple(values))


def _pair(values: tuple[int, ...]) -> tuple[int, int]:
    first, second = values
    return first, second
