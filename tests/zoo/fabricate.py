"""Small stand-ins for CIFAR-10 in every form it is found in."""

import io
import json
import struct
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from haloc.zoo.cifar10 import Expected, digest
from haloc.zoo.cifar10_formats import CLASSES
from haloc.zoo.images import ImageSet

ROWS = 20
NAMES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")


def batches(seed: int = 0) -> dict[str, tuple[np.ndarray, list[int]]]:
    random = np.random.RandomState(seed)
    return {
        name: (
            random.randint(256, size=(ROWS, 3, 32, 32)).astype(np.uint8),
            random.randint(10, size=ROWS).tolist(),
        )
        for name in NAMES
    }


def truth(seed: int = 0) -> tuple[ImageSet, ImageSet]:
    import torch

    made = batches(seed)
    images = np.concatenate([made[name][0] for name in NAMES])
    labels = [label for name in NAMES for label in made[name][1]]
    whole = ImageSet(torch.from_numpy(images), torch.tensor(labels), CLASSES)
    return whole.subset(range(5 * ROWS)), whole.subset(range(5 * ROWS, 6 * ROWS))


def expected(seed: int = 0) -> Expected:
    train, test = truth(seed)
    return Expected(ROWS, digest(train), digest(test))


def python2_pickle(images: np.ndarray, labels: list[int]) -> bytes:
    """Writes the opcodes Python 2 wrote: byte strings, protocol 2, and NumPy under its old module name."""

    def text(value: str) -> bytes:
        return b"U" + bytes([len(value)]) + value.encode()

    data = images.reshape(len(images), -1)
    shape = b"".join(b"J" + struct.pack("<i", side) for side in data.shape)
    dtype = b"cnumpy\ndtype\n" + text("u1") + b"K\x00K\x01\x87R"
    dtype += b"(K\x03" + text("|") + b"NNN" + b"J\xff\xff\xff\xff" * 2 + b"K\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text("b") + b"\x87R"
    array += b"(K\x01" + shape + b"\x86" + dtype + b"\x89T" + struct.pack("<i", data.size) + data.tobytes() + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + text("data") + array + text("labels") + numbers + b"u."


def pickles(seed: int = 0) -> dict[str, bytes]:
    return {name: python2_pickle(*batch) for name, batch in batches(seed).items()}


def pngs(seed: int = 0) -> dict[str, bytes]:
    made = batches(seed)
    files = {f"{name}.png": _png(images) for name, (images, _) in made.items()}
    train = [label for name in NAMES[:-1] for label in made[name][1]]
    files["train_lables.json"] = json.dumps(train).encode()
    files["test_lables.json"] = json.dumps(made["test_batch"][1]).encode()
    return files


def write_folder(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def write_archive(path: Path, inner: str, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{inner}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def _png(images: np.ndarray) -> bytes:
    rows = images.transpose(0, 2, 3, 1).reshape(len(images), 1024, 3)
    buffer = io.BytesIO()
    Image.fromarray(rows).save(buffer, format="PNG")
    return buffer.getvalue()
