import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from haloc.zoo.transforms import _random_box, centre_crop, random_resized_crop


def gradient(width: int, height: int) -> Image.Image:
    """Red is the column and green the row, in steps that fit a byte."""
    column, row = np.meshgrid(np.arange(width), np.arange(height))
    pixels = np.stack([column * 255 // max(width - 1, 1), row * 255 // max(height - 1, 1), 0 * row], -1)
    return Image.fromarray(pixels.astype(np.uint8))


def test_centre_crop_without_scaling_is_the_middle() -> None:
    picture = gradient(300, 256)
    got = np.asarray(centre_crop(picture, 224, 256))
    assert np.array_equal(got, np.asarray(picture)[16:240, 38:262])


@pytest.mark.parametrize(("width", "height"), [(512, 1024), (1024, 512), (100, 150), (256, 256)])
def test_centre_crop_of_a_gradient_keeps_its_middle_and_its_scale(width: int, height: int) -> None:
    got = np.asarray(centre_crop(gradient(width, height), 224, 256)).astype(float)
    assert got.shape == (224, 224, 3)
    scale = 256 / min(width, height)
    for channel, side, axis in ((0, width, 1), (1, height, 0)):
        line = got[..., channel].mean(1 - axis)
        assert line[111:113].mean() == pytest.approx(127, abs=1.5)
        assert (line[-1] - line[0]) == pytest.approx(255 * 223 / (scale * side), abs=3)


def test_centre_crop_rounds_the_long_side_down() -> None:
    # 375 → 256 makes of 500 the 341 of torchvision, so the crop starts at column 58 of these.
    picture = gradient(500, 375)
    scaled = picture.resize((341, 256), Image.Resampling.BILINEAR)
    assert np.array_equal(np.asarray(centre_crop(picture, 224, 256)), np.asarray(scaled)[16:240, 58:282])


@pytest.mark.parametrize("size", [(300, 200), (1, 1), (1000, 3), (3, 1000), (40, 40)])
def test_random_crop_has_the_size_asked_for(size: tuple[int, int]) -> None:
    assert random_resized_crop(gradient(*size), 32, np.random.RandomState(0)).size == (32, 32)


@given(st.integers(20, 600), st.integers(20, 600), st.integers(0, 2**32 - 1))
def test_random_boxes_lie_inside_with_the_area_and_shape_asked_for(width: int, height: int, seed: int) -> None:
    left, top, right, bottom = _random_box(width, height, np.random.RandomState(seed))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    w, h = right - left, bottom - top
    # Sides are whole pixels, so a side may be half a pixel off.
    assert (w + 0.5) / (h - 0.5) >= 3 / 4
    assert (w - 0.5) / (h + 0.5) <= 4 / 3
    assert (w + 0.5) * (h + 0.5) >= 0.08 * min(width * height, min(width, height) ** 2)


@pytest.mark.parametrize(("size", "box"), [((1000, 30), (480, 0, 520, 30)), ((30, 1000), (0, 480, 30, 520))])
def test_a_picture_too_narrow_gives_its_middle(size: tuple[int, int], box: tuple[int, ...]) -> None:
    class Whole(np.random.RandomState):
        def uniform(self, low: float, high: float) -> float:  # the largest area: it never fits
            return high

    assert _random_box(*size, Whole(0)) == box


def test_half_of_the_random_crops_are_mirrored() -> None:
    random = np.random.RandomState(0)
    reds = [np.asarray(random_resized_crop(gradient(64, 64), 16, random)).astype(int)[..., 0] for _ in range(300)]
    assert 0.4 < np.mean([red[0, 0] > red[0, -1] for red in reds]) < 0.6
