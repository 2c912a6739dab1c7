from __future__ import annotations

import pytest
import torch

from haloc.errors import SpecError
from haloc.zoo.augment import CropFlip

IMAGES = torch.arange(1, 25, dtype=torch.uint8).view(2, 1, 3, 4)


def made(augment: CropFlip, index: int, *draws: int) -> list[list[int]]:
    """One image by its row of draws: top, left, flipped, the square's middle."""
    return augment(IMAGES, torch.tensor([index]), torch.tensor([[*draws, 0, 0][:5]]))[0, 0].tolist()


def test_crops_by_hand():
    assert made(CropFlip(1), 0, 1, 1, 0) == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert made(CropFlip(1), 0, 0, 2, 0) == [[0, 0, 0, 0], [2, 3, 4, 0], [6, 7, 8, 0]]
    assert made(CropFlip(1), 0, 0, 2, 1) == [[0, 0, 0, 0], [0, 4, 3, 2], [0, 8, 7, 6]]
    assert made(CropFlip(2), 1, 4, 0, 0) == [[0, 0, 21, 22], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_without_flipping_the_draw_is_not_heeded():
    assert made(CropFlip(1, flip=False), 0, 0, 2, 1) == made(CropFlip(1), 0, 0, 2, 0)


@pytest.mark.parametrize(
    ("side", "rows", "columns"), [(1, [1], [2]), (2, [0, 1], [1, 2]), (9, [0, 1, 2], [0, 1, 2, 3])]
)
def test_the_square_has_the_side_asked_for_and_stays_where_it_is_when_the_image_is_flipped(side, rows, columns):
    black = [[y, x] for y in rows for x in columns]
    for flipped in (0, 1):
        painted = torch.tensor(made(CropFlip(0, cutout=side), 0, 0, 0, flipped, 1, 2))
        assert painted.eq(0).nonzero().tolist() == black


def test_every_image_has_its_own_row():
    augment, index = CropFlip(1), torch.tensor([1, 0, 1])
    draws = augment.draw(3, 3, 4, torch.Generator().manual_seed(2))
    together = augment(IMAGES, index, draws)
    for number in range(3):
        assert together[number, 0].tolist() == made(augment, int(index[number]), *draws[number].tolist())


def test_draws_are_whole_numbers_in_their_ranges():
    draws = CropFlip(2).draw(2000, 3, 7, torch.Generator().manual_seed(0))
    assert (draws.dtype, draws.shape) == (torch.int64, (2000, 5))
    assert draws.amin(0).tolist() == [0] * 5
    assert draws.amax(0).tolist() == [4, 4, 1, 2, 6]


@pytest.mark.parametrize("options", [{"padding": -1}, {"cutout": -2}])
def test_less_than_nothing_is_refused(options):
    with pytest.raises(SpecError, match="padding and cutout must be 0 or more, got"):
        CropFlip(**options)
