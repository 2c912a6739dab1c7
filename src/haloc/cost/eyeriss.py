"""Eyeriss as a few numbers, how its row-stationary dataflow lays a layer over the array, and what that takes at least.

Pure arithmetic, no torch and no engine. Where the numbers come from is said in docs/eyeriss.md.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from math import ceil, prod

from haloc.cost.nest import Nest, StageCost, nest_of
from haloc.errors import SpecError
from haloc.shapes import Shape


@dataclass(frozen=True)
class Eyeriss:
    """The accelerator: an array of processing elements (PEs) with scratch pads, a global buffer, and DRAM.

    Attributes:
        rows: PEs in a column of the array.
        columns: PEs in a row of it.
        clock_mhz: Clock of the array; it only turns cycles into time.
        dram_bits_per_cycle: Bandwidth of the memory bus, both directions together.
        buffer_bits_per_cycle: Bandwidth of the global buffer, for reading and for writing.
        pad_bits_per_cycle: Bandwidth of each scratch pad, for reading and for writing.
        word_bits: Width of weights, activations and partial sums.
        global_buffer_kb: Size of the global buffer.
        filter_buffer_kb: The part of it that only holds weights on their way to the array.
        ifmap_words: Inputs in one PE's scratch pad.
        filter_words: Weights in one PE's scratch pad.
        psum_words: Partial sums in one PE's scratch pad.
        mac_pj: Energy of a multiply-add.
        ifmap_pj: Energy of a word from or to the inputs' scratch pad.
        filter_pj: Energy of a word from or to the weights' scratch pad.
        psum_pj: Energy of a word from or to the partial sums' scratch pad.
        buffer_pj: Energy of a word from or to the global buffer.
        dram_pj: Energy of a word from or to DRAM.
    """

    rows: int = 12
    columns: int = 14
    clock_mhz: float = 200.0
    dram_bits_per_cycle: int = 128
    buffer_bits_per_cycle: int = 256
    pad_bits_per_cycle: int = 32
    word_bits: int = 16
    global_buffer_kb: int = 108
    filter_buffer_kb: int = 8
    ifmap_words: int = 12
    filter_words: int = 224
    psum_words: int = 24
    mac_pj: float = 2.2
    ifmap_pj: float = 0.24
    filter_pj: float = 1.59
    psum_pj: float = 0.25
    buffer_pj: float = 18.8
    dram_pj: float = 128.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise SpecError(f"Eyeriss takes a positive number as {field.name}, got {value!r}")
            if field.type == "int" and not isinstance(value, int):
                raise SpecError(f"Eyeriss takes a whole number as {field.name}, got {value!r}")
        if self.filter_buffer_kb >= self.global_buffer_kb:
            raise SpecError(
                f"Eyeriss keeps filter_buffer_kb of its global_buffer_kb for weights, so "
                f"{self.filter_buffer_kb} must be less than {self.global_buffer_kb}"
            )

    @property
    def shared_buffer_bits(self) -> int:
        """What the global buffer has for activations and partial sums."""
        return (self.global_buffer_kb - self.filter_buffer_kb) * 1024 * 8

    @property
    def digest(self) -> str:
        """A hash of the whole description."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return f"Eyeriss with {self.rows}×{self.columns} PEs"


#: The accelerator as published.
EYERISS = Eyeriss()


@dataclass(frozen=True)
class Unrolling:
    """Which loops run side by side in the array instead of one after the other.

    Attributes:
        columns: How often each loop is laid across the columns.
        rows: How often each loop is laid down the rows.
    """

    columns: Mapping[str, int]
    rows: Mapping[str, int]

    def remaining(self, nest: Nest) -> dict[str, int]:
        """How often each loop still runs one after the other; the last round may leave PEs idle."""
        across, down = self.columns, self.rows
        return {loop: ceil(n / (across.get(loop, 1) * down.get(loop, 1))) for loop, n in nest.loops.items()}

    def cycles(self, nest: Nest) -> int:
        """Cycles of the array if it never waits."""
        return prod(self.remaining(nest).values())


def unrollings(nest: Nest, hardware: Eyeriss = EYERISS) -> list[Unrolling]:
    """All row-stationary ways to lay a layer over the array, those with the fewest cycles first.

    A row of the kernel stays in a PE: the kernel's rows go down the array, the output's rows across it. What is left
    of a column takes channels, filters and groups, what is left of a row takes filters and groups.
    """
    loops = nest.loops
    kernel_rows = min(loops["FY"], hardware.rows)
    across = list(_fillings(("OY", "K", "G"), loops, hardware.columns))
    down = list(_fillings(("C", "K", "G"), loops, hardware.rows // kernel_rows))
    found = [
        Unrolling(columns, {"FY": kernel_rows} | rows)
        for columns in across
        for rows in down
        if all(columns[loop] * rows[loop] <= loops[loop] for loop in ("K", "G"))
    ]
    # Among equals output rows come first: it is what the dataflow reuses inputs and weights along.
    return sorted(found, key=lambda u: (u.cycles(nest), *(-n for n in (*u.columns.values(), *u.rows.values()))))


def bound(stage: Shape | Nest, hardware: Eyeriss = EYERISS) -> StageCost:
    """What a layer takes at least, in closed form.

    The cycles are those of an array that never waits, or of a memory bus that moves every word once, whichever is
    more. The energy is that of the multiply-adds, of every word over the bus once, and of activations into and out of
    the global buffer once.
    """
    nest = stage if isinstance(stage, Nest) else nest_of(stage)
    activations = nest.inputs + nest.outputs
    words = nest.weights + activations
    bits = words * hardware.word_bits
    cycles = max(unrollings(nest, hardware)[0].cycles(nest), bits / hardware.dram_bits_per_cycle)
    energy = nest.macs * hardware.mac_pj + words * hardware.dram_pj + 2 * activations * hardware.buffer_pj
    return StageCost(float(cycles), energy, float(bits), float(cycles))


def _fillings(letters: tuple[str, ...], loops: Mapping[str, int], room: int) -> Iterator[dict[str, int]]:
    """All ways to lay loops side by side in ``room`` places."""
    if not letters:
        yield {}
        return
    first, *rest = letters
    for count in range(1, min(loops[first], room) + 1):
        for filling in _fillings(tuple(rest), loops, room // count):
            yield {first: count} | filling
