"""Networks with hard numbers in them, and of every precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from network_checks import Case
from torch import Tensor, nn

Fill = Callable[[Tensor], Tensor]
Make = Callable[[], tuple[nn.Module, Any]]


def linear(fill: Fill, inputs: Callable[[], Tensor] = lambda: torch.randn(8, 16)) -> Make:
    """One linear layer whose weight is made by ``fill``, in float64."""

    def make() -> tuple[nn.Module, Any]:
        model = nn.Sequential(nn.Linear(16, 16, bias=False))
        model[0].weight.data.copy_(fill(torch.randn(16, 16, dtype=torch.float64)))
        return model, inputs()

    return make


def conv(fill: Fill, inputs: Callable[[], Tensor] = lambda: torch.randn(4, 8, 6, 6)) -> Make:
    """The same with a convolution."""

    def make() -> tuple[nn.Module, Any]:
        model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False))
        model[0].weight.data.copy_(fill(torch.randn(8, 8, 3, 3, dtype=torch.float64)))
        return model, inputs()

    return make


def rank_one(weight: Tensor) -> Tensor:
    """The first channel's weight in multiples."""
    return weight[:1] * torch.arange(1, len(weight) + 1).reshape(-1, *[1] * (weight.dim() - 1)) / len(weight)


def rank_one_taps(weight: Tensor) -> Tensor:
    """Rank one in every mode of a convolution."""
    a, b, c, d = (torch.randn(extent, dtype=torch.float64) for extent in weight.shape)
    return torch.einsum("a,b,c,d->abcd", a, b, c, d)


def duplicates(weight: Tensor) -> Tensor:
    """Channels in pairs."""
    return weight[: len(weight) // 2].repeat_interleave(2, 0)


def mixed(weight: Tensor) -> Tensor:
    """Huge and tiny channels side by side."""
    return weight * torch.tensor([1e30, 1e-30]).repeat(len(weight) // 2).reshape(-1, *[1] * (weight.dim() - 1))


def with_value(value: float) -> Fill:
    """One weight is that value."""

    def fill(weight: Tensor) -> Tensor:
        weight.view(-1)[3] = value
        return weight

    return fill


def of_dtype(dtype: torch.dtype) -> Make:
    """A network of convolutions, norms and a linear layer in a precision."""

    def make() -> tuple[nn.Module, Any]:
        layers = (nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 16))
        return nn.Sequential(*layers).to(dtype).eval(), torch.randn(4, 8, 6, 6).to(dtype)

    return make


def images(*extents: int, channels: int = 8) -> Callable[[], Tensor]:
    """Inputs of those extents."""
    return lambda: torch.randn(4, channels, *extents)


def scaled(factor: float) -> Fill:
    """All weights times a factor."""
    return lambda weight: weight * factor


def one_channel() -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.Conv2d(1, 16, 5), nn.ReLU(), nn.Conv2d(16, 1, 5)), torch.randn(4, 1, 12, 12)


def dead_channels() -> Tensor:
    """Half of the input channels are zero, always."""
    x = torch.randn(4, 8, 6, 6)
    x[:, ::2] = 0
    return x


def bad_input(value: float) -> Callable[[], Tensor]:
    """One input is that value."""

    def make() -> Tensor:
        x = torch.randn(8, 16)
        x[0, 0] = value
        return x

    return make


def same(weight: Tensor) -> Tensor:
    return weight


STEPS = ("train", "search", "sensitivity", "aware")
#: Where a loss of squares would overflow by itself.
UNTRAINED = ("search", "aware")
#: Outputs that are not finite before anything is cut cannot be compared.
SPOILT: dict[str, Any] = {"steps": ("aware",), "same": True, "tolerance": float("inf")}

NUMBERS = (
    Case("a linear layer of zeros", linear(torch.zeros_like), same=True, steps=STEPS),
    Case("a convolution of zeros", conv(torch.zeros_like), same=True, steps=STEPS),
    Case("a linear layer of rank one", linear(rank_one), same=True, steps=STEPS),
    Case("a convolution of rank one", conv(rank_one_taps), same=True, steps=STEPS),
    Case("duplicate channels, linear", linear(duplicates), steps=STEPS),
    Case("duplicate channels, convolution", conv(duplicates), steps=STEPS),
    Case("weights of 1e30, linear", linear(scaled(1e30)), steps=UNTRAINED),
    Case("weights of 1e30, convolution", conv(scaled(1e30)), steps=UNTRAINED),
    Case("weights of 1e-30, linear", linear(scaled(1e-30)), steps=STEPS),
    Case("weights of 1e-30, convolution", conv(scaled(1e-30)), steps=STEPS),
    Case("weights of 1e-42, which are subnormal", linear(scaled(1e-42)), steps=STEPS, tolerance=1e-2),
    Case("channels of 1e30 and 1e-30, linear", linear(mixed), steps=UNTRAINED),
    Case("channels of 1e30 and 1e-30, convolution", conv(mixed), steps=UNTRAINED),
    Case("a NaN weight", linear(with_value(float("nan"))), "refused: layer '0'"),
    Case("an infinite weight", conv(with_value(float("inf"))), "refused: layer '0'"),
    Case("NaN activations", linear(same, bad_input(float("nan"))), "refused: layer '0' saw NaN", **SPOILT),
    Case("infinite activations", linear(same, bad_input(float("inf"))), "refused: layer '0' saw NaN", **SPOILT),
    Case("activations of 1e25", linear(same, lambda: torch.randn(8, 16) * 1e25), steps=UNTRAINED),
    Case("activations of 1e-25", conv(same, lambda: torch.randn(4, 8, 6, 6) * 1e-25), steps=STEPS),
    Case("dead input channels", conv(same, dead_channels), steps=STEPS),
    Case("zero activations", conv(same, lambda: torch.zeros(4, 8, 6, 6)), same=True, steps=STEPS),
    Case("constant activations", conv(same, lambda: torch.ones(4, 8, 6, 6)), steps=STEPS),
    Case("constant activations, linear", linear(same, lambda: torch.ones(8, 16)), steps=STEPS),
    Case("float16", of_dtype(torch.float16), steps=STEPS),
    Case("bfloat16", of_dtype(torch.bfloat16), steps=STEPS),
    Case("float64", of_dtype(torch.float64), steps=STEPS),
    Case("complex64", lambda: (nn.Sequential(nn.Linear(16, 16, dtype=torch.complex64)),
         torch.randn(2, 16, dtype=torch.complex64)), "left alone: complex64 weight"),
    Case("one channel in, one channel out", one_channel, steps=STEPS),
    Case("1×1 positions, 3×3 kernel", conv(same, images(1, 1)), steps=STEPS),
    Case("a kernel larger than the input", lambda: (nn.Sequential(nn.Conv2d(8, 8, 7)), torch.randn(2, 8, 4, 4)),
         "refused: does not run"),
    Case("a kernel larger than the input, padded", lambda: (nn.Sequential(nn.Conv2d(8, 8, 7, padding=3)),
         torch.randn(2, 8, 4, 4)), steps=STEPS),
)  # fmt: skip
