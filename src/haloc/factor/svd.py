"""Truncated SVD of a weight between its input channels and everything else.

For one tap this is the SVD of a matrix (1×1 convolutions, linear layers); with the kernel's first axis moved to the
inputs it is the spatial form. Done once per layer, it serves all ranks: a truncation is a slice.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from haloc.factor.factors import Factors
from haloc.factor.tensors import eigenvectors, gram, unfold_in


@dataclass(frozen=True, eq=False)
class InputSvd:
    """All components of a weight, largest first: ``into`` (groups, in, q) and ``core`` (groups, out, q, taps)."""

    into: Tensor
    core: Tensor

    def truncated(self, rank: int) -> Factors:
        """The best approximation of the weight through ``rank`` channels."""
        return Factors(self.into[..., :rank], self.core[:, :, :rank], None)


def input_svd(stack: Tensor) -> InputSvd:
    """Decomposes a stack (groups, out, in, taps) through the Gram matrix of its smaller side.

    The factor that is not orthonormal carries the singular values; `balance` shares them out.
    """
    matrix = unfold_in(stack)
    groups, out_channels, _, taps = stack.shape
    if matrix.shape[1] <= matrix.shape[2]:
        _, into = eigenvectors(gram(matrix))
        core = into.mT @ matrix
    else:
        _, right = eigenvectors(gram(matrix.mT))
        into, core = matrix @ right, right.mT
    return InputSvd(into, core.reshape(groups, -1, out_channels, taps).transpose(1, 2))
