"""Running somebody else's model: inputs of any kind, modes put back, errors in one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from haloc.errors import ModelError, PlanError, nearest

#: Keys of a batch dict that are targets, not inputs.
LABELS = ("label", "labels", "target", "targets")


def call(model: nn.Module, inputs: Any) -> Any:
    """Calls the model with a tensor, with a tuple or list as positional, or with a dict as named arguments.

    What it raises becomes one clear sentence that says what it was called with.
    """
    try:
        if isinstance(inputs, dict):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
    except Exception as error:
        text = (str(error).strip() or "no message").splitlines()[0]
        raise ModelError(
            f"the model does not run on the inputs given ({describe(inputs)}): {type(error).__name__}: {text}"
        ) from error


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients inside, every module's own mode again afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def compiling_many() -> Iterator[None]:
    """Lets any number of networks be compiled: all plans of one share the code of its forward.

    Without it torch.compile gives up, without a word, after eight of them.
    """
    with torch._dynamo.config.patch(recompile_limit=1 << 16, accumulated_recompile_limit=1 << 20):
        yield


def inputs_of(batch: Any) -> Any:
    """Takes the model's inputs out of a loader's batch: the first of a pair, a dict without its labels."""
    if isinstance(batch, dict):
        return {key: value for key, value in batch.items() if key not in LABELS}
    return batch[0] if isinstance(batch, (tuple, list)) else batch


def mapped(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """The same nest of dicts, lists, tuples and named tuples with the function's result for every tensor in it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: mapped(item, function) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [mapped(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in a nest of dicts, lists and tuples, in order."""
    found: list[Tensor] = []
    mapped(value, found.append)
    return found


def to_device(inputs: Any, device: torch.device) -> Any:
    """Moves every tensor in nested tuples, lists and dicts."""
    ahead = device.type == "cuda"  # the other way, what is read might not have arrived
    return mapped(inputs, lambda tensor: tensor.to(device, non_blocking=ahead))


def device_of(model: nn.Module) -> torch.device:
    """Where the model's first parameter lives."""
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def batch_size(inputs: Any) -> int:
    """The leading extent of the first tensor found, 1 when there is none."""
    tensors = tensors_in(inputs)
    return tensors[0].shape[0] if tensors and tensors[0].dim() else 1


def describe(inputs: Any) -> str:
    """A short picture of the inputs for a message."""
    if isinstance(inputs, Tensor):
        return f"{'×'.join(map(str, inputs.shape)) or 'scalar'} {str(inputs.dtype).removeprefix('torch.')}"
    if isinstance(inputs, dict):
        return ", ".join(f"{key}: {describe(value)}" for key, value in inputs.items()) or "an empty dict"
    if isinstance(inputs, (tuple, list)):
        return ", ".join(map(describe, inputs)) or "an empty tuple"
    return type(inputs).__name__


def module_at(model: nn.Module, name: str) -> nn.Module:
    """The module of that name, or a message with the nearest one there is."""
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    if name not in modules:
        raise PlanError(f"the model has no layer {name!r}.{nearest(name, modules)}")
    return modules[name]
