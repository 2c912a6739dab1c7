"""Networks for 64×64 images; named in commands and recipes as ``benchmarks.tiny_imagenet.networks:deit``."""

from __future__ import annotations

from haloc.zoo.convnext import ConvNeXt
from haloc.zoo.vit import VisionTransformer, deit_tiny

SIDE = 64


def deit(num_classes: int = 200) -> VisionTransformer:
    """Returns DeiT-tiny with patches of 8×8, so that there are 64 of them."""
    return deit_tiny(num_classes, size=SIDE, patch=8)


def convnext(num_classes: int = 200) -> ConvNeXt:
    """Returns ConvNeXt of half of ConvNeXt-T's widths and two thirds of its blocks."""
    return ConvNeXt((2, 2, 6, 2), (48, 96, 192, 384), num_classes)
