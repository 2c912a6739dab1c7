from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from haloc.forms import Dense, Tucker2
from haloc.shapes import ConvShape


@dataclass
class FakeClock:
    """Time that passes only when somebody works."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeRunner:
    """Takes as long as it is told."""

    clock: FakeClock
    seconds: float
    executions: int = 1
    runs: int = 0
    closed: bool = False

    def run(self) -> None:
        self.runs += 1
        self.clock.now += self.seconds

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeOpener:
    """Opens rows whose every visit takes the next of the seconds written for it, the last one for ever."""

    clock: FakeClock
    seconds: dict[str, list[float]]
    opened: list[str] = field(default_factory=list)
    runners: list[FakeRunner] = field(default_factory=list)

    def __call__(self, row, target):
        times = self.seconds[row["key"]]
        number = self.opened.count(row["key"])
        self.opened.append(row["key"])
        self.runners.append(FakeRunner(self.clock, times[min(number, len(times) - 1)]))
        return self.runners[-1]


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def conv():
    return ConvShape(8, 16, (3, 3), (10, 10), (1, 1), (1, 1), (1, 1))


@pytest.fixture
def rows(conv):
    return [(conv, Dense()), (conv, Tucker2(4, 4)), (conv, Tucker2(8, 4))]
