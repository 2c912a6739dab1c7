"""What is global and has to be so while a run trains, put back afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from haloc.training.checkpoint import random_states, set_random_states


@contextmanager
def numerics(precision: str) -> Iterator[None]:
    """TF32 where it was asked for or products are mixed anyway, and cuDNN's fastest kernels."""
    coarse = precision != "fp32"
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = coarse
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=coarse):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@contextmanager
def own_random_numbers(seed: int) -> Iterator[None]:
    """Random numbers that hang on ``seed`` alone inside, and those of the caller again afterwards.

    All processes have the same: they must agree on the order of a user's loader and on the paths of a search.
    """
    before = random_states()
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    try:
        yield
    finally:
        set_random_states(before)
