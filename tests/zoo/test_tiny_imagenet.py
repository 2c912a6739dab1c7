"""Tiny-ImageNet from a small folder of the same form."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from haloc.errors import DataError
from haloc.zoo import load_data, tiny_imagenet
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


def test_load_data_splits_it_in_three(root, monkeypatch, tmp_path):
    monkeypatch.setenv("HALOC_CACHE", str(tmp_path / "cache"))
    splits = load_data("tiny-imagenet", root=root, val_fraction=0.25)
    assert [len(part) for part in (splits.train, splits.val, splits.test, splits.whole)] == [9, 3, 3, 12]
