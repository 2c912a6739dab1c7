import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from haloc.errors import DataError, SpecError
from haloc.zoo.augment import CropFlip
from haloc.zoo.images import CIFAR10, IMAGENET, ImageSet, Normalisation, split

PLAIN = Normalisation((0.0,) * 3, (1.0,) * 3)


def make(count: int = 40, classes: int = 4, size: int = 6) -> ImageSet:
    """Images that are bright everywhere (never black) and carry their index in every pixel."""
    images = torch.arange(1, count + 1, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, size, size).clone()
    return ImageSet(images, torch.arange(count) % classes, tuple(f"class {i}" for i in range(classes)))


def indices(inputs: torch.Tensor) -> list[int]:
    return (inputs.amax((1, 2, 3)) * 255).round().int().sub(1).tolist()


def test_normalisation_by_hand() -> None:
    images = torch.tensor([0, 255, 51], dtype=torch.uint8).view(1, 3, 1, 1)
    got = Normalisation((0.5, 0.25, 0.1), (0.5, 0.25, 0.2))(images).flatten()
    torch.testing.assert_close(got, torch.tensor([-1.0, 3.0, 0.5]))
    assert got.dtype == torch.float32


def test_published_constants() -> None:
    assert Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)) == IMAGENET
    assert Normalisation((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)) == CIFAR10


def test_normalisation_refuses_other_channels() -> None:
    with pytest.raises(SpecError, match="for images of 3 channels, got images of 1"):
        IMAGENET(torch.zeros(2, 1, 4, 4, dtype=torch.uint8))


@pytest.mark.parametrize(("mean", "std"), [((0.5,), ()), ((), ()), ((0.5,), (0.0,))])
def test_normalisation_refuses_nonsense(mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    with pytest.raises(SpecError, match="a mean and a positive std for every channel"):
        Normalisation(mean, std)


@pytest.mark.parametrize(
    ("images", "labels", "match"),
    [
        (torch.zeros(2, 3, 4, 4), torch.zeros(2).long(), "got torch.float32"),
        (torch.zeros(2, 4, 4).byte(), torch.zeros(2).long(), r"of shape \(2, 4, 4\)"),
        (torch.zeros(2, 3, 4, 4).byte(), torch.zeros(3).long(), "of 2 values"),
        (torch.zeros(2, 3, 4, 4).byte(), torch.zeros(2), "int64"),
        (torch.zeros(2, 3, 4, 4).byte(), torch.tensor([0, 2]), "from 0 to 1"),
        (torch.zeros(2, 3, 4, 4).byte(), torch.tensor([-1, 0]), "from 0 to 1"),
    ],
)
def test_image_set_refuses_what_it_is_not(images: torch.Tensor, labels: torch.Tensor, match: str) -> None:
    with pytest.raises(DataError, match=match):
        ImageSet(images, labels, ("a", "b"))


def test_batches_are_sized_ordered_and_normalised() -> None:
    batches = make(10).batches(4, normalisation=PLAIN)
    got = list(batches)
    assert len(batches) == len(got) == 3
    assert [len(labels) for _, labels in got] == [4, 4, 2]
    assert [i for inputs, _ in got for i in indices(inputs)] == list(range(10))
    assert torch.cat([labels for _, labels in got]).tolist() == [i % 4 for i in range(10)]
    assert got[0][0].dtype == torch.float32
    assert got[0][0].max() < 1


def epochs(seed: int, count: int = 2, **options: object) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    batches = make().batches(16, normalisation=PLAIN, shuffle=True, seed=seed, **options)
    return [list(batches) for _ in range(count)]


def same(left: list, right: list) -> bool:
    return all(torch.equal(a, b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True))


def test_the_same_seed_gives_the_same_epochs_and_another_does_not() -> None:
    first, again, other = epochs(3, augment=True), epochs(3, augment=True), epochs(4, augment=True)
    assert same(first[0], again[0])
    assert same(first[1], again[1])
    assert not same(first[0], first[1])
    assert not same(first[0], other[0])


@pytest.mark.parametrize("options", [{"shuffle": True}, {"augment": True}])
def test_every_epoch_draws_anew(options: dict) -> None:
    batches = make().batches(40, normalisation=PLAIN, **options)
    assert not same(list(batches), list(batches))


def test_an_epoch_can_be_set_to_go_on() -> None:
    batches = make().batches(16, normalisation=PLAIN, shuffle=True, augment=True, seed=3)
    batches.epoch = 1
    assert same(list(batches), epochs(3, augment=True)[1])


def test_shuffling_takes_every_image_once_with_its_label() -> None:
    (epoch,) = epochs(0, 1, augment=True)
    order = [i for inputs, _ in epoch for i in indices(inputs)]
    assert order != list(range(40))
    assert sorted(order) == list(range(40))
    assert torch.cat([labels for _, labels in epoch]).tolist() == [i % 4 for i in order]


def test_limit_takes_the_first_of_the_order() -> None:
    whole, part = epochs(5, 1)[0], epochs(5, 1, limit=20)[0]
    assert [len(labels) for _, labels in part] == [16, 4]
    assert torch.equal(part[0][0], whole[0][0])
    assert torch.equal(part[1][0], whole[1][0][:4])
    assert len(make(10).batches(4, normalisation=PLAIN, limit=99)) == 3


def test_global_random_numbers_are_left_alone() -> None:
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    epochs(0, augment=True)
    split(make(), 0.5, 1)
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"batch_size": 1, "limit": 0}, "limit must be at least 1, got 0"),
        ({"batch_size": 1, "seed": -1}, "seed must be"),
    ],
)
def test_batches_refuse_nonsense(options: dict, match: str) -> None:
    with pytest.raises(SpecError, match=match):
        make().batches(normalisation=PLAIN, **options)


def test_no_images_are_no_batches() -> None:
    batches = make().subset([]).batches(4, normalisation=PLAIN)
    assert len(batches) == len(list(batches)) == 0


def test_augment_true_is_the_sets_own_augmentation() -> None:
    images = make()
    still = ImageSet(images.images, images.labels, images.classes, CropFlip(padding=0, flip=False))
    plain, kept = (next(iter(still.batches(40, normalisation=PLAIN, augment=a)))[0] for a in (None, True))
    assert torch.equal(plain, kept)
    (moved, _), *_ = images.batches(40, normalisation=PLAIN, augment=True)
    assert not torch.equal(plain, moved)


def test_padding_is_black_before_normalisation() -> None:
    (inputs, _), *_ = make().batches(40, normalisation=IMAGENET, augment=True)
    black = IMAGENET(torch.zeros(1, 3, 1, 1, dtype=torch.uint8))
    edge = inputs[:, :, [0, 0, -1, -1], [0, -1, 0, -1]]
    assert (edge == black[..., 0]).all(1).any(1).float().mean() > 0.5


def augmented(augment: CropFlip, images: torch.Tensor, seed: int = 0) -> torch.Tensor:
    draws = augment.draw(len(images), *images.shape[2:], torch.Generator().manual_seed(seed))
    return augment(images, torch.arange(len(images)), draws)


def test_cutout_paints_a_black_square_at_the_place_drawn() -> None:
    images = torch.full((1, 2, 6, 6), 9, dtype=torch.uint8)
    draws = torch.tensor([[0, 0, 0, 2, 5]])
    (painted,) = CropFlip(padding=0, flip=False, cutout=3)(images, torch.tensor([0]), draws)
    expected = torch.full((2, 6, 6), 9, dtype=torch.uint8)
    expected[:, 1:4, 4:6] = 0  # the square reaches over the edge
    assert torch.equal(painted, expected)
    assert augmented(CropFlip(0, cutout=2), torch.full((50, 1, 6, 6), 9, dtype=torch.uint8)).eq(0).any((1, 2, 3)).all()


@settings(max_examples=25, deadline=None)
@given(padding=st.integers(0, 4), flip=st.booleans(), seed=st.integers(0, 2**31), width=st.integers(1, 7))
def test_every_crop_is_a_window_of_the_padded_image(padding: int, flip: bool, seed: int, width: int) -> None:
    random = np.random.RandomState(seed)
    images = torch.from_numpy(random.randint(1, 256, size=(5, 2, 6, width)).astype(np.uint8))
    crops = augmented(CropFlip(padding, flip), images, seed)
    assert crops.shape == images.shape
    assert crops.dtype == torch.uint8
    for image, crop in zip(images.numpy(), crops.numpy(), strict=True):
        padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
        offsets = range(2 * padding + 1)
        windows = [padded[:, top : top + 6, left : left + width] for top in offsets for left in offsets]
        windows += [window[:, :, ::-1] for window in windows] if flip else []
        assert any(np.array_equal(crop, window) for window in windows)


def test_crops_reach_every_offset_and_both_directions() -> None:
    images = torch.arange(1, 10, dtype=torch.uint8).view(1, 1, 3, 3).expand(600, -1, -1, -1)
    crops = augmented(CropFlip(1), images)
    assert len(crops.unique(dim=0)) == 18  # nine offsets, flipped or not
    flipped = augmented(CropFlip(0), images).ne(images).flatten(1).any(1)
    assert 0.4 < flipped.float().mean() < 0.6


def test_split_is_disjoint_complete_and_stratified() -> None:
    images = make(40, 4)
    rest, held = split(images, 0.2, 7)
    kept, out = ((part.images[:, 0, 0, 0].int() - 1).tolist() for part in (rest, held))
    assert sorted(kept + out) == list(range(40))
    assert torch.bincount(held.labels).tolist() == [2, 2, 2, 2]
    assert rest.classes == held.classes == images.classes


@given(fraction=st.floats(0.01, 0.99), counts=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_split_leaves_some_of_every_class_on_either_side(fraction: float, counts: list[int]) -> None:
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    images = ImageSet(torch.zeros(len(labels), 1, 1, 1).byte(), labels, tuple(map(str, range(len(counts)))))
    rest, held = split(images, fraction, 0)
    for label, count in enumerate(counts):
        assert (rest.labels == label).sum() >= 1
        assert (held.labels == label).sum() >= min(1, count - 1)


SPLIT = """
import torch
from haloc.zoo.images import ImageSet, split
images = ImageSet(torch.arange(30).byte().view(-1, 1, 1, 1), torch.arange(30) % 3, ("a", "b", "c"))
print(split(images, 0.2, 5)[1].images.flatten().tolist())
"""


def test_split_is_the_same_everywhere() -> None:
    spawned = subprocess.run([sys.executable, "-c", SPLIT], capture_output=True, text=True, check=True)
    assert spawned.stdout.strip() == "[2, 7, 11, 15, 16, 27]"


def test_split_depends_on_the_seed() -> None:
    assert not torch.equal(split(make(), 0.5, 0)[1].images, split(make(), 0.5, 1)[1].images)


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 1.5, float("nan")])
def test_split_refuses_other_fractions(fraction: float) -> None:
    with pytest.raises(SpecError, match="between 0 and 1"):
        split(make(), fraction, 0)
