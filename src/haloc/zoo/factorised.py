"""A factorised network from its plan and its weights, without decomposing anything."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from haloc.factor.layers import plain_layer
from haloc.factor.surgery import skeleton
from haloc.forms import Dense, Form
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
    found = read_weights(weights, network.state_dict())
    for name, form in plan.items():
        chain = network.get_submodule(name)
        if not isinstance(form, Dense) and isinstance(chain, nn.Sequential):
            _add_biases(chain, f"{name}." if name else "", found)
    load_weights(network, weights)
    return network.eval()


def _add_biases(chain: nn.Sequential, prefix: str, found: Mapping[str, object]) -> None:
    """Gives every factor but the last a bias if the weights have one; the last has one if the dense layer has."""
    for name, module in list(chain.named_children())[:-1]:
        factor = plain_layer(module, prefix + name)
        if f"{prefix}{name}.bias" in found:
            zeros = factor.weight.new_zeros(factor.weight.shape[0])
            factor.bias = nn.Parameter(zeros, requires_grad=factor.weight.requires_grad)
