"""What a layer's inputs look like: first and second moments of the patches it is applied to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from haloc.errors import ModelError
from haloc.factor.forward import call, device_of, evaluating, inputs_of, module_at, to_device, unmoved
from haloc.factor.layers import Conv, Layer, plain_layer
from haloc.factor.response import output_weights
from haloc.factor.tensors import widened

#: Patches are unfolded at most this many numbers at a time.
CHUNK_NUMBERS = 1 << 25


@dataclass(frozen=True, eq=False)
class InputMoments:
    """Moments of a layer's input patches, in float64, one matrix per group.

    Attributes:
        second: E[x xᵀ], (groups, in * taps, in * taps).
        mean: E[x], (groups, in * taps).
        count: How many patches were seen.
        response: What comes of errors in the layer's outputs, see `haloc.factor.response`, (out, out); None where all
            outputs count alike.
    """

    second: Tensor
    mean: Tensor
    count: int
    response: Tensor | None = None

    def covariance(self) -> Tensor:
        """The second moment about the mean."""
        return self.second - self.mean.unsqueeze(2) * self.mean.unsqueeze(1)


class Sums:
    """Running sums over patches; float32 products within a chunk, float64 across chunks."""

    def __init__(self) -> None:
        self.second: Tensor | float = 0.0
        self.first: Tensor | float = 0.0
        self.count = 0

    def add(self, patches: Tensor) -> None:
        """Adds patches laid out (groups, patches, in * taps)."""
        patches = widened(patches) if _squares_leave_float32(patches) else patches
        with _full_precision(patches.device.type):
            self.second = self.second + widened(patches.mT @ patches)
        self.first = self.first + widened(patches.sum(1))
        self.count += patches.shape[1]

    def __add__(self, other: Sums) -> Sums:
        """The sums over both."""
        found = Sums()
        found.second, found.first = self.second + other.second, self.first + other.first
        found.count = self.count + other.count
        return found

    def moments(self, name: str) -> InputMoments:
        """What they come to, for the layer of that name."""
        if not isinstance(self.second, Tensor) or not isinstance(self.first, Tensor):
            raise ModelError(f"layer {name!r} was not called on any calibration batch; leave it out or give others")
        if not bool(self.second.isfinite().all()):
            raise ModelError(f"layer {name!r} saw NaN or infinite inputs in calibration; check the batches")
        return InputMoments((self.second + self.second.mT) / (2 * self.count), self.first / self.count, self.count)


def _squares_leave_float32(patches: Tensor) -> bool:
    """Whether products of inputs that large or small would be infinite, or nothing at all."""
    largest = float(patches.abs().max()) if patches.numel() else 0.0
    return largest > 0 and not 1e-12 < largest < 1e12


@contextmanager
def _full_precision(device: str) -> Iterator[None]:
    """True float32 products, whatever the user allows elsewhere: with TF32 or autocast Σ would be mostly noise."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    layers: Iterable[str],
    *,
    inputs: Callable[[Any], Any] = inputs_of,
    positions: int = 64,
    responses: bool = False,
) -> dict[str, InputMoments]:
    """Runs batches through the model and gathers the input moments of the named layers.

    A few hundred images are enough, since each gives many patches. They should look like training images: the same
    normalisation and the same augmentation. The same batches give the same moments.

    A layer's moments take 8·(in·taps)² bytes per group: 170 MB for 512 channels and 3×3. Where that is too much for
    all layers at once, calibrate and apply a plan in parts.

    Args:
        model: The dense model; it runs in eval mode and is left as it was.
        batches: A loader, or any iterable; it is gone through once.
        layers: Names of the layers, such as the keys of a plan.
        inputs: Takes the model's inputs out of a batch; by default the first of a tuple or list, and a dict as it is
            without its labels.
        positions: From every image at most this many patches are taken, at random places; neighbours say little new.
        responses: Whether to find out as well, by a second run with a pass back, what comes of errors in the layers'
            outputs: then factors have the least error of the *network's* outputs, as far as layers can tell. Batches
            are held in memory meanwhile.
    """
    batches = list(batches) if responses else batches
    modules = {name: plain_layer(module_at(model, name), name) for name in layers}
    sums = {name: Sums() for name in modules}
    device = device_of(model)
    with ExitStack() as hooks:
        for name, layer in modules.items():
            hooks.enter_context(_gathering(layer, sums[name], positions))
        hooks.enter_context(unmoved(model))
        hooks.enter_context(evaluating(model))
        for batch in batches:
            call(model, to_device(inputs(batch), device))
    found = {name: sums[name].moments(name) for name in modules}
    weights = output_weights(model, map(inputs, batches), modules) if responses else None
    return {name: replace(each, response=weights[name]) for name, each in found.items()} if weights else found


@contextmanager
def _gathering(layer: Layer, sums: Sums, positions: int) -> Iterator[None]:
    """Adds up what reaches ``layer`` inside the block."""
    generator = torch.Generator().manual_seed(0)

    def gather(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        for chunk in _chunks(layer, args[0].detach(), positions) if args[0].numel() else ():
            sums.add(patches(layer, chunk, positions, generator))

    handle = layer.register_forward_pre_hook(gather)
    try:
        yield
    finally:
        handle.remove()


def _chunks(layer: Layer, inputs: Tensor, positions: int) -> tuple[Tensor, ...]:
    """Splits a batch so that its patches, which repeat every input once per tap, stay small in memory."""
    if isinstance(layer, nn.Linear):
        rows = inputs.reshape(len(inputs) if inputs.dim() > 1 else 1, -1, layer.in_features)
        per_image = min(rows.shape[1], positions) * layer.in_features
        return torch.split(rows, max(1, CHUNK_NUMBERS // per_image))
    batched = inputs if inputs.dim() == layer.weight.dim() else inputs.unsqueeze(0)
    per_image = layer.in_channels * prod(layer.kernel_size) * min(prod(batched.shape[2:]), positions)
    return torch.split(batched, max(1, CHUNK_NUMBERS // per_image))


def patches(
    layer: Layer, inputs: Tensor, positions: int | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """The input patches the layer multiplies with its weight, as rows (groups, patches, in * taps), at least float32.

    Args:
        layer: A convolution or linear layer.
        inputs: A batch: (batch, in, *extents) for a convolution, (batch, positions, in) for a linear layer.
        positions: If given, only so many places, drawn from ``generator``, the same for all of the batch.
        generator: Where the places are drawn from.
    """
    inputs = inputs if inputs.dtype in (torch.float32, torch.float64) else inputs.float()
    if isinstance(layer, nn.Linear):
        return inputs[:, _places(inputs.shape[1], positions, generator)].flatten(0, 1).unsqueeze(0)
    windows, axes = _padded(layer, inputs), len(layer.kernel_size)
    for axis in range(axes):
        extent = layer.dilation[axis] * (layer.kernel_size[axis] - 1) + 1
        windows = windows.unfold(2 + axis, extent, layer.stride[axis])[..., :: layer.dilation[axis]]
    outputs = windows.shape[2 : 2 + axes]
    where = torch.unravel_index(_places(prod(outputs), positions, generator).to(inputs.device), outputs)
    index: list[slice | Tensor] = [slice(None), slice(None), *where]
    # (batch, in, *outputs, *kernel) -> (batch, in, places, taps) -> (groups, batch * places, in of a group * taps)
    chosen: Tensor = windows[tuple(index)].flatten(3).unflatten(1, (layer.groups, -1))
    return chosen.permute(1, 0, 3, 2, 4).flatten(3).flatten(1, 2)


def _places(available: int, wanted: int | None, generator: torch.Generator | None) -> Tensor:
    """All places, or as many as wanted at random."""
    if wanted is None or wanted >= available:
        return torch.arange(available)
    return torch.randperm(available, generator=generator)[:wanted]


def _padded(layer: Conv, inputs: Tensor) -> Tensor:
    """The input with the border that the layer itself would add."""
    border = layer._reversed_padding_repeated_twice
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(inputs, border, mode=mode)
