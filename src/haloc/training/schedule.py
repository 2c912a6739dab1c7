"""Learning rates as functions of the time in epochs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from haloc.training.settings import TrainSettings

SCHEDULES = ("cosine", "steps", "constant")


def learning_rate(settings: TrainSettings) -> Callable[[float], float]:
    """Returns the function from epochs done, in fractions, to the learning rate of the next step."""

    def at(epoch: float) -> float:
        rising = min(1.0, (epoch + _FIRST) / settings.warmup_epochs) if settings.warmup_epochs else 1.0
        return settings.lr * rising * _falling(settings, epoch)

    return at


#: A warm-up that began at exactly 0 would waste the first step.
_FIRST = 0.01


def _falling(settings: TrainSettings, epoch: float) -> float:
    if settings.schedule == "steps":
        return settings.step_factor ** (int(epoch) // settings.step_epochs)
    if settings.schedule == "cosine":
        warm = min(settings.warmup_epochs, settings.epochs)
        done = max(0.0, epoch - warm) / max(settings.epochs - warm, 1e-9)
        return (1 + math.cos(math.pi * min(done, 1.0))) / 2
    return 1.0
