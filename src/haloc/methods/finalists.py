"""The last word of a search: a few networks are fine-tuned briefly, and the one that comes out best is taken.

What a candidate does in an over-parameterised network, with weights that it shares, is a good guess at what it will do
when the network is trained by itself, and no more than that. How far a network has come after a few epochs tells
networks apart by far more than its seed does. So the search names some: where it began, where it ended, and what lies
between the two. Others may name some, too: which form suits training best does not show before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from haloc.errors import BudgetError, SpecError, TrainError
from haloc.factor.forward import call, device_of, evaluating, inputs_of
from haloc.factor.padding import cut_ranks, pad_ranks
from haloc.factor.surgery import apply_plan
from haloc.forms import FORMS, Dense, Form
from haloc.methods.evidence import Evidence
from haloc.methods.judges import Judge, by_labels, by_original
from haloc.methods.moves import REACH, Lost, lost, moved
from haloc.methods.notes import fingerprint, notes
from haloc.methods.search import method_of
from haloc.methods.supernet import Choice
from haloc.methods.task import Rehearsal, Task
from haloc.methods.trials import Batch, Divergence, divergence, examples, take_statistics_from_batches
from haloc.plan import Plan
from haloc.training.baseline import weights_update
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


def between(own: Mapping[str, Choice], count: int) -> dict[str, Losses]:
    """−log p of ``count`` distributions from what the search began with to what it ended with, in equal steps."""
    ends = {name: choice.log_probabilities.cpu().numpy() for name, choice in own.items()}
    first = began(own)
    parts = np.linspace(0.0, 1.0, count) if count > 1 else [1.0]
    return {
        f"{100 * part:.3g}% of the way": {name: (1 - part) * first[name] - part * ends[name] for name in own}
        for part in parts
    }


def began(own: Mapping[str, Choice]) -> dict[str, Vector]:
    """−log p as the search began."""
    return {name: -choice.start.double().log_softmax(0).cpu().numpy() for name, choice in own.items()}


def nominated(task: Task, nominees: Sequence[str], first: Losses, last: Losses) -> dict[str, Losses]:
    """Losses by which the plans are likeliest that others name; who has none within the budgets names none.

    Args:
        task: What is searched.
        nominees: Names of methods and of forms.
        first: −log p as the search began.
        last: −log p as it ended, which all else follows.
    """
    found: dict[str, Losses] = {}
    for name in nominees:
        with suppress(BudgetError):
            plan = _plan(task, _of_form(task, name, first)) if name in FORMS else _by_method(task, name)
            found[name] = _favouring(task, last, plan)
    return found


def _by_method(task: Task, name: str) -> Plan:
    alone = replace(task, folder=None, on_step=None, on_progress=None)
    return method_of(name)(alone).plan(task.limits)


def _of_form(task: Task, name: str, losses: Losses) -> Losses:
    """Losses by which a layer takes that form or stays dense; one to which it is not offered has all it had."""
    found = dict(losses)
    for layer, offer in _offers(task).items():
        if any(form.name == name for form in offer):
            suits = np.array([form.name in (name, Dense.name) for form in offer])
            found[layer] = np.where(suits, losses[layer], np.inf)
    return found


@dataclass(frozen=True)
class Tried:
    """A plan that was fine-tuned.

    Attributes:
        plan: What was tried.
        loss: How far it is from the uncompressed network.
        less: What it would lose by smaller ranks, where that was asked for.
    """

    plan: Plan
    loss: float
    less: Lost


#: Trains a network that a plan was written into.
Train = Callable[[nn.Module, Plan], None]


@dataclass(frozen=True, eq=False)
class Contest:
    """Plans are tried in it, each once.

    Attributes:
        task: Where they are from.
        train: How a network is trained.
        judge: How bad it is then.
        asked: Whether layers are asked what they would lose by smaller ranks, where a network is the best so far.
        known: What was tried before, by plan.
        note: Keeps a row for the next time.
    """

    task: Task
    train: Train
    judge: Judge
    asked: bool
    known: dict[str, Tried]
    note: Callable[[dict[str, Any]], None]

    def tried(self, plan: Plan) -> Tried:
        """The plan with what it is worth. All processes are told what the main one finds, which alone has notes."""
        together = self.task.session or Session()
        if not together.agree(_key(plan) in self.known):
            self.known[_key(plan)] = found = self._try(plan)
            self.note({"plan": plan.to_dict(), "loss": found.loss, "less": dict(found.less)})
        own = self.known.get(_key(plan), Tried(plan, 0.0, {}))
        return own if together.alone else _shared(own, self.task, together)

    def _try(self, plan: Plan) -> Tried:
        network = apply_plan(self.task.model, plan, moments=self.task.moments)
        try:
            self.train(network, plan)
        except TrainError:  # one that does not train is not the best; the search is not lost for it
            return Tried(plan, float("inf"), {})
        with evaluating(network):
            own = self.judge(network)
        leads = own < min((other.loss for other in self.known.values()), default=float("inf"))
        return Tried(plan, own, self._less(network, plan) if self.asked and leads else {})

    def _less(self, network: nn.Module, plan: Plan) -> Lost:
        """BatchNorms go by the batch: smaller ranks shift what they see, for which training would make up at once."""
        take_statistics_from_batches(network.eval())
        return lost(network, plan, _offers(self.task), self.judge)


def taught_by(task: Task, original: nn.Module, training: TrainSettings) -> Train:
    """Networks learn to answer as the uncompressed one does."""
    taught = Taught(original, divergence(task, TEMPERATURE), None if task.loss is None else task.inputs or inputs_of)

    def train(network: nn.Module, plan: Plan) -> None:
        padded = pad_ranks(network, plan.changes(), _block(device_of(network), training))
        fit(network, [weights_update(network, task.feed(task.train), taught, training)], training, session=task.session)
        cut_ranks(network, padded)

    return train


def rehearsed(rehearsal: Rehearsal, epochs: int) -> Train:
    """Networks are fine-tuned as they will be in the end, only shorter."""

    def train(network: nn.Module, plan: Plan) -> None:
        rehearsal.run(network, epochs)

    return train


def best_of(
    task: Task,
    original: nn.Module,
    found: Mapping[str, Losses],
    training: TrainSettings,
    images: int,
    moves: int = 0,
    trial: str = "taught",
) -> tuple[Losses, list[dict[str, Any]]]:
    """Fine-tunes the plan of each of these losses; returns losses by which the best one is chosen, and what to tell.

    Plans that are the same are tried once. What was tried is noted in the folder of the search.

    Args:
        task: What is searched.
        original: The uncompressed network.
        found: −log p of every candidate, several times, by the names of those who say so.
        training: How plans are fine-tuned.
        images: Held-out examples that they are judged on.
        moves: How often the best is changed by exchanging ranks between its layers, and tried again.
        trial: How plans are tried, as in `SearchSettings`.
    """
    with own_random_numbers(training.seed):
        held_out = examples(task, images)
    with notes(task, "finalists", _identity(task, held_out, training, moves, trial)) as (before, note):
        known = {_key(Plan.from_dict(row["plan"])): _read(row) for row in before}
        contest = Contest(task, *_trial(task, original, training, held_out, trial), moves > 0, known, note)
        rows: list[dict[str, Any]] = []
        tried: list[Tried] = []
        for name, losses in found.items():
            tried.append(contest.tried(_plan(task, losses)))
            rows.append({"finalist": name, "loss": tried[-1].loss})
            task.step(len(rows), len(found) + moves)
        best = int(np.argmin([each.loss for each in tried]))
        chosen = list(found.values())[best]
        for losses, each in _moves(contest, chosen, tried[best], moves):
            rows.append({"move": len(rows) - len(found) + 1, "loss": each.loss})
            task.step(len(rows), len(found) + moves)
            chosen = losses if each.loss < min(row["loss"] for row in rows[:-1]) else chosen
    return chosen, rows


def _trial(
    task: Task, original: nn.Module, training: TrainSettings, held_out: Sequence[Batch], trial: str
) -> tuple[Train, Judge]:
    """How plans are trained, and judged."""
    if trial == "taught":
        return taught_by(task, original, training), by_original(original, divergence(task, TEMPERATURE), held_out)
    if task.rehearsal is None:
        raise SpecError(
            'trial="finetuned" has to know how the network will be fine-tuned in the end: haloc compress knows it from '
            "its recipe, where finetune.epochs is not 0; in Python give rehearsal="
        )
    return rehearsed(task.rehearsal, training.epochs), by_labels(task, held_out)


def _identity(task: Task, held_out: Sequence[Batch], training: TrainSettings, moves: int, trial: str) -> dict[str, Any]:
    """What decides a trial, for notes of it to be used again."""
    decisive = {name: value for name, value in asdict(training).items() if name not in FREE}
    of = {"of": fingerprint(task, held_out), "training": decisive, "data": task.feed(task.train).identity}
    if trial != "taught" and task.rehearsal is not None:
        of |= {"trial": trial, "rehearsal": dict(task.rehearsal.identity), "training": {"epochs": training.epochs}}
    return of | ({"moves": True} if moves else {})


def _moves(contest: Contest, losses: Losses, best: Tried, count: int) -> Iterator[tuple[Losses, Tried]]:
    """Networks a few steps away from the best so far, each tried; ever nearer where they do no better."""
    task, reach, seen = contest.task, REACH, {_key(best.plan)}
    for _ in range(count):
        while reach:
            wanted = moved(best.plan, best.less, _offers(task), task.limits, reach)
            other = _favouring(task, losses, wanted)
            plan = _plan(task, other)
            if _key(plan) not in seen:
                break
            reach -= 1
        if not reach:
            return
        seen.add(_key(plan))
        tried = contest.tried(plan)
        yield other, tried
        if tried.loss < best.loss:
            best, losses = tried, other
        else:
            reach -= 1


def _favouring(task: Task, losses: Losses, plan: Plan) -> Losses:
    """Losses by which every form of the plan is likelier than others, which stay in their order as far as they can."""
    found: dict[str, Vector] = {}
    for name, offer in _offers(task).items():
        chosen = offer.index(plan.get(name, Dense()))
        row = np.maximum(losses[name], losses[name][chosen] + 1.0)
        row[chosen] = losses[name][chosen]
        row = row - row[chosen]
        found[name] = row + np.log(np.exp(-row).sum())  # probabilities add up to one
    return found


def _offers(task: Task) -> dict[str, tuple[Form, ...]]:
    return {name: tuple(offer) for name, offer in task.space.open_layers.items()}


def _shared(own: Tried, task: Task, together: Session) -> Tried:
    """What the main process knows of a plan."""
    names = list(task.space.open_layers)
    table = torch.full((len(names), REACH), float("nan"), dtype=torch.float64)
    for place, name in enumerate(names):
        for step, value in enumerate(own.less.get(name, ())):
            table[place, step] = value
    sent = torch.cat([torch.tensor([own.loss], dtype=torch.float64), table.flatten()]).to(device_of(task.model))
    together.share([sent])
    loss, rows = float(sent[0]), sent[1:].reshape(-1, REACH).tolist()
    less = {name: tuple(value for value in row if value == value) for name, row in zip(names, rows, strict=True)}
    return Tried(own.plan, loss, {name: row for name, row in less.items() if row})


def _read(row: Mapping[str, Any]) -> Tried:
    """What was noted."""
    less = {name: tuple(map(_number, values)) for name, values in row.get("less", {}).items()}
    return Tried(Plan.from_dict(row["plan"]), _number(row["loss"]), less)


def _number(noted: float | None) -> float:
    """A log has no infinity: it says null."""
    return float("inf") if noted is None else float(noted)


def _plan(task: Task, losses: Losses) -> Plan:
    return Evidence("haloc", task.space, {name: tuple(row) for name, row in losses.items()}, "likeliest").plan(
        task.limits
    )


def _key(plan: Plan) -> str:
    return str(sorted((name, str(form)) for name, form in plan.items()))


def _block(device: torch.device, training: TrainSettings) -> int:
    """What ranks are padded to for the time of a trial, see `haloc.factor.padding`."""
    return 8 if device.type == "cuda" and training.precision in ("bf16", "fp16") else 1
