"""What readers have in common: a small network, its layers, and a place for a file.

A reader takes bytes and a folder to put them in. It ends, or raises one of HALOC's errors; anything else is a crash.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn

from haloc.forms import Dense, Svd, Tucker2
from haloc.plan import Plan

Mutate = Callable[[bytes, Random], bytes]
Read = Callable[[bytes, Path], None]


@dataclass(frozen=True)
class Reader:
    """One reader.

    Attributes:
        name: What is read.
        seeds: Returns whole files of the kind.
        read: Puts a file into a folder and reads it.
        mutate: Makes a file wrong.
        weight: How many wrong files the benchmark tries it on: fewer where one takes long.
    """

    name: str
    seeds: Callable[[], list[bytes]]
    read: Read
    mutate: Mutate
    weight: int = 5000


PLAN = Plan({"0": Tucker2(4, 2), "4": Svd(5), "2": Dense()})


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Linear(8 * 16, 6)
    ).eval()


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def placed(content: bytes, folder: Path, name: str) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@cache
def layers() -> Any:
    from haloc.factor.inspect import inspect

    return inspect(network(), torch.zeros(1, 3, 4, 4))
