"""Eyeriss as ZigZag writes an accelerator. Plain values; the engine itself is not needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from haloc.cost.eyeriss import Eyeriss

_Uses = Mapping[str, tuple[str, ...]]

#: The columns and the rows of the array.
_SIDES = ("D1", "D2")

#: What the ports of a memory do. "I1, tl" is the operand I1 going to the level below (tl) or above (th), or coming from
#: the level below (fl) or above (fh). I1 are inputs, I2 weights, O outputs.
_INPUTS = {"read": ("I1, tl",), "write": ("I1, fh",)}
_WEIGHTS = {"read": ("I2, tl",), "write": ("I2, fh",)}
_OUTPUTS = {"read": ("O, tl", "O, th"), "write": ("O, fh", "O, fl")}
_ACTIVATIONS = {way: _INPUTS[way] + _OUTPUTS[way] for way in ("read", "write")}
_EVERYTHING = {
    "read_write": tuple(use for ports in (_ACTIVATIONS, _WEIGHTS) for uses in ports.values() for use in uses)
}

#: A size in bits that no layer reaches.
_ENDLESS = 1 << 50


def zigzag_description(hardware: Eyeriss) -> dict[str, Any]:
    """The accelerator with all its memories.

    Weights go from DRAM straight to the array: their part of the global buffer only holds them on their way, and if
    they were let into the shared part, they would take the room of activations.
    """

    def pad(words: int, word_pj: float, uses: _Uses) -> dict[str, Any]:
        bits = words * hardware.word_bits
        return _memory(hardware, bits, word_pj, hardware.pad_bits_per_cycle, uses, serves=())

    def shared(bits: int, word_pj: float, width: int, uses: _Uses) -> dict[str, Any]:
        return _memory(hardware, bits, word_pj, width, uses, serves=_SIDES)

    buffer_bits, buffer_width = hardware.shared_buffer_bits, hardware.buffer_bits_per_cycle
    return {
        "name": "eyeriss",
        "memories": {
            "ifmap_pad": pad(hardware.ifmap_words, hardware.ifmap_pj, _INPUTS),
            "filter_pad": pad(hardware.filter_words, hardware.filter_pj, _WEIGHTS),
            "psum_pad": pad(hardware.psum_words, hardware.psum_pj, _OUTPUTS),
            "global_buffer": shared(buffer_bits, hardware.buffer_pj, buffer_width, _ACTIVATIONS),
            "dram": shared(_ENDLESS, hardware.dram_pj, hardware.dram_bits_per_cycle, _EVERYTHING),
        },
        "operational_array": {
            "unit_energy": hardware.mac_pj,
            "unit_area": 0.0,
            "dimensions": list(_SIDES),
            "sizes": [hardware.columns, hardware.rows],
        },
    }


def _memory(
    hardware: Eyeriss, bits: int, word_pj: float, width: int, uses: _Uses, serves: tuple[str, ...]
) -> dict[str, Any]:
    """One memory. Its energies are per access of the full width; a narrower access costs its share, down to a word."""
    access_pj = word_pj * width / hardware.word_bits
    names = {"read": "r_port_1", "write": "w_port_1", "read_write": "rw_port_1"}
    ports = [
        {
            "name": names[kind],
            "type": kind,
            "bandwidth_min": min(hardware.word_bits, width),
            "bandwidth_max": width,
            "allocation": list(allocation),
        }
        for kind, allocation in uses.items()
    ]
    operands = sorted({use.split(",")[0] for allocation in uses.values() for use in allocation})
    energy = {"r_cost": access_pj, "w_cost": access_pj, "area": 0.0, "latency": 1}
    return {"size": bits, "operands": operands, "ports": ports, "served_dimensions": list(serves)} | energy
