"""A moving average of the weights, which is evaluated and kept in their place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

State = dict[str, Tensor]


class Ema:
    """Averages of a model's parameters and buffers; ``decay`` 0 keeps none and costs nothing."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        live = tensors_of(model) if decay else {}
        self.state: State = {name: tensor.detach().clone() for name, tensor in live.items()}
        floating = [name for name, tensor in live.items() if tensor.is_floating_point()]
        self._averaged = [self.state[name] for name in floating], [live[name].detach() for name in floating]
        rest = [name for name in live if name not in set(floating)]
        self._copied = [(self.state[name], live[name]) for name in rest]
        self._weight = torch.ones((), device=next(iter(live.values())).device) if live else torch.ones(())

    def set_step(self, step: int) -> None:
        """Young averages forget faster: the first steps are no part of what is sought."""
        if self.decay:
            self._weight.fill_(1 - min(self.decay, (1 + step) / (10 + step)))

    def update(self) -> None:
        """Moves the averages a little towards the live values."""
        averages, live = self._averaged
        if averages:
            difference = torch._foreach_sub(live, averages)
            torch._foreach_mul_(difference, self._weight)
            torch._foreach_add_(averages, difference)
        for kept, current in self._copied:
            kept.copy_(current)

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """Inside the block the model has the averages, afterwards its own values again."""
        own = {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()} if self.decay else {}
        self.put_into(model)
        try:
            yield
        finally:
            put(model, own)

    def restart(self, model: nn.Module) -> None:
        """Begins anew from the model's values as they are now."""
        self.load(tensors_of(model) if self.decay else {})

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Takes averages from elsewhere, into the same tensors."""
        for name, value in state.items():
            self.state[name].copy_(value)

    def put_into(self, model: nn.Module) -> None:
        """Gives the model the averages for good."""
        put(model, self.state)


def tensors_of(model: nn.Module) -> State:
    """Every parameter and buffer once, whatever it is shared by."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@torch.no_grad()
def put(model: nn.Module, values: State) -> None:
    """Copies values into the model's tensors of the same names."""
    own = tensors_of(model)
    for name, value in values.items():
        own[name].copy_(value)
