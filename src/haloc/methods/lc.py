"""Learning-compression: weights and ranks learnt in turns, within the budget.

Idelbayev and Carreira-Perpiñán, "Low-rank compression of neural nets: learning the rank of each layer", CVPR 2020
(LCNN). The low-rank weights Θ are split off from the weights W, and a quadratic penalty with growing μ draws the two
together:

    L step   min over W:             loss(W) + μ/2 Σ_i ‖W_i − Θ_i‖²        SGD
    C step   min over Θ, its ranks:  Σ_i ‖W_i − Θ_i‖²  within the budget   exact, see `lc_step`

The paper weighs the cost of the ranks against the error with a λ, which has to be tried out until the network has the
size that was wanted; here the budget is a constraint of the C step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from haloc.errors import SpecError
from haloc.factor.forward import copied
from haloc.factor.surgery import check_plan
from haloc.methods.evidence import Evidence
from haloc.methods.lc_step import Attracted, Offers, compress, squared_errors
from haloc.methods.task import Method, Task
from haloc.training.baseline import weights_update
from haloc.training.feed import Feed
from haloc.training.loop import fit
from haloc.training.objective import CrossEntropy, Loss, Objective
from haloc.training.settings import TrainSettings, require
from haloc.training.step import Update

#: Training that suits a network which is trained already.
TRAINING = TrainSettings(epochs=30, lr=0.05, weight_decay=5e-4, warmup_epochs=1.0)


@dataclass(frozen=True)
class LcSettings:
    """What learning-compression is told, besides `TrainSettings`.

    Attributes:
        rounds: C steps, at equal distances over the whole training; the first is before its first step.
        mu: μ of the first round. As long as it is small the ranks still change from round to round.
        mu_end: μ of the last, large enough for the weights to come to their ranks; it grows by the same factor always.
    """

    rounds: int = 30
    mu: float = 1e-3
    mu_end: float = 1.0

    def __post_init__(self) -> None:
        require("rounds", self.rounds, isinstance(self.rounds, int) and self.rounds >= 1, "a whole number from 1")
        require("mu", self.mu, 0 < self.mu < float("inf"), "above 0")
        require("mu_end", self.mu_end, self.mu <= self.mu_end < float("inf"), f"at least mu, {self.mu}")

    def mu_of(self, number: int) -> float:
        """μ of a round, counted from 0."""
        return float(self.mu * (self.mu_end / self.mu) ** (number / max(1, self.rounds - 1)))


@dataclass(frozen=True)
class Rounds:
    """Which steps of a training are of which round.

    Attributes:
        settings: How many rounds there are, and their μ.
        steps: How many steps the training has.
    """

    settings: LcSettings
    steps: int

    def at(self, step: int) -> int:
        """The round of a step; what lies beyond the end is of the last."""
        return min(step * self.settings.rounds // self.steps, self.settings.rounds - 1)

    def begins(self, step: int) -> bool:
        """Whether a round begins with this step."""
        return step == 0 or self.at(step) != self.at(step - 1)

    def mu(self, step: int) -> float:
        """μ during a step."""
        return self.settings.mu_of(self.at(step))


@dataclass(frozen=True)
class Penalised:
    """What the L step minimises: cross-entropy, or the user's own loss, and μ/2 Σ_i ‖W_i − Θ_i‖²."""

    model: Attracted
    loss: Objective = field(default_factory=CrossEntropy)

    def __call__(self, model: nn.Module, inputs: Any, targets: Tensor) -> Loss:
        """Returns all terms; ``model`` may be a compiled version of the one whose weights are drawn."""
        plain = self.loss(model, inputs, targets)
        penalty = self.model.mu / 2 * self.model.squared_distance()
        return Loss({**plain.terms, "penalty": penalty}, plain.accuracy)


def find(task: Task, settings: LcSettings) -> Evidence:
    """Trains a copy of the network towards low rank; the losses are the distances of its final weights.

    They depend on the budget, since the ranks chosen on the way are those to which the weights are drawn: for a budget
    far from it the search is better done again.
    """
    training = task.training or TRAINING
    if training.ema:
        raise SpecError(f"a search keeps no moving average, ema must be 0, got {training.ema}")
    offers = {name: tuple(choices) for name, choices in task.space.open_layers.items()}
    check_plan(task.model, {name: forms[-1] for name, forms in offers.items()})
    model = Attracted(copied(task.model), offers)
    outcome = fit(
        model,
        [learning(model, task.feed(task.train), offers, task, settings, training)],
        training,
        validate=lambda _: {"distance": model.relative_distance(), "mu": float(model.mu)},
        folder=task.folder,
        resume=task.resume,
        config=_config(task, offers, settings),
        session=task.session,
        on_progress=task.on_progress,
    )
    losses = {name: squared_errors(layer, offers[name]) for name, layer in model.open_layers().items()}
    return Evidence(
        METHOD.name, task.space, losses,
        settings=asdict(settings), history=outcome.history, finished=outcome.finished,
    )  # fmt: skip


def learning(
    model: Attracted, feed: Feed, offers: Offers, task: Task, settings: LcSettings, training: TrainSettings
) -> Update:
    """L steps with a C step before the first of every round.

    The steps are all alike, so they can be captured: Θ and μ change in place, between them.
    """
    rounds = Rounds(settings, training.epochs * feed.steps)
    plain = weights_update(model, feed, Penalised(model, task.own_loss or CrossEntropy()), training)
    lr = partial(_stable, plain.lr, rounds, feed.steps)
    return replace(plain, lr=lr, before_step=partial(_begin_round, model, offers, task, rounds))


def _stable(lr: Callable[[float], float], rounds: Rounds, steps: int, epoch: float) -> float:
    """At most 1/μ, as in LCNN: the penalty alone has curvature μ, and longer steps would overshoot it."""
    return min(lr(epoch), 1 / rounds.mu(round(epoch * steps)))


def _begin_round(model: Attracted, offers: Offers, task: Task, rounds: Rounds, step: int) -> None:
    if rounds.begins(step):
        compress(model, offers, task.limits, rounds.mu(step))


def _config(task: Task, offers: Offers, settings: LcSettings) -> dict[str, Any]:
    """What decides a search besides its training, for a checkpoint to compare."""
    rows = [{x.prices.quantity: {"budget": x.budget, "prices": x.prices.prices}} for x in task.limits]
    forms = {name: [str(form) for form in row] for name, row in offers.items()}
    named = {} if task.own_loss is None else {"loss": task.own_loss.name}
    return {"lc": asdict(settings), "limits": dict(enumerate(rows)), "candidates": forms, **named}


METHOD = Method(
    "lc",
    "learning-compression: trains the weights towards low rank, choosing the ranks anew on the way",
    find,
    LcSettings,
    needs=("train",),
    trains=True,
)
