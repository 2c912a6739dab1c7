"""Tucker-2 of a convolution's weight: a core between two channel bases (the paper's Eq. 1).

`hosvd` is done once per layer and serves all ranks; `tucker2` then refines one pair of ranks by alternating sweeps
(HOOI). The bases are orthonormal, so the error follows from the norms of weight and core.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from haloc.factor.factors import Factors
from haloc.factor.tensors import eigenvectors, gram, squared_norm, unfold_in, unfold_out


@dataclass(frozen=True, eq=False)
class Hosvd:
    """A weight written in the eigenbases of its two channel modes, largest first; nothing is truncated.

    Attributes:
        stack: The weight itself, (groups, out, in, taps).
        by_out: The weight in those bases, laid out (groups, out, taps, in).
        by_in: The same, laid out (groups, in, taps, out), so that either mode is contracted by one plain product.
        out_basis: Columns span the output channels, (groups, out, out).
        in_basis: Columns span the input channels, (groups, in, in).
    """

    stack: Tensor
    by_out: Tensor
    by_in: Tensor
    out_basis: Tensor
    in_basis: Tensor


def hosvd(stack: Tensor) -> Hosvd:
    """Rotates a stack (groups, out, in, taps) into the eigenbases of its two channel modes."""
    _, out_basis = eigenvectors(gram(unfold_out(stack)))
    _, in_basis = eigenvectors(gram(unfold_in(stack)))
    by_out = torch.einsum("gock,gop,gcq->gpkq", stack, out_basis, in_basis).contiguous()
    return Hosvd(stack, by_out, by_out.transpose(1, 3).contiguous(), out_basis, in_basis)


def tucker2(
    decomposition: Hosvd, rank_out: int, rank_in: int, *, tolerance: float = 3e-4, max_sweeps: int = 100
) -> Factors:
    """The Tucker-2 approximation of the given ranks.

    With a full rank on either side the HOSVD is already optimal; otherwise `sweep` refines it.

    Args:
        decomposition: What `hosvd` made of the weight.
        rank_out: The paper's r(1), at most the output channels of a group.
        rank_in: The paper's r(2), at most the input channels of a group.
        tolerance: Sweeping ends when one sweep lowers the squared error by less than this part of it.
        max_sweeps: Sweeping ends here at the latest.
    """
    narrow_out = rank_out < decomposition.by_out.shape[1]
    narrow_in = rank_in < decomposition.by_in.shape[1]
    if narrow_out and narrow_in:
        return _refined(decomposition, rank_out, rank_in, tolerance, max_sweeps)
    if narrow_out:
        out = decomposition.out_basis[..., :rank_out]
        return Factors(None, torch.einsum("gock,gor->grck", decomposition.stack, out), out)
    if narrow_in:
        into = decomposition.in_basis[..., :rank_in]
        return Factors(into, torch.einsum("gock,gcr->gork", decomposition.stack, into), None)
    return Factors(None, decomposition.stack, None)


def _refined(rotated: Hosvd, rank_out: int, rank_in: int, tolerance: float, max_sweeps: int) -> Factors:
    """Sweeps for an output basis, then the best input basis and core for it in float64.

    Sweeps run in float32, which is twice as fast and no worse where the approximation is coarse; where the HOSVD is
    already so good that rounding would show, they run in float64.
    """
    start = squared_norm(rotated.by_out) - squared_norm(rotated.by_out[:, :rank_out, :, :rank_in])
    coarse = start > 1e-4 * squared_norm(rotated.by_out)
    dtype = torch.float32 if coarse else torch.float64
    swept = _sweep(rotated.by_out.to(dtype), rotated.by_in.to(dtype), rank_out, rank_in, tolerance, max_sweeps)
    out: Tensor = torch.linalg.qr(swept.double()).Q
    squeezed = _contract(rotated.by_in, out)
    _, into = _leading(squeezed, rank_in)
    core = torch.einsum("gckr,gcs->grsk", squeezed, into)
    return Factors(rotated.in_basis @ into, core, rotated.out_basis @ out)


def _sweep(by_out: Tensor, by_in: Tensor, rank_out: int, rank_in: int, tolerance: float, max_sweeps: int) -> Tensor:
    """Alternates between the best output basis for the input basis and the reverse, from the HOSVD's leading ones."""
    rounding = 2 * torch.finfo(by_out.dtype).eps
    total = squared_norm(by_out)
    narrowed, error = by_out[..., :rank_in], total
    for _ in range(max_sweeps):
        _, out = _leading(narrowed, rank_out)
        energy, into = _leading(_contract(by_in, out), rank_in)
        previous, error = error, total - energy
        if previous - error <= tolerance * error.clamp_min(0) + rounding * total:
            break
        narrowed = _contract(by_out, into)
    return out


def _contract(laid_out: Tensor, basis: Tensor) -> Tensor:
    """Projects the last mode on a basis, as one large product per group."""
    product = laid_out.flatten(1, 2) @ basis
    return product.reshape(*laid_out.shape[:3], -1)


def _leading(stack: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The energy in, and the basis of, the ``rank`` leading directions of a stack's first mode."""
    values, vectors = eigenvectors(gram(unfold_out(stack)))
    return values[..., :rank].sum(), vectors[..., :rank]
