from pathlib import Path

import pytest
import torch

from haloc.errors import DataError, SpecError
from haloc.zoo import DIGITS, IMAGENET, FolderImages, ImageSet, data, load_data, load_digits

from . import fabricate
from .test_folder import write


def rows(images: ImageSet) -> set[tuple[int, ...]]:
    return {tuple(image.flatten().tolist()) for image in images.images}


def test_digits_keep_the_test_set_out_of_the_search() -> None:
    splits = load_data("digits", val_fraction=0.25, seed=3)
    train, test = load_digits()
    assert isinstance(splits.train, ImageSet)
    assert isinstance(splits.val, ImageSet)
    assert isinstance(splits.test, ImageSet)
    assert torch.equal(splits.test.images, test.images)
    assert rows(splits.train) | rows(splits.val) == rows(train)
    assert len(splits.val) == pytest.approx(0.25 * len(train), abs=5)
    assert splits.normalisation == DIGITS


def test_seed_moves_only_what_is_split_off_train() -> None:
    one, two = (load_data("digits", seed=seed) for seed in (0, 1))
    assert torch.equal(one.test.images, two.test.images)
    assert not torch.equal(one.val.images, two.val.images)


def test_cifar10_takes_root_and_splits_train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []
    monkeypatch.setattr(data, "load_cifar10", lambda root: asked.append(root) or fabricate.truth())
    splits = load_data("cifar10", root=tmp_path)
    train, test = fabricate.truth()
    assert asked == [tmp_path]
    assert torch.equal(splits.test.images, test.images)
    assert rows(splits.train) | rows(splits.val) == rows(train)
    assert not rows(splits.train) & rows(splits.val)
    assert splits.normalisation == IMAGENET


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for part in ("train", "val"):
        for label in ("a", "b"):
            for number in range(4):
                write(tmp_path / part / label / f"{number}.png")
    return tmp_path


def test_imagefolder_takes_val_for_testing(root: Path) -> None:
    splits = load_data("imagefolder", root=str(root), val_fraction=0.25, workers=2)
    assert isinstance(splits.train, FolderImages)
    assert isinstance(splits.val, FolderImages)
    assert isinstance(splits.test, FolderImages)
    assert {path.parts[-3] for path in splits.test.paths} == {"val"}
    assert {path.parts[-3] for path in (*splits.train.paths, *splits.val.paths)} == {"train"}
    assert (len(splits.train), len(splits.val), len(splits.test)) == (6, 2, 8)
    assert splits.train.workers == 2


def test_imagefolder_refuses_classes_that_differ(root: Path) -> None:
    write(root / "val" / "c" / "0.png")
    write(root / "train" / "d" / "0.png")
    with pytest.raises(DataError, match="only one of them has 'c' and 1 more"):
        load_data("imagefolder", root=root)


def test_imagefolder_needs_its_folders(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="'imagefolder' needs a root, a folder with train/ and val/"):
        load_data("imagefolder")
    with pytest.raises(DataError, match=f"there is no folder {tmp_path}/train"):
        load_data("imagefolder", root=tmp_path)


def test_unknown_name_answers_with_the_nearest() -> None:
    with pytest.raises(SpecError, match=r"no data set 'cifar-10', expected one of .*Did you mean 'cifar10'\?"):
        load_data("cifar-10")


def test_every_source_gives_batches_in_the_same_way(root: Path) -> None:
    for splits in (load_data("digits"), load_data("imagefolder", root=root)):
        for source in (splits.train, splits.val, splits.test):
            batches = source.batches(2, normalisation=splits.normalisation, augment=True, shuffle=True, seed=1, limit=3)
            inputs, labels = next(iter(batches))
            assert len(inputs) == len(labels) == 2
            assert int(labels.max()) < len(source.classes)
