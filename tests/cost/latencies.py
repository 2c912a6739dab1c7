"""Latencies of a machine that does not exist: a roofline with steps, so that tables can be made without measuring."""

from __future__ import annotations

import random
from math import prod

from haloc.cost.count import elements_read, elements_written
from haloc.cost.table import Row, Table
from haloc.cost.target import Target
from haloc.forms import Form, stages
from haloc.shapes import LinearShape, Shape, as_deployed


def stage_ms(stage: Shape) -> float:
    """Two microseconds to start, then the slower of computing and of moving data.

    Computing goes in blocks of 16 channels, is slower for 1×1 kernels, and best with many channels and positions.
    """
    linear = isinstance(stage, LinearShape)
    widths = (stage.in_features, stage.out_features) if linear else (stage.group_in, stage.group_out)
    positions = stage.positions if linear else prod(stage.output_size)
    filled = prod(-(-width // 16) * 16 / width for width in widths)
    slow = (1 if linear or not stage.pointwise else 2) * (1 + 24 / min(widths)) * (1 + 100 / positions)
    computing = stage.macs * filled * slow / 2e7
    moving = (elements_read(stage) + elements_written(stage) + stage.params) / 1e6
    return 0.002 + max(computing, moving)


def made_up_ms(shape: Shape, form: Form) -> float:
    return sum(map(stage_ms, stages(as_deployed(shape), form)))


def made_up_table(rows, noise: float = 0.02, seed: int = 0) -> Table:
    draw = random.Random(seed)
    made = []
    for shape, form in rows:
        latency = made_up_ms(shape, form) * draw.lognormvariate(0, noise)
        made.append(Row(as_deployed(shape), form, latency, 2 * noise * latency, 9))
    return Table(Target.parse("cpu:b1:t1"), tuple(made), {"device": "made up"})
