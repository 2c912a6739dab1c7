"""Ranks at random within the budget: what any method has to beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from haloc.forms import Dense, Form, full_ranks, ranks
from haloc.methods.evidence import Evidence
from haloc.methods.levels import shortfall
from haloc.methods.task import Method, Task
from haloc.shapes import Shape
from haloc.training.settings import require

#: How many times more than another a layer may be spared, as a power of two.
SPREAD = 4.0


@dataclass(frozen=True)
class RandomSettings:
    """Which plan is drawn.

    Attributes:
        seed: decides it, together with the space; the weights do not matter.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        whole = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        require("seed", self.seed, whole and 0 <= self.seed < 2**32, "a whole number from 0 to 2**32 - 1")


def find(task: Task, settings: RandomSettings) -> Evidence:
    """Draws for every layer a kind of form and how much it is to be spared.

    The levels of different layers never coincide, so going down by one changes one layer by one rank, and what the plan
    leaves of the budget is less than such a step.
    """
    draw = np.random.default_rng(settings.seed)
    losses: dict[str, tuple[float, ...]] = {}
    for number, (name, offer) in enumerate(task.space.open_layers.items(), start=1):
        losses[name] = _drawn(offer.calls[0], tuple(offer), draw)
        task.step(number, len(task.space.open_layers))
    return Evidence(METHOD.name, task.space, losses, "largest", settings=asdict(settings))


def _drawn(shape: Shape, forms: Sequence[Form], draw: np.random.Generator) -> tuple[float, ...]:
    """Losses that grow as ranks fall, for one kind of form from 0 on; other kinds come when that kind is used up.

    They are not ruled out: then a draw might leave no network that is small enough.
    """
    kinds = sorted({_kind(shape, form) for form in forms if not isinstance(form, Dense)})
    kind = kinds[int(draw.integers(len(kinds)))]
    weight = 2 ** float(draw.uniform(0, SPREAD))

    def loss(form: Form) -> float:
        if isinstance(form, Dense):
            return 0.0
        return weight * (shortfall(shape, form) + (_kind(shape, form) != kind))

    return tuple(map(loss, forms))


def _kind(shape: Shape, form: Form) -> tuple[str, tuple[bool, ...]]:
    """The form's name and which of its ranks are full: one-sided Tucker-2 is a kind of its own."""
    fulls = full_ranks(shape, form.name)
    return form.name, tuple(rank == full for rank, full in zip(ranks(form), fulls, strict=True))


METHOD = Method("random", "random forms and ranks within the budget", find, RandomSettings)
