from __future__ import annotations

from itertools import pairwise

import pytest

from haloc.training.schedule import learning_rate
from haloc.training.settings import TrainSettings

PAPER = TrainSettings(epochs=220, lr=0.1, schedule="steps", warmup_epochs=0, step_epochs=55, step_factor=0.2)
COSINE = TrainSettings(epochs=25, lr=0.4, schedule="cosine", warmup_epochs=5)


@pytest.mark.parametrize(
    ("epoch", "lr"),
    [(0, 0.1), (54.99, 0.1), (55, 0.02), (109.99, 0.02), (110, 0.004), (165, 0.0008), (219.99, 0.0008)],
)
def test_the_papers_schedule(epoch, lr):
    assert learning_rate(PAPER)(epoch) == pytest.approx(lr)


# The warm-up is a hundredth of an epoch ahead of time. cos 60° = 1/2, cos 90° = 0, cos 120° = -1/2.
@pytest.mark.parametrize(
    ("epoch", "lr"),
    [(0, 0.4 * 0.01 / 5), (2.49, 0.2), (5, 0.4), (5 + 20 / 3, 0.3), (15, 0.2), (5 + 40 / 3, 0.1), (25, 0.0)],
)
def test_cosine_with_warm_up(epoch, lr):
    assert learning_rate(COSINE)(epoch) == pytest.approx(lr, abs=1e-12)


def test_a_constant_stays_where_it_is_after_the_warm_up():
    at = learning_rate(TrainSettings(lr=0.3, schedule="constant", warmup_epochs=2))
    assert [at(epoch) for epoch in (2, 17.3, 200)] == [0.3] * 3
    assert at(0.99) == pytest.approx(0.15)
    assert learning_rate(TrainSettings(lr=0.3, schedule="constant", warmup_epochs=0))(0) == 0.3


@pytest.mark.parametrize("settings", [PAPER, COSINE, TrainSettings(epochs=3, warmup_epochs=5)])
def test_it_rises_in_the_warm_up_and_never_afterwards(settings):
    at = learning_rate(settings)
    times = [step / 20 for step in range(20 * settings.epochs + 1)]
    rising = [at(time) for time in times if time < settings.warmup_epochs]
    falling = [at(time) for time in times if time >= settings.warmup_epochs]
    assert all(a <= b for a, b in pairwise(rising))
    assert all(a >= b for a, b in pairwise(falling))
    assert all(0 <= at(time) <= settings.lr for time in times)
    assert at(0) > 0
