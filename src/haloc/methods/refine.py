"""The end of a search: whole networks within the budget are run with the weights that were trained.

Until then the probabilities of a layer have learnt what its candidates do for whatever else was drawn. Here networks
are drawn by their probabilities and judged as a whole, and the probabilities move towards the best of them: the
cross-entropy method. The plan follows from them as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from haloc.factor.forward import call
from haloc.methods.budget import Limit
from haloc.methods.supernet import Choice, choices
from haloc.methods.trials import Batch, Divergence, of_classes, take_statistics_from_batches
from haloc.training.feed import batch_size

Vector = NDArray[np.float64]
#: The number of a candidate for every choice, in their order.
Path = tuple[int, ...]

#: What share of a round's number the best of all rounds are, and how far the probabilities go towards them.
ELITE, STRIDE = 0.2, 0.4
#: So many times as many networks are drawn as are judged, those that use the budgets best: what is left is wasted.
CHOICE = 4
#: Softens both outputs, as in the method "sensitivity": the fewer examples it takes to tell networks apart.
TEMPERATURE = 4.0
#: Draws at once, and how often they are tried.
_DRAWS, _ATTEMPTS = 4096, 25
#: Of adding up; the plan itself is held to the budget to the last bit.
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Prices:
    """What every candidate takes of every budget, as shares of it.

    Attributes:
        shares: A row of candidates for every choice, a column for every budget.
        rest: What is taken whatever is chosen.
    """

    shares: tuple[Vector, ...]
    rest: Vector

    @classmethod
    def of(cls, names: Sequence[str], limits: Sequence[Limit]) -> Prices:
        """The limits of a task, in the order of the network's choices."""
        rows = [[np.array(limit.prices.prices[name]) / limit.budget for limit in limits] for name in names]
        rest = np.array([limit.prices.rest / limit.budget for limit in limits])
        return cls(tuple(np.stack(row, axis=1) for row in rows), rest)

    def taken(self, paths: NDArray[np.int64]) -> Vector:
        """The shares that networks take, a row for each."""
        layers = (row[paths[:, number]] for number, row in enumerate(self.shares))
        total: Vector = self.rest + sum(layers)
        return total


def refine(
    network: nn.Module,
    original: nn.Module,
    limits: Sequence[Limit],
    examples: Sequence[Batch],
    *,
    rounds: int,
    networks: int,
    seed: int,
    apart: Divergence | None = None,
) -> Iterator[dict[str, float]]:
    """Moves the probabilities of the network's choices round by round, and tells of each.

    Args:
        network: The over-parameterised network, trained.
        original: The uncompressed network, whose answers are to be kept.
        limits: What a network may cost.
        examples: What networks are judged on.
        rounds: How often networks are drawn.
        networks: How many at once.
        seed: Decides the draws.
        apart: How far answers are from those of the uncompressed network; as classes unless told otherwise.
    """
    own = choices(network)
    judge = _Judge(
        network, own, [_answer(original, inputs) for inputs, _ in examples], examples, apart or of_classes(TEMPERATURE)
    )
    chances = [choice.log_probabilities.cpu().numpy() for choice in own.values()]
    prices, draw = Prices.of(list(own), limits), np.random.default_rng(seed)
    losses: dict[Path, float] = {}
    for number in range(rounds):
        drawn = drawn_within(prices, chances, networks, draw, losses)
        with _batch_statistics(network):
            losses |= {path: judge.loss(path) for path in drawn}
        if not losses:
            break  # nothing that is likely is within the budget
        best = sorted(losses, key=losses.__getitem__)[: max(2, round(ELITE * networks))]
        chances = [towards(row, [path[layer] for path in best]) for layer, row in enumerate(chances)]
        yield {"round": number, "best": losses[best[0]], "new": len(drawn)}
    for choice, row in zip(own.values(), chances, strict=True):
        choice.alpha.data.copy_(torch.from_numpy(choice.temperature * row))


def drawn_within(
    prices: Prices, chances: Sequence[Vector], count: int, draw: np.random.Generator, known: Mapping[Path, float]
) -> list[Path]:
    """New networks by their probabilities, all within the budgets; of more than enough those that use them best."""
    found: dict[Path, float] = {}
    for _ in range(_ATTEMPTS):
        rows = (np.exp(row) / np.exp(row).sum() for row in chances)
        paths = np.stack([draw.choice(len(row), size=_DRAWS, p=row) for row in rows], axis=1)
        taken = prices.taken(paths)
        fitting = (taken <= 1 + _ROUNDING).all(axis=1)
        for path, shares in zip(paths[fitting].tolist(), taken[fitting], strict=True):
            if tuple(path) not in known:
                found[tuple(path)] = float(shares.mean())
            if len(found) == CHOICE * count:
                break
        if len(found) == CHOICE * count:
            break
    return sorted(found, key=found.__getitem__, reverse=True)[:count]


def towards(chances: Vector, best: Sequence[int]) -> Vector:
    """Log probabilities of a layer on their way to its candidates in the best networks, the first of which counts most.

    As logarithms, for what is next to impossible has one, too, by which other budgets are solved.
    """
    weights = np.log(len(best) + 0.5) - np.log(np.arange(1, len(best) + 1))
    often = np.bincount(best, weights, minlength=len(chances)) / weights.sum()
    with np.errstate(divide="ignore"):  # of candidates that are in none of them
        moved: Vector = np.logaddexp(np.log(1 - STRIDE) + chances, np.log(STRIDE * often))
    return moved


@dataclass(frozen=True, eq=False)
class _Judge:
    network: nn.Module
    choices: Mapping[str, Choice]
    expected: Sequence[Any]
    examples: Sequence[Batch]
    apart: Divergence

    def loss(self, path: Path) -> float:
        """How far the answers are from those of the uncompressed network, in the mean."""
        for choice, number in zip(self.choices.values(), path, strict=True):
            choice.active = number
        total, count = 0.0, 0
        for (inputs, targets), expected in zip(self.examples, self.expected, strict=True):
            size = batch_size((inputs, targets))
            total += float(self.apart(_answer(self.network, inputs), expected, targets)) * size
            count += size
        loss = total / count
        return loss if np.isfinite(loss) else float("inf")


@torch.no_grad()
def _answer(network: nn.Module, inputs: Any) -> Any:
    return call(network, inputs)


@contextmanager
def _batch_statistics(network: nn.Module) -> Iterator[None]:
    """Eval mode, but BatchNorms take their statistics from the batch at hand, since every path has others."""
    norms = [module for module in network.modules() if isinstance(module, _BatchNorm)]
    modes = [(module, module.training) for module in network.modules()]
    momenta = [module.momentum for module in norms]
    take_statistics_from_batches(network.eval())
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
