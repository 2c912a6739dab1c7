"""The 1,797 handwritten digits (8×8, grey) that come with scikit-learn: real data that need no download."""

from __future__ import annotations

import numpy as np
import torch

from haloc.zoo.augment import CropFlip
from haloc.zoo.images import ImageSet, Normalisation, split

# Mean and standard deviation of all the pixels.
DIGITS = Normalisation((0.3053,), (0.3760,))
_TEST_FRACTION = 0.2
_SPLIT_SEED = 0  # fixed: the test set is the same for everyone


def load_digits() -> tuple[ImageSet, ImageSet]:
    """Returns ``(train, test)``: always the same split, a fifth of every class for testing."""
    return split(_all_digits(), _TEST_FRACTION, _SPLIT_SEED)


def _all_digits() -> ImageSet:
    # Here and not above: importing it takes a second, and most who come by want no digits.
    from sklearn import datasets

    pixels, labels = datasets.load_digits(return_X_y=True)
    images = np.rint(pixels * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)  # they come as 0 to 16
    # A digit stays a digit when shifted by a pixel, not when mirrored.
    shift = CropFlip(padding=1, flip=False)
    classes = tuple(str(digit) for digit in range(10))
    return ImageSet(torch.from_numpy(images), torch.from_numpy(labels).long(), classes, shift)
