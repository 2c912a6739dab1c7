"""The state of a training run, and what happens between its steps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from haloc.errors import FileFormatError, HalocError, SpecError, TrainError
from haloc.factor.forward import compiling_many, device_of
from haloc.locks import folder_at_work
from haloc.training.checkpoint import Checkpoint, Store, random_states, set_random_states, under
from haloc.training.clock import Clock
from haloc.training.ema import Ema, put, tensors_of
from haloc.training.events import EventFile
from haloc.training.feed import Raw, check_feed
from haloc.training.finite import NotFiniteError, spoilt_state
from haloc.training.journal import Journal
from haloc.training.optimiser import start_at_rest
from haloc.training.session import Session
from haloc.training.settings import FREE, GENTLER, TrainSettings
from haloc.training.step import Stepper, Update
from haloc.training.surroundings import at_home, numerics, own_random_numbers

#: ``(model) -> figures``: how good the model is on held-out data.
Validate = Callable[[nn.Module], Mapping[str, float]]


@dataclass(frozen=True)
class Progress:
    """Where a run stands.

    Attributes:
        epoch: epochs done, in fractions.
        epochs: epochs in all.
        figures: loss, its terms, accuracy and the like, of this epoch so far.
        images_per_s: how fast it goes.
        seconds_left: how long the rest will take at this rate.
        ended: whether ``figures`` are those of a whole epoch, evaluation included.
    """

    epoch: float
    epochs: int
    figures: Mapping[str, float]
    images_per_s: float
    seconds_left: float
    ended: bool = False


class Run:
    """A run between two steps: what it is made of, where it stands, where it is written."""

    def __init__(
        self,
        model: nn.Module,
        updates: Sequence[Update],
        settings: TrainSettings,
        session: Session,
        folder: str | Path | None,
        config: Mapping[str, Any],
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        for update in updates:
            check_feed(update.feed, session.shard.world, settings.accumulate)
        if settings.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for update in updates:
            start_at_rest(update.optimiser)
        self.model, self.settings, self.session = model, settings, session
        self.steps = updates[0].feed.steps
        self.step, self.out_of_time = 0, False
        self._saved_step = self._doomed_step = -1
        self.history: list[dict[str, Any]] = []
        self.ema = Ema(model, settings.ema)
        self._steppers = [
            Stepper(model, update, settings, session, None if number else self.ema)
            for number, update in enumerate(updates)
        ]
        self._streams: list[Iterator[Raw]] = []
        data = {update.name: update.feed.identity for update in updates}
        self._config = json.loads(json.dumps({**config, "settings": asdict(settings), "data": data}))
        self._folder = None if folder is None else Path(folder)
        self._store = None if folder is None else Store(Path(folder) / "checkpoints")
        self._logs: tuple[Journal, EventFile] | None = None
        self._on_progress = on_progress or (lambda progress: None)
        self._clock = Clock()

    @property
    def seconds(self) -> float:
        """Training time, over all the times the run was resumed."""
        return self._clock.total

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """Training mode, the numerics asked for and random numbers of the run's own; all put back at the end."""
        modes = [(module, module.training) for module in self.model.modules()]
        with ExitStack() as stack:
            if self._folder is not None and self.session.is_main:
                stack.enter_context(folder_at_work(self._folder))
            stack.enter_context(at_home(device_of(self.model)))
            repeats = all(stepper.update.changes is None for stepper in self._steppers)
            stack.enter_context(numerics(self.settings.precision, repeats))
            if self.settings.speed == "compile":
                stack.enter_context(compiling_many())
            stack.enter_context(own_random_numbers(self.settings.seed))
            stack.callback(self._close_logs)
            self.model.train()
            try:
                yield
            finally:
                for module, training in modes:
                    module.training = training
                for parameter in self.model.parameters():
                    parameter.grad = None  # of the last step, and part of a captured one's memory

    def begin(self, on_start: Callable[[], None] | None) -> None:
        """Starts afresh, all processes from the same weights."""
        if on_start is not None:
            on_start()
        self.session.share(tensors_of(self.model).values())
        self.ema.restart(self.model)
        if self._store is not None and self.session.is_main:
            self._store.clear()
        self._open_logs(None)
        self._clock.start(0, 0.0)

    def restore(self) -> bool:
        """Goes on from the newest checkpoint; False when there is none."""
        found = None if self._store is None else self._store.newest(self._config, FREE, GENTLER)
        self._require_one_folder(-1 if found is None else found.step)
        if found is None:
            return False
        _require_same_tensors(under("model", found.tensors), tensors_of(self.model), self._folder)
        try:
            seconds = self._take(found)
        # It is whole and has the settings of this run, yet somebody else may have written it.
        except (LookupError, TypeError, ValueError, RuntimeError, AttributeError, ArithmeticError) as error:
            raise FileFormatError(
                f"the newest checkpoint in {self._folder} is not one that this run wrote ({type(error).__name__}: "
                f"{' '.join(str(error).split())[:200]}); start afresh without resuming, or choose another folder"
            ) from error
        self._saved_step = found.step
        if self._store is not None and self._store.diverged:
            self._doomed_step = found.step  # if nothing comes of it for the second time
        self._open_logs(self.step)
        self._clock.start(self.step, seconds)
        return True

    def _take(self, found: Checkpoint) -> float:
        """Takes over what a checkpoint holds; returns how long the run had taken."""
        rows, seconds = found.facts["history"], float(found.facts["seconds"])
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows) or not 0 <= seconds < math.inf:
            raise ValueError("history is a list of rows, and seconds a number from 0")
        put(self.model, under("model", found.tensors))
        self.ema.load(under("ema", found.tensors))
        for number, stepper in enumerate(self._steppers):
            stepper.load(under(f"update{number}", found.tensors), found.facts["updates"][number])
        set_random_states(under("random", found.tensors))
        self.step, self.history = found.step, list(rows)
        return seconds

    def next_batches(self) -> Iterator[tuple[Stepper, Raw]]:
        """The updates that take part in this step, each with its batch."""
        epoch, within = divmod(self.step, self.steps)
        if within == 0 or not self._streams:
            self._streams = [self._stream(stepper.update, epoch) for stepper in self._steppers]
        for stepper, stream in zip(self._steppers, self._streams, strict=True):
            if epoch >= stepper.update.from_epoch and self.step % stepper.update.every == 0:
                yield stepper, next(stream)

    def take(self, stepper: Stepper, raw: Raw) -> None:
        """One step of one update."""
        try:
            stepper(raw, self.step, self.step / self.steps)
        except NotFiniteError as error:
            if self._saved_step == self.step:
                self._doomed_step = self.step  # finite, and yet the very next loss is not: no good state
            self.step += 1  # the one that it happened in
            raise self._diverged(str(error), error.where) from None

    def look(self) -> None:
        """Waits for the device, tells how it goes, and saves when it is time."""
        figures = self._measured(self.step % self.steps)
        self._tell(figures, ended=False)
        self._after_look(may_save=all(stepper.update.feed.seekable for stepper in self._steppers))

    def end_epoch(self, validate: Validate | None) -> None:
        """Evaluates, writes the epoch's row, and saves when it is time."""
        figures = self._measured(self.steps)
        figures["images_per_s"] = self._clock.epoch_rate()
        epoch = self.step // self.steps
        if validate is not None and (epoch % self.settings.evaluate_every == 0 or epoch == self.settings.epochs):
            with self.ema.in_place(self.model):
                figures |= {f"val_{name}": float(value) for name, value in _without_trace(validate, self.model).items()}
        for stepper in self._steppers:
            stepper.totals.clear()
        row = {"step": self.step, "epoch": epoch, "lr": self._lr(), "seconds": self._clock.total, **figures}
        self.history.append(row)
        self._write(row)
        self._tell(figures, ended=True)
        self._after_look(may_save=True)

    def finish(self) -> None:
        """Saves, and leaves the model with the weights to keep."""
        if self._saved_step != self.step:
            self._save()
        self.ema.put_into(self.model)

    def _stream(self, update: Update, epoch: int) -> Iterator[Raw]:
        """What is left of the batches of one epoch, for which a shorter feed is gone through several times."""
        feed = update.feed
        rounds = math.ceil(math.ceil(self.steps / update.every) / feed.steps)
        first, offset = divmod(self._taken(update, self.step % self.steps), feed.steps)
        for number in range(first, rounds):
            yield from feed.raw(epoch * rounds + number, offset if number == first else 0, self.session.shard)

    def _taken(self, update: Update, last: int) -> int:
        """In how many of the last steps an update took part."""
        return update.steps_before(self.step) - update.steps_before(self.step - last)

    def _measured(self, steps: int) -> dict[str, float]:
        figures: dict[str, float] = {}
        for number, stepper in enumerate(self._steppers):
            taken = self._taken(stepper.update, steps)
            means = stepper.totals.means(self.session, taken) if taken else {}
            figures |= means if number == 0 else {f"{stepper.update.name}_{name}": means[name] for name in means}
        self._clock.measure(self.step, self._steppers[0].update.feed.batch_size)
        for name, value in figures.items():
            if not math.isfinite(value):
                spoilt = spoilt_state(self.model)
                raise self._diverged(f"{name} is {value}", f"{spoilt} is not finite" if spoilt else "")
        return figures

    def _require_finite_weights(self) -> None:
        """The last step may have spoilt them, and the loss would tell only after the next one."""
        spoilt = spoilt_state(self.model)
        if spoilt is not None:
            raise self._diverged(f"{spoilt} has values that are not finite")

    def _diverged(self, what: str, where: str = "") -> TrainError:
        """What is told; a checkpoint from before stays, and a run may go on from it more gently."""
        kept = self._store is not None and self._saved_step >= 0
        if self._store is not None:
            if self._doomed_step == self._saved_step >= 0:
                self._store.drop(self._saved_step)
                kept = self._store.last_step is not None
            with suppress(HalocError):  # a disk may be full, too
                self._store.note_divergence(f"{what}: {where}" if where else what)
        after, how = (f"; the last good state is in {self._folder}", " to go on from there") if kept else ("", "")
        return TrainError(
            f"{what} in epoch {self.step / self.steps:.2f}{where and f' ({where})'}: training has diverged{after}. "
            f"Lower the learning rate or lengthen the warm-up{how}"
        )

    def _lr(self) -> float:
        return self._steppers[0].update.lr(self.step / self.steps)

    def _tell(self, figures: Mapping[str, float], ended: bool) -> None:
        epoch = self.step / self.steps
        left = self._clock.left(self.step, self.settings.epochs * self.steps)
        self._on_progress(Progress(epoch, self.settings.epochs, figures, self._clock.rate, left, ended))

    def _after_look(self, may_save: bool) -> None:
        limit = self.settings.minutes
        # A run stops only where it could go on from.
        self.out_of_time = may_save and self.session.agree(limit is not None and self._clock.total >= 60 * limit)
        due = self._clock.unsaved_s >= self.settings.save_every_s
        if may_save and self.session.agree(due):
            self._save()
        self._clock.mark(self.step)

    def _save(self) -> None:
        """Writes a checkpoint, from the main process alone."""
        self._require_finite_weights()
        self._clock.saved()
        self._saved_step = self.step
        if self._store is None:
            return
        checkpoint = self._checkpoint()
        if self.session.is_main:
            self._store.save(checkpoint)
        self.session.wait()

    def _checkpoint(self) -> Checkpoint:
        tensors = {f"model/{name}": tensor for name, tensor in tensors_of(self.model).items()}
        tensors |= {f"ema/{name}": tensor for name, tensor in self.ema.state.items()}
        tensors |= {f"random/{name}": tensor for name, tensor in random_states().items()}
        updates = []
        for number, stepper in enumerate(self._steppers):
            own, facts = stepper.state()
            tensors |= {f"update{number}/{name}": tensor for name, tensor in own.items()}
            updates.append(facts)
        seconds = self._clock.total
        facts = {"seconds": seconds, "updates": updates, "history": self.history, "config": self._config}
        return Checkpoint(self.step, tensors, facts)

    def _open_logs(self, step: int | None) -> None:
        """Opens the logs without what an earlier try wrote beyond ``step``."""
        if self._folder is not None and self.session.is_main:
            purge = 0 if step is None else step + 1
            journal = Journal(self._folder / "log.jsonl", keep_until=step)
            self._logs = journal, EventFile(self._folder, purge_step=purge)

    def _write(self, row: Mapping[str, Any]) -> None:
        if self._logs is not None:
            journal, events = self._logs
            journal.append(row)
            events.scalars(row["step"], {name: value for name, value in row.items() if name != "step"})

    def _close_logs(self) -> None:
        for log in self._logs or ():
            log.close()

    def _require_one_folder(self, step: int) -> None:
        """Processes on several machines must see the same checkpoints."""
        steps = self.session.gather(torch.tensor(step, device=device_of(self.model)))
        if len(set(steps.tolist())) > 1:
            raise TrainError(
                f"the processes do not see the same checkpoints in {self._folder}; give a folder that all of them share"
            )


def _without_trace(validate: Validate, model: nn.Module) -> Mapping[str, float]:
    """What a loader draws while it is evaluated on must not change the training that follows."""
    before = random_states()
    try:
        return validate(model)
    finally:
        set_random_states(before)


def _require_same_tensors(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], folder: Path | None) -> None:
    """Refuses to go on with another network than the run began with."""
    old, new = ({name: tuple(tensor.shape) for name, tensor in tensors.items()} for tensors in (found, wanted))
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            raise SpecError(
                f"{folder} holds a run of another network: its {name} is {old.get(name, 'not there')}, and now it is "
                f"{new.get(name, 'not there')}; give the network as it was when the run began, start afresh without "
                "resuming, or choose another folder"
            )
