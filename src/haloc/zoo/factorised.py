"""A factorised network from its plan and its weights, without decomposing anything."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from torch import nn

from haloc.factor.layers import Layer, plain_layer
from haloc.factor.surgery import skeleton
from haloc.forms import Form
from haloc.zoo.weights import load_weights, read_weights


def restore(model: nn.Module, plan: Mapping[str, Form], weights: str | Path) -> nn.Module:
    """Builds the network that ``weights`` were saved from.

    Args:
        model: The dense model; its weights do not matter, and it is not changed.
        plan: The plan that the network was factorised by.
        weights: The state dict of the factorised network, in a file that `load_weights` reads. Factors may have a
            bias that `apply_plan` would not give them, as `fold_norms` does.

    Returns:
        The factorised network in eval mode, on the model's device and in its dtype.

    Raises:
        PlanError: the plan does not fit the model.
        FileFormatError: the file is missing, unreadable or holds no state dict.
        WeightsError: the weights are those of another plan or another model.
    """
    network = skeleton(model, plan)
    add_biases(network, read_weights(weights, network.state_dict()))
    load_weights(network, weights)
    return network.eval()


def add_biases(network: nn.Module, found: Collection[str]) -> None:
    """Gives every factor but the last of a chain a bias if the weights have one of that name, in place.

    The last has one if the dense layer has.
    """
    for name, chain in _chains(network).items():
        for child, factor in list(chain.named_children())[:-1]:
            if f"{name}.{child}.bias".removeprefix(".") in found:
                _add_bias(plain_layer(factor, f"{name}.{child}"))


def _chains(network: nn.Module) -> dict[str, nn.Sequential]:
    """The factorised layers, of this plan or an earlier one; they answer for the extents of what they stand for."""
    found = {name: module for name, module in network.named_modules() if isinstance(module, nn.Sequential)}
    return {
        name: chain
        for name, chain in found.items()
        if (hasattr(chain, "in_channels") or hasattr(chain, "in_features"))
        and all(isinstance(factor, Layer) for factor in chain)
    }


def _add_bias(factor: Layer) -> None:
    if factor.bias is None:
        zeros = factor.weight.new_zeros(factor.weight.shape[0])
        factor.bias = nn.Parameter(zeros, requires_grad=factor.weight.requires_grad)
