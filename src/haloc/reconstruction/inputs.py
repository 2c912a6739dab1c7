"""What networks are reconstructed from, and the state that they are in meanwhile."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from haloc.errors import DataError
from haloc.factor.forward import batch_size, device_of, mapped, tensors_in, to_device
from haloc.reconstruction.settings import ReconstructionSettings
from haloc.training.feed import parts


def some_inputs(batches: Sequence[Any], told: ReconstructionSettings) -> list[Any]:
    """The first so many inputs, as many at a time as are learnt from in a step."""
    found: list[Any] = []
    missing = told.images
    for batch in batches:
        taken = min(batch_size(batch), missing)
        starts = range(0, taken, told.batch_size)
        found += [parts(batch, slice(start, min(start + told.batch_size, taken))) for start in starts]
        missing -= taken
        if missing <= 0:
            break
    if len(found) == 1 and batch_size(found[0]) > 1:  # one to learn from, one to be judged on
        half = batch_size(found[0]) // 2
        found = [parts(found[0], cut) for cut in (slice(half), slice(half, None))]
    if len(found) < 2:
        raise DataError("reconstruction needs two inputs at the least: one to learn from, one to be judged on")
    return found


def told_apart(inputs: Sequence[Any]) -> str:
    """What tells inputs from others."""
    found = hashlib.sha256()
    for tensor in (tensor for batch in inputs for tensor in tensors_in(batch)):
        found.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:24]


def bytes_of(inputs: Any) -> int:
    """What the tensors in it take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(inputs))


def place_for(room: float, device: torch.device) -> torch.device:
    """Where so many bytes are held: on the device itself where they take less than half of what is free there."""
    if device.type == "cuda" and room < torch.cuda.mem_get_info(device)[0] / 2:
        return device
    return torch.device("cpu")


def own_copy(inputs: Any, model: nn.Module) -> Any:
    """On the model's device, and no longer the caller's: a model may change what it is called with."""
    return mapped(to_device(inputs, device_of(model)), torch.clone)


@contextmanager
def learning_alone(model: nn.Module) -> Iterator[None]:
    """Eval mode, and parameters that learn; both are put back."""
    modes = [(module, module.training) for module in model.modules()]
    learning = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    model.eval()
    for parameter, _ in learning:
        parameter.requires_grad_(parameter.is_floating_point())
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, learns in learning:
            parameter.requires_grad_(learns)
            parameter.grad = None
