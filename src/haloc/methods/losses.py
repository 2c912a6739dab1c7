"""The losses of the paper's search, one function per equation."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def expected_cost(probabilities: Iterable[Tensor], costs: Iterable[Tensor]) -> Tensor:
    """Σ_i E_i with E_i = Σ_j p_ij M_ij (Eq. nas_1): what the layers cost in the mean over all paths."""
    # Not a product of matrices, which autocast would take to half precision, where costs have no place.
    return (torch.cat(tuple(probabilities)) * torch.cat(tuple(costs))).sum()


def hardware_penalty(ratios: Iterable[Tensor], eta: float, theta: float, one_sided: bool) -> Tensor:
    """η (Σ_i E_i / ε)^θ, the factor of Eq. nas_2; of several budgets the powers are multiplied.

    As printed it goes on rewarding a network that is already within the budget. One-sided, the ratio counts as 1 there,
    and accuracy alone decides.
    """
    powers = [(ratio.clamp(min=1.0) if one_sided else ratio) ** theta for ratio in ratios]
    return eta * torch.stack(powers).prod()


def on_the_way(start: float, end: float, progress: float) -> float:
    """A value that goes from one to another at a constant rate, for λ; ``progress`` goes from 0 to 1."""
    return start + (end - start) * progress


def cooled(start: float, end: float, progress: float) -> float:
    """A value that is multiplied by the same in equal times, for a temperature."""
    return float(start * (end / start) ** progress)


def probability_loss(cross_entropy: Tensor, penalty: Tensor) -> Tensor:
    """L_prob = L_CE · η (Σ_i E_i / ε)^θ (Eq. nas_2), what the selection probabilities minimise on held-out data."""
    return cross_entropy * penalty


def weight_terms(cross_entropy: Tensor, approach: Tensor, lam: float) -> dict[str, Tensor]:
    """The terms of L_weight = L_CE + λ L_approach (Eq. child_loss), what the weights minimise on training data."""
    return {"cross_entropy": cross_entropy, "features": lam * approach}


def entropy(probabilities: Iterable[Tensor]) -> Tensor:
    """The mean over the layers of −Σ_j p_ij log p_ij: log m where m candidates are equally likely, 0 once decided."""
    return torch.stack([torch.special.entr(chances).sum() for chances in probabilities]).mean()
