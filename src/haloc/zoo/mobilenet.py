"""MobileNetV2 (Sandler et al. 2018) with the parameter names of torchvision so that its weights load."""

from __future__ import annotations

from torch import Tensor, nn

# Table 2 of the paper: expansion, output channels, number of blocks, stride of the first.
_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
_STEM = 32
_LAST = 1280


class InvertedResidual(nn.Module):
    """Widen by a 1×1, filter each channel by a 3×3, narrow by a 1×1 without an activation."""

    def __init__(self, in_channels: int, out_channels: int, expansion: int, stride: int) -> None:
        super().__init__()
        hidden = expansion * in_channels
        widen = [] if expansion == 1 else [_conv_bn_relu(in_channels, hidden, 1)]
        self.conv = nn.Sequential(
            *widen,
            _conv_bn_relu(hidden, hidden, 3, stride, groups=hidden),
            nn.Conv2d(hidden, out_channels, 1, bias=False),
            nn.BatchNorm2d(out_channels),
        )
        self.residual = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        """Returns the block's output."""
        out: Tensor = self.conv(x)
        return x + out if self.residual else out


class MobileNetV2(nn.Module):
    """A stem, seventeen inverted residuals, a last 1×1, the mean, dropout and a linear layer."""

    def __init__(self, num_classes: int = 1000, dropout: float = 0.2) -> None:
        super().__init__()
        self.features = _features()
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(_LAST, num_classes))
        self.apply(_initialise)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits of a batch of images."""
        logits: Tensor = self.classifier(self.avgpool(self.features(x)).flatten(1))
        return logits


def mobilenet_v2(num_classes: int = 1000, dropout: float = 0.2) -> MobileNetV2:
    """Returns MobileNetV2, with random weights."""
    return MobileNetV2(num_classes, dropout)


def _features() -> nn.Sequential:
    layers: list[nn.Module] = [_conv_bn_relu(3, _STEM, 3, stride=2)]
    channels = _STEM
    for expansion, width, depth, stride in _STAGES:
        for index in range(depth):
            layers.append(InvertedResidual(channels, width, expansion, stride if index == 0 else 1))
            channels = width
    return nn.Sequential(*layers, _conv_bn_relu(channels, _LAST, 1))


def _conv_bn_relu(in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels), nn.ReLU6(inplace=True))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out")
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.01)
        nn.init.zeros_(module.bias)
