"""The arithmetic of a stream: in which directions its channels say most to those that read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from haloc.narrowing.interpolate import Moments


@dataclass(frozen=True, eq=False)
class Basis:
    """Directions of a stream, those that are missed most first.

    Attributes:
        directions: Orthonormal rows, (channels, channels).
        errors: The share of the readers' outputs that is lost without so many of the last ones: ``errors[0]`` is 0.
    """

    directions: Tensor
    errors: Sequence[float]

    def code(self, width: int) -> Tensor:
        """The first ``width`` of them."""
        return self.directions[:width]


def principal(readers: Sequence[tuple[Tensor, Moments]]) -> Basis:
    """The directions that all readers together need most, whatever of them is left.

    For one reader W the squared error of W h that r directions must leave is the sum of the last eigenvalues of
    L C Lᵀ, with LᵀL = WᵀW and C the covariance of h; the leading eigenvectors U give the directions Uᵀ L. Readers see
    the stream at different places, so C is the mean over them.

    Args:
        readers: For each its weights as rows over the channels, scaled to what they matter, and what it sees.
    """
    gram = torch.stack([rows.T @ rows for rows, _ in readers]).sum(0)
    covariance = torch.stack([seen.covariance for _, seen in readers]).mean(0)
    # A stream of which a reader takes nothing in some directions still has as many directions as channels.
    level = gram.diagonal().mean()
    gram = gram + (1e-9 * level if bool(level > 0) else 1.0) * torch.eye(
        len(gram), dtype=gram.dtype, device=gram.device
    )
    root = torch.linalg.cholesky(gram).T
    values, vectors = torch.linalg.eigh(root @ covariance @ root.T)
    directions = torch.linalg.qr(root.T @ vectors.flip(1)).Q.T  # the first r rows span what the first r of U do
    lost = values.clamp_min(0).cumsum(0) / values.clamp_min(0).sum().clamp_min(torch.finfo(values.dtype).tiny)
    return Basis(directions, [0.0, *lost[:-1].tolist()])
