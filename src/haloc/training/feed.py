"""What training asks of its data: raw batches fetched on the host, made into inputs on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from haloc.errors import DataError, SpecError
from haloc.factor.forward import LABELS, cut, describe, inputs_of, lists_examples, tensors_in
from haloc.factor.forward import batch_size as first_extent

#: Tensors (or anything that tensors are in) whose first extent is the batch.
Raw = Any


@dataclass(frozen=True)
class Shard:
    """Which part of every batch is this process's: part ``rank`` of ``world`` equal ones."""

    rank: int = 0
    world: int = 1

    def of(self, start: int, length: int) -> slice:
        """This process's part of ``length`` places from ``start`` on."""
        part = length // self.world
        return slice(start + self.rank * part, start + (self.rank + 1) * part)


WHOLE = Shard()


@runtime_checkable
class Feed(Protocol):
    """A source of training batches; `haloc.zoo.batches.Batches` is one.

    ``batch_size`` is what one step of the optimiser sees, over all processes together.
    """

    batch_size: int
    #: Whether an epoch can be entered in the middle and go on exactly as it would have.
    seekable: bool

    @property
    def steps(self) -> int:
        """Full batches in an epoch."""

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the batches, for a checkpoint to compare."""

    def raw(self, epoch: int, start: int = 0, shard: Shard = WHOLE) -> Iterator[Raw]:
        """The full batches of an epoch from the ``start``-th on, of each the part that is this process's."""

    def prepare(self, raw: Raw) -> tuple[Any, Any]:
        """Makes inputs and targets of it, on the device that it lies on; the same computation every time."""


class LoaderFeed:
    """A user's own loader as a feed: whatever it yields is the batch.

    Several processes each iterate the whole loader and take their part of every batch. Batches smaller than the first
    are left out, as the last of an epoch often is.

    Args:
        loader: Yields batches, as often as it is asked to.
        prepare: Makes inputs and targets of a batch; unless told otherwise it is a pair of them.
    """

    seekable = False  # what it draws at random, and when, is its own affair

    def __init__(self, loader: Iterable[Any], prepare: Callable[[Any], tuple[Any, Any]] | None = None) -> None:
        self._loader, self._prepare = loader, prepare or inputs_and_targets
        self.batch_size = _first_size(loader)

    @property
    def steps(self) -> int:
        """Full batches in an epoch."""
        try:
            count = len(self._loader)  # type: ignore[arg-type]
        except TypeError as error:
            raise SpecError("the loader has no length; give one whose len() is its number of batches") from error
        examples = _examples(self._loader)
        return count if examples is None else min(count, examples // self.batch_size)

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the batches, as far as it can be known of a user's loader."""
        return {"loader": type(self._loader).__name__, "batch_size": self.batch_size, "steps": self.steps}

    def raw(self, epoch: int, start: int = 0, shard: Shard = WHOLE) -> Iterator[Raw]:
        """The full batches of an epoch; a sampler that wants to know the epoch is told."""
        for owner in (self._loader, getattr(self._loader, "sampler", None)):
            getattr(owner, "set_epoch", _ignore)(epoch)
        full = (batch for batch in self._loader if self._is_full(batch))
        given = start
        for batch in islice(full, start, self.steps):
            yield batch if shard.world == 1 else parts(batch, shard.of(0, self.batch_size))
            given += 1
        if given < self.steps:
            raise DataError(
                f"the loader gave {given} full batches of {self.batch_size} in epoch {epoch}, and its length promised "
                f"{self.steps}; let it leave out the last, smaller one"
            )

    def prepare(self, raw: Raw) -> tuple[Any, Any]:
        """The batch as it is."""
        return self._prepare(raw)

    def _is_full(self, batch: Any) -> bool:
        """Whether it has all its examples; how many a batch of points or of nobody knows what has cannot be told."""
        size = batch_size(batch)
        untold = self._prepare is _whole and (size > self.batch_size or not tensors_in(batch))
        return size == self.batch_size or untold


class WholeFeed:
    """A feed whose batches are handed over whole, for a loss of the user's own: `prepare` gives no targets besides."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self.batch_size, self.seekable = feed.batch_size, feed.seekable

    @property
    def device(self) -> Any:
        """Where the examples lie, if they are held in memory."""
        return getattr(self._feed, "device", None)

    @property
    def steps(self) -> int:
        """Full batches in an epoch."""
        return self._feed.steps

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the batches."""
        return self._feed.identity

    def raw(self, epoch: int, start: int = 0, shard: Shard = WHOLE) -> Iterator[Raw]:
        """The full batches of an epoch."""
        return self._feed.raw(epoch, start, shard)

    def prepare(self, raw: Raw) -> tuple[Any, Any]:
        """The batch, which is a pair where the feed prepares pairs, in the inputs' place."""
        return self._feed.prepare(raw), None


def as_feed(source: Any, whole: bool = False) -> Feed:
    """The source itself where it is a feed, else a loader taken for one.

    Args:
        source: Where batches come from.
        whole: Batches take the inputs' place as they are, and there are no targets: for a loss of the user's own.
    """
    if isinstance(source, Feed):
        return WholeFeed(source) if whole else source
    return LoaderFeed(source, _whole if whole else None)


def check_feed(feed: Feed, world: int, accumulate: int) -> None:
    """Refuses data that make no full batch, or batches that cannot be shared equally."""
    if feed.steps < 1:
        raise DataError(
            f"the training data do not fill one batch of {feed.batch_size}; give more images or a smaller batch"
        )
    if feed.batch_size % (world * accumulate):
        raise SpecError(
            f"a batch of {feed.batch_size} cannot be shared equally by {world} processes in {accumulate} parts each; "
            f"give a multiple of {world * accumulate}"
        )


def inputs_and_targets(batch: Any) -> tuple[Any, Any]:
    """The two halves of a loader's batch: a pair, or a dict with its labels under one of their usual names."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    names = [name for name in LABELS if name in batch] if isinstance(batch, dict) else []
    if len(names) != 1:
        raise DataError(
            f"a batch must be a pair of inputs and targets, or a dict with one of {', '.join(LABELS)} in it, "
            f"got {type(batch).__name__} of {describe(batch)}"
        )
    return inputs_of(batch), batch[names[0]]


def batch_size(batch: Any) -> int:
    """How many examples a batch has: the leading extent of its tensors, or the length of lists of examples."""
    lists = _lists(batch)
    return len(lists[0]) if lists else first_extent(batch)


def parts(raw: Raw, places: slice) -> Raw:
    """The same places of every tensor in the batch; what has another extent is no part of any example."""
    lists = _lists(raw)
    if lists:
        return lists[0][places] if lists[0] is raw else type(raw)(each[places] for each in lists)
    return cut(raw, places)


def pieces(raw: Raw, count: int) -> list[Raw]:
    """The batch in so many equal pieces, one after the other."""
    if count == 1:
        return [raw]
    length = batch_size(raw)
    return [parts(raw, Shard(piece, count).of(0, length)) for piece in range(count)]


def _lists(batch: Any) -> list[Any]:
    """The lists that a batch is made of where examples were not collated: itself, or all its members.

    Members must be of one length, and their tensors must not be of one leading extent: then that is the batch.
    """
    if lists_examples(batch):
        return [batch]
    if type(batch) not in (tuple, list) or not all(isinstance(each, (tuple, list)) for each in batch):
        return []
    alike = len({len(each) for each in batch}) == 1
    extents = {len(tensor) if tensor.dim() else 0 for tensor in tensors_in(batch)}
    return list(batch) if alike and len(extents) > 1 else []


def _whole(batch: Any) -> tuple[Any, None]:
    return batch, None


def _ignore(epoch: int) -> None:
    """What is done with the epoch's number by those who do not ask for it."""


def _first_size(loader: Iterable[Any]) -> int:
    size = getattr(loader, "batch_size", None)
    if isinstance(size, int):
        return size
    if not isinstance(loader, Iterable):
        raise SpecError(f"training data must be batches or a loader of them, got {type(loader).__name__}")
    first = next(iter(loader), None)
    if first is None:
        raise DataError("the loader gave no batch")
    return batch_size(first)


def _examples(loader: Iterable[Any]) -> int | None:
    """How many examples an epoch has, where the loader tells."""
    if isinstance(loader, (list, tuple)):
        return sum(batch_size(batch) for batch in loader)
    batches: Any = getattr(loader, "batch_sampler", None)
    if batches is None and getattr(loader, "batch_size", None) is None:
        return None  # it puts no batches together: what it goes through are batches already
    owner: Any = getattr(batches, "sampler", None) or getattr(loader, "dataset", None)
    return len(owner) if hasattr(owner, "__len__") else None
