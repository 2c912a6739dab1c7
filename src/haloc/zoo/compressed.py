"""Compressed networks that come with the package: a dense network of the zoo, a plan, and the weights of the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from haloc.errors import SpecError
from haloc.factor.modules import FORM
from haloc.factor.surgery import skeleton
from haloc.plan import Plan
from haloc.zoo.factorised import add_biases, restore
from haloc.zoo.weights import read_weights

#: Two of the files that `haloc.save` writes.
WEIGHTS, PLAN = "weights.safetensors", "plan.json"


@dataclass(frozen=True)
class Compressed:
    """Builds a compressed network from the folder that `haloc.save` wrote of it.

    What is built is a network in its own right: it does not say any more that it was written by a plan, so that it may
    be factorised once more, saved and loaded like any other, by plans that name its layers.

    Attributes:
        name: the zoo's name of it.
        base: returns the dense network with random weights; takes ``num_classes``.
        folder: where its plan and its weights are.
    """

    name: str
    base: Callable[..., nn.Module]
    folder: Path

    @property
    def weights(self) -> Path:
        """The file of its weights."""
        return self.folder / WEIGHTS

    @property
    def plan(self) -> Plan:
        """What was done to the dense network."""
        for name in (PLAN, WEIGHTS):
            if not (self.folder / name).is_file():
                raise SpecError(f"{self.name!r} is incomplete: there is no {self.folder / name}; install haloc anew")
        return Plan.load(self.folder / PLAN)

    def __call__(self, **kwargs: Any) -> nn.Module:
        """The network with random weights; its factors have biases where the packaged ones do."""
        plan = self.plan
        network = skeleton(self.base(**kwargs), plan)
        add_biases(network, read_weights(self.weights, network.state_dict()))
        for name in plan.changes():
            network.get_submodule(name).apply(_initialise)
        return _in_its_own_right(network)

    def restored(self, weights: str | Path, **kwargs: Any) -> nn.Module:
        """The network with the weights of a file: the packaged ones, or others by the same plan."""
        return _in_its_own_right(restore(self.base(**kwargs), self.plan, weights))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear):
        nn.init.kaiming_normal_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _in_its_own_right(network: nn.Module) -> nn.Module:
    for module in network.modules():
        vars(module).pop(FORM, None)
    return network
