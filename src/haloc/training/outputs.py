"""Networks whose outputs may be anything: how they were called, and how far two answers to a call are apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from haloc.errors import ModelError
from haloc.factor.forward import describe, tensors_in

#: Keeps the distance finite where the original says nothing but zeros.
_LEAST = 1e-8


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a network: its arguments, and the real numbers that came out."""

    args: tuple[Any, ...]
    named: Mapping[str, Any]
    outputs: Sequence[Tensor]

    def again(self, network: nn.Module) -> Any:
        """What another network says to the same."""
        return network(*self.args, **self.named)


@contextmanager
def listening(network: nn.Module) -> Iterator[list[Call]]:
    """Inside the block, every call of the network is added to the list that this yields."""
    calls: list[Call] = []

    def note(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any], outputs: Any) -> None:
        calls.append(Call(args, named, floating(outputs)))

    hook = network.register_forward_hook(note, with_kwargs=True)
    try:
        yield calls
    finally:
        hook.remove()


def answers(network: nn.Module, calls: Sequence[Call]) -> list[Any]:
    """What another network, which does not learn, says to the same calls."""
    if not calls:
        raise ModelError(
            "the loss did not call the model itself, so it cannot be compared with the original; call model(…) in it, "
            "or let what compares them weigh nothing (distillation=0, features=0)"
        )
    with torch.no_grad():
        return [call.again(network) for call in calls]


def distance(outputs: Any, original: Any) -> Tensor:
    """How far outputs are from the original's: Σ(y − y₀)² / Σ y₀², the mean over all tensors of real numbers.

    A share, without a unit: 0 where they are the same, 1 where all outputs are zero. So heads of different
    scales (classes and boxes, say) count alike.
    """
    own, other = floating(outputs), floating(original)
    if [tensor.shape for tensor in own] != [tensor.shape for tensor in other] or not own:
        raise ModelError(
            f"the outputs ({describe(outputs)}) cannot be compared with the original's ({describe(original)}): "
            "it takes real numbers of the same shapes. Let the model put out the same in training and evaluation mode, "
            "or let what compares them weigh nothing (distillation=0)"
        )
    return torch.stack([_relative(mine, theirs) for mine, theirs in zip(own, other, strict=True)]).mean()


def floating(outputs: Any) -> list[Tensor]:
    """The tensors of real numbers in a nest of outputs, in order."""
    return [tensor for tensor in tensors_in(outputs) if tensor.is_floating_point() and tensor.numel()]


def _relative(own: Tensor, original: Tensor) -> Tensor:
    wanted = original.detach().float()
    return (own.float() - wanted).square().mean() / (wanted.square().mean() + _LEAST)
