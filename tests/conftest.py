from __future__ import annotations

import gc

import pytest
import torch

from haloc.cost import runtimes, sampling


@pytest.fixture(autouse=True)
def _one_thread_one_seed():
    """Test processes run side by side: torch's thread pools would fight over the cores."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _old_objects_are_not_searched_for_garbage():
    """Clocks collect garbage after every visit, which takes long where a million objects of packages are looked at."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def hurried(monkeypatch):
    """Measurements that take milliseconds, for tests in which the figures do not matter."""
    brief = sampling.Schedule(3, 3, 0.0, 0.001, 2)
    monkeypatch.setattr(sampling, "SCHEDULES", dict.fromkeys(sampling.SCHEDULES, brief))
    monkeypatch.setattr(runtimes, "ROTATED_BYTES", 1)
