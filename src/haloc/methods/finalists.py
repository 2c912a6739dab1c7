"""The last word of a search: a few networks are fine-tuned briefly, and the one that comes out best is taken.

What a candidate does in an over-parameterised network, with weights that it shares, is a good guess at what it will do
when the network is trained by itself, and no more than that. How far a network has come after a few epochs tells
networks apart by far more than its seed does. So the search names some: where it began, where it ended, and what lies
between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from haloc.errors import TrainError
from haloc.factor.forward import call, evaluating, inputs_of
from haloc.factor.surgery import apply_plan
from haloc.methods.evidence import Evidence
from haloc.methods.notes import fingerprint, notes
from haloc.methods.supernet import Choice
from haloc.methods.task import Task
from haloc.methods.trials import Batch, Divergence, divergence, examples
from haloc.plan import Plan
from haloc.training.baseline import weights_update
from haloc.training.feed import batch_size
from haloc.training.loop import fit
from haloc.training.objective import Loss
from haloc.training.session import Session
from haloc.training.settings import FREE, TrainSettings
from haloc.training.surroundings import own_random_numbers

Vector = NDArray[np.float64]
Losses = Mapping[str, Vector]

#: Softens both outputs, as in fine-tuning.
TEMPERATURE = 4.0


@dataclass(frozen=True, eq=False)
class Taught:
    """What a finalist minimises: how far its answers are from those of the uncompressed network.

    Attributes:
        original: That network.
        apart: How far answers are from each other.
        inputs: Takes the model's inputs out of a batch that is whole; None: it is a pair.
    """

    original: nn.Module
    apart: Divergence
    inputs: Callable[[Any], Any] | None = None

    def __call__(self, model: nn.Module, inputs: Any, targets: Any) -> Loss:
        """Returns the one term."""
        given = inputs if self.inputs is None else self.inputs(inputs)
        with torch.no_grad():
            expected = call(self.original, given)
        return Loss({"distillation": self.apart(call(model, given), expected, targets)})


def between(own: Mapping[str, Choice], count: int) -> list[Losses]:
    """−log p of ``count`` distributions from what the search began with to what it ended with, in equal steps."""
    ends = {name: choice.log_probabilities.cpu().numpy() for name, choice in own.items()}
    first = {name: choice.start.double().log_softmax(0).cpu().numpy() for name, choice in own.items()}
    parts = np.linspace(0.0, 1.0, count) if count > 1 else [1.0]
    return [{name: -((1 - part) * first[name] + part * ends[name]) for name in own} for part in parts]


def best_of(
    task: Task, original: nn.Module, found: Sequence[Losses], training: TrainSettings, images: int
) -> tuple[int, list[dict[str, Any]]]:
    """Fine-tunes the plan of each of these losses; returns the number of the best, and what is told of all.

    Plans that are the same are tried once. What was tried is noted in the folder of the search.
    """
    plans = [_plan(task, losses) for losses in found]
    with own_random_numbers(training.seed):
        held_out = examples(task, images)
    decisive = {name: value for name, value in asdict(training).items() if name not in FREE}
    of = {"of": fingerprint(task, held_out), "training": decisive, "data": task.feed(task.train).identity}
    together = task.session or Session()
    with notes(task, "finalists", of) as (before, note):
        known = {_key(Plan.from_dict(row["plan"])): _loss(row) for row in before}
        for number, plan in enumerate(plans):
            if not together.agree(_key(plan) in known):  # the main process alone has the notes
                known[_key(plan)] = _tried(task, original, plan, training, held_out)
                note({"plan": plan.to_dict(), "loss": known[_key(plan)]})
            task.step(number + 1, len(plans))
    losses = [known.get(_key(plan), float("inf")) for plan in plans]  # all get what the main process finds best
    rows = [{"part": number, "loss": loss} for number, loss in enumerate(losses)]
    return int(np.argmin(losses)), rows


def _loss(row: Mapping[str, Any]) -> float:
    """A log has no infinity: it says null."""
    return float("inf") if row["loss"] is None else float(row["loss"])


def _plan(task: Task, losses: Losses) -> Plan:
    return Evidence("haloc", task.space, {name: tuple(row) for name, row in losses.items()}, "likeliest").plan(
        task.limits
    )


def _key(plan: Plan) -> str:
    return str(sorted((name, str(form)) for name, form in plan.items()))


def _tried(task: Task, original: nn.Module, plan: Plan, training: TrainSettings, held_out: Sequence[Batch]) -> float:
    """How far a network is from the uncompressed one on held-out examples after a brief fine-tuning."""
    network, apart = apply_plan(task.model, plan, moments=task.moments), divergence(task, TEMPERATURE)
    taught = Taught(original, apart, None if task.loss is None else task.inputs or inputs_of)
    try:
        fit(network, [weights_update(network, task.feed(task.train), taught, training)], training, session=task.session)
    except TrainError:  # one that does not train is not the best; the search is not lost for it
        return float("inf")
    return _apart(network, original, apart, held_out)


@torch.no_grad()
def _apart(network: nn.Module, original: nn.Module, apart: Divergence, held_out: Sequence[Batch]) -> float:
    total, count = 0.0, 0
    with evaluating(network):
        for inputs, targets in held_out:
            size = batch_size((inputs, targets))
            total += float(apart(call(network, inputs), call(original, inputs), targets)) * size
            count += size
    return total / count if np.isfinite(total) else float("inf")
