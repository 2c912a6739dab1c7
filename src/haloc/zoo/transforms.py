"""The two usual ways from a picture of any size to a square one, as ImageNet networks are trained and tested."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

_SCALE = (0.08, 1.0)  # share of the picture's area that a training crop covers
_MIN_RATIO, _MAX_RATIO = 3 / 4, 4 / 3  # width to height of a training crop
_ATTEMPTS = 10
_LONGEST = 64  # sides of a picture beyond which only its middle is looked at: it is all that the crop shows

Box = tuple[int, int, int, int]  # left, top, right, bottom


def centre_crop(picture: Image.Image, size: int, resize: int) -> Image.Image:
    """Returns the middle ``size``×``size`` of the picture scaled so that its short side is ``resize``."""
    short = min(picture.size)
    picture = _shortened(picture, short * _LONGEST)
    width, height = (side * resize // short for side in picture.size)
    left, top = round((width - size) / 2), round((height - size) / 2)
    scaled = picture.resize((width, height), Image.Resampling.BILINEAR)
    return scaled.crop((left, top, left + size, top + size))


def _shortened(picture: Image.Image, most: int) -> Image.Image:
    """The middle of a picture that is very long: a line of a million pixels would become a wall when it is scaled."""
    width, height = picture.size
    if max(width, height) <= most:
        return picture
    left, top = (max(0, (side - most) // 2) for side in (width, height))
    return picture.crop((left, top, width - left, height - top))


def random_resized_crop(picture: Image.Image, size: int, random: np.random.RandomState) -> Image.Image:
    """Returns a random part of the picture as ``size``×``size``, mirrored every other time."""
    box = _random_box(*picture.size, random)
    cropped = picture.crop(box).resize((size, size), Image.Resampling.BILINEAR)
    mirrored = random.random_sample() < 0.5
    return cropped.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else cropped


def _random_box(width: int, height: int, random: np.random.RandomState) -> Box:
    """Draws area and shape until the box fits; after ten misses takes the largest middle box allowed."""
    for _ in range(_ATTEMPTS):
        area = width * height * random.uniform(*_SCALE)
        ratio = math.exp(random.uniform(math.log(_MIN_RATIO), math.log(_MAX_RATIO)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return _box(random.randint(width - w + 1), random.randint(height - h + 1), w, h)
    return _middle_box(width, height)


def _middle_box(width: int, height: int) -> Box:
    w = max(1, min(width, round(height * _MAX_RATIO)))
    h = max(1, min(height, round(width / _MIN_RATIO)))
    return _box((width - w) // 2, (height - h) // 2, w, h)


def _box(left: int, top: int, width: int, height: int) -> Box:
    return left, top, left + width, top + height
