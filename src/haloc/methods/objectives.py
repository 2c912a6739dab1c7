"""What the weights and the probabilities of a search minimise: the paper's L_weight and L_prob on a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from haloc.factor.forward import call, device_of
from haloc.methods.budget import Limit
from haloc.methods.estimators import ESTIMATORS
from haloc.methods.losses import expected_cost, hardware_penalty, probability_loss, weight_terms
from haloc.methods.prices import PriceList
from haloc.methods.supernet import Choice, choices, gates_open
from haloc.training.objective import (
    Loss,
    OwnLoss,
    accuracy,
    cross_entropy,
    feature_map_loss,
    logits_of,
    recording,
    total,
)
from haloc.training.outputs import Call, answers, distance, listening


@dataclass(eq=False)
class WeightObjective:
    """L_weight (Eq. child_loss) of the active path, against the feature maps of the uncompressed network.

    Attributes:
        original: the uncompressed network.
        layers: where feature maps are compared.
        lam: λ, which may change from step to step.
    """

    original: nn.Module
    layers: tuple[str, ...]
    lam: float

    def __call__(self, model: nn.Module, inputs: Any, targets: Tensor) -> Loss:
        """Returns both terms; feature maps that weigh nothing are not computed."""
        with recording(model, self.layers if self.lam else ()) as maps:
            logits = logits_of(call(model, inputs))
        plain = cross_entropy(logits, targets)
        terms = weight_terms(plain, self._approach(maps, inputs), self.lam) if maps else {"cross_entropy": plain}
        return Loss(terms, accuracy(logits, targets))

    def _approach(self, maps: Mapping[str, Tensor], inputs: Any) -> Tensor:
        """L_approach (Eq. min_interfere)."""
        with torch.no_grad(), recording(self.original, maps) as original:
            call(self.original, inputs)
        return feature_map_loss(maps.values(), (original.pop(name) for name in maps))


@dataclass(eq=False)
class OwnWeightObjective(WeightObjective):
    """L_weight with the user's own loss for the cross-entropy; the original is called as the loss calls the network."""

    loss: OwnLoss = field(kw_only=True)

    def __call__(self, model: nn.Module, inputs: Any, targets: Any = None) -> Loss:
        """Returns the terms of a batch, which takes the inputs' place."""
        with recording(model, self.layers if self.lam else ()) as maps, listening(model) as calls:
            terms = self.loss.terms(model, inputs)
        if maps:
            with recording(self.original, maps) as original:
                answers(self.original, calls)
            terms["features"] = self.lam * feature_map_loss(maps.values(), (original.pop(name) for name in maps))
        return Loss(terms)


@dataclass(frozen=True, eq=False)
class Priced:
    """A budget over the selection probabilities.

    Attributes:
        costs: M_ij of all layers in a row, on the device.
        rest: What does not depend on them.
        budget: ε, for the whole network.
    """

    costs: Tensor
    rest: float
    budget: float

    @classmethod
    def of(cls, network: nn.Module, prices: PriceList, budget: float) -> Priced:
        """The prices in the order of the network's choices, which need not be that of the space."""
        row = [price for name in choices(network) for price in prices.prices[name]]
        return cls(torch.tensor(row, dtype=torch.float32, device=device_of(network)), prices.rest, budget)

    def expected(self, probabilities: Sequence[Tensor]) -> Tensor:
        """What the whole network costs in the mean over all paths."""
        return self.rest + expected_cost(probabilities, [self.costs])


@dataclass(frozen=True, eq=False)
class Hardware:
    """What the hardware makes of the selection probabilities.

    Attributes:
        priced: The budgets.
        eta: η.
        theta: θ.
        one_sided: Whether being under a budget earns nothing.
    """

    priced: tuple[Priced, ...]
    eta: float
    theta: float
    one_sided: bool

    @classmethod
    def of(cls, network: nn.Module, limits: Sequence[Limit], eta: float, theta: float, one_sided: bool) -> Hardware:
        """The limits of a task."""
        priced = tuple(Priced.of(network, limit.prices, limit.budget) for limit in limits)
        return cls(priced, eta, theta, one_sided)

    def penalty(self, probabilities: Sequence[Tensor]) -> Tensor:
        """The factor of Eq. nas_2."""
        ratios = [priced.expected(probabilities) / priced.budget for priced in self.priced]
        return hardware_penalty(ratios, self.eta, self.theta, self.one_sided)


@dataclass(frozen=True, eq=False)
class ProbabilityObjective:
    """L_prob (Eq. nas_2) of the active path.

    Attributes:
        hardware: The penalty.
        estimate: How α gets its gradient.
        teacher: The network whose answers stand in for the labels, or None.
    """

    hardware: Hardware
    estimate: Callable[[Choice, Tensor], Tensor] = field(default=ESTIMATORS["all"])
    teacher: nn.Module | None = None

    def __call__(self, model: nn.Module, inputs: Any, targets: Tensor) -> Loss:
        """Returns the one term, whose gradient reaches the alphas alone."""
        with gates_open(model, self.estimate):
            logits = logits_of(call(model, inputs))
            penalty = self.hardware.penalty(probabilities(model))
        plain = cross_entropy(logits, targets if self.teacher is None else _said(self.teacher, inputs))
        return Loss({"penalised": probability_loss(plain, penalty)}, accuracy(logits, targets))


@dataclass(frozen=True, eq=False)
class OwnProbabilityObjective(ProbabilityObjective):
    """L_prob with the user's own loss for the cross-entropy; with a teacher, the distance to its outputs."""

    loss: OwnLoss = field(kw_only=True)

    def __call__(self, model: nn.Module, inputs: Any, targets: Any = None) -> Loss:
        """Returns the one term of a batch, which takes the inputs' place."""
        with gates_open(model, self.estimate), listening(model) as calls:
            plain = total(self.loss.terms(model, inputs))
            penalty = self.hardware.penalty(probabilities(model))
        if self.teacher is not None:
            plain = _apart(calls, self.teacher)
        return Loss({"penalised": probability_loss(plain, penalty)})


def _apart(calls: Sequence[Call], teacher: nn.Module) -> Tensor:
    pairs = zip(calls, answers(teacher, calls), strict=True)
    return torch.stack([distance(own.outputs, other) for own, other in pairs]).sum()


@torch.no_grad()
def _said(teacher: nn.Module, inputs: Any) -> Tensor:
    """The class probabilities that a network gives."""
    return logits_of(call(teacher, inputs)).float().softmax(1)


def probabilities(network: nn.Module) -> list[Tensor]:
    """Those of all choices, in their order."""
    return [choice.probabilities for choice in choices(network).values()]
