"""Tiny-ImageNet-200 from the folder it is unpacked to: 200 classes, 100,000 training and 10,000 validation images.

They are 64×64 and fit into memory, so they are read once, held as one tensor, and kept in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from haloc.errors import DataError
from haloc.files import check_regular, read_whole
from haloc.zoo.augment import CropFlip
from haloc.zoo.cifar10 import default_cache
from haloc.zoo.images import ImageSet
from haloc.zoo.jpegs import OtherSizeError, planes, read_many
from haloc.zoo.kept import keep

SIDE = 64
CLASSES = 200
_ANNOTATIONS = "val_annotations.txt"
_LONGEST = 2**24  # bytes of a list; those that there are have less than half a million
#: A shift by an eighth of the side either way, as by 4 of CIFAR-10's 32.
_AUGMENTATION = CropFlip(padding=SIDE // 8)

Pair = tuple[ImageSet, ImageSet]
#: Picture files and the number of each one's class.
Listed = tuple[list[Path], list[int]]


def load_tiny_imagenet(root: str | Path | None = None, *, cache: str | Path | None = None) -> Pair:
    """Returns the training images and the annotated validation images, which serve as the test set.

    Args:
        root: the folder ``tiny-imagenet-200``, with ``wnids.txt``, ``train`` and ``val`` in it. When given, the
            cache is not looked at.
        cache: the folder where the images are kept from one call to the next; see `default_cache`.

    Raises:
        DataError: there is no such data set there, or something of it is missing or cannot be read.
    """
    kept = Path(cache or default_cache()).expanduser() / "tiny-imagenet.safetensors"
    if root is None:
        return _from_cache(kept)
    pair = read_tiny_imagenet(Path(root).expanduser())
    if len(pair[0].classes) == CLASSES:  # a part of it is not what the next one expects to find
        keep("Tiny-ImageNet", pair, kept, {"classes": _written(pair[0].classes)})
    return pair


def read_tiny_imagenet(root: Path) -> Pair:
    """Reads all pictures of the folder; classes have the order of ``wnids.txt``."""
    listed = root / "wnids.txt"
    if not listed.is_file():
        raise DataError(
            f"{root} is not the folder of Tiny-ImageNet: it has no wnids.txt; unpack tiny-imagenet-200.zip and "
            "name the folder tiny-imagenet-200"
        )
    classes = tuple(_lines(listed))
    train, test = _training(root, classes), _validation(root, classes)
    return _images(train, classes), _images(test, classes)


def _training(root: Path, classes: Sequence[str]) -> Listed:
    paths, labels = [], []
    for number, name in enumerate(classes):
        found = sorted((root / "train" / name / "images").glob("*.JPEG"))
        if not found:
            raise DataError(f"there are no pictures in {root / 'train' / name / 'images'}; unpack the data set again")
        paths += found
        labels += [number] * len(found)
    return paths, labels


def _validation(root: Path, classes: Sequence[str]) -> Listed:
    annotations, numbers = root / "val" / _ANNOTATIONS, {name: number for number, name in enumerate(classes)}
    if not annotations.is_file():
        raise DataError(f"there is no {annotations}, which says the classes of the validation images")
    paths, labels = [], []
    for line in _lines(annotations):
        picture, name, *_ = [*line.split("\t"), ""]
        if name not in numbers:
            raise DataError(f"{annotations} has a line that names no class of wnids.txt: {line[:80]!r}")
        paths.append(root / "val" / "images" / picture)
        labels.append(numbers[name])
    if not paths:
        raise DataError(f"{annotations} is empty, expected a picture and its class in every line")
    return paths, labels


def _lines(path: Path) -> list[str]:
    """The lines of a list; a name in it that leads out of the folder is refused."""
    try:
        lines = [line for line in read_whole(path, _LONGEST).decode("utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no text: {error}") from error
    for line in lines:
        if set(line) & {"/", "\\", "\0"} or line.startswith("."):
            raise DataError(f"{path} has a line that names nothing of this folder: {line[:80]!r}")
    return lines


def _images(listed: Listed, classes: tuple[str, ...]) -> ImageSet:
    paths, labels = listed
    pixels = np.empty((len(paths), 3 * SIDE * SIDE), np.uint8)
    with closing(read_many(paths, SIDE)) as pictures:  # those who read them end with an error here, or Ctrl-C
        for number, (path, picture) in enumerate(zip(paths, pictures, strict=True)):
            pixels[number] = np.frombuffer(picture or _picture(path), np.uint8)
    images = torch.from_numpy(pixels).view(-1, 3, SIDE, SIDE)
    return ImageSet(images, torch.tensor(labels), classes, _AUGMENTATION)


def _picture(path: Path) -> bytes:
    try:
        check_regular(path)
        return planes(path, SIDE)
    except OtherSizeError as error:
        raise DataError(f"the picture {path} is {error}, those of Tiny-ImageNet are {SIDE}×{SIDE}") from error
    except Exception as error:  # a damaged picture makes Pillow raise nearly anything
        raise DataError(f"the picture {path} cannot be read: {error}; unpack the data set again") from error


def _from_cache(kept: Path) -> Pair:
    if not kept.exists():
        raise DataError(
            f"Tiny-ImageNet has not been read yet (there is no {kept}); name its unpacked folder tiny-imagenet-200 "
            "with --data-root, data.root in a recipe, or root= in Python"
        )
    try:
        check_regular(kept)
        tensors = load_file(kept)
        classes = tuple(bytes(tensors["classes"].tolist()).decode("ascii").split())
        train, test = (
            ImageSet(tensors[f"{name}_images"], tensors[f"{name}_labels"].long(), classes, _AUGMENTATION)
            for name in ("train", "test")
        )
    except Exception as error:  # what is wrong with a header that a stranger wrote decides what is raised
        raise DataError(f"{kept} cannot be read: {error}; remove it and name the data's folder again") from error
    return train, test


def _written(classes: Sequence[str]) -> Tensor:
    """The names of the classes as bytes, a line each."""
    return torch.tensor(list("\n".join(classes).encode("ascii")), dtype=torch.uint8)
