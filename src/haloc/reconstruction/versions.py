"""Random versions of images, so that few of them are many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from numpy.random import SeedSequence
from torch import Tensor
from torch.nn import functional as F

from haloc.factor.forward import mapped

#: Sides below which a tensor is not taken for an image, the least part of a side, and the share that is blended.
_SMALLEST, _LEAST, _BLENDED = 8, 0.6, 0.5


def with_versions(batches: Sequence[Any], versions: int, seed: int) -> Iterator[Any]:
    """The batches as they are, then so many random versions of each; the same ones every time."""
    yield from batches
    for version in range(versions):
        for number, batch in enumerate(batches):
            yield random_versions(batch, generator_of(seed, version, number))


def generator_of(*key: int) -> torch.Generator:
    """Returns a generator of its own for ``key``."""
    return torch.Generator().manual_seed(int(SeedSequence(key).generate_state(1)[0]))


def random_versions(inputs: Any, generator: torch.Generator) -> Any:
    """Random parts of images, scaled back and mirrored at random, through half of which another image shines.

    What is no batch of images is left as it is. A blend has no label, and needs none where networks are compared.
    """
    return mapped(inputs, lambda tensor: _versions(tensor, generator) if _are_images(tensor) else tensor)


def _are_images(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dim() == 4 and min(tensor.shape[2:]) >= _SMALLEST


def _versions(images: Tensor, generator: torch.Generator) -> Tensor:
    side, top, left, mirrored, chosen, weight = torch.rand(6, len(images), generator=generator).to(images)
    half = _LEAST + (1 - _LEAST) * side  # of the part, in units of half the image
    middle_y, middle_x = ((1 - half) * (2 * place - 1) for place in (top, left))
    none = torch.zeros_like(half)
    across = torch.where(mirrored < 0.5, -half, half)  # from right to left it is mirrored
    rows = torch.stack([torch.stack([across, none, middle_x], 1), torch.stack([none, half, middle_y], 1)], 1)
    grid = F.affine_grid(rows, list(images.shape), align_corners=False)
    parts = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
    others = torch.randperm(len(images), generator=generator).to(images.device)
    share = torch.where(chosen < _BLENDED, weight / 2, none)[:, None, None, None]
    return torch.lerp(parts, parts[others], share)
