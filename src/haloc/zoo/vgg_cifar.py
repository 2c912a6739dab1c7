"""VGG-16 with BatchNorm for 32×32 images: the ImageNet network's features and a single linear layer."""

from __future__ import annotations

from torch import Tensor, nn

# Output channels of the 3×3 convolutions, stage by stage; every stage ends in a 2×2 max-pooling.
_STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class CifarVGG(nn.Module):
    """VGG-16-BN whose ``features`` are named as torchvision names them."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.features = _features()
        # At 32×32 the features are 1×1 already; the mean lets larger images through as well.
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(_STAGES[-1][-1], num_classes)
        self.apply(_initialise)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits of a batch of images."""
        logits: Tensor = self.classifier(self.avgpool(self.features(x)).flatten(1))
        return logits


def vgg16_bn_cifar(num_classes: int = 10) -> CifarVGG:
    """Returns VGG-16-BN for 32×32 images, with random weights."""
    return CifarVGG(num_classes)


def _features() -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = 3
    for stage in _STAGES:
        for width in stage:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.01)
    if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
