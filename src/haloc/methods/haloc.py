"""The paper's search: weights and selection probabilities learn in turns, and the likeliest forms that fit are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from haloc.cost.count import Count
from haloc.errors import SpecError
from haloc.methods import sensitivity
from haloc.methods.budget import Limit
from haloc.methods.estimators import ESTIMATORS
from haloc.methods.evidence import Evidence
from haloc.methods.finalists import began, best_of, between, nominated
from haloc.methods.haloc_settings import SearchSettings
from haloc.methods.losses import entropy
from haloc.methods.objectives import (
    Hardware,
    OwnProbabilityObjective,
    OwnWeightObjective,
    Priced,
    ProbabilityObjective,
    WeightObjective,
    probabilities,
)
from haloc.methods.prices import PriceList
from haloc.methods.refine import TEMPERATURE, refine
from haloc.methods.shared import SharedWeights
from haloc.methods.start import boltzmann
from haloc.methods.supernet import (
    Alone,
    Build,
    Choice,
    OwnWeights,
    choices,
    draw_paths,
    make_room,
    note_probabilities,
    noted,
    set_temperature,
    supernet,
)
from haloc.methods.task import Method, Task
from haloc.methods.trials import divergence, examples
from haloc.training.feed import Feed
from haloc.training.loop import Outcome, fit
from haloc.training.objective import OwnLoss, onlooker
from haloc.training.optimiser import optimiser_of
from haloc.training.run import Validate
from haloc.training.schedule import learning_rate
from haloc.training.session import Session
from haloc.training.settings import TrainSettings
from haloc.training.step import Update
from haloc.training.surroundings import own_random_numbers

_CHANGES = "a search takes another path in every step"

#: The draws for weights and for probabilities: in the same step they take different paths.
_WEIGHTS, _PROBABILITIES = 1, 2

#: What the candidates' weights may be.
WEIGHTS: dict[str, Build] = {"own": OwnWeights.of, "shared": SharedWeights.of}

#: Settings of what comes after the training: a finished search can be ended in another way.
_AFTERWARDS = ("rounds", "networks", "images", "finalists", "nominees", "trial", "trial_epochs", "moves")

#: What is told of the network over the search, whatever is budgeted.
_FOLLOWED = ("params", "macs")


def find(task: Task, settings: SearchSettings) -> Evidence:
    """The paper's differentiable search; the losses are −log p.

    Every step draws a path through the over-parameterised network and updates its weights by L_weight on a training
    batch; every few steps it then draws another and updates all selection probabilities by L_prob on a held-out batch.
    """
    training = task.training or TrainSettings()
    check_settings(settings, training)
    network = supernet(task.model, task.space, task.moments, WEIGHTS[settings.weights])
    make_room(network, training.epochs)
    original = onlooker(task.model, training)
    hardware = Hardware.of(network, task.limits, settings.eta, settings.theta, settings.one_sided)
    lessons, held_out, loss = task.feed(task.train), task.feed(task.val), task.own_loss
    outcome = fit(
        network,
        [
            path_update(network, original, lessons, settings, training, loss),
            probabilities_update(network, hardware, held_out, settings, training, lessons.steps, original, loss),
        ],
        training,
        validate=_figures(_followed(task)),
        folder=task.folder,
        resume=task.resume,
        config=_config(task.limits, settings, loss),
        session=task.session,
        on_start=partial(begin, network, task, settings),
        on_progress=task.on_progress,
    )
    set_temperature(network, settings.temperature_at(outcome.epochs, training.epochs))
    if not outcome.finished:
        return _evidence(task, settings, network, outcome)
    judged = {"rounds": _refined(network, original, task, settings, training.seed)}
    judged["finalists"] = _tried(network, original, task, settings, training)
    return _evidence(task, settings, network, outcome, judged)


def begin(network: nn.Module, task: Task, settings: SearchSettings) -> None:
    """Sets the probabilities that the search begins with, and keeps them."""
    own = choices(network)
    if settings.start == "alike":
        return
    found = sensitivity.METHOD(replace(task, folder=None, candidate=lambda name, form: Alone(own[name], form)))
    for name, alpha in boltzmann(found.losses, task.limits, settings.start_spread).items():
        own[name].alpha.data.copy_(torch.from_numpy(alpha * settings.temperature))
        own[name].start.copy_(torch.from_numpy(alpha))


def _refined(
    network: nn.Module, original: nn.Module, task: Task, settings: SearchSettings, seed: int
) -> list[dict[str, float]]:
    """The end of the search: networks are run as a whole. All processes end with what the first one found."""
    if not settings.rounds:
        return []
    rows: list[dict[str, float]] = []
    with own_random_numbers(seed):  # a user's loader may shuffle
        batches = examples(task, settings.images)
        how = {"rounds": settings.rounds, "networks": settings.networks, "seed": seed}
        for row in refine(network, original, task.limits, batches, apart=divergence(task, TEMPERATURE), **how):
            task.step(len(rows) + 1, settings.rounds)
            rows.append(row)
    (task.session or Session()).share(_alphas(network))
    return rows


def _tried(
    network: nn.Module, original: nn.Module, task: Task, settings: SearchSettings, training: TrainSettings
) -> list[dict[str, float]]:
    """The very end: plans are fine-tuned, and the probabilities become those of the best one."""
    if not settings.finalists:
        return []
    own = choices(network)
    brief = replace(training, epochs=settings.trial_epochs, warmup_epochs=0.5, minutes=None)
    found = between(own, settings.finalists)
    found |= nominated(task, settings.nominees, began(own), list(found.values())[-1])
    best, rows = best_of(task, original, found, brief, settings.images, settings.moves, settings.trial)
    for name, choice in own.items():
        choice.alpha.data.copy_(torch.from_numpy(-choice.temperature * best[name]))
    (task.session or Session()).share(_alphas(network))
    return rows


METHOD = Method(
    "haloc",
    "the paper's differentiable search: selection probabilities learned on held-out data, guided by the hardware",
    find,
    SearchSettings,
    needs=("train", "val"),
    trains=True,
)


def path_update(
    network: nn.Module,
    original: nn.Module,
    feed: Feed,
    settings: SearchSettings,
    training: TrainSettings,
    loss: OwnLoss | None = None,
) -> Update:
    """SGD on the weights of the path drawn.

    Candidates of their own that did not run have no gradient and stay as they are; of shared weights those outside of
    the path have a gradient of zero, and momentum and weight decay move them still.
    """
    what = original, tuple(choices(network)), settings.lam
    objective = WeightObjective(*what) if loss is None else OwnWeightObjective(*what, loss=loss)

    def draw(step: int) -> None:
        epoch = step / feed.steps
        objective.lam = settings.lam_at(epoch / training.epochs)
        draw_paths(network, step, training.seed, _WEIGHTS, settings.temperature_at(epoch, training.epochs))

    return Update(
        "weights",
        feed,
        objective,
        optimiser_of(network, training, skip=_alphas(network)),
        learning_rate(training),
        before_step=draw,
        changes=_CHANGES,
    )


def probabilities_update(
    network: nn.Module,
    hardware: Hardware,
    feed: Feed,
    settings: SearchSettings,
    training: TrainSettings,
    steps: int,
    original: nn.Module,
    loss: OwnLoss | None = None,
) -> Update:
    """Adam on the alphas of all layers, once the weights have had their warm-up; ``steps`` make an epoch."""
    what = hardware, ESTIMATORS[settings.gradient], original if settings.soft else None

    def draw(step: int) -> None:
        temperature = settings.temperature_at(step / steps, training.epochs)
        draw_paths(network, step, training.seed, _PROBABILITIES, temperature)

    return Update(
        "alpha",
        feed,
        ProbabilityObjective(*what) if loss is None else OwnProbabilityObjective(*what, loss=loss),
        torch.optim.Adam(_alphas(network), settings.alpha_lr, settings.alpha_betas),
        lambda epoch: settings.alpha_lr,
        from_epoch=settings.warmup_epochs,
        every=settings.alpha_every,
        before_step=draw,
        changes=_CHANGES,
    )


def _alphas(network: nn.Module) -> list[nn.Parameter]:
    return [choice.alpha for choice in choices(network).values()]


def _followed(task: Task) -> dict[str, PriceList]:
    """The budgets' prices, and counts that are told besides."""
    own = {limit.prices.quantity: limit.prices for limit in task.limits}
    return own | {name: PriceList.of(task.space, Count(name)) for name in _FOLLOWED if name not in own}


def _figures(prices: Mapping[str, PriceList]) -> Validate:
    """What is told of the probabilities after an epoch: what the network costs in the mean and if it ended now."""

    @torch.no_grad()
    def figures(network: nn.Module) -> dict[str, float]:
        note_probabilities(network)
        own = probabilities(network)
        likeliest = {name: choice.forms[int(choice.alpha.argmax())] for name, choice in choices(network).items()}
        told = {"entropy": float(entropy(own))}
        for name, row in prices.items():
            told[f"expected_{name}"] = float(Priced.of(network, row, 1.0).expected(own))
            told[f"likeliest_{name}"] = row.cost_of(likeliest)
        return told

    return figures


def _config(limits: Sequence[Limit], settings: SearchSettings, loss: OwnLoss | None) -> dict[str, Any]:
    """What decides a search besides its training, for a checkpoint to compare."""
    forms = {name: [str(form) for form in row] for name, row in limits[0].prices.forms.items()}
    budgets = {limit.prices.quantity: limit.budget for limit in limits}
    prices = {limit.prices.quantity: dict(limit.prices.prices) for limit in limits}
    trained = {name: value for name, value in asdict(settings).items() if name not in _AFTERWARDS}
    named = {} if loss is None else {"loss": loss.name}
    return {"search": trained, "budget": budgets, "candidates": forms, "prices": prices, **named}


def _evidence(
    task: Task,
    settings: SearchSettings,
    network: nn.Module,
    outcome: Outcome,
    judged: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
) -> Evidence:
    found = choices(network)
    losses = {name: tuple((-found[name].log_probabilities).tolist()) for name in task.space.open_layers}
    history = _with_probabilities(outcome.history, found)
    for what, rows in (judged or {}).items():
        if rows:
            history[-1][what] = [dict(row) for row in rows]
    return Evidence(
        "haloc", task.space, losses, "likeliest", settings=asdict(settings), history=history, finished=outcome.finished
    )


def _with_probabilities(history: Sequence[Mapping[str, Any]], found: Mapping[str, Choice]) -> list[dict[str, Any]]:
    """The rows with the probabilities that were noted at their ends; four digits are enough for a figure."""
    traces = {name: noted(choice).tolist() for name, choice in found.items()}
    rows, number = [], 0
    for row in history:
        rows.append(dict(row))
        if "val_entropy" in row:
            rows[-1]["probabilities"] = {name: [round(p, 4) for p in trace[number]] for name, trace in traces.items()}
            number += 1
    return rows


def check_settings(settings: SearchSettings, training: TrainSettings) -> None:
    """Refuses searches in which nothing would be found."""
    if settings.warmup_epochs >= training.epochs:
        raise SpecError(
            f"warmup_epochs must be below the {training.epochs} epochs of the search, got {settings.warmup_epochs}: "
            "the probabilities would learn nothing"
        )
    if training.ema:
        raise SpecError(f"a search keeps no moving average, ema must be 0, got {training.ema}")
