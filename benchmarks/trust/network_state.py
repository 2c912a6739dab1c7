"""What a network is and what it says, compared bit by bit or by the largest output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin

from haloc.factor.forward import call, evaluating, members, tensors_in

#: How far outputs at full rank may be from the dense ones, as a part of the largest.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}

#: Where PyTorch keeps what was registered on a module.
HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


class WrongError(AssertionError):
    """Something was changed, or computes something else, and nobody was told."""


def require(holds: bool, message: str) -> None:
    """Says what is wrong."""
    if not holds:
        raise WrongError(message)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """The model is afterwards what it was before: values, modes, hooks, classes, what is trained."""
    before = picture(model)
    yield
    after = picture(model)
    for name in before.keys() | after.keys():
        require(name in before and name in after, f"the model given has gained or lost {name!r}")
        require(before[name] == after[name], f"the model given has changed at {name!r}")


@contextmanager
def same_numbers(doing: str) -> Iterator[None]:
    """No random number is drawn inside."""
    before = torch.get_rng_state()
    yield
    require(torch.equal(torch.get_rng_state(), before), f"{doing} draws random numbers of the user's")


def picture(model: nn.Module) -> dict[str, Any]:
    """All that could be changed by accident, as values that compare."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        hooks = tuple(tuple(getattr(module, kind, ())) for kind in HOOKS)
        found[f"module {name}"] = (id(module), type(module), module.training, hooks, tuple(sorted(vars(module))))
    for name, tensor in tensors(model).items():
        grad = None if not tensor.is_leaf or tensor.grad is None else as_bytes(tensor.grad)
        found[f"tensor {name}"] = (id(tensor), tensor.requires_grad, tensor.dtype, as_bytes(tensor), grad)
    return found


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under all their names; kept out of the state dict or not."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def as_bytes(tensor: Tensor) -> bytes:
    """The bits of a tensor, or what there is of one without."""
    if isinstance(tensor, UninitializedTensorMixin) or tensor.is_meta:
        return str(getattr(tensor, "shape", "none") if tensor.is_meta else "none").encode()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same to the last bit."""
    return one.dtype == other.dtype and one.shape == other.shape and as_bytes(one) == as_bytes(other)


def outputs_of(model: nn.Module, inputs: Any) -> Any:
    """What a network says in eval mode, with the same random numbers each time."""
    state, buffers = torch.get_rng_state(), [(buffer, buffer.clone()) for buffer in model.buffers()]
    torch.manual_seed(7)
    try:
        with evaluating(model):
            return call(model, inputs)
    finally:
        torch.set_rng_state(state)
        for buffer, value in buffers:
            buffer.copy_(value)


def structure(value: Any) -> Any:
    """The kinds and names of a nest, and the shapes and dtypes of its tensors."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    return type(value), tuple((key, structure(member)) for key, member in members(value))


def distance(got: Any, wanted: Any) -> float:
    """The largest difference as a part of the largest output; nests must be alike."""
    require(structure(got) == structure(wanted), f"the output is {structure(got)}, it was {structure(wanted)}")
    pairs = zip(tensors_in(got), tensors_in(wanted), strict=True)
    return max((apart(one, other) for one, other in pairs), default=0.0)


def apart(one: Tensor, other: Tensor) -> float:
    """The same for two tensors; infinite where one has values that are not finite and the other has others."""
    if other.is_meta or not other.numel():
        return 0.0
    wide = torch.complex128 if other.is_complex() else torch.float64
    first, second = one.to(wide), other.to(wide)
    same = (first == second) | (first.isnan() & second.isnan())
    difference = torch.where(same, torch.zeros_like(first), first - second).abs()
    scale = float(second[second.isfinite()].abs().max()) if bool(second.isfinite().any()) else 0.0
    largest = float(difference.max())
    if largest != largest:
        return float("inf")
    return largest / scale if scale else largest


def equal(one: Any, other: Any) -> bool:
    """Whether two nests of outputs are the same to the last bit."""
    return structure(one) == structure(other) and all(
        same_bits(a, b) for a, b in zip(tensors_in(one), tensors_in(other), strict=True)
    )


def finite(value: Any) -> bool:
    """Whether all numbers in a nest are."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors_in(value) if not tensor.is_meta)


def tolerance(outputs: Any) -> float:
    """What the precision of the outputs allows."""
    return max((TOLERANCES.get(tensor.dtype, 0.0) for tensor in tensors_in(outputs)), default=0.0)
