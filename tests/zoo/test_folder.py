from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from haloc.errors import DataError, SpecError
from haloc.zoo.folder import FolderImages
from haloc.zoo.images import IMAGENET, Normalisation, split

PLAIN = Normalisation((0.0,) * 3, (1.0,) * 3)


def write(path: Path, colour: tuple[int, int, int] | None = None, mode: str = "RGB") -> None:
    """Writes a picture of one colour, or of noise that hangs on its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.RandomState(sum(map(ord, path.name)))
    pixels = random.randint(256, size=(40, 50, 3)) if colour is None else np.full((40, 50, 3), colour)
    Image.fromarray(pixels.astype(np.uint8)).convert(mode).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for label in ("dog", "cat"):
        for number in range(5):
            write(tmp_path / "pictures" / label / f"{number}.png")
    return tmp_path / "pictures"


def test_classes_and_files_are_sorted_by_name(root: Path) -> None:
    images = FolderImages(root)
    assert images.classes == ("cat", "dog")
    assert images.labels.tolist() == [0] * 5 + [1] * 5
    assert [path.relative_to(root).as_posix() for path in images.paths[4:6]] == ["cat/4.png", "dog/0.png"]
    assert len(images) == 10


def test_only_pictures_are_taken(root: Path) -> None:
    (root / "cat" / "notes.txt").write_text("no picture")
    (root / "cat" / "._0.png").write_text("left by a file manager")
    (root / ".cache").mkdir()
    write(root / "cat" / "inner" / "9.JPEG")
    images = FolderImages(root)
    assert images.classes == ("cat", "dog")
    assert images.labels.tolist() == [0] * 6 + [1] * 5
    assert images.paths[5].name == "9.JPEG"


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "CMYK"])
def test_every_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    write(tmp_path / "a" / ("x.tif" if mode == "CMYK" else "x.png"), (90, 90, 90), mode)
    (inputs, _), *_ = FolderImages(tmp_path, size=8).batches(1, normalisation=PLAIN)
    assert inputs.shape == (1, 3, 8, 8)
    torch.testing.assert_close(inputs, torch.full_like(inputs, 90 / 255), atol=2 / 255, rtol=0)


def test_the_usual_size_and_normalisation(tmp_path: Path) -> None:
    write(tmp_path / "a" / "x.png", (255, 0, 51))
    (inputs, labels), *_ = FolderImages(tmp_path).batches(4, normalisation=IMAGENET)
    assert inputs.shape == (1, 3, 224, 224)
    assert (inputs.dtype, labels.dtype) == (torch.float32, torch.int64)
    expected = (torch.tensor([1.0, 0.0, 0.2]) - torch.tensor(IMAGENET.mean)) / torch.tensor(IMAGENET.std)
    torch.testing.assert_close(inputs[0, :, 100, 100], expected)


def test_resize_follows_size(root: Path) -> None:
    assert FolderImages(root).resize == 256
    assert FolderImages(root, size=112).resize == 128
    assert FolderImages(root, size=32, resize=32).resize == 32


def epoch(root: Path, workers: int, number: int = 0, **options: object) -> list[tuple[torch.Tensor, torch.Tensor]]:
    batches = FolderImages(root, size=16, workers=workers).batches(4, normalisation=PLAIN, **options)
    batches.epoch = number
    return list(batches)


def same(left: list, right: list) -> bool:
    return all(torch.equal(a, b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True))


def test_the_same_with_any_number_of_workers(root: Path) -> None:
    options = {"augment": True, "shuffle": True, "seed": 3}
    alone, helped = epoch(root, 0, **options), epoch(root, 2, **options)
    assert [len(labels) for _, labels in alone] == [4, 4, 2]
    assert same(alone, helped)


def test_random_parts_hang_on_seed_and_epoch(root: Path) -> None:
    first = epoch(root, 0, augment=True, seed=3)
    assert same(first, epoch(root, 0, augment=True, seed=3))
    assert not same(first, epoch(root, 0, augment=True, seed=4))
    assert not same(first, epoch(root, 0, 1, augment=True, seed=3))


def test_equal_pictures_are_cropped_differently(root: Path) -> None:
    for path in root.rglob("*.png"):
        path.write_bytes((root / "cat" / "0.png").read_bytes())
    images = torch.cat([inputs for inputs, _ in epoch(root, 0, augment=True)])
    assert len(images.unique(dim=0)) == 10


def test_a_picture_is_cropped_the_same_in_any_order(root: Path) -> None:
    ordered = torch.cat([inputs for inputs, _ in epoch(root, 0, augment=True)])
    shuffled = torch.cat([inputs for inputs, _ in epoch(root, 0, augment=True, shuffle=True)])
    assert not torch.equal(ordered, shuffled)
    assert {tuple(image.flatten().tolist()) for image in ordered} == {
        tuple(image.flatten().tolist()) for image in shuffled
    }


def test_limit_and_length(root: Path) -> None:
    batches = FolderImages(root, size=8).batches(4, normalisation=PLAIN, limit=6)
    assert len(batches) == 2
    assert torch.cat([labels for _, labels in batches]).tolist() == [0] * 5 + [1]


@pytest.mark.parametrize("workers", [0, 1])
def test_global_random_numbers_are_left_alone(root: Path, workers: int) -> None:
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    epoch(root, workers, augment=True, shuffle=True)
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)


def test_split_keeps_pictures_with_their_labels(root: Path) -> None:
    rest, held = split(FolderImages(root), 0.4, 0)
    assert torch.bincount(held.labels).tolist() == [2, 2]
    assert not set(rest.paths) & set(held.paths)
    for part in (rest, held):
        assert [part.classes[label] for label in part.labels] == [path.parent.name for path in part.paths]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("content", [b"", b"no picture", None])
def test_an_unreadable_picture_is_named(root: Path, workers: int, content: bytes | None) -> None:
    path = root / "dog" / "2.png"
    path.write_bytes(path.read_bytes()[:500] if content is None else content)
    with pytest.raises(DataError, match=f"^the picture {path} cannot be read") as caught:
        epoch(root, workers)
    assert "\n" not in str(caught.value)


def test_folders_without_pictures_are_named(root: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"there is no folder {tmp_path}/none"):
        FolderImages(tmp_path / "none")
    with pytest.raises(DataError, match=f"{root}/cat holds no class folders"):
        FolderImages(root / "cat")
    (root / "eel").mkdir()
    with pytest.raises(DataError, match=f"the class folder {root}/eel holds no pictures"):
        FolderImages(root)


def test_nonsense_is_refused(root: Path) -> None:
    with pytest.raises(SpecError, match="got size=64 and resize=32"):
        FolderImages(root, size=64, resize=32)
    with pytest.raises(SpecError, match="workers must be 0 or more, got -1"):
        FolderImages(root).batches(1, normalisation=PLAIN, workers=-1)


def test_numbers_of_classes(tmp_path: Path) -> None:
    for number in (0, 2, 10):
        write(tmp_path / str(number) / "x.png")
    images = FolderImages.numbered(tmp_path)
    assert images.labels.tolist() == [0, 10, 2], "the files are in the order of their names"
    assert len(images.classes) == 11
    assert FolderImages(tmp_path).labels.tolist() == [0, 1, 2], "as elsewhere, unless they are said to be numbers"
    write(tmp_path / "cat" / "x.png")
    assert FolderImages.numbered(tmp_path).classes == ("0", "10", "2", "cat")


def test_pictures_without_labels(root: Path, tmp_path: Path) -> None:
    write(root / "9.png")
    images = FolderImages.unlabelled(root, size=16)
    assert (len(images), images.labels.unique().tolist(), images.classes) == (11, [0], ("pictures",))
    ((inputs, _), *_) = images.batches(11, normalisation=PLAIN)
    assert inputs.shape == (11, 3, 16, 16)
    (tmp_path / "empty").mkdir()
    for folder, said in (("empty", "empty holds no pictures"), ("none", "there is no folder")):
        with pytest.raises(DataError, match=said):
            FolderImages.unlabelled(tmp_path / folder)
