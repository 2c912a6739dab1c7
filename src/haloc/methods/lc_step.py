"""The C step of learning-compression: the low-rank weights nearest to the weights as they are, ranks and all.

What every form would cost in accuracy is told from one decomposition per layer and kind of form. For the forms that
are an SVD in disguise (svd, spatial, Tucker-2 with one full rank) the squared error is exactly the energy of the
singular values left out. For two-sided Tucker-2 it is that of the truncated HOSVD, which bounds the error from above:
a table of sums tells it for all pairs of ranks at once, where refining each pair would take a hundred times as long.
The form that is chosen is then refined.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from haloc.errors import TrainError
from haloc.factor.layers import Layer, plain_layer
from haloc.factor.modules import Factoriser
from haloc.factor.svd import input_svd
from haloc.factor.tensors import as_stack
from haloc.factor.tucker2 import hosvd
from haloc.forms import Form, Spatial, Svd, Tucker2
from haloc.methods.budget import Limit
from haloc.methods.solve import least_sum
from haloc.plan import Plan

Offers = Mapping[str, tuple[Form, ...]]


class Attracted(nn.Module):
    """A network whose open layers are drawn to low-rank weights.

    Attributes:
        network: The network.
        layers: The names of the open layers.
        targets: Θ, the low-rank weights of all of them in a row. A buffer, as is ``mu``: checkpoints hold both, and a
            captured step reads from where they lie, so that they may change between steps.
        mu: μ, how strongly they draw.
    """

    targets: Tensor
    mu: Tensor

    def __init__(self, network: nn.Module, layers: Iterable[str]) -> None:
        super().__init__()
        self.network, self.layers = network, tuple(layers)
        targets = self._weights().detach().clone()
        self.register_buffer("targets", targets)
        self.register_buffer("mu", torch.zeros((), device=targets.device))

    def __getattr__(self, name: str) -> Any:
        """What a user's own loss may ask of the network besides its outputs."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "network":  # it is not there yet
                raise
            return getattr(self.network, name)

    def forward(self, *inputs: object, **named: object) -> object:
        """What the network says."""
        return self.network(*inputs, **named)

    def open_layers(self) -> dict[str, Layer]:
        """The open layers, by name."""
        return {name: plain_layer(self.network.get_submodule(name), name) for name in self.layers}

    def squared_distance(self) -> Tensor:
        """Σ_i ‖W_i − Θ_i‖²."""
        return (self._weights() - self.targets).square().sum()

    @torch.no_grad()
    def relative_distance(self) -> float:
        """The square root of that, over the norm of all W_i."""
        return float((self.squared_distance() / self._weights().square().sum()).sqrt())

    @torch.no_grad()
    def aim(self, targets: Iterable[Tensor], mu: float) -> None:
        """Draws to other weights, in the order of the layers, and with another strength."""
        self.targets.copy_(torch.cat([target.flatten() for target in targets]))
        self.mu.fill_(mu)

    def _weights(self) -> Tensor:
        return torch.cat([layer.weight.flatten() for layer in self.open_layers().values()])


def compress(model: Attracted, offers: Offers, limits: Sequence[Limit], mu: float) -> Plan:
    """The C step: minimises Σ_i ‖W_i − Θ_i‖² over ranks and low-rank weights within the limits.

    Alike in all processes and wherever the network lies: it is done on the host, in float64, from the weights alone.

    Returns:
        The forms that were chosen.
    """
    layers = {name: _on_host(name, layer) for name, layer in model.open_layers().items()}
    plan = least_sum({name: squared_errors(layers[name], forms) for name, forms in offers.items()}, limits)
    model.aim([approximation(layer, plan[name]) for name, layer in layers.items()], mu)
    return plan


def squared_errors(layer: Layer, forms: Iterable[Form]) -> tuple[float, ...]:
    """‖W − Θ(form)‖² of every form; for two-sided Tucker-2 an upper bound of it, see the head of this module."""
    spectra = _Spectra(layer)
    return tuple(spectra.lost(form) for form in forms)


def approximation(layer: Layer, form: Form) -> Tensor:
    """The layer's weight as near as the form can come to it."""
    return Factoriser(layer).factors(form).rebuild().reshape(layer.weight.shape)


class _Spectra:
    """How much of a weight's energy every rank keeps; sums over the groups, whose ranks are the same."""

    def __init__(self, layer: Layer) -> None:
        self._stack = as_stack(layer.weight, 1 if isinstance(layer, nn.Linear) else layer.groups)
        self._first = 1 if isinstance(layer, nn.Linear) else layer.kernel_size[0]

    def lost(self, form: Form) -> float:
        """The energy that a form leaves out."""
        match form:
            case Tucker2(rank_out, rank_in):
                kept, total = self._tucker2[rank_out - 1, rank_in - 1], self._tucker2[-1, -1]
            case Spatial(rank):
                kept, total = self._spatial[rank - 1], self._spatial[-1]
            case Svd(rank):
                kept, total = self._svd[rank - 1], self._svd[-1]
            case _:
                return 0.0
        return max(0.0, float(total - kept))

    @cached_property
    def _tucker2(self) -> Tensor:
        """[r(1) − 1, r(2) − 1]: what the leading vectors of both modes keep together."""
        return hosvd(self._stack).by_out.square().sum((0, 2)).cumsum(0).cumsum(1)

    @cached_property
    def _spatial(self) -> Tensor:
        return _kept(self._stack.reshape(*self._stack.shape[:2], self._stack.shape[2] * self._first, -1))

    @cached_property
    def _svd(self) -> Tensor:
        return _kept(self._stack)


def _kept(stack: Tensor) -> Tensor:
    """Sums of squared singular values between the input channels and everything else, largest first."""
    parts = input_svd(stack)
    # One of the two is orthonormal and the other carries the singular values, whichever way round.
    return (parts.into.square().sum(1) * parts.core.square().sum((1, 3))).sum(0).cumsum(0)


def _on_host(name: str, layer: Layer) -> Layer:
    if not bool(layer.weight.isfinite().all()):
        raise TrainError(
            f"layer {name!r} has weights that are not finite; give a network with sound weights, or where training has "
            "diverged lower its learning rate"
        )
    return copy.deepcopy(layer).cpu()
