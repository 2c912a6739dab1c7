"""What a run would do, and about how long that would take, without doing it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from haloc.cost.sampling import schedule_of
from haloc.factor.forward import batch_size, call, device_of, tensors_in, to_device
from haloc.factor.inspect import inspect
from haloc.methods.haloc_settings import SearchSettings
from haloc.methods.search import method_of
from haloc.narrowing.find import hidden_channels
from haloc.narrowing.latency import width_rows
from haloc.narrowing.narrow import TRIALS
from haloc.pipeline.deliver import STAGES, check_extras
from haloc.pipeline.flow import check_folder, check_plan, check_recipe, fingerprint_of
from haloc.pipeline.job import Job, job_from
from haloc.pipeline.listener import Listener
from haloc.pipeline.recipe import Recipe
from haloc.pipeline.settings import finetuning, method_settings, reconstruction, search_training
from haloc.pipeline.stage import Stage
from haloc.pipeline.stamps import Stamp, Stamps
from haloc.pipeline.work import Work
from haloc.space import RankSpace, rank_space
from haloc.training.feed import as_feed

#: Blocks of a network, about, and groups of channels that can be narrowed.
BLOCKS, GROUPS = 12, 16

#: Setting a row up takes about as long as timing it.
SETTING_UP = 2.0
#: What a step with a teacher costs beside a plain one, what a step of a search does, and a forward pass beside a step.
TAUGHT, SEARCHED, FORWARD = 1.4, 2.5, 0.33


@dataclass(frozen=True)
class Prospect:
    """What would become of a stage.

    Attributes:
        name: The stage.
        what: What it does.
        state: "kept", "goes on", "to do", or "not needed".
        seconds: About how long it takes; 0 where nothing is done.
        known: Whether that is what it took before, and no estimate.
        why: Why it is not needed, if so.
    """

    name: str
    what: str
    state: str
    seconds: float = 0.0
    known: bool = False
    why: str | None = None


def outlook(recipe: Recipe, folder: str | Path) -> list[Prospect]:
    """Looks at the recipe, the network, the data and the folder; a training step is timed, nothing is written."""
    check_recipe(recipe)
    check_folder(Path(folder))
    work = Work(Path(folder), recipe, job_from(recipe), Listener())
    check_extras(work)
    check_plan(work)
    stamps, guess, changed = Stamps(Path(folder)), _guesses(work), False
    found = []
    for stage in STAGES:
        prospect = _prospect(stage, work, stamps, guess[stage.name], changed)
        changed = changed or prospect.state in ("to do", "goes on")
        found.append(prospect)
    return found


def _prospect(stage: Stage, work: Work, stamps: Stamps, guess: Callable[[], float], changed: bool) -> Prospect:
    idle, known = stage.idle(work), stamps.get(stage.name)
    if idle is not None:
        return Prospect(stage.name, stage.what, "not needed", why=idle)
    # What follows on a stage that is done again cannot be known to stay the same.
    same = not changed and known is not None and fingerprint_of(stage, work) == known.fingerprint
    if same and known is not None and known.done and not stamps.changed(stage.name):
        return Prospect(stage.name, stage.what, "kept")
    state = "goes on" if same and known is not None and not known.done else "to do"
    before = _before(known)
    seconds = guess() if before is None else before
    return Prospect(stage.name, stage.what, state, seconds, known=before is not None)


def _before(stamp: Stamp | None) -> float | None:
    return stamp.seconds if stamp is not None and stamp.done else None


def _guesses(work: Work) -> dict[str, Callable[[], float]]:
    """For every stage what estimates its seconds."""
    pace = _Pace(work)
    return {
        "narrow": pace.narrow,
        "inspect": lambda: 1.0,
        "space": lambda: 1.0,
        "table": pace.table,
        "search": pace.search,
        "apply": lambda: 5.0 + pace.calibration(),
        "recalibrate": lambda: pace.forward(work.recipe.recalibrate.images),
        "reconstruct": pace.reconstruct,
        "finetune": pace.finetune,
        "export": lambda: 10.0 * len(work.recipe.export.formats) + 20.0 * work.recipe.export.int8,
        "evaluate": pace.evaluate,
        "report": lambda: 2.0,
    }


class _Pace:
    """How fast things go: a training step is timed when it is first asked for."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._example: float | None = None

    def step(self) -> float:
        """Seconds of a training step for one example."""
        if self._example is None:
            self._example = _timed_step(self._work.job)
        return self._example

    def forward(self, examples: float) -> float:
        """Seconds of so many examples going through the network."""
        return FORWARD * self.step() * examples

    def calibration(self) -> float:
        """Images go through the network once, and forth and back where it is asked what comes of errors."""
        images = self._work.recipe.search.activations
        return self.forward(images) + (self.step() * images if self._work.responses else 0.0)

    def narrow(self) -> float:
        """What the channels look like, trials in every group, and what widths cost where the clock is asked."""
        part = self._work.recipe.narrow
        trials = 20.0 + self.step() * part.images + self.forward(part.images + GROUPS * len(TRIALS) * part.tried)
        if part.latency is None:
            return trials
        model, example = self._work.job.on_cpu()
        rows = width_rows(inspect(model, example), hidden_channels(model, example), part.round_to)
        return trials + self._clocked(len(rows), self._work.recipe.target.networks)

    def table(self) -> float:
        """Visits of all rows and of the whole networks."""
        return self._clocked(len(_space(self._work).rows()), self._work.recipe.target.networks + 2)

    def _clocked(self, rows: int, networks: int) -> float:
        target = self._work.target
        if target is None or target.device == "asic":
            return 60.0
        schedules = schedule_of(target.to_dict()), schedule_of(target.to_dict(), networks=True)
        seconds = [each.rounds * (each.warm_seconds + each.seconds) for each in schedules]
        return SETTING_UP * (seconds[0] * rows + seconds[1] * networks)

    def reconstruct(self) -> float:
        """Every block goes through its inputs; to get at these the network runs up to each block, in both networks."""
        told = reconstruction(self._work.recipe)
        return 0.0 if told is None else (self.step() * told.epochs + BLOCKS * self.forward(1)) * told.images

    def search(self) -> float:
        """Training, or one look at every candidate."""
        recipe = self._work.recipe
        if recipe.search.plan is not None:
            return 1.0
        training = search_training(recipe)
        if training is not None:
            tried = _tried_epochs(method_settings(recipe.search))
            return (SEARCHED * training.epochs + TAUGHT * tried) * self._examples() * self.step()
        if not method_of(recipe.search.method).needs:
            return 10.0
        candidates = sum(map(len, _space(self._work).open_layers.values()))
        return self.calibration() + candidates * self.forward(192) / 2

    def finetune(self) -> float:
        """All epochs."""
        told = finetuning(self._work.recipe, self._work.job.loss is not None)
        return 0.0 if told is None else TAUGHT * told[0].epochs * self._examples() * self.step()

    def evaluate(self) -> float:
        """Every network on all test examples, and the timing of the files."""
        tested = (self._work.job.labels.get("data") or {}).get("test") or 0
        return 5 * self.forward(tested) + 20.0

    def _examples(self) -> int:
        if self._work.job.train is None:
            return 0
        feed = as_feed(self._work.job.train)
        return feed.steps * feed.batch_size


def _tried_epochs(told: Any) -> int:
    """Epochs in which finalists of a search are fine-tuned."""
    if not isinstance(told, SearchSettings):
        return 0
    return told.trial_epochs * (told.finalists + len(told.nominees) + told.moves)


def _space(work: Work) -> RankSpace:
    part = work.recipe.space
    layers = inspect(work.job.model, work.job.example)
    step = 8 if part.round_to == "auto" else part.round_to
    return rank_space(layers, forms=part.forms, round_to=step, equal=part.equal, names=part.layers or None)


def _timed_step(job: Job) -> float:
    """A forward and a backward pass of the dense network; of random weights' gradients nothing is kept."""
    batches = job.samples(32) or [job.example]
    inputs, size = to_device(batches[0], device_of(job.model)), batch_size(batches[0])
    best = float("inf")
    for _ in range(2):
        started = time.perf_counter()
        _backward(job.model, inputs)
        best = min(best, time.perf_counter() - started)
    job.model.zero_grad(set_to_none=True)
    return best / max(1, size)


def _backward(model: nn.Module, inputs: Any) -> None:
    with torch.enable_grad():
        outputs = [tensor for tensor in tensors_in(call(model, inputs)) if tensor.requires_grad]
        if outputs:
            torch.stack([tensor.float().square().mean() for tensor in outputs]).sum().backward()
