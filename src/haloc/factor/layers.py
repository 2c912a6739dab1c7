"""The bridge between PyTorch's layers and our shapes: what a module is, and how to build the plain ones again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from haloc.errors import ModelError
from haloc.shapes import ConvShape, LinearShape, Shape

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
Layer = Conv | nn.Linear
CONVS: dict[int, Callable[..., Conv]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def plain_layer(module: nn.Module, name: str) -> Layer:
    """The module itself if it is a convolution or linear layer, which is all that can be decomposed."""
    if not isinstance(module, Layer):
        raise ModelError(f"{name!r} is a {type(module).__name__}, expected a Conv1d, Conv2d, Conv3d or Linear")
    return module


def conv_shape(layer: Conv, input_size: tuple[int, ...] | None = None, images: int = 1) -> ConvShape:
    """Reads a convolution's shape; without an input size, the smallest input that gives one output is assumed."""
    extents = tuple(d * (k - 1) + 1 for d, k in zip(layer.dilation, layer.kernel_size, strict=True))
    padding = layer.padding
    if padding == "valid":
        padding = (0,) * len(extents)
    elif padding == "same" and all(extent % 2 for extent in extents):
        # An odd extent pads both sides alike, which numbers can say; equal layers should look equal.
        padding = tuple(extent // 2 for extent in extents)
    return ConvShape(
        in_channels=layer.in_channels,
        out_channels=layer.out_channels,
        kernel=layer.kernel_size,
        input_size=input_size or extents,
        stride=layer.stride,
        padding=padding,
        dilation=layer.dilation,
        groups=layer.groups,
        bias=layer.bias is not None,
        padding_mode=layer.padding_mode,
        images=images,
    )


def layer_shape(layer: Layer) -> Shape:
    """The shape of a layer apart from what flows through it."""
    if isinstance(layer, nn.Linear):
        return LinearShape(layer.in_features, layer.out_features, layer.bias is not None)
    return conv_shape(layer)


def build_layer(shape: Shape, weight: Tensor, like: Layer) -> Layer:
    """A plain layer of ``shape`` holding ``weight``, with the dtype, device, layout and mode of ``like``."""
    with torch.device("meta"):
        layer = _empty_layer(shape)
    layer.to_empty(device=like.weight.device)
    layer.to(like.weight.dtype)
    weight = weight.reshape(layer.weight.shape).to(layer.weight)
    layer.weight = nn.Parameter(weight.clone(memory_format=memory_format_of(like.weight)))
    layer.weight.requires_grad_(like.weight.requires_grad)
    return layer.train(like.training)


def memory_format_of(weight: Tensor) -> torch.memory_format:
    """How a weight lies in memory; where that could be said either way (one channel, 1×1), the usual one."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    chosen = formats.get(weight.dim(), torch.contiguous_format)
    clear = not weight.is_contiguous() and weight.is_contiguous(memory_format=chosen)
    return chosen if clear else torch.contiguous_format


def _empty_layer(shape: Shape) -> Layer:
    if isinstance(shape, LinearShape):
        return nn.Linear(shape.in_features, shape.out_features, bias=shape.bias)
    return CONVS[len(shape.kernel)](
        shape.in_channels,
        shape.out_channels,
        shape.kernel,
        stride=shape.stride,
        padding=shape.padding,
        dilation=shape.dilation,
        groups=shape.groups,
        bias=shape.bias,
        padding_mode=shape.padding_mode,
    )
