"""Batches of normalised images: sized, iterable again and again, and the same for the same seed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from haloc.errors import SpecError
from haloc.training.feed import WHOLE, Raw, Shard

Batch = tuple[Tensor, Tensor]


class Reader(Protocol):
    """Where batches come from: ``read`` fetches on the host, ``prepare`` computes on the device."""

    @property
    def augment(self) -> object:
        """How images are changed at random; its text tells one way from another."""

    @property
    def device(self) -> torch.device | None:
        """Where the images lie, if they are held in memory."""

    def read(self, order: Tensor, cuts: Sequence[slice], epoch: int) -> Iterable[Raw]:
        """Yields what each cut of the epoch's order needs, as tensors whose first extent is the batch."""

    def prepare(self, raw: Raw) -> Batch:
        """Makes uint8 images and labels of it, the same computation for every batch."""


class Batches:
    """Yields ``(inputs float32, labels int64)``; every iteration is the next epoch.

    What is random in an epoch is drawn from ``(seed, epoch)`` alone, so that the same seed gives the same
    sequence of epochs whatever else draws random numbers. Set ``epoch`` to go on where a run was broken off.

    It is also a `haloc.training.feed.Feed`: training takes full batches only, and several processes share each.
    """

    seekable = True

    def __init__(
        self,
        reader: Reader,
        count: int,
        batch_size: int,
        *,
        normalise: Any,
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
        self._reader = reader
        self._count = count
        self._taken = count if limit is None else min(limit, count)
        self._normalise = normalise
        self._shuffle = shuffle
        self._seed = seed

    def __len__(self) -> int:
        return -(-self._taken // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        starts = range(0, self._taken, self.batch_size)
        cuts = [slice(start, min(start + self.batch_size, self._taken)) for start in starts]
        return map(self.prepare, self._reader.read(self._order(epoch), cuts, epoch))

    @property
    def steps(self) -> int:
        """Full batches in an epoch."""
        return self._taken // self.batch_size

    @property
    def device(self) -> torch.device | None:
        """Where the images lie, if they are held in memory."""
        return self._reader.device

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the batches, for a checkpoint to compare."""
        drawn = {"shuffle": self._shuffle, "seed": self._seed, "augment": str(self._reader.augment)}
        return {"images": self._taken, "batch_size": self.batch_size, "scale": str(self._normalise), **drawn}

    def raw(self, epoch: int, start: int = 0, shard: Shard = WHOLE) -> Iterator[Raw]:
        """The full batches of an epoch from the ``start``-th on, of each the part that is this process's."""
        cuts = [shard.of(step * self.batch_size, self.batch_size) for step in range(start, self.steps)]
        return iter(self._reader.read(self._order(epoch), cuts, epoch))

    def prepare(self, raw: Raw) -> Batch:
        """Makes normalised inputs and labels of what `raw` yields, on the device that it lies on."""
        images, labels = self._reader.prepare(raw)
        return self._normalise(images), labels

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
