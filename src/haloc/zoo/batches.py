"""Batches of normalised images: sized, iterable again and again, and the same for the same seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from haloc.errors import SpecError

Batch = tuple[Tensor, Tensor]
# Reads the images (uint8) and labels of each given tensor of indices, in the given epoch.
Read = Callable[[Sequence[Tensor], int], Iterable[Batch]]


class Batches:
    """Yields ``(inputs float32, labels int64)``; every iteration is the next epoch.

    What is random in an epoch is drawn from ``(seed, epoch)`` alone, so that the same seed gives the same
    sequence of epochs whatever else draws random numbers. Set ``epoch`` to go on where a run was broken off.
    """

    def __init__(
        self,
        read: Read,
        count: int,
        batch_size: int,
        *,
        normalise: Callable[[Tensor], Tensor],
        shuffle: bool = False,
        seed: int = 0,
        limit: int | None = None,
    ) -> None:
        _require_positive("batch_size", batch_size)
        if limit is not None:
            _require_positive("limit", limit)
        require_seed(seed)
        self.batch_size = batch_size
        self.epoch = 0
        self._read = read
        self._count = count
        self._taken = count if limit is None else min(limit, count)
        self._normalise = normalise
        self._shuffle = shuffle
        self._seed = seed

    def __len__(self) -> int:
        return -(-self._taken // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        return self._iterate(epoch)

    def _iterate(self, epoch: int) -> Iterator[Batch]:
        order = self._order(epoch)
        batches = [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]
        for images, labels in self._read(batches, epoch):
            yield self._normalise(images), labels

    def _order(self, epoch: int) -> Tensor:
        if not self._shuffle:
            return torch.arange(self._taken)
        return torch.randperm(self._count, generator=generator_for(self._seed, epoch))[: self._taken]


def generator_for(*key: int) -> torch.Generator:
    """Returns a generator of its own for ``key``, leaving the global one alone."""
    state = np.random.SeedSequence(key).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]))


def require_seed(seed: int) -> None:
    """Refuses a seed that NumPy's generators would not take."""
    if not 0 <= seed < 2**32:
        raise SpecError(f"seed must be a whole number from 0 to 2**32 - 1, got {seed}")


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise SpecError(f"{name} must be at least 1, got {value}")
