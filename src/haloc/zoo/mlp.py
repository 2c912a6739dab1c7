"""What transformers and ConvNeXt have between their ways of looking around."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class Mlp(nn.Module):
    """Two linear layers, four times as wide between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the outputs."""
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out
