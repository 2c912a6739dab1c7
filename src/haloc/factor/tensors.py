"""The vocabulary of the decompositions: weights as stacks of small tensors, and eigenvectors of Gram matrices.

Weights are worked on in float64 as ``(groups, out, in, taps)``: out and in are channels of one group, taps is the
kernel flattened. A linear layer has one group and one tap. All functions are batched over the groups.
"""

from __future__ import annotations

import torch
from torch import Tensor


def as_stack(weight: Tensor, groups: int = 1) -> Tensor:
    """Reshapes a layer's weight (out, in / groups, *kernel) to a float64 stack (groups, out, in, taps)."""
    out_channels, group_in = weight.shape[:2]
    return widened(weight).reshape(groups, out_channels // groups, group_in, -1)


def widened(tensor: Tensor) -> Tensor:
    """The values in float64, without gradients; on the CPU where the device has no float64 (mps)."""
    device = torch.device("cpu") if tensor.device.type == "mps" else tensor.device
    return tensor.detach().to(device=device, dtype=torch.float64)


def unfold_out(stack: Tensor) -> Tensor:
    """Mode-F unfolding: (groups, out, in * taps)."""
    return stack.flatten(2)


def unfold_in(stack: Tensor) -> Tensor:
    """Mode-C unfolding: (groups, in, out * taps)."""
    return stack.transpose(1, 2).flatten(2)


def gram(matrix: Tensor) -> Tensor:
    """A·Aᵀ for a stack of matrices: small where A is wide, and with the same left singular vectors."""
    return matrix @ matrix.mT


def eigenvectors(symmetric: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors (as columns) of symmetric matrices, largest first."""
    values, vectors = torch.linalg.eigh(symmetric)
    return values.flip(-1), vectors.flip(-1)


def squared_norm(tensor: Tensor) -> Tensor:
    """The squared Frobenius norm over everything."""
    return tensor.square().sum()
