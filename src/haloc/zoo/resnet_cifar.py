"""ResNet-20/32/44/56 for 32×32 images: He et al. 2016, section 4.2, with shortcuts of option A."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

_WIDTHS = (16, 32, 64)


class PadShortcut(nn.Module):
    """Option A: take every ``stride``-th pixel and pad the channels with zeros; no parameters."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        # The zeros go on both sides, as in the published weights; all on one side would permute channels.
        self.before = (out_channels - in_channels) // 2
        self.after = out_channels - in_channels - self.before

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``x`` subsampled and widened."""
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.before, self.after))


class CifarBlock(nn.Module):
    """Two 3×3 convolutions with a shortcut around them."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv3x3(in_channels, out_channels, stride)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = _conv3x3(out_channels, out_channels, 1)
        self.bn2 = nn.BatchNorm2d(out_channels)
        same = stride == 1 and in_channels == out_channels
        self.shortcut = nn.Identity() if same else PadShortcut(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the block's output."""
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class CifarResNet(nn.Module):
    """A stem, three stages of ``depth`` blocks (16, 32 and 64 channels), the mean and a linear layer."""

    def __init__(self, depth: int, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = _conv3x3(3, _WIDTHS[0], 1)
        self.bn1 = nn.BatchNorm2d(_WIDTHS[0])
        self.layer1 = _stage(_WIDTHS[0], _WIDTHS[0], depth, stride=1)
        self.layer2 = _stage(_WIDTHS[0], _WIDTHS[1], depth, stride=2)
        self.layer3 = _stage(_WIDTHS[1], _WIDTHS[2], depth, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(_WIDTHS[2], num_classes)
        self.apply(_initialise)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits of a batch of images."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.linear(self.avgpool(x).flatten(1))
        return logits


def resnet20(num_classes: int = 10) -> CifarResNet:
    """Returns ResNet-20, with random weights."""
    return CifarResNet(3, num_classes)


def resnet32(num_classes: int = 10) -> CifarResNet:
    """Returns ResNet-32, with random weights."""
    return CifarResNet(5, num_classes)


def resnet44(num_classes: int = 10) -> CifarResNet:
    """Returns ResNet-44, with random weights."""
    return CifarResNet(7, num_classes)


def resnet56(num_classes: int = 10) -> CifarResNet:
    """Returns ResNet-56, with random weights."""
    return CifarResNet(9, num_classes)


def _conv3x3(in_channels: int, out_channels: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)


def _stage(in_channels: int, out_channels: int, depth: int, stride: int) -> nn.Sequential:
    first = CifarBlock(in_channels, out_channels, stride)
    return nn.Sequential(first, *(CifarBlock(out_channels, out_channels, 1) for _ in range(depth - 1)))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(module.weight)
