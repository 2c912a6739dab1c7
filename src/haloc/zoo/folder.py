"""Pictures in folders, one folder per class, as ImageNet is usually kept; read while they are needed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from haloc.errors import DataError, SpecError
from haloc.training.feed import Raw
from haloc.zoo.batches import Batch, Batches, generator_for
from haloc.zoo.images import Normalisation
from haloc.zoo.transforms import centre_crop, random_resized_crop

_EXTENSIONS = frozenset((".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff"))
#: What these files may be, whatever they are called: Pillow knows others, and runs programs to read some of them.
_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "TIFF")
#: The most pixels of a picture, and the most classes.
_MOST_PIXELS, _MOST_CLASSES = 9 * 10**7, 10**6


class FolderImages:
    """The pictures in ``root/class/…``, classes and files in the order of their names.

    Args:
        root: the folder that holds one folder per class.
        size: side of the square images given out.
        resize: short side to which a picture is scaled before its middle is cut out; 256 for 224 by default.
        workers: processes that read pictures, unless `batches` is told another number.

    Attributes:
        paths: the picture files.
        labels: int64, the class of each.
        classes: the names of the class folders.
    """

    def __init__(self, root: str | Path, *, size: int = 224, resize: int | None = None, workers: int = 0) -> None:
        folders = _class_folders(Path(root).expanduser())
        self._set(folders, [_pictures(folder, "class folder") for folder in folders], size, resize, workers)

    def _set(
        self, folders: Sequence[Path], found: Sequence[list[Path]], size: int, resize: int | None, workers: int
    ) -> None:
        self.classes: tuple[str, ...] = tuple(folder.name for folder in folders)
        self.paths: tuple[Path, ...] = tuple(path for paths in found for path in paths)
        counts = torch.tensor([len(paths) for paths in found])
        self.labels: Tensor = torch.arange(len(found)).repeat_interleave(counts)
        self.size = size
        self.resize = round(size * 256 / 224) if resize is None else resize
        self.workers = workers
        if not 0 < self.size <= self.resize:
            raise SpecError(f"size must lie from 1 to resize, got size={size} and resize={self.resize}")

    @classmethod
    def numbered(
        cls, root: str | Path, *, size: int = 224, resize: int | None = None, workers: int = 0
    ) -> FolderImages:
        """Folders whose names are the numbers of their classes, and need not be all of them; others go by name."""
        self = cls(root, size=size, resize=resize, workers=workers)
        if all(name.isdecimal() for name in self.classes):
            numbers = torch.tensor(list(map(_class_number, self.classes)))
            self.labels = numbers[self.labels]
            self.classes = tuple(map(str, range(int(numbers.max()) + 1)))
        return self

    @classmethod
    def unlabelled(
        cls, root: str | Path, *, size: int = 224, resize: int | None = None, workers: int = 0
    ) -> FolderImages:
        """All pictures in a folder and its folders, without labels: they are all of one class."""
        place = Path(root).expanduser()
        if not place.is_dir():
            raise DataError(f"there is no folder {place}")
        self = cls.__new__(cls)
        self._set([place], [_pictures(place)], size, resize, workers)
        return self

    def __len__(self) -> int:
        return len(self.paths)

    def subset(self, indices: Tensor | NDArray[np.int64] | Sequence[int]) -> Self:
        """Returns the pictures at ``indices``, in that order."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        part = copy.copy(self)
        part.paths = tuple(self.paths[index] for index in chosen.tolist())
        part.labels = self.labels[chosen]
        return part

    def on(self, device: torch.device | str) -> Self:
        """Returns the set itself: pictures are read from disk, and each batch moves to the device that trains."""
        return self

    def batches(
        self,
        batch_size: int,
        *,
        normalisation: Normalisation,
        augment: bool = False,
        shuffle: bool = False,
        seed: int = 0,
        limit: int | None = None,
        workers: int | None = None,
    ) -> Batches:
        """Returns the pictures as normalised batches, the same for every number of ``workers``.

        With ``augment`` every picture is cropped, scaled and mirrored at random; without, its middle is taken.
        """
        processes = self.workers if workers is None else workers
        if processes < 0:
            raise SpecError(f"workers must be 0 or more, got {processes}")
        reader = _Reader(self, augment, seed, processes)
        return Batches(reader, len(self), batch_size, normalise=normalisation, shuffle=shuffle, seed=seed, limit=limit)

    def image(self, index: int, key: tuple[int, ...] | None = None) -> Tensor:
        """Returns one picture as uint8 (3, size, size): a random part of it drawn from ``key``, or its middle."""
        picture = _open(self.paths[index])
        if key is None:
            square = centre_crop(picture, self.size, self.resize)
        else:
            square = random_resized_crop(picture, self.size, _random(key))
        return torch.from_numpy(np.array(square)).permute(2, 0, 1)


@dataclass(frozen=True, eq=False)
class _Reader:
    """Reads pictures through a DataLoader, ahead of their use where there are workers."""

    images: FolderImages
    augment: bool
    seed: int
    workers: int
    device: None = None  # they lie on a disk

    def read(self, order: Tensor, cuts: Sequence[slice], epoch: int) -> Iterator[Raw]:
        """Yields the pictures of every cut and their labels."""
        loader = DataLoader(
            _Samples(self.images, (self.seed, epoch) if self.augment else None),
            batch_sampler=[order[cut].tolist() for cut in cuts],
            num_workers=self.workers,
            collate_fn=_collate,
            pin_memory=torch.cuda.is_available(),
            generator=generator_for(self.seed, epoch, 2),  # else the loader would draw from the global generator
        )
        for batch in loader:
            if isinstance(batch, DataError):
                raise batch
            yield tuple(batch)

    def prepare(self, raw: Raw) -> Batch:
        """They are images and labels already."""
        images, labels = raw
        return images, labels


class _Samples(Dataset["tuple[Tensor, int] | DataError"]):
    """What a worker reads: pictures whose random numbers hang on seed, epoch and index, not on the worker."""

    def __init__(self, images: FolderImages, key: tuple[int, int] | None) -> None:
        self.images = images
        self.key = key

    def __getitem__(self, index: int) -> tuple[Tensor, int] | DataError:
        # An error raised in a worker arrives with the worker's traceback in its text; a value arrives as it is.
        try:
            image = self.images.image(index, None if self.key is None else (*self.key, index))
        except DataError as error:
            return DataError(str(error))
        return image, int(self.images.labels[index])


def _collate(samples: list[tuple[Tensor, int] | DataError]) -> Batch | DataError:
    images, labels = [], []
    for sample in samples:
        if isinstance(sample, DataError):
            return sample
        images.append(sample[0])
        labels.append(sample[1])
    return torch.stack(images), torch.tensor(labels)


def _random(key: tuple[int, ...]) -> np.random.RandomState:
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(key)))


def _open(path: Path) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            return opened_picture(path, _FORMATS)
    # A damaged picture makes Pillow raise nearly anything.
    except Exception as error:
        raise DataError(f"the picture {path} cannot be read: {error}; mend or remove it") from error


def opened_picture(file: Any, formats: tuple[str, ...]) -> Image.Image:
    """A picture in three colours, refused before it takes memory if it says that it is too large."""
    with Image.open(file, formats=formats) as picture:
        width, height = picture.size
        if width * height > _MOST_PIXELS:
            raise ValueError(f"it says that it has {width:,}×{height:,} pixels, of which {_MOST_PIXELS:,} are read")
        return picture.convert("RGB")


def _class_folders(root: Path) -> list[Path]:
    if not root.is_dir():
        raise DataError(f"there is no folder {root}")
    folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not folders:
        raise DataError(f"{root} holds no class folders: expected one folder of pictures per class")
    return folders


def _pictures(folder: Path, what: str = "folder") -> list[Path]:
    paths = sorted(path for path in folder.rglob("*") if _is_picture(path))
    if not paths:
        raise DataError(f"the {what} {folder} holds no pictures ({', '.join(sorted(_EXTENSIONS))})")
    return paths


def _class_number(name: str) -> int:
    number = int(name) if len(name) < 20 else _MOST_CLASSES
    if number >= _MOST_CLASSES:
        raise DataError(f"the folder {name[:40]} cannot be a class: their numbers are less than {_MOST_CLASSES:,}")
    return number


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in _EXTENSIONS and not path.name.startswith(".") and path.is_file()
