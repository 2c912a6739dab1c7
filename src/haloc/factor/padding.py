"""Ranks padded with channels of zero while a network is trained, and cut off again afterwards.

GPUs multiply matrices in blocks: in half precision a convolution between 10 channels can take longer than one between
16. A channel whose weights are zero on both sides gets no gradient, momentum or decay, so it stays zero, and a network
with padded ranks learns what it would have learnt without.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn

from haloc.errors import SpecError
from haloc.factor.forward import module_at
from haloc.factor.layers import Layer, plain_layer

#: The ranks of a chain: the channels between its factors.
Ranks = tuple[int, ...]


def pad_ranks(model: nn.Module, names: Iterable[str], multiple: int) -> dict[str, Ranks]:
    """Pads the ranks of factorised layers to the next multiple, in place; outputs stay the same.

    Layers in groups are left as they are, and so are those whose ranks are multiples already.

    Args:
        model: What `apply_plan` made.
        names: The layers.
        multiple: 8 suits half precision.

    Returns:
        The ranks of the layers that were padded, for `cut_ranks`.
    """
    if multiple < 1:
        raise SpecError(f"ranks are padded to multiples of 1 or more, got {multiple}")
    chains = {name: _factors(model, name) for name in names}
    own = {name: tuple(_outputs(factor) for factor in chain[:-1]) for name, chain in chains.items() if chain}
    padded = {name: ranks for name, ranks in own.items() if any(rank % multiple for rank in ranks)}
    for name, ranks in padded.items():
        _resize(chains[name], tuple(-(-rank // multiple) * multiple for rank in ranks))
    return padded


def cut_ranks(model: nn.Module, padded: Mapping[str, Ranks]) -> None:
    """Brings ranks back to what they were before `pad_ranks`, in place."""
    for name, ranks in padded.items():
        _resize(_factors(model, name), ranks)


def _factors(model: nn.Module, name: str) -> list[Layer]:
    """The factors of a layer; none where their channels cannot simply be more."""
    chain = module_at(model, name)
    if not isinstance(chain, nn.Sequential):
        return []
    layers = [plain_layer(layer, f"{name}.{child}") for child, layer in chain.named_children()]
    return [] if any(getattr(layer, "groups", 1) != 1 for layer in layers) else layers


def _outputs(layer: Layer) -> int:
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels


def _resize(factors: list[Layer], ranks: Ranks) -> None:
    """Gives the channels between the factors these numbers: zeros are added, or what is beyond is cut off."""
    for (before, after), rank in zip(pairwise(factors), ranks, strict=True):
        before.weight = _resized(before.weight, 0, rank)
        if before.bias is not None:
            before.bias = _resized(before.bias, 0, rank)
        after.weight = _resized(after.weight, 1, rank)
        if isinstance(before, nn.Linear):
            before.out_features = rank
        else:
            before.out_channels = rank
        if isinstance(after, nn.Linear):
            after.in_features = rank
        else:
            after.in_channels = rank


def _resized(parameter: Tensor, axis: int, extent: int) -> nn.Parameter:
    value = parameter.detach()
    shape = list(value.shape)
    more, shape[axis] = extent - shape[axis], extent - shape[axis]
    longer = torch.cat([value, value.new_zeros(shape)], axis) if more > 0 else value
    return nn.Parameter(longer.narrow(axis, 0, extent).clone(), requires_grad=parameter.requires_grad)
