"""Running somebody else's model: inputs of any kind, modes put back, errors in one sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer

from haloc.errors import DataError, ModelError, PlanError, SpecError, TrainError, nearest

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
    except TrainError:  # of several processes another one has ended, say: the model has no part in it
        raise
    except Exception as error:
        text = (str(error).strip() or "no message").splitlines()[0]
        raise ModelError(
            f"the model does not run on the inputs given ({describe(inputs)}): {type(error).__name__}: {text}"
        ) from error


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients inside, every module's own mode again afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        _to_eval(model)
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def _to_eval(model: nn.Module) -> None:
    try:
        model.eval()
    except NotImplementedError as error:  # an exported program is in one mode for good
        raise ModelError(
            f"{type(model).__name__} cannot be put into eval mode ({error}); give the Python model, not an exported "
            "program of it"
        ) from error


@contextmanager
def unmoved(model: nn.Module) -> Iterator[None]:
    """Buffers have their values again afterwards, whatever a run of the model did to them: some count their runs."""
    buffers = [
        (module, name, buffer, buffer._version, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not isinstance(buffer, UninitializedBuffer) and not buffer.is_inference()
    ]
    try:
        yield
    finally:
        for module, name, buffer, version, value in buffers:
            if buffer._version != version:
                with torch.no_grad():
                    buffer.copy_(value)
            module._buffers[name] = buffer


@contextmanager
def own_numbers(model: nn.Module) -> Iterator[None]:
    """Random numbers that are drawn inside are drawn again by whoever comes after."""
    with torch.random.fork_rng(devices=_gpus(model)):
        yield


def _gpus(model: nn.Module) -> list[int]:
    """The numbers of the GPUs that a model is on."""
    found = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    return sorted(torch.cuda.current_device() if device.index is None else device.index for device in found)


def copied(model: nn.Module) -> nn.Module:
    """A copy of the model; what its hooks compute before each run (pruned weights, say) is copied as it is now.

    PyTorch refuses to copy a tensor that was computed with gradients.
    """
    computed = [
        value
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    ]
    return copy.deepcopy(model, {id(value): value.detach().clone() for value in computed})


@contextmanager
def compiling_many() -> Iterator[None]:
    """Lets any number of networks be compiled: all plans of one share the code of its forward.

    Without it torch.compile gives up, without a word, after eight of them.
    """
    with torch._dynamo.config.patch(recompile_limit=1 << 16, accumulated_recompile_limit=1 << 20):
        yield


def inputs_of(batch: Any) -> Any:
    """Takes the model's inputs out of a loader's batch: the first of a pair or tuple, a dict without its labels."""
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key not in LABELS}
    if not isinstance(batch, (tuple, list)):
        return batch
    if not batch or lists_examples(batch):
        raise DataError(
            f"what to call the model with cannot be told from a batch that lists {len(batch)} examples one by one; "
            "give inputs=, a function that takes the model's inputs out of a batch"
        )
    return batch[0]


def lists_examples(batch: Any) -> bool:
    """Whether it is a list of dicts that all have the same keys: one for every example, not collated."""
    rows = batch if isinstance(batch, (tuple, list)) else ()
    return len(rows) > 1 and all(isinstance(row, Mapping) and row.keys() == rows[0].keys() for row in rows)


def mapped(value: Any, function: Callable[[Tensor], Any], otherwise: Callable[[Any], Any] = lambda other: other) -> Any:
    """The same nest of dicts, lists, tuples and dataclasses with the function's result for every tensor in it.

    Args:
        value: The nest, or a tensor.
        function: What is done with a tensor.
        otherwise: What is done with anything else that is no nest.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        items = {key: mapped(item, function, otherwise) for key, item in value.items()}
        return items if isinstance(value, dict) else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, (tuple, list)):
        parts = [mapped(item, function, otherwise) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if is_dataclass(value) and not isinstance(value, type):
        given = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        return replace(value, **{name: mapped(item, function, otherwise) for name, item in given.items()})
    return otherwise(value)


def members(value: Any) -> list[tuple[Any, Any]]:
    """What a nest holds, each with its key, place or name; nothing, for all that is no nest."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return []


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in a nest of dicts, lists, tuples and dataclasses, in order."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for _, member in members(value) for tensor in tensors_in(member)]


def to_device(inputs: Any, device: torch.device) -> Any:
    """Moves every tensor in a nest, and every object that can be moved with its method ``to``."""
    ahead = device.type == "cuda"  # the other way, what is read might not have arrived
    return mapped(
        inputs,
        lambda tensor: tensor.to(device, non_blocking=ahead),
        lambda other: other.to(device) if callable(getattr(other, "to", None)) else other,
    )


def device_of(model: nn.Module) -> torch.device:
    """Where the model's first parameter lives."""
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def usable_device(name: str) -> torch.device:
    """A torch device that is there, or a message saying what is."""
    try:
        chosen = torch.device(name)
        torch.empty(1, device=chosen).zero_().item()  # there, and able to compute
    except (RuntimeError, AssertionError) as error:
        there = "cpu, cuda" if torch.cuda.is_available() else "cpu"
        raise SpecError(f"device {name!r} cannot be used here; there is {there}") from error
    return chosen


def batch_size(inputs: Any) -> int:
    """The leading extent of the first tensor found, 1 when there is none."""
    tensors = tensors_in(inputs)
    return tensors[0].shape[0] if tensors and tensors[0].dim() else 1


def cut(inputs: Any, places: slice) -> Any:
    """The same places of every tensor in a nest; what has another extent than the first is no part of any example."""
    length = batch_size(inputs)
    return mapped(inputs, lambda tensor: tensor[places] if tensor.dim() and len(tensor) == length else tensor)


def describe(inputs: Any) -> str:
    """A short picture of the inputs for a message."""
    if isinstance(inputs, Tensor):
        return f"{'×'.join(map(str, inputs.shape)) or 'scalar'} {str(inputs.dtype).removeprefix('torch.')}"
    if isinstance(inputs, Mapping):
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
