"""A genetic algorithm over whole networks, judged on held-out examples without any training.

After N. Li, Pan, Chen, Ding, Zhao and Xu, "Heuristic rank selection with progressively searching tensor ring network",
Complex & Intelligent Systems, 2022 (PSTR): ranks are genes, and the fitness of a network is how well it does on
held-out data as it is. Here all networks keep to the limits, and the fitness is the loss (cross-entropy, or the user's
own), which tells networks apart that are right equally often. They are judged with BatchNorm statistics of the examples
at hand, as statistics will be measured anew once the ranks are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite
from typing import Any

import numpy as np
from torch import Tensor

from haloc.errors import ModelError, SpecError
from haloc.factor.forward import describe
from haloc.methods.evidence import Evidence
from haloc.methods.genes import Genes, Ladders
from haloc.methods.notes import Row, fingerprint, notes
from haloc.methods.task import Method, Task
from haloc.methods.trials import Batch, Trials, class_rows, examples
from haloc.training.feed import batch_size
from haloc.training.objective import cross_entropy
from haloc.training.settings import require

#: The share of a generation that lives on.
ELITE = 0.25
#: How often a child is born again that had been seen before.
ATTEMPTS = 10


@dataclass(frozen=True)
class GeneticSettings:
    """What a genetic search is made of.

    Attributes:
        population: networks of a generation.
        generations: how many there are; the first is drawn at random.
        images: held-out examples that every network is run on.
        mutation: how likely a layer is to move to a candidate of about the same cost.
        seed: decides everything that is drawn.
    """

    population: int = 24
    generations: int = 20
    images: int = 256
    mutation: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("population", 2), ("generations", 1), ("images", 1), ("seed", 0)):
            value = getattr(self, name)
            require(name, value, type(value) is int and value >= least, f"a whole number from {least}")
        require("mutation", self.mutation, 0 <= self.mutation <= 1, "from 0 to 1")

    @property
    def elite(self) -> int:
        """How many of a generation live on: at least one, and never all."""
        return min(max(1, round(ELITE * self.population)), self.population - 1)


def find(task: Task, settings: GeneticSettings) -> Evidence:
    """Breeds networks generation by generation; those of an earlier run are not judged again."""
    batches, trials = examples(task, settings.images), Trials(task, batch_statistics=True)
    ladders = Ladders.of(task.limits, {name: trials.errors(name) for name in task.space.open_layers})
    losses: dict[Genes, float] = {}
    history: list[Row] = []
    total = settings.population * settings.generations

    def judged(genes: Genes, done: int) -> float:
        if genes not in losses:
            trials.put(ladders.plan(genes))
            losses[genes] = _loss(trials, batches, task.loss is not None)
        task.step(done, total)
        return losses[genes]

    with notes(task, METHOD.name, _identity(task, settings, batches)) as (rows, note):
        population: list[Genes] = []
        for number in range(settings.generations):
            if number < len(rows):
                population = [tuple(genes) for genes, _ in rows[number]["population"]]
                losses |= {tuple(genes): inf if loss is None else loss for genes, loss in rows[number]["population"]}
            else:
                population = _next(population, losses, ladders, settings, number)
            first = number * settings.population + 1
            figures = [judged(genes, done) for done, genes in enumerate(population, start=first)]
            if number >= len(rows):
                note({"population": [*zip(population, figures, strict=True)]})
            history.append({"generation": number, "best": min(figures), "mean": float(np.mean(figures))})
    seen = tuple((ladders.plan(genes), loss) for genes, loss in losses.items() if isfinite(loss))
    if not seen:
        raise ModelError("no network of the space gives a finite loss; calibrate it, or offer larger ranks")
    return Evidence(METHOD.name, task.space, rule="seen", seen=seen, settings=asdict(settings), history=tuple(history))


def _next(
    population: Sequence[Genes], losses: dict[Genes, float], ladders: Ladders, settings: GeneticSettings, number: int
) -> list[Genes]:
    """The next generation: the best of this one, and children of parents of which each was the better of two.

    What is drawn hangs on the seed and the number alone, so a search that goes on draws what it would have drawn.
    """
    draw = np.random.default_rng((settings.seed, number))
    elite = sorted(population, key=losses.__getitem__)[: settings.elite]

    def parent() -> Genes:
        return min((population[int(draw.integers(len(population)))] for _ in range(2)), key=losses.__getitem__)

    def born() -> Genes:
        return ladders.child(parent(), parent(), settings.mutation, draw) if population else ladders.drawn(draw)

    found = list(elite)
    while len(found) < settings.population:
        child = born()
        for _ in range(ATTEMPTS):
            if child not in losses and child not in found:
                break
            child = born()
        found.append(child)
    return found


def _loss(trials: Trials, batches: Sequence[Batch], own: bool) -> float:
    """The mean loss of the network as it is now: the user's own, or the cross-entropy."""
    if own:
        sums = [(float(trials.loss(batch)) * batch_size(batch), batch_size(batch)) for _, batch in batches]
    else:
        sums = [_summed(trials.logits(inputs), targets) for inputs, targets in batches]
    loss = sum(total for total, _ in sums) / sum(count for _, count in sums)
    return loss if isfinite(loss) else inf


def _summed(logits: Tensor, targets: Any) -> tuple[float, int]:
    if not isinstance(targets, Tensor):
        raise SpecError(
            f"method {METHOD.name!r} needs targets that are a tensor of classes, got {describe(targets)}; for a "
            "network that puts out something else give loss="
        )
    count = targets.numel()
    return float(cross_entropy(class_rows(logits, targets), targets.flatten())) * count, count


def _identity(task: Task, settings: GeneticSettings, batches: Sequence[Batch]) -> dict[str, Any]:
    """What decides a generation; how many there are does not."""
    told = {name: value for name, value in asdict(settings).items() if name != "generations"}
    limits = [[limit.prices.quantity, limit.budget] for limit in task.limits]
    return told | {"limits": limits, "task": fingerprint(task, batches)}


METHOD = Method(
    "genetic",
    "the best of many networks bred within the budget, judged on held-out data without training",
    find,
    GeneticSettings,
    needs=("val",),
)
