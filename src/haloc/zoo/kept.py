"""Image sets kept in the cache from one call to the next."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from haloc.errors import HalocError
from haloc.files import replacing
from haloc.zoo.images import ImageSet

_LOG = logging.getLogger(__name__)


def keep(what: str, pair: tuple[ImageSet, ImageSet], kept: Path, more: Mapping[str, Tensor] | None = None) -> None:
    """Writes training and test images, whole or not at all; that they cannot be written is no reason to fail.

    Args:
        what: The data set's name, for the log.
        pair: Training and test images, of at most 256 classes.
        kept: The file.
        more: What else is kept with them.
    """
    tensors = dict(more or {})
    for name, images in zip(("train", "test"), pair, strict=True):
        tensors[f"{name}_images"] = images.images
        tensors[f"{name}_labels"] = images.labels.to(torch.uint8)
    try:
        with replacing(kept) as temporary:
            save_file(tensors, temporary)
    except (HalocError, SafetensorError, OSError) as error:
        _LOG.warning("%s is not kept for the next time: %s", what, error)
