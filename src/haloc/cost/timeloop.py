"""Timeloop as an engine: runs the ``timeloop-mapper`` that is on the PATH on Eyeriss, one layer at a time.

Layer, architecture and constraints are written in the format of Timeloop's own configs/mapper/eyeriss-256.yaml, but as
JSON, which is YAML too. Energies are given with every memory, so that Accelergy is not needed.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from haloc.cost.accelerators import Hardware
from haloc.cost.eyeriss import Eyeriss, bound
from haloc.cost.nest import Nest, StageCost
from haloc.errors import CostError, SpecError

BINARY = "timeloop-mapper"

#: Timeloop's letters for our loops; its R and P run along the width.
_LETTERS = {"B": "N", "G": "G", "K": "K", "C": "C", "OY": "Q", "OX": "P", "FY": "S", "FX": "R"}

#: One thread, so that a search does not depend on timing; it ends after this many mappings without a better one.
_MAPPER = {
    "algorithm": "hybrid",
    "optimization_metrics": ["edp"],
    "num_threads": 1,
    "timeout": 10_000,
    "victory_condition": 500,
}


class Timeloop:
    """The engine for Eyeriss."""

    def __init__(self, hardware: Hardware) -> None:
        if not isinstance(hardware, Eyeriss):
            raise SpecError("Timeloop runs on Eyeriss only; a description in ZigZag's format needs engine='zigzag'")
        self.hardware = hardware

    def price(self, nest: Nest) -> StageCost:
        """The cost of a layer in the mapping with the least product of energy and delay that Timeloop finds."""
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder, "layer.yaml")
            config.write_text(json.dumps(configuration(nest, self.hardware)), encoding="utf-8")
            command = [_binary(), str(config), "-o", folder]
            ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
            stats = Path(folder, f"{BINARY}.stats.txt")
            text = stats.read_text(encoding="utf-8", errors="replace") if stats.is_file() else ""
        cycles, energy = (re.search(rf"^{name}: ([\d.eE+]+)", text, re.MULTILINE) for name in ("Cycles", "Energy"))
        if cycles is None or energy is None:
            reason = (ran.stderr.strip().splitlines() or [f"it ended with status {ran.returncode}"])[-1]
            raise CostError(f"Timeloop finds no way to run {nest}: {reason}")
        least = bound(nest, self.hardware)
        return replace(least, cycles=max(float(cycles[1]), least.cycles), energy_pj=float(energy[1]) * 1e6)


def available() -> bool:
    """Whether there is a binary."""
    return shutil.which(BINARY) is not None


def engine_name() -> str:
    """The engine with everything its prices depend on besides the hardware; the binary does not tell its version."""
    return f"timeloop {hashlib.sha256(Path(_binary()).read_bytes()).hexdigest()[:12]}"


def configuration(nest: Nest, hardware: Eyeriss) -> dict[str, Any]:
    """Everything that Timeloop reads about one layer."""
    return {
        "arch": _architecture(hardware),
        "mapspace_constraints": _constraints(),
        "mapper": _MAPPER,
        "problem": {"shape": _shape(), "instance": _instance(nest)},
    }


def _binary() -> str:
    path = shutil.which(BINARY)
    if path is None:
        raise SpecError(f"there is no {BINARY} on the PATH; install Timeloop or use engine='zigzag'")
    return path


def _instance(nest: Nest) -> dict[str, int]:
    extents = {_LETTERS[loop]: count for loop, count in nest.loops.items()}
    steps = {"Hstride": nest.stride[0], "Wstride": nest.stride[1]}
    return extents | steps | {"Hdilation": nest.dilation[0], "Wdilation": nest.dilation[1]}


def _shape() -> dict[str, Any]:
    def tensor(name: str, *axes: list[list[str]], written: bool = False) -> dict[str, Any]:
        return {"name": name, "projection": list(axes)} | ({"read_write": True} if written else {})

    def axis(*letters: str) -> list[list[list[str]]]:
        return [[[letter]] for letter in letters]

    window = [[["R", "Wdilation"], ["P", "Wstride"]], [["S", "Hdilation"], ["Q", "Hstride"]]]
    steps = ("Wstride", "Hstride", "Wdilation", "Hdilation")
    return {
        "name": "GroupedConvolution",
        "dimensions": list(_LETTERS.values()),
        "coefficients": [{"name": step, "default": 1} for step in steps],
        "data_spaces": [
            tensor("Weights", *axis("G", "C", "K", "R", "S")),
            tensor("Inputs", *axis("N", "G", "C"), *window),
            tensor("Outputs", *axis("N", "G", "K", "Q", "P"), written=True),
        ],
    }


def _architecture(hardware: Eyeriss) -> dict[str, Any]:
    word = hardware.word_bits

    def memory(name: str, word_pj: float, bits_per_cycle: int, **size: Any) -> dict[str, Any]:
        words = bits_per_cycle / word
        speed = {"read_bandwidth": words, "write_bandwidth": words}
        return {"name": name, "word_bits": word, "block_size": 1, "vector_access_energy": word_pj} | speed | size

    def pad(name: str, words: int, word_pj: float) -> dict[str, Any]:
        return memory(name, word_pj, hardware.pad_bits_per_cycle, entries=words) | elements

    elements = {"instances": hardware.rows * hardware.columns, "meshX": hardware.columns}
    column = {"name": "Column", "entries": 0, "instances": hardware.columns, "meshX": hardware.columns}
    entries = hardware.shared_buffer_bits // word
    return {
        "arithmetic": {"name": "MACs", "word_bits": word, "energy": hardware.mac_pj} | elements,
        "storage": [
            pad("PsumPad", hardware.psum_words, hardware.psum_pj),
            pad("FilterPad", hardware.filter_words, hardware.filter_pj),
            pad("IfmapPad", hardware.ifmap_words, hardware.ifmap_pj),
            column | {"word_bits": word},
            memory("Buffer", hardware.buffer_pj, hardware.buffer_bits_per_cycle, entries=entries, instances=1),
            memory("DRAM", hardware.dram_pj, hardware.dram_bits_per_cycle, technology="DRAM", instances=1),
        ],
    }


def _constraints() -> list[dict[str, Any]]:
    """What is kept where, and the row-stationary unrolling: kernel rows down the array, output rows across it."""
    tensors = ("Weights", "Inputs", "Outputs")
    kept = {
        "PsumPad": ("Outputs",),
        "FilterPad": ("Weights",),
        "IfmapPad": ("Inputs",),
        "Column": (),
        "Buffer": ("Inputs", "Outputs"),
    }
    keeping = [
        {"type": "datatype", "target": target, "keep": list(keep), "bypass": [t for t in tensors if t not in keep]}
        for target, keep in kept.items()
    ]
    return [
        *keeping,
        {"type": "spatial", "target": "Buffer", "factors": "N1 C1 P1 R1 S1", "permutation": "NCPRSQKG", "split": 8},
        {"type": "spatial", "target": "Column", "factors": "N1 P1 Q1 R1 S0", "permutation": "NPQRSCKG", "split": 0},
        {"type": "temporal", "target": "FilterPad", "factors": "R0"},
    ]
