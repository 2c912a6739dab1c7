"""Which channels are hidden: found in the graph of operations that `torch.export` writes of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.fx import Node
from torch.nn.modules.batchnorm import _BatchNorm

from haloc.factor.layers import Conv
from haloc.narrowing.graph import (
    Graph,
    channel_axis,
    drops_positions,
    graph_of,
    merges_positions,
    operation,
    shape_of,
    width_of,
)
from haloc.narrowing.hidden import Channels, Hidden
from haloc.narrowing.streams import streams_in

#: Operations that treat every channel by itself, whatever else they are told.
_ELEMENTWISE = frozenset(
    name + ending
    for ending in ("", "_")
    for name in (
        *("relu", "relu6", "hardtanh", "silu", "gelu", "sigmoid", "tanh", "hardswish", "hardsigmoid", "elu", "selu"),
        *("celu", "leaky_relu", "softplus", "mish", "dropout", "feature_dropout", "clamp", "abs", "detach", "square"),
    )
) | {"clone", "contiguous", "alias", "softsign", "log_sigmoid"}
#: Those that move or merge positions within a channel; channels have to be the second axis.
_POOLING = frozenset(
    f"{adaptive}{kind}_pool{axes}d" for adaptive in ("", "adaptive_") for kind in ("avg", "max") for axes in (1, 2, 3)
)


def hidden_channels(model: nn.Module, example_inputs: Any) -> tuple[Channels, ...]:
    """The channels of a model that can be made fewer, in the order in which they are read.

    Either one layer makes them and one reads them, with nothing in between but what treats channels one by one:
    activations, BatchNorm, depthwise convolutions, pooling. Or several layers make and read them, and nothing happens
    to them but that they are added up. A model that `torch.export` cannot follow has none that could be found; why is
    logged.

    Args:
        model: Any module; it is left as it was.
        example_inputs: What it takes: a tensor, a tuple or list of positional arguments, or a dict of named ones.
    """
    graph = graph_of(model, example_inputs)
    if graph is None:
        return ()
    streams = {stream.consumer: stream for stream in streams_in(graph)}
    read = {reader for stream in streams.values() for reader in stream.readers}
    readers = [(name, node) for node in graph.nodes if (name := graph.mixer(node)) is not None]
    found = (streams.get(name) if name in read else _hidden_behind(graph, node, name) for name, node in readers)
    return tuple(channels for channels in found if channels is not None)


def _hidden_behind(graph: Graph, node: Node, consumer: str) -> Hidden | None:
    """The hidden channels that a layer reads, where they are hidden."""
    axis = channel_axis(graph.modules[consumer], shape_of(node.args[0]))
    if axis < 1:
        return None
    carriers: list[str] = []
    for before in _up(node):
        producer = graph.mixer(before)
        if producer is not None:
            whole = axis == channel_axis(graph.modules[producer], shape_of(before))
            return _hidden(graph, node, consumer, producer, carriers[::-1]) if whole else None
        carrier = graph.layer(before) or graph.norm(before)
        if carrier is not None:
            if axis != 1 or not _carries(graph.modules[carrier]):
                return None
            carriers.append(carrier)
        elif not _by_channel(before, axis):
            return None
    return None


def _hidden(graph: Graph, node: Node, consumer: str, producer: str, carriers: list[str]) -> Hidden:
    norms = [carrier for carrier in carriers if isinstance(graph.modules[carrier], _BatchNorm)]
    spare = sum(2 for name in norms if getattr(graph.modules[name], "affine", False))
    width = width_of(graph.modules[producer])
    return Hidden(consumer, producer, tuple(carriers), graph.norm_behind(node), width, spare)


def _up(node: Node) -> Iterator[Node]:
    """The operations before one, nearest first, as far as each is the only one to read the one before it."""
    while isinstance(before := node.args[0], Node) and before.op == "call_function" and len(before.users) == 1:
        yield before
        if not before.args:
            return
        node = before


def _by_channel(node: Node, axis: int) -> bool:
    """Whether an operation leaves channels on their axis and treats each by itself."""
    name, tensors = operation(node), [arg for arg in node.args if isinstance(arg, Node)]
    if len(tensors) != 1:
        return False
    if name in _ELEMENTWISE:
        return True
    before, after = shape_of(tensors[0]), shape_of(node)
    if name in _POOLING:
        return axis == 1 and len(after) == len(before) and len(before) > 2
    if name == "mean":
        return axis == 1 and merges_positions(node)
    return axis == 1 and drops_positions(node)


def _carries(module: nn.Module) -> bool:
    """Whether every channel has weights of its own and becomes one channel."""
    depthwise = isinstance(module, Conv) and module.groups == module.in_channels == module.out_channels
    return depthwise or isinstance(module, _BatchNorm)
