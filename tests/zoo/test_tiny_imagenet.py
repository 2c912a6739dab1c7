"""Tiny-ImageNet from a small folder of the same form."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from haloc.errors import DataError
from haloc.zoo import jpegs, load_data, tiny_imagenet
from haloc.zoo.tiny_imagenet import load_tiny_imagenet

WNIDS = ("n03", "n01", "n02")  # not in the order of their names, as in the real list
COLOURS = {"n01": (250, 10, 10), "n02": (10, 250, 10), "n03": (10, 10, 250)}


def picture(path: Path, colour: tuple[int, int, int], side: int = 64) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (side, side), colour).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny-imagenet-200"
    for name in WNIDS:
        for number in range(4):
            picture(folder / "train" / name / "images" / f"{name}_{number}.JPEG", COLOURS[name])
    rows = ["val_0.JPEG\tn01\t0\t0\t5\t5", "val_1.JPEG\tn02\t0\t0\t5\t5", "val_2.JPEG\tn03\t0\t0\t5\t5"]
    for number, row in enumerate(rows):
        picture(folder / "val" / "images" / f"val_{number}.JPEG", COLOURS[row.split("\t")[1]])
    (folder / "val" / "val_annotations.txt").write_text("\n".join(rows) + "\n")
    (folder / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
    return folder


def colour_of(image: torch.Tensor) -> int:
    return int(image.float().mean((1, 2)).argmax())


def test_pictures_have_the_classes_of_their_folders_and_annotations(root, tmp_path):
    train, test = load_tiny_imagenet(root, cache=tmp_path / "cache")
    assert train.images.shape == (12, 3, 64, 64)
    assert test.images.shape == (3, 3, 64, 64)
    assert train.classes == test.classes == WNIDS
    strongest = {"n01": 0, "n02": 1, "n03": 2}
    for images in (train, test):
        for image, label in zip(images.images, images.labels, strict=True):
            assert colour_of(image) == strongest[WNIDS[label]]


def test_the_whole_set_is_kept_and_found_again(root, tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_imagenet, "CLASSES", len(WNIDS))
    first = load_tiny_imagenet(root, cache=tmp_path / "cache")
    again = load_tiny_imagenet(cache=tmp_path / "cache")
    for one, two in zip(first, again, strict=True):
        assert torch.equal(one.images, two.images)
        assert torch.equal(one.labels, two.labels)
        assert one.classes == two.classes
        assert one.augmentation == two.augmentation


def test_a_part_of_it_is_not_kept_for_the_whole(root, tmp_path):
    load_tiny_imagenet(root, cache=tmp_path / "cache")
    with pytest.raises(DataError, match=r"has not been read yet .*--data-root"):
        load_tiny_imagenet(cache=tmp_path / "cache")


def test_a_damaged_cache_is_told(tmp_path):
    (tmp_path / "tiny-imagenet.safetensors").write_bytes(b"nonsense")
    with pytest.raises(DataError, match="cannot be read"):
        load_tiny_imagenet(cache=tmp_path)


@pytest.fixture
def readers(monkeypatch) -> list[subprocess.Popen]:
    """Lets two processes read even a few pictures; the processes that were started."""
    started = []

    class Noted(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    monkeypatch.setattr(jpegs, "FEW", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    return started


def assert_same(one, two):
    assert torch.equal(one.images, two.images)
    assert torch.equal(one.labels, two.labels)


def test_processes_read_what_one_alone_reads(root, readers, monkeypatch):
    pairs = [tiny_imagenet.read_tiny_imagenet(root)]
    assert len(readers) == 4  # two for the training images, two for the others
    with monkeypatch.context() as alone:
        alone.setattr(jpegs, "FEW", 1000)
        pairs.append(tiny_imagenet.read_tiny_imagenet(root))
    assert len(readers) == 4
    for one, two in zip(*pairs, strict=True):
        assert_same(one, two)


def test_processes_do_read_the_pictures(root, readers, monkeypatch):
    monkeypatch.setattr(tiny_imagenet, "_picture", lambda path: pytest.fail(f"{path} was left to the caller"))
    train, _ = tiny_imagenet.read_tiny_imagenet(root)
    assert colour_of(train.images[-1]) == 1


@pytest.mark.parametrize("python", [None, "", "no-such-program", "/bin/false", "/bin/echo"])
def test_without_processes_that_work_the_pictures_are_read_all_the_same(root, readers, python, monkeypatch):
    expected = tiny_imagenet.read_tiny_imagenet(root)
    monkeypatch.setattr(sys, "executable", python)
    for one, two in zip(expected, tiny_imagenet.read_tiny_imagenet(root), strict=True):
        assert_same(one, two)


def test_what_an_interpreter_prints_at_its_start_is_not_taken_for_pixels(root, readers, tmp_path, monkeypatch):
    expected = tiny_imagenet.read_tiny_imagenet(root)
    (tmp_path / "sitecustomize.py").write_text("print('x' * 100)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    for one, two in zip(expected, tiny_imagenet.read_tiny_imagenet(root), strict=True):
        assert_same(one, two)


def test_readers_end_with_whoever_asked_them(root, readers):
    pictures = jpegs.read_many(sorted(root.rglob("*.JPEG")), 64)
    assert next(pictures) is not None
    pictures.close()
    assert len(readers) == 2
    assert all(reader.returncode is not None for reader in readers)


def test_a_pipe_in_the_place_of_a_picture_is_not_waited_for(root, readers, tmp_path):
    pipe = root / "train" / "n01" / "images" / "n01_2.JPEG"
    pipe.unlink()
    os.mkfifo(pipe)
    with pytest.raises(DataError, match="n01_2.JPEG cannot be read: .*a device or a pipe"):
        load_tiny_imagenet(root, cache=tmp_path / "cache")


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda root: (root / "wnids.txt").unlink(), "has no wnids.txt"),
        (lambda root: (root / "val" / "val_annotations.txt").unlink(), "there is no .*val_annotations.txt"),
        (lambda root: (root / "val" / "val_annotations.txt").write_text(""), "is empty"),
        (lambda root: (root / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn09\n"), "names no class"),
        (lambda root: (root / "val" / "val_annotations.txt").write_text("only words\n"), "names no class"),
        (lambda root: (root / "val" / "images" / "val_1.JPEG").unlink(), "val_1.JPEG cannot be read"),
        (lambda root: picture(root / "val" / "images" / "val_1.JPEG", (0, 0, 0), 32), "32×32, those .* 64×64"),
        (lambda root: (root / "train" / "n01" / "images" / "n01_0.JPEG").write_bytes(b"x"), "cannot be read"),
        (lambda root: (root / "wnids.txt").write_text("n07\n"), "no pictures in .*n07"),
        (lambda root: (root / "wnids.txt").write_text("../elsewhere\n"), "names nothing of this folder"),
        (lambda root: (root / "val" / "val_annotations.txt").write_text("../a.JPEG\tn01\n"), "names nothing of this"),
        (lambda root: (root / "wnids.txt").write_bytes(b"\xff\xfe"), "is no text"),
    ],
)
def test_what_is_wrong_with_the_folder_is_told(root, tmp_path, break_it, message):
    break_it(root)
    with pytest.raises(DataError, match=message):
        load_tiny_imagenet(root, cache=tmp_path / "cache")


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda root: (root / "val" / "images" / "val_1.JPEG").unlink(), "val_1.JPEG cannot be read: .*No such file"),
        (lambda root: picture(root / "val" / "images" / "val_1.JPEG", (0, 0, 0), 32), "32×32, those .* 64×64"),
        (
            lambda root: (root / "train" / "n01" / "images" / "n01_0.JPEG").write_bytes(b"x"),
            "n01_0.JPEG cannot be read",
        ),
    ],
)
def test_processes_leave_it_to_the_caller_to_tell_what_is_wrong(root, tmp_path, readers, break_it, message):
    break_it(root)
    with pytest.raises(DataError, match=message):
        load_tiny_imagenet(root, cache=tmp_path / "cache")
    assert all(reader.returncode is not None for reader in readers)


def test_load_data_splits_it_in_three(root, monkeypatch, tmp_path):
    monkeypatch.setenv("HALOC_CACHE", str(tmp_path / "cache"))
    splits = load_data("tiny-imagenet", root=root, val_fraction=0.25)
    assert [len(part) for part in (splits.train, splits.val, splits.test, splits.whole)] == [9, 3, 3, 12]
