"""Networks that are fine-tuned side by side on one GPU: threads of one process, each on a stream of its own.

Processes that share a GPU only take turns. Streams can also fill each other's gaps, where one small network leaves a
part of the GPU idle; how much that gains has not been measured with the same network alone and beside others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, wait
from contextlib import contextmanager
from functools import partial

import torch

from haloc.pipeline.listener import Listener, Steps, Training
from haloc.training.run import Progress
from haloc.training.surroundings import numerics, own_random_numbers


class Crowd:
    """Several who tell one listener: of all that train the first is shown.

    Attributes:
        shown: The first that had something to do.
        gate: Opened when all are under way; who arrives early waits there.
        stop: Set when all are to stop.
    """

    def __init__(self, listener: Listener, size: int) -> None:
        self.listener, self.size = listener, size
        self.gate, self.stop = threading.Event(), threading.Event()
        self.seats: list[Seat] = []
        self.shown: Seat | None = None

    def seat(self) -> Seat:
        """A listener for one more of them."""
        self.seats.append(Seat(self))
        return self.seats[-1]


class Seat(Listener):
    """One of a crowd."""

    def __init__(self, crowd: Crowd) -> None:
        self._crowd = crowd
        self.under_way = threading.Event()

    def stage(self, name: str, what: str, place: str) -> None:
        """Said once for all."""
        if self._crowd.shown is None:
            self._crowd.shown = self
            self._crowd.listener.stage(name, f"{what}, {self._crowd.size} networks side by side", place)

    def note(self, text: str) -> None:
        """Whoever says it."""
        self._crowd.listener.note(text)

    @contextmanager
    def working(self, what: str) -> Iterator[tuple[Steps, Training]]:
        """Shows the first, and lets the next begin once this one trains."""
        shown = self._crowd.listener if self._crowd.shown is self else Listener()
        with shown.working(what) as (steps, training):
            yield steps, partial(self._progress, training)

    def _progress(self, training: Training, progress: Progress) -> None:
        self.under_way.set()
        self._crowd.gate.wait()
        if self._crowd.stop.is_set():
            raise KeyboardInterrupt
        training(progress)


def side_by_side(
    tasks: Sequence[Callable[[], None]],
    crowd: Crowd,
    device: torch.device,
    precision: str = "fp32",
    *,
    workers: Executor,
) -> list[Exception | None]:
    """Each task in a thread and on a stream of its own. They start one after the other, and train once all are ready.

    A start changes things for the whole process (kernels, precision, random numbers), and it waits for the device again
    and again, which takes long where somebody trains on it already.

    Args:
        tasks: What is to be done.
        crowd: Who listens to them, in the same order.
        device: The GPU.
        precision: That of all of them: the first to end puts it back to what it was when it began.
        workers: As many threads as there are tasks, or more. Which kernels are fastest is known to a thread alone, so
            threads that did this before begin sooner.

    Returns:
        What each of them raised, or None.
    """
    errors: list[Exception | None] = [None] * len(tasks)

    def run(number: int, task: Callable[[], None], seat: Seat) -> None:
        try:
            with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
                task()
                torch.cuda.current_stream().synchronize()
        except KeyboardInterrupt:
            crowd.stop.set()
        except Exception as error:  # told by the main thread
            errors[number] = error
        finally:
            seat.under_way.set()

    torch.cuda.synchronize(device)  # what they begin with was made on another stream
    futures = []
    with numerics(precision), own_random_numbers(0):
        try:
            for number, (task, seat) in enumerate(zip(tasks, crowd.seats, strict=True)):
                futures.append(workers.submit(run, number, task, seat))
                seat.under_way.wait()
            crowd.gate.set()
            wait(futures)
        except KeyboardInterrupt:
            crowd.stop.set()
            crowd.gate.set()
            wait(futures)
            raise
    if crowd.stop.is_set():
        raise KeyboardInterrupt
    return errors
