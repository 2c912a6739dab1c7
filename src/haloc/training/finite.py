"""Numbers that are not finite: where they are first met, in the order in which a network runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from haloc.factor.forward import tensors_in


class NotFiniteError(Exception):
    """A step whose loss is no number; `Run` tells the user.

    Attributes:
        where: The layer that it comes from.
    """

    def __init__(self, loss: float, where: str) -> None:
        super().__init__(f"loss is {loss}")
        self.where = where


def spoilt_state(model: nn.Module) -> str | None:
    """The first tensor that a checkpoint must not hold as it is: weights, or what a BatchNorm has seen.

    Other buffers may be infinite on purpose, as masks are.
    """
    return next((name for name, tensor in _state(model) if not _finite(tensor)), None)


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            for kind, buffer in module.named_buffers():
                yield f"{name}.{kind}" if name else kind, buffer


def first_spoilt(model: nn.Module, again: Callable[[], Any]) -> str:
    """Says which layer first has, or puts out, what is not finite when ``again`` runs the network once more."""
    found: list[str] = []
    with _watched(model, found):
        again()
    return found[0] if found else "every layer puts out finite values, so it is the targets, the teacher or the loss"


@contextmanager
def _watched(model: nn.Module, found: list[str]) -> Iterator[None]:
    hooks = []
    for name, module in model.named_modules():
        told = name or type(model).__name__
        hooks.append(module.register_forward_pre_hook(partial(_entered, found, told), with_kwargs=True))
        hooks.append(module.register_forward_hook(partial(_left, found, told)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _entered(found: list[str], name: str, module: nn.Module, args: Any, named: Any) -> None:
    if not found and not _all_finite((args, named)):
        found.append(f"the inputs of layer {name!r} are the first values that are not finite")
    own = (key for key, tensor in module.named_parameters(recurse=False) if not _finite(tensor))
    spoilt = next(own, None)
    if not found and spoilt is not None:
        found.append(f"layer {name!r} is the first whose {spoilt} is not finite")


def _left(found: list[str], name: str, module: nn.Module, args: Any, outputs: Any) -> None:
    if not found and not _all_finite(outputs):
        found.append(f"layer {name!r} is the first whose output is not finite")


def _all_finite(value: Any) -> bool:
    return all(map(_finite, tensors_in(value)))


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())
