from __future__ import annotations

from types import SimpleNamespace

import pytest

from haloc.training.clock import Clock


@pytest.fixture
def clock(monkeypatch):
    """A clock and the hand that moves its time."""
    now = [100.0]
    monkeypatch.setattr("haloc.training.clock.time", SimpleNamespace(monotonic=lambda: now[0]))

    def pass_by(seconds: float) -> None:
        now[0] += seconds

    return Clock(), pass_by


def test_the_rate_is_of_the_stretch_and_of_the_epoch(clock):
    clock, pass_by = clock
    clock.start(0, 0.0)
    pass_by(5.0)
    clock.measure(50, batch_size=10)
    assert clock.rate == pytest.approx(100)
    pass_by(3.0)  # evaluating, saving
    clock.mark(50)
    pass_by(0.05)
    clock.measure(51, batch_size=10)
    assert clock.rate == pytest.approx(200)
    assert clock.epoch_rate() == pytest.approx(510 / 5.05)
    clock.mark(51)
    pass_by(1.0)
    clock.measure(61, batch_size=10)
    assert clock.epoch_rate() == pytest.approx(100)


def test_time_goes_on_from_earlier_tries(clock):
    clock, pass_by = clock
    clock.start(40, 30.0)
    pass_by(10.0)
    assert clock.total == pytest.approx(40)
    assert clock.left(50, 100) == pytest.approx(50)
    assert clock.unsaved_s == pytest.approx(10)
    clock.saved()
    assert clock.unsaved_s == 0
