"""What every method is given, and what a method is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from haloc.errors import SpecError
from haloc.factor.calibrate import InputMoments
from haloc.forms import Form
from haloc.methods.budget import Limit
from haloc.methods.evidence import Evidence
from haloc.space import RankSpace
from haloc.training.feed import Feed, as_feed
from haloc.training.objective import LossFunction, OwnLoss
from haloc.training.run import Progress
from haloc.training.session import Session
from haloc.training.settings import TrainSettings


@dataclass(frozen=True, eq=False)
class Rehearsal:
    """How a network will be fine-tuned once its ranks are chosen.

    Attributes:
        run: Fine-tunes a factorised network for so many epochs, in place.
        identity: What decides how, to tell it from others; plain values.
    """

    run: Callable[[nn.Module, int], Any]
    identity: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Task:
    """Layers to be given forms, within limits.

    Attributes:
        model: The trained dense network, on the device to work on; methods do not change it.
        space: What its layers may become.
        limits: What the network may cost; methods may use them as guidance, the plan is held to them afterwards.
        train: Training batches, or None.
        val: Held-out batches, or None.
        moments: From `calibrate`, or None.
        training: How weights are trained, by methods that do.
        folder: Where a method keeps what it takes to go on after an interruption; None: nowhere.
        resume: Whether to go on from there.
        session: This process among several.
        on_progress: Called during training.
        on_step: Called with how many of how many steps are done, by methods that do not train.
        candidate: Gives a layer, by its name, in one of its forms; None: it is decomposed.
        loss: What the network was trained by, ``loss(model, batch)``; None: cross-entropy, of a classifier.
        inputs: Takes the model's inputs out of a batch; None: a batch is a pair of inputs and targets, or where there
            is a ``loss``, the first of a tuple or list, and a dict without its labels.
        rehearsal: How the network will be fine-tuned in the end, where that is known.
    """

    model: nn.Module
    space: RankSpace
    limits: tuple[Limit, ...]
    train: Any = None
    val: Any = None
    moments: Mapping[str, InputMoments] | None = None
    training: TrainSettings | None = None
    folder: Path | None = None
    resume: bool = True
    session: Session | None = None
    on_progress: Callable[[Progress], None] | None = None
    on_step: Callable[[int, int], None] | None = None
    candidate: Callable[[str, Form], nn.Module] | None = None
    loss: LossFunction | None = None
    inputs: Callable[[Any], Any] | None = None
    rehearsal: Rehearsal | None = None

    @property
    def own_loss(self) -> OwnLoss | None:
        """The user's own loss, if there is one, as an objective."""
        return None if self.loss is None else OwnLoss(self.loss)

    def feed(self, source: Any) -> Feed:
        """Batches to learn from: whole ones, where the user's own loss takes them."""
        return as_feed(source, whole=self.loss is not None)

    def step(self, done: int, total: int) -> None:
        """Tells how far the work is."""
        if self.on_step is not None:
            self.on_step(done, total)


@dataclass(frozen=True)
class Method:
    """A way to choose ranks.

    Attributes:
        name: What it is called.
        summary: What it does, in one line.
        find: Finds out what there is to know about the candidates of a task.
        settings: The class of its settings, which `find` takes as its second argument; None where it has none.
        needs: Which data it cannot do without: "train", "val", or "val|train" where either will do.
        trains: Whether it takes `TrainSettings`.
    """

    name: str
    summary: str
    find: Callable[..., Evidence]
    settings: type | None = None
    needs: tuple[str, ...] = ()
    trains: bool = False

    def __call__(self, task: Task, settings: Any = None) -> Evidence:
        """Runs the method, once it has all it needs."""
        for need in self.needs:
            if all(getattr(task, name) is None for name in need.split("|")):
                names = need.replace("|", " or ")
                raise SpecError(
                    f"method {self.name!r} needs {names}: batches of (inputs, targets), or of what loss= takes"
                )
        if self.settings is None:
            if settings is not None:
                raise SpecError(f"method {self.name!r} has no settings, got {settings!r}")
            return self.find(task)
        if settings is not None and not isinstance(settings, self.settings):
            raise SpecError(f"method {self.name!r} takes {self.settings.__name__} as its settings, got {settings!r}")
        return self.find(task, settings or self.settings())
