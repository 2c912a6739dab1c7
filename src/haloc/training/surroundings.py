"""What is global and has to be so while a run trains, put back afterwards."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

from haloc.training.checkpoint import random_states, set_random_states

_LOG = logging.getLogger(__name__)

#: Kernels that cuDNN tries for each convolution, the likeliest first; by itself it would try ten. The first epoch of
#: MobileNetV2 on an H200 takes 20 s instead of 33 with that, and those after it are no slower.
_KERNELS_TRIED = 3


@contextmanager
def numerics(precision: str, repeats: bool = True) -> Iterator[None]:
    """TF32 where it was asked for or products are mixed anyway, and cuDNN's fastest kernels.

    Args:
        precision: One of `TrainSettings`.
        repeats: Whether the same shapes come again and again. To try kernels on each new one, as cuDNN does to find a
            fast one, takes a search many times longer than the slower kernels do.
    """
    with ExitStack() as stack:
        if torch.cuda.is_available():
            try:
                stack.enter_context(_switches(coarse=precision != "fp32", try_some=repeats))
            except RuntimeError as error:  # PyTorch has two sets of switches and does not let them be mixed
                _LOG.warning("TF32 stays as it is set: %s", str(error).splitlines()[0])
        yield


@contextmanager
def _switches(coarse: bool, try_some: bool) -> Iterator[None]:
    before, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn
    torch.set_float32_matmul_precision("high" if coarse else "highest")
    try:
        with cudnn.flags(
            enabled=True,
            benchmark=try_some,
            benchmark_limit=_KERNELS_TRIED,
            deterministic=cudnn.deterministic,
            allow_tf32=coarse,
        ):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def at_home(device: torch.device) -> Iterator[None]:
    """Makes a GPU the current one: captures, streams and random states are those of the current GPU."""
    with torch.cuda.device(device) if device.type == "cuda" else ExitStack():
        yield


@contextmanager
def own_random_numbers(seed: int) -> Iterator[None]:
    """Random numbers that hang on ``seed`` alone inside, and those of the caller again afterwards.

    All processes have the same: they must agree on the order of a user's loader and on the paths of a search.
    """
    before = random_states()
    others = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # seeded along with the current one
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    try:
        yield
    finally:
        if others:
            torch.cuda.set_rng_state_all(others)
        set_random_states(before)
