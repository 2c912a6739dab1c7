"""Training a network from its labels: baselines, and the networks that compression starts from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from haloc.errors import SpecError
from haloc.factor.forward import describe, evaluating
from haloc.files import replacing
from haloc.training.evaluate import evaluate, mean_loss
from haloc.training.feed import Feed, as_feed
from haloc.training.loop import Outcome, fit
from haloc.training.objective import CrossEntropy, LossFunction, Objective, OwnLoss
from haloc.training.optimiser import optimiser_of
from haloc.training.run import Progress, Validate
from haloc.training.schedule import learning_rate
from haloc.training.session import Session
from haloc.training.settings import TrainSettings
from haloc.training.step import Update

WEIGHTS = "weights.safetensors"


def train(
    model: nn.Module,
    data: Any,
    *,
    val: Any = None,
    settings: TrainSettings | None = None,
    loss: LossFunction | None = None,
    objective: Objective | None = None,
    folder: str | Path | None = None,
    resume: bool = True,
    config: Mapping[str, Any] | None = None,
    session: Session | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Outcome:
    """Trains a network in place, on whatever device it is on.

    Args:
        model: The network.
        data: Training batches: a data set's ``batches(…)``, or any loader of ``(inputs, targets)``; with a ``loss``
            any loader at all.
        val: Held-out batches to evaluate on after epochs; or a function from the model, in eval mode, to a score or to
            named figures.
        settings: How to train; `TrainSettings` has the defaults.
        loss: What to minimise, ``loss(model, batch)``: a scalar, or scalars by name whose sum it is. The batch is what
            the loader gave, on the model's device. Cross-entropy unless told otherwise.
        objective: The same with the batch taken apart, ``objective(model, inputs, targets) -> Loss``.
        folder: Where checkpoints, logs and the final weights go; without it nothing is written.
        resume: Go on from the folder's newest checkpoint, if there is one.
        config: What else decides the run, to be kept in its checkpoints and compared when it goes on.
        session: This process among several, from `join_session`.
        on_progress: Called every few steps, for a progress bar.
    """
    settings, session = settings or TrainSettings(), session or Session()
    if loss is not None and objective is not None:
        raise SpecError("there is one thing to minimise: give loss= or objective=, not both")
    own = None if loss is None else OwnLoss(loss)
    objective = own or objective or CrossEntropy()
    outcome = fit(
        model,
        [weights_update(model, as_feed(data, whole=own is not None), objective, settings)],
        settings,
        validate=validation(val, session, own),
        folder=folder,
        resume=resume,
        config={**(config or {}), "objective": _described(objective)},
        session=session,
        on_progress=on_progress,
    )
    write_weights(model, folder, session)
    return outcome


def weights_update(model: nn.Module, feed: Feed, objective: Objective, settings: TrainSettings) -> Update:
    """The update that all training has: on the weights."""
    return Update("weights", feed, objective, optimiser_of(model, settings), learning_rate(settings))


def validation(val: Any, session: Session, loss: OwnLoss | None = None) -> Validate | None:
    """How held-out data are looked at: what a user's function says, or on batches a classifier's accuracy.

    Where the user has a loss of their own, batches are whatever that takes, and it is what is told.
    """
    if val is None:
        return None
    if callable(val):
        return lambda model: _scored(val, model)

    def figures(model: nn.Module) -> Mapping[str, float]:
        if loss is not None:
            return {"loss": mean_loss(model, val, loss, session)}
        accuracy = evaluate(model, val, session=session)
        return {"top1": accuracy.top1, "top5": accuracy.top5, "loss": accuracy.loss}

    return figures


def _scored(score: Callable[[nn.Module], Any], model: nn.Module) -> Mapping[str, float]:
    """What a user's function says of a model: figures by name, or one that is the score."""
    with evaluating(model):
        said = score(model)
    figures = said if isinstance(said, Mapping) else {"score": said}
    try:
        return {str(name): float(figure) for name, figure in figures.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        got = describe(said) if isinstance(said, torch.Tensor) else repr(said)
        raise SpecError(f"a score must be a number, or numbers by name, got {got}") from error


def write_weights(model: nn.Module, folder: str | Path | None, session: Session) -> None:
    """Writes the weights as safetensors, from the main process alone."""
    if folder is not None and session.is_main:
        save_weights(model, Path(folder) / WEIGHTS)


def save_weights(model: nn.Module, file: Path) -> None:
    """Writes a model's tensors as safetensors, whole or not at all."""
    # Copies: safetensors refuses tensors that share their memory, as tied weights do.
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    copies = {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}
    with replacing(file) as path:
        try:
            save_file(copies, path)
        except SafetensorError as error:  # a full disk, say
            raise OSError(str(error)) from error


def _described(objective: Objective) -> Any:
    """An objective's settings where it has some that can be written down, else its name."""
    if isinstance(objective, OwnLoss):
        return objective.name
    if is_dataclass(objective) and not isinstance(objective, type):
        settings = {field.name: getattr(objective, field.name) for field in fields(objective)}
        with suppress(TypeError):  # a teacher, say, cannot be
            return json.loads(json.dumps(settings))
    return getattr(objective, "__qualname__", type(objective).__qualname__)
