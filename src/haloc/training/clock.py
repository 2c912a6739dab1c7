"""How long a run has taken, how fast it goes, and how long it will take."""

from __future__ import annotations

import time


class Clock:
    """Training time, how fast the steps go, and how long ago the last checkpoint was."""

    def __init__(self) -> None:
        self.rate = 0.0
        self._images, self._seconds = 0, 0.0
        self.start(0, 0.0)

    def start(self, step: int, before: float) -> None:
        """Begins at ``step``, after ``before`` seconds of earlier tries."""
        self._before, self._started, self._first = before, time.monotonic(), step
        self.mark(step)
        self.saved()

    @property
    def total(self) -> float:
        """Seconds of training, earlier tries included."""
        return self._before + time.monotonic() - self._started

    def mark(self, step: int) -> None:
        """Begins a stretch of steps, after whatever was done between."""
        self._marked, self._marked_at = step, time.monotonic()

    def measure(self, step: int, batch_size: int) -> None:
        """Takes the rate of the stretch that ends here."""
        seconds = max(time.monotonic() - self._marked_at, 1e-9)
        images = (step - self._marked) * batch_size
        self.rate = images / seconds
        self._images, self._seconds = self._images + images, self._seconds + seconds

    def epoch_rate(self) -> float:
        """The rate over all stretches since this was last asked for."""
        rate = self._images / max(self._seconds, 1e-9)
        self._images, self._seconds = 0, 0.0
        return rate

    def left(self, step: int, steps: int) -> float:
        """Seconds that the steps from here to ``steps`` will take, everything between them included."""
        done = max(step - self._first, 1)
        return (time.monotonic() - self._started) / done * (steps - step)

    def saved(self) -> None:
        """Notes that all is written."""
        self._saved_at = time.monotonic()

    @property
    def unsaved_s(self) -> float:
        """Seconds since the last checkpoint."""
        return time.monotonic() - self._saved_at
