"""Layers to test on: the whole grid of what a convolution can be, and weights that are exactly of low rank."""

from __future__ import annotations

from itertools import product

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
KERNELS = [(3,), (1,), (3, 3), (1, 1), (1, 3), (5, 2), (3, 1, 3), (2, 2, 2), (1, 1, 1)]
PADDINGS = [0, 1, 2, "same"]

#: Every stride × padding × dilation × groups × bias × kernel shape; "same" exists for stride 1 only.
GRID = [
    {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "bias": bias}
    for stride, padding, dilation, groups, bias, kernel in product(
        (1, 2, 3), PADDINGS, (1, 2), (1, 2), (False, True), KERNELS
    )
    if not (padding == "same" and stride > 1)
]


def make_conv(kernel, stride=1, padding=0, dilation=1, groups=1, bias=True, c=6, f=8, padding_mode="zeros", seed=0):
    torch.manual_seed(seed)
    return CONVS[len(kernel)](
        c, f, kernel, stride=stride, padding=padding, dilation=dilation, groups=groups, bias=bias,
        padding_mode=padding_mode,
    )  # fmt: skip


def make_input(layer: nn.Module, batch: int = 2) -> Tensor:
    if isinstance(layer, nn.Linear):
        return torch.randn(batch, 5, layer.in_features)
    extents = [9, 8, 7][: len(layer.kernel_size)]
    return torch.randn(batch, layer.in_channels, *extents)


@st.composite
def convs(draw) -> nn.Module:
    """Any convolution: the grid, with axes that differ from each other, channels, and borders of every kind."""
    axes = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 2, 3]))
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    numbers = st.tuples(*[st.integers(1, 2)] * axes)
    same = draw(st.booleans())
    kernel = draw(st.tuples(*[st.integers(1, 3)] * axes))
    dilation = draw(numbers)
    # A reflected border must be narrower than the input, which these are.
    padding = "same" if same else draw(st.tuples(*[st.integers(0, 2)] * axes))
    return make_conv(
        kernel, 1 if same else draw(numbers), padding, dilation, groups, draw(st.booleans()),
        groups * draw(st.integers(1, 4)), groups * draw(st.integers(1, 4)), mode, draw(st.integers(0, 99)),
    )  # fmt: skip


def lower_rank(layer: nn.Module, rank_out: int, rank_in: int) -> nn.Module:
    """Replaces a convolution's weight by one whose channel modes have exactly these ranks in every group."""
    groups, kernel = layer.groups, layer.kernel_size
    out_channels, in_channels = layer.out_channels // groups, layer.in_channels // groups
    core = torch.randn(groups, rank_out, rank_in, *kernel)
    left, right = torch.randn(groups, out_channels, rank_out), torch.randn(groups, in_channels, rank_in)
    weight = torch.einsum("gop,gcq,gpq...->goc...", left, right, core)
    layer.weight.data.copy_(weight.reshape(layer.weight.shape))
    return layer


def deviation(expected: Tensor, got: Tensor) -> float:
    """The largest difference relative to the largest value."""
    assert got.shape == expected.shape
    return ((got - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()
