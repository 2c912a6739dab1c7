"""Networks of a space drawn at random, from the smallest to nearly the dense one."""

from __future__ import annotations

import random

from haloc.forms import Dense, Form
from haloc.plan import Plan
from haloc.space.grids import LayerChoices, RankSpace

#: How much of a random plan stays dense, and how far its layers stray from their common level.
DENSE_SHARE, JITTER = 0.25, 0.15


def random_plan(space: RankSpace, seed: int) -> Plan:
    """A network of the space: all layers at about the same level between smallest and largest, some of them dense.

    The level is drawn too, so that plans of many seeds spread over everything from the smallest network to nearly the
    dense one. The same seed gives the same plan.
    """
    draw = random.Random(seed)
    level = draw.random()

    def around() -> float:
        return level + draw.uniform(-JITTER, JITTER)

    def choice(choices: LayerChoices) -> Form:
        if choices.dense and draw.random() < DENSE_SHARE:
            return Dense()
        return draw.choice(choices.grids).near(around)

    return Plan({name: choice(choices) for name, choices in space.open_layers.items()})
