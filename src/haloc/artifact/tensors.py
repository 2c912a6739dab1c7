"""Inputs and outputs of models: names for their tensors, other batch sizes, and nests as plain values."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from haloc.factor.forward import batch_size, inputs_of, mapped, members, tensors_in, to_device


def named_inputs(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """Every tensor of the inputs, by the name of the parameter of ``forward`` that it is given to."""
    if isinstance(inputs, Mapping):
        return dict(_leaves(inputs, ""))
    values = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    names = _parameter_names(model, len(values))
    return dict(leaf for name, value in zip(names, values, strict=True) for leaf in _leaves(value, name))


def named_outputs(outputs: Any) -> dict[str, Tensor]:
    """Every tensor of the outputs: "output", "output_0" and so on, or the names it has in a dict or dataclass."""
    return dict(_leaves(outputs, "" if isinstance(outputs, Mapping) or is_dataclass(outputs) else "output"))


def _parameter_names(model: nn.Module, count: int) -> list[str]:
    """The names of the first parameters of ``forward``; numbers where it takes any number of them."""
    usual = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = [item.name for item in inspect.signature(model.forward).parameters.values() if item.kind in usual]
    return [known[number] if number < len(known) else f"input_{number}" for number in range(count)]


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    for key, member in members(value):
        yield from _leaves(member, f"{name}_{key}" if name else str(key))


def plain(value: Any) -> Any:
    """The same nest of nothing but tuples, lists and dicts, without what is no tensor."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Mapping) or is_dataclass(value):
        return {key: plain(member) for key, member in members(value) if _holds_tensors(member)}
    items = [plain(member) for _, member in members(value) if _holds_tensors(member)]
    return items if isinstance(value, list) else tuple(items)


def is_plain(value: Any) -> bool:
    """Whether every nest in it is a tuple, list or dict, and every leaf a tensor."""
    if isinstance(value, Tensor):
        return True
    return type(value) in (tuple, list, dict) and all(is_plain(member) for _, member in members(value))


def _holds_tensors(value: Any) -> bool:
    return next(_leaves(value, ""), None) is not None


def of_batch(inputs: Any, size: int) -> Any:
    """The inputs with ``size`` examples, over and over or cut; tensors without a batch stay as they are."""
    batch = batch_size(inputs)

    def resized(tensor: Tensor) -> Tensor:
        if not has_batch(tensor, batch):
            return tensor
        repeats = -(-size // batch)
        return tensor.repeat(repeats, *[1] * (tensor.dim() - 1))[:size]

    return mapped(inputs, resized)


def has_batch(tensor: Tensor, batch: int) -> bool:
    """Whether the first extent of a tensor is that of the batch."""
    return tensor.dim() > 0 and tensor.shape[0] == batch and batch > 0


def noise_like(inputs: Any, seed: int = 0) -> Any:
    """Other inputs of the same kind: numbers are drawn anew, the same ones every time; whole numbers are kept."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator).to(tensor) if tensor.is_floating_point() else tensor

    return mapped(inputs, drawn)


def first_samples(names: Collection[str], samples: Any, most: int) -> Iterator[Any]:
    """The first inputs in ``samples``, on the CPU, for a model whose input tensors have these names.

    Args:
        names: The names.
        samples: An iterable of inputs (a tensor, a tuple or a dict each) or of a loader's batches, whose labels are
            left out; or inputs by themselves.
        most: It ends with the batch that makes it so many examples.
    """
    alone = isinstance(samples, (Tensor, Mapping)) or _positional(names, samples)
    several: Iterable[Any] = [samples] if alone else samples
    seen = 0
    for sample in several:
        inputs = to_device(_inputs_in(names, sample), torch.device("cpu"))
        yield inputs
        seen += batch_size(inputs)
        if seen >= most:
            return


def _inputs_in(names: Collection[str], sample: Any) -> Any:
    if isinstance(sample, Mapping):
        return {key: value for key, value in sample.items() if _is_taken(str(key), names)}
    return tuple(sample) if _positional(names, sample) else inputs_of(sample)


def _is_taken(key: str, names: Collection[str]) -> bool:
    return any(name == key or name.startswith(f"{key}_") for name in names)


def _positional(names: Collection[str], sample: Any) -> bool:
    """Whether these are all arguments of a model that takes several tensors, in nests or not."""
    several = isinstance(sample, (tuple, list)) and len(sample) > 1 and len(tensors_in(sample)) == len(names)
    return several and any(isinstance(value, Tensor) for value in sample)
