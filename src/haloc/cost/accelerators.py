"""The accelerators that can be priced: Eyeriss, or one that the user has a ZigZag description of."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from haloc.cost.eyeriss import Eyeriss
from haloc.errors import FileFormatError, SpecError
from haloc.files import read_whole

#: The most bytes of a description; they have a few thousand.
MOST_BYTES = 256 << 10


@dataclass(frozen=True)
class OwnAccelerator:
    """An accelerator in a YAML file of ZigZag's.

    Attributes:
        path: The file.
        mapping: A mapping file of ZigZag's, for arrays that it finds no unrolling of itself; the entry "Conv" or
            "default" counts for all layers. Without it the operand I1 is for inputs, I2 for weights, O for outputs.
        clock_mhz: Clock, which such a file does not have; it only turns cycles into time.
        word_bits: Width of weights, activations and partial sums.
    """

    path: Path
    mapping: Path | None = None
    clock_mhz: float = 200.0
    word_bits: int = 8

    def __post_init__(self) -> None:
        if not (self.clock_mhz > 0 and self.word_bits > 0):
            raise SpecError(f"an accelerator's clock_mhz and word_bits must be positive, got {self}")

    @property
    def digest(self) -> str:
        """A hash of the whole description."""
        parts = [_content(self.path), f"{self.clock_mhz} {self.word_bits}".encode()]
        parts += [] if self.mapping is None else [_content(self.mapping)]
        return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]

    def __str__(self) -> str:
        return str(self.path)


Hardware = Eyeriss | OwnAccelerator


def as_hardware(hardware: Hardware | Path | str) -> Hardware:
    """Takes a path for the accelerator that it describes."""
    return OwnAccelerator(Path(hardware)) if isinstance(hardware, str | Path) else hardware


def _content(path: Path) -> bytes:
    try:
        return read_whole(path, MOST_BYTES)
    except FileFormatError as error:
        raise FileFormatError(f"cannot read the accelerator {path}: {error}") from error
