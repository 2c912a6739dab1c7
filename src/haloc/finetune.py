"""Recovering accuracy after factorisation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from haloc.errors import DataError
from haloc.factor.forward import call, device_of, evaluating, inputs_of, to_device


def recalibrate(model: nn.Module, batches: Iterable[Any], *, inputs: Callable[[Any], Any] = inputs_of) -> int:
    """Measures the BatchNorm statistics anew, in place, and returns how many BatchNorms there were.

    After factorisation every layer's input is a little off; statistics taken on the factorised network bring means
    and variances back into place. **Use batches augmented as in training.** Statistics belong to the images they were
    taken on: a ResNet-20 trained on padded crops loses three points when recalibrated on plain images.

    Only BatchNorms run in training mode; dropout and all else stay in eval mode, and all modes are put back.

    Args:
        model: The factorised model.
        batches: About 2,000 training images, in batches of 100 or more.
        inputs: Takes the model's inputs out of a batch.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    if not norms:
        return 0
    device = device_of(model)
    with evaluating(model), _averaging(norms):
        for batch in batches:
            call(model, to_device(inputs(batch), device))
    return len(norms)


@contextmanager
def _averaging(norms: list[_BatchNorm]) -> Iterator[None]:
    """Lets BatchNorms gather plain averages over all batches, from zero; puts the old statistics back on failure."""
    before = [(copy.deepcopy(norm._buffers), norm.momentum) for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    try:
        yield
        if any(int(norm.num_batches_tracked or 0) == 0 for norm in norms):
            raise DataError("recalibration saw no batch for some BatchNorm; give batches that reach all of the model")
    except BaseException:
        for norm, (buffers, _) in zip(norms, before, strict=True):
            norm._buffers.update(buffers)
        raise
    finally:
        for norm, (_, momentum) in zip(norms, before, strict=True):
            norm.momentum = momentum
