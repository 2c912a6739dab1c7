from __future__ import annotations

import pytest

from haloc.cost import sampling


def shorten(patch: pytest.MonkeyPatch) -> None:
    """Clocks that look once: what is measured does not matter, so it need not take as long as it should."""
    schedule = sampling.Schedule(2, 2, 0.0, 0.0005, 2)
    patch.setattr(sampling, "SCHEDULES", dict.fromkeys(sampling.SCHEDULES, schedule))


@pytest.fixture(autouse=True)
def _brief(monkeypatch):
    shorten(monkeypatch)
