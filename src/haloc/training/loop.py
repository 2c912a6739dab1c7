"""The training loop, for baselines, search and fine-tuning alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from haloc.training.run import Progress, Run, Validate
from haloc.training.session import Session, synced_norms
from haloc.training.settings import TrainSettings
from haloc.training.step import Update

#: Steps between two looks at the clock and the loss; a look waits for the device.
STRETCH = 50


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        history: a row of figures for every epoch.
        seconds: training time, over all the times it was resumed.
        finished: whether all epochs were done; False when the time was up.
        epochs: how many were done, in fractions.
    """

    history: list[dict[str, Any]]
    seconds: float
    finished: bool
    epochs: float = 0.0


def fit(
    model: nn.Module,
    updates: Sequence[Update],
    settings: TrainSettings,
    *,
    validate: Validate | None = None,
    folder: str | Path | None = None,
    resume: bool = True,
    config: Mapping[str, Any] | None = None,
    session: Session | None = None,
    on_start: Callable[[], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Outcome:
    """Trains ``model`` in place: every step takes one step of every update, the first of which counts the epochs.

    Args:
        model: What is trained, on the device to train on.
        updates: What is minimised by whom, on which data.
        settings: How.
        validate: Called on the evaluation model (the moving average where there is one) after epochs.
        folder: Where checkpoints and logs go; without it nothing is written.
        resume: Go on from the folder's newest checkpoint, if there is one.
        config: What else decides the run, to be found in the checkpoint and compared on resuming.
        session: This process among several.
        on_start: Called before the first step of a run that is not resumed.
        on_progress: Called every few steps.
    """
    run = Run(model, updates, settings, session or Session(), folder, config or {}, on_progress)
    steps = run.steps
    with run.surroundings():
        if not (resume and run.restore()):
            run.begin(on_start)
        with synced_norms(model, run.session):
            while run.step < settings.epochs * steps and not run.out_of_time:
                for stepper, raw in run.next_batches():
                    run.take(stepper, raw)
                run.step += 1
                within = run.step % steps
                if within == 0:
                    run.end_epoch(validate)
                elif within % STRETCH == 0:
                    run.look()
        run.finish()
    return Outcome(run.history, run.seconds, run.step >= settings.epochs * steps, run.step / steps)
