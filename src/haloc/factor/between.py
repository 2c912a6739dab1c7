"""BatchNorm between the factors of a layer while it is trained, and folded away exactly afterwards.

It keeps the channels between the factors at one scale while their weights move. In eval mode it only scales and shifts
every channel, which the factor before it can do by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from haloc.factor.forward import module_at
from haloc.factor.layers import Conv, Layer, plain_layer
from haloc.factor.modules import carried, carries
from haloc.factor.tensors import widened

NORMS: dict[int, Callable[..., _BatchNorm]] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}

# Our norms are known by their names: after factor "0" comes "norm0". That survives copies, pickles and wrappers that
# swap the class (SyncBatchNorm), and the factors keep the names they have without norms.
_PREFIX = "norm"


def insert_norms(model: nn.Module, names: Iterable[str]) -> int:
    """Puts a BatchNorm after every factor but the last of factorised convolutions, in place.

    In eval mode the outputs stay the same until the model is trained. Layers of the plan that are one module, linear
    layers (their inputs may be tokens) and layers that have their norms already are left as they are.

    Args:
        model: What `apply_plan` made.
        names: The layers, such as those of the plan.

    Returns:
        How many were put in.
    """
    chains = {name: module_at(model, name) for name in names}
    factors = {name: _factors(name, chain) for name, chain in chains.items() if isinstance(chain, nn.Sequential)}
    return sum(_insert(chains[name], convs) for name, convs in factors.items())


def fold_norms(model: nn.Module) -> int:
    """Multiplies every BatchNorm that `insert_norms` put in into the factor before it, in place.

    In eval mode the outputs stay the same. A factor gains a bias by it, which moves on into the next one wherever that
    has a bias as well and the outputs stay the same at the borders too.

    Returns:
        How many were folded.
    """
    return sum(_fold(module) for module in model.modules() if isinstance(module, nn.Sequential))


def norms_between(model: nn.Module) -> list[_BatchNorm]:
    """The BatchNorms that `insert_norms` put in."""
    chains = [module for module in model.modules() if isinstance(module, nn.Sequential)]
    return [norm for chain in chains for norm in _norms(chain).values()]


@torch.no_grad()
def absorb(layer: Layer, norm: _BatchNorm) -> None:
    """Makes the layer compute what it and the norm after it compute in eval mode, in float64 until it is stored."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = (widened(norm.running_var) + norm.eps).rsqrt()
    scale = scale * widened(norm.weight) if norm.affine else scale
    shift = -widened(norm.running_mean) * scale
    shift = shift + widened(norm.bias) if norm.affine else shift
    bias = shift if layer.bias is None else shift + widened(layer.bias) * scale
    layer.weight.copy_(widened(layer.weight) * scale.reshape(-1, *[1] * (layer.weight.dim() - 1)))
    _set_bias(layer, bias)


def _factors(name: str, chain: nn.Sequential) -> dict[str, Conv]:
    """The convolutions of a factorised layer by name; none where there is nothing to do."""
    if _norms(chain):
        return {}
    layers = {child: plain_layer(module, f"{name}.{child}") for child, module in chain.named_children()}
    convs = {child: layer for child, layer in layers.items() if not isinstance(layer, nn.Linear)}
    return convs if len(convs) == len(layers) else {}


def _insert(chain: nn.Module, factors: dict[str, Conv]) -> int:
    """Changes the chain itself, which has the mode and hooks of the layer and answers for it."""
    if not factors or _norms(chain):  # two names can lead to one chain
        return 0
    *others, last = factors
    for name in factors:
        delattr(chain, name)
    for name in others:
        chain.add_module(name, factors[name])
        chain.add_module(_PREFIX + name, _fresh(factors[name]))
    chain.add_module(last, factors[last])
    return len(others)


def _fresh(factor: Conv) -> _BatchNorm:
    """A norm that changes nothing in eval mode: its weight undoes the eps, and it takes the factor's bias over."""
    norm = NORMS[len(factor.kernel_size)](factor.out_channels, device=factor.weight.device, dtype=factor.weight.dtype)
    nn.init.constant_(norm.weight, sqrt(1 + norm.eps))
    if factor.bias is not None:  # left by norms that were folded; a network that is trained again looks as it did
        norm.bias.data.copy_(factor.bias.data)
        factor.bias = None
    norm.requires_grad_(factor.weight.requires_grad)
    return norm.train(factor.training)


def _norms(chain: nn.Module) -> dict[str, _BatchNorm]:
    """Our norms in a chain, by the names of the factors before them."""
    return {
        name: after
        for (name, before), (after_name, after) in pairwise(chain.named_children())
        if after_name == _PREFIX + name and isinstance(before, Conv) and isinstance(after, _BatchNorm)
    }


def _fold(chain: nn.Sequential) -> int:
    norms = _norms(chain)
    for name, norm in norms.items():
        absorb(plain_layer(chain.get_submodule(name), name), norm)
        delattr(chain, _PREFIX + name)
    if norms:
        for factor, following in pairwise(plain_layer(layer, name) for name, layer in chain.named_children()):
            _move_bias(factor, following)
    return len(norms)


def _move_bias(factor: Layer, following: Layer) -> None:
    """One bias less to add, where that is exact and the next layer adds one anyway."""
    if factor.bias is None or following.bias is None or not carries(following):
        return
    _set_bias(following, widened(following.bias) + carried(factor.bias, following))
    factor.bias = None


def _set_bias(layer: Layer, bias: Tensor) -> None:
    trained = (layer.weight if layer.bias is None else layer.bias).requires_grad
    layer.bias = nn.Parameter(bias.to(layer.weight), requires_grad=trained)
