"""Data sets by name, each in three parts; the test part is never what a search looks at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from haloc.errors import DataError, SpecError, nearest
from haloc.zoo.batches import Batches
from haloc.zoo.cifar10 import load_cifar10
from haloc.zoo.digits import DIGITS, load_digits
from haloc.zoo.folder import FolderImages
from haloc.zoo.images import IMAGENET, Normalisation, split
from haloc.zoo.tiny_imagenet import load_tiny_imagenet


class ImageSource(Protocol):
    """Labelled images, in memory or on disk."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes."""

    def __len__(self) -> int: ...

    def on(self, device: torch.device | str) -> ImageSource:
        """Returns the images held on ``device`` where they are held in memory."""

    def batches(
        self,
        batch_size: int,
        *,
        normalisation: Normalisation,
        augment: bool = False,
        shuffle: bool = False,
        seed: int = 0,
        limit: int | None = None,
    ) -> Batches:
        """Returns the images as normalised batches; ``augment`` is whatever is usual for such images."""


@dataclass(frozen=True)
class Splits:
    """A data set in three parts; ``val`` is split off ``train``, so ``test`` stays unseen until the end.

    Attributes:
        train: what weights are trained on.
        val: what choices are made on.
        test: what results are reported on.
        whole: train and val together, for a last run whose settings are decided.
        normalisation: what suits the data when the model says nothing of its own.
    """

    train: ImageSource
    val: ImageSource
    test: ImageSource
    whole: ImageSource
    normalisation: Normalisation = IMAGENET


def load_data(
    spec: str,
    *,
    root: str | Path | None = None,
    val_fraction: float = 0.1,
    seed: int = 0,
    workers: int = 0,
) -> Splits:
    """Returns the data set that ``spec`` names: ``cifar10``, ``digits``, ``tiny-imagenet`` or ``imagefolder``.

    Args:
        spec: the name of the data set.
        root: where it lies; ``imagefolder`` needs it (with ``train/`` and ``val/`` in it), ``cifar10`` looks
            in the cache and the network without it, ``tiny-imagenet`` in the cache, ``digits`` has no use for it.
        val_fraction: share of every class of the training images that is held out for validation.
        seed: decides which images these are.
        workers: processes that read the pictures of an ``imagefolder``.
    """
    if spec not in _LOADERS:
        known = ", ".join(_LOADERS)
        raise SpecError(f"there is no data set {spec!r}, expected one of {known}.{nearest(spec, _LOADERS)}")
    return _LOADERS[spec](_Options(root, val_fraction, seed, workers))


@dataclass(frozen=True)
class _Options:
    root: str | Path | None
    val_fraction: float
    seed: int
    workers: int


def _cifar10(options: _Options) -> Splits:
    whole, test = load_cifar10(options.root)
    train, val = split(whole, options.val_fraction, options.seed)
    return Splits(train, val, test, whole)


def _digits(options: _Options) -> Splits:
    whole, test = load_digits()
    train, val = split(whole, options.val_fraction, options.seed)
    return Splits(train, val, test, whole, DIGITS)


def _tiny_imagenet(options: _Options) -> Splits:
    whole, test = load_tiny_imagenet(options.root)
    train, val = split(whole, options.val_fraction, options.seed)
    return Splits(train, val, test, whole)


def _imagefolder(options: _Options) -> Splits:
    if options.root is None:
        raise SpecError("the data set 'imagefolder' needs a root, a folder with train/ and val/ in it")
    root = Path(options.root)
    whole, test = (FolderImages(root / part, workers=options.workers) for part in ("train", "val"))
    _require_same_classes(whole, test, root)
    train, val = split(whole, options.val_fraction, options.seed)
    return Splits(train, val, test, whole)


def _require_same_classes(train: FolderImages, test: FolderImages, root: Path) -> None:
    """Refuses folders whose classes differ: the same number would mean two classes."""
    odd = sorted(set(train.classes) ^ set(test.classes))
    if odd:
        raise DataError(
            f"train/ and val/ in {root} must have the same class folders; only one of them has {odd[0]!r}"
            + (f" and {len(odd) - 1} more" if len(odd) > 1 else "")
        )


_LOADERS: dict[str, Callable[[_Options], Splits]] = {
    "cifar10": _cifar10,
    "digits": _digits,
    "tiny-imagenet": _tiny_imagenet,
    "imagefolder": _imagefolder,
}
