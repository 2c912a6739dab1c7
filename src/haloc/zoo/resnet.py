"""ResNet-18/34/50 with the module names of torchvision, so that its weights load; ResNet-18 for 32×32 images too.

ResNet-50 is the "v1.5" network: the stride sits in the 3×3 convolution of a bottleneck, not in its first 1×1.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

_WIDTHS = (64, 128, 256, 512)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with a shortcut around them."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(in_channels, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _downsample(in_channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the block's output."""
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        result: Tensor = self.relu(self.bn2(self.conv2(out)) + shortcut)
        return result


class Bottleneck(nn.Module):
    """A 1×1 convolution down, a 3×3 with the stride, a 1×1 up to four times the width; with a shortcut."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = self.expansion * width
        self.conv1 = _conv(in_channels, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv(width, out_channels, 1)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _downsample(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the block's output."""
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        result: Tensor = self.relu(self.bn3(self.conv3(out)) + shortcut)
        return result


class ResNet(nn.Module):
    """A stem, four stages of blocks, the mean and a linear layer.

    The stem is a 7×7 convolution and a pooling that leave a quarter of the image's sides, or for ``small_images`` a 3×3
    convolution that leaves them as they are.
    """

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        depths: Sequence[int],
        num_classes: int = 1000,
        *,
        small_images: bool = False,
    ) -> None:
        super().__init__()
        self.conv1 = _conv(3, _WIDTHS[0], 3) if small_images else _conv(3, _WIDTHS[0], 7, stride=2)
        self.bn1 = nn.BatchNorm2d(_WIDTHS[0])
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small_images else nn.MaxPool2d(3, stride=2, padding=1)
        first, second, third, fourth = (width * block.expansion for width in _WIDTHS)
        self.layer1 = _stage(block, _WIDTHS[0], _WIDTHS[0], depths[0], stride=1)
        self.layer2 = _stage(block, first, _WIDTHS[1], depths[1], stride=2)
        self.layer3 = _stage(block, second, _WIDTHS[2], depths[2], stride=2)
        self.layer4 = _stage(block, third, _WIDTHS[3], depths[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(fourth, num_classes)
        self.apply(_initialise)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits of a batch of images."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


def resnet18(num_classes: int = 1000) -> ResNet:
    """Returns ResNet-18, with random weights."""
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes)


def resnet18_cifar(num_classes: int = 10) -> ResNet:
    """Returns ResNet-18 for 32×32 images, with random weights."""
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes, small_images=True)


def resnet34(num_classes: int = 1000) -> ResNet:
    """Returns ResNet-34, with random weights."""
    return ResNet(BasicBlock, (3, 4, 6, 3), num_classes)


def resnet50(num_classes: int = 1000) -> ResNet:
    """Returns ResNet-50 v1.5, with random weights."""
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes)


def _conv(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, bias=False)


def _downsample(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    """Returns the 1×1 projection of a shortcut that changes shape, or None for one that does not."""
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(_conv(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels))


def _stage(
    block: type[BasicBlock | Bottleneck], in_channels: int, width: int, depth: int, stride: int
) -> nn.Sequential:
    first = block(in_channels, width, stride)
    rest = (block(width * block.expansion, width, 1) for _ in range(depth - 1))
    return nn.Sequential(first, *rest)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
