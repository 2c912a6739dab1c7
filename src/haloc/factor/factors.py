"""What every decomposition returns: up to three factors around a core.

All forms are one shape of thing. A weight (groups, out, in, taps) is a core (groups, rank_out, rank_in, taps) between
a matrix on the input side and one on the output side. Tucker-2 has both. SVD has one of them and a single tap. Spatial
has the one on the input side, after the kernel's first axis has been moved from the taps to the inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from haloc.factor.tensors import eigenvectors


@dataclass(frozen=True, eq=False)
class Factors:
    """``weight ≈ core ×₁ out ×₂ into``; a side is None where its rank is full and its layer is left out.

    Attributes:
        into: From input channels to the core's, (groups, in, rank_in).
        core: (groups, rank_out, rank_in, taps).
        out: From the core's channels to output channels, (groups, out, rank_out).
    """

    into: Tensor | None
    core: Tensor
    out: Tensor | None

    def rebuild(self) -> Tensor:
        """Multiplies the factors out to a dense stack (groups, out, in, taps)."""
        stack = self.core
        if self.out is not None:
            stack = torch.einsum("gor,grck->gock", self.out, stack)
        if self.into is not None:
            stack = torch.einsum("gcr,gork->gock", self.into, stack)
        return stack

    def behind(self, mixture: Tensor) -> Factors:
        """The factors of the weight whose outputs are mixed, by one matrix for every group, (groups, out, out)."""
        if self.out is not None:
            return replace(self, out=mixture @ self.out)
        return replace(self, core=torch.einsum("gpo,gock->gpck", mixture, self.core))


def balance(factors: Factors, sweeps: int = 20) -> Factors:
    """Rescales every hidden channel so that the weights into it and out of it have equal norms.

    The product stays the same. Of all such scalings this one has the smallest sum of squares, and gradient steps on
    two neighbouring factors then have equal reach: with orthonormal bases the core would hold all of the scale, and
    weight decay and momentum would treat the factors unequally. Two factors are balanced in one sweep, three in a few.
    """
    into, core, out = factors.into, factors.core, factors.out
    # Channels are scaled as a whole, so their energies tell all that is needed: (groups, rank_out, rank_in).
    energy = core.square().sum(-1)
    scale_in = core.new_ones(core.shape[0], core.shape[2])
    scale_out = core.new_ones(core.shape[0], core.shape[1])
    for _ in range(sweeps if into is not None and out is not None else 1):
        if into is not None:
            others = (energy / scale_out.square().unsqueeze(2)).sum(1)
            scale_in = _equalising(into.square().sum(1), others)
        if out is not None:
            others = (energy / scale_in.square().unsqueeze(1)).sum(2)
            scale_out = _equalising(out.square().sum(1), others)
    return Factors(
        None if into is None else into * scale_in.unsqueeze(1),
        core / (scale_out.unsqueeze(2) * scale_in.unsqueeze(1)).unsqueeze(3),
        None if out is None else out * scale_out.unsqueeze(1),
    )


def ordered(factors: Factors, moment: Tensor | None = None) -> Factors:
    """Turns the hidden channels so that the first matter most: cut after any r, they are good factors of rank r.

    The product stays the same. Each side goes to the basis in which its channels are uncorrelated and their
    contributions to the output orthogonal, largest first; taps are taken as if they did not interact.

    Args:
        factors: What is turned; `balance` it afterwards.
        moment: The second moment of the input channels, (groups, in, in), where it is known.
    """
    into, core, out = factors.into, factors.core, factors.out
    if into is not None:
        root, inverse = _roots(into.mT @ into if moment is None else into.mT @ moment @ into)
        widened = core if out is None else torch.einsum("gor,grck->gock", out, core)
        contributions = torch.einsum("gock,godk->gcd", widened, widened)
        _, turn = eigenvectors(root @ contributions @ root)
        into, core, moment = into @ inverse @ turn, torch.einsum("gock,gcd->godk", core, root @ turn), None
    if out is not None:
        inputs = core if moment is None else torch.einsum("gock,gcd->godk", core, moment)
        root, inverse = _roots(out.mT @ out)
        _, turn = eigenvectors(root @ torch.einsum("gock,gpck->gop", inputs, core) @ root)
        out, core = out @ inverse @ turn, torch.einsum("gop,gpck->gock", (root @ turn).mT, core)
    return Factors(into, core, out)


def _roots(symmetric: Tensor) -> tuple[Tensor, Tensor]:
    """The symmetric square root of a positive semidefinite matrix, and its inverse."""
    values, vectors = eigenvectors(symmetric)
    scale = values.clamp_min(values[..., :1].clamp_min(1e-300) * 1e-12).sqrt().unsqueeze(-2)
    return (vectors * scale) @ vectors.mT, (vectors / scale) @ vectors.mT


def _equalising(first: Tensor, second: Tensor) -> Tensor:
    """The factor s for which s²·first = second/s², for squared norms; a dead channel is left alone."""
    alive = (first > 0) & (second > 0)
    return torch.where(alive, second / first.clamp_min(1e-300), torch.ones_like(first)).sqrt().sqrt()
