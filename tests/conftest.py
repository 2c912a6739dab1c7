from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread_one_seed():
    """Test processes run side by side: torch's thread pools would fight over the cores."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
