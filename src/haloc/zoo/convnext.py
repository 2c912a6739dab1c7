"""ConvNeXt (Liu et al. 2022), with timm's parameter names so that its weights load."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from haloc.zoo.mlp import Mlp

_EPS = 1e-6
#: What a block's output is multiplied by at first, so that a deep network begins as a shallow one.
_SCALE = 1e-6


class _LayerNorm2d(nn.LayerNorm):
    """A LayerNorm over the channels of feature maps."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns the maps, normed at every place."""
        normed: Tensor = super().forward(x.permute(0, 2, 3, 1))
        return normed.permute(0, 3, 1, 2)


class _Block(nn.Module):
    """A 7×7 of each channel alone, then the layers of each place alone, added to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), _SCALE))
        self.conv_dw = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, _EPS)
        self.mlp = Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the block's output."""
        out: Tensor = self.mlp(self.norm(self.conv_dw(x).permute(0, 2, 3, 1)))
        return x + (out * self.gamma).permute(0, 3, 1, 2)


class _Stage(nn.Module):
    """Maps of half the side and more channels, then blocks."""

    def __init__(self, before: int, width: int, depth: int) -> None:
        super().__init__()
        halved = (_LayerNorm2d(before, _EPS), nn.Conv2d(before, width, 2, 2)) if before != width else (nn.Identity(),)
        self.downsample = nn.Sequential(*halved)
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the stage's output."""
        out: Tensor = self.blocks(self.downsample(x))
        return out


class _Head(nn.Module):
    """The mean over all places, normed, and a linear layer."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, _EPS)
        self.fc = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits."""
        logits: Tensor = self.fc(self.norm(x.mean((2, 3))))
        return logits


class ConvNeXt(nn.Module):
    """A stem of 4×4 squares, four stages, and a linear layer."""

    def __init__(self, depths: Sequence[int], widths: Sequence[int], num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, widths[0], 4, 4), _LayerNorm2d(widths[0], _EPS))
        pairs = zip([widths[0], *widths[:-1]], widths, depths, strict=True)
        self.stages = nn.Sequential(*(_Stage(before, width, depth) for before, width, depth in pairs))
        self.head = _Head(widths[-1], num_classes)
        self.apply(_initialise)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits of a batch of images."""
        logits: Tensor = self.head(self.stages(self.stem(x)))
        return logits


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def convnext_tiny(num_classes: int = 1000) -> ConvNeXt:
    """Returns ConvNeXt-T, with random weights."""
    return ConvNeXt((3, 3, 9, 3), (96, 192, 384, 768), num_classes)
