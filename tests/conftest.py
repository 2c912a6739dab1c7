from __future__ import annotations

import gc

import pytest
import torch


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
