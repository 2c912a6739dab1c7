"""Which channels are hidden: found in the graph of operations that `torch.export` writes of a model."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.nn.modules.batchnorm import _BatchNorm

from haloc.factor.forward import evaluating, to_device
from haloc.factor.inspect import static_reasons
from haloc.factor.layers import Conv, Layer
from haloc.narrowing.hidden import Hidden

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
_CONVS = frozenset(f"conv{axes}d" for axes in (1, 2, 3))


def hidden_channels(model: nn.Module, example_inputs: Any) -> tuple[Hidden, ...]:
    """The channels of a model that only one layer makes and only one reads, in the order in which they are read.

    Between the two there may be whatever treats channels one by one: activations, BatchNorm, depthwise convolutions,
    pooling. A model that `torch.export` cannot follow has none that could be found; why is logged.

    Args:
        model: Any module; it is left as it was.
        example_inputs: What it takes: a tensor, a tuple or list of positional arguments, or a dict of named ones.
    """
    program = _exported(model, example_inputs)
    if program is None:
        return ()
    graph = _Graph(model, dict(program.graph_signature.inputs_to_parameters))
    found = (graph.hidden_behind(node) for node in program.graph.nodes if node.op == "call_function")
    return tuple(hidden for hidden in found if hidden is not None)


def _exported(model: nn.Module, inputs: Any) -> Any:
    # On the CPU: what is asked for is the graph, and a copy of it need not take room elsewhere.
    alone = copy.deepcopy(model).cpu()
    inputs = to_device(inputs, torch.device("cpu"))
    args, named = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    try:
        with evaluating(alone), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.export(alone, args, named, strict=False)
    except Exception as error:
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        logging.getLogger(__name__).warning("no hidden channels can be found, the model cannot be exported: %s", text)
        return None


@dataclass
class _Graph:
    """The graph, and which module a parameter in it is of."""

    model: nn.Module
    parameters: dict[str, str]
    closed: dict[str, str] = field(init=False)
    modules: dict[str, nn.Module] = field(init=False)

    def __post_init__(self) -> None:
        self.closed = {name: why for name, why in static_reasons(self.model).items() if why != "depthwise"}
        self.modules = dict(self.model.named_modules())

    def hidden_behind(self, node: Node) -> Hidden | None:
        """The hidden channels that an operation reads, where it is a layer and they are hidden."""
        consumer = self._layer(node)
        if consumer is None or not _mixes(self.modules[consumer]):
            return None
        axis = _channel_axis(self.modules[consumer], _shape(node.args[0]))
        if axis < 1:
            return None
        carriers: list[str] = []
        for before in _up(node):
            producer = self._layer(before)
            if producer is not None and _mixes(self.modules[producer]):
                whole = axis == _channel_axis(self.modules[producer], _shape(before))
                return self._hidden(node, consumer, producer, carriers[::-1]) if whole else None
            carrier = producer or self._norm(before)
            if carrier is not None:
                if axis != 1 or not _carries(self.modules[carrier]):
                    return None
                carriers.append(carrier)
            elif not _by_channel(before, axis):
                return None
        return None

    def _hidden(self, node: Node, consumer: str, producer: str, carriers: list[str]) -> Hidden:
        norms = [carrier for carrier in carriers if isinstance(self.modules[carrier], _BatchNorm)]
        spare = sum(2 for name in norms if getattr(self.modules[name], "affine", False))
        behind = list(node.users)
        norm = self._norm(behind[0]) if len(behind) == 1 else None
        return Hidden(consumer, producer, tuple(carriers), norm, _width(self.modules[producer]), spare)

    def _layer(self, node: Node) -> str | None:
        """The name of the layer that an operation is, if it is one that runs once and may be changed."""
        if _operation(node) not in _CONVS | {"linear"}:
            return None
        name = self._owner(node, 1, "weight")
        module = None if name is None else self.modules.get(name)
        return name if isinstance(module, Layer) and name not in self.closed else None

    def _norm(self, node: Node) -> str | None:
        """The name of the BatchNorm that an operation is, if it has statistics of its own."""
        if _operation(node) != "batch_norm":
            return None
        name = self._owner(node, 1, "weight")
        module = None if name is None else self.modules.get(name)
        return name if isinstance(module, _BatchNorm) and module.running_mean is not None else None

    def _owner(self, node: Node, place: int, kind: str) -> str | None:
        """The module whose weight an operation takes, where nothing else takes it."""
        weight = node.args[place] if len(node.args) > place else None
        if not isinstance(weight, Node) or len(weight.users) != 1:
            return None
        owner, _, own = self.parameters.get(weight.name, "").rpartition(".")
        return owner if own == kind else None


def _up(node: Node) -> Iterator[Node]:
    """The operations before one, nearest first, as far as each is the only one to read the one before it."""
    while isinstance(before := node.args[0], Node) and before.op == "call_function" and len(before.users) == 1:
        yield before
        if not before.args:
            return
        node = before


def _operation(node: Node) -> str:
    """What an operation is called in ATen, without its overload."""
    name = getattr(node.target, "_opname", None)
    return str(name) if name is not None else ""


def _by_channel(node: Node, axis: int) -> bool:
    """Whether an operation leaves channels on their axis and treats each by itself."""
    name, tensors = _operation(node), [arg for arg in node.args if isinstance(arg, Node)]
    if len(tensors) != 1:
        return False
    before, after = _shape(tensors[0]), _shape(node)
    if name in _ELEMENTWISE:
        return True
    if name in _POOLING:
        return axis == 1 and len(after) == len(before) and len(before) > 2
    if name == "mean":
        return axis == 1 and _merges_positions(node, len(before))
    if name in ("flatten", "view", "reshape", "squeeze"):
        # (batch, channels, 1, 1) as (batch, channels): channels stay where they are.
        return axis == 1 and len(after) == 2 and tuple(before[:2]) == tuple(after) and all(n == 1 for n in before[2:])
    return False


def _merges_positions(node: Node, axes: int) -> bool:
    """Whether a mean is taken over positions alone, which come after examples and channels."""
    over = node.args[1] if len(node.args) > 1 else None
    return isinstance(over, (list, tuple)) and all(isinstance(a, int) and a % axes > 1 for a in over) and len(over) > 0


def _shape(node: Any) -> tuple[int, ...]:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _channel_axis(layer: nn.Module, shape: tuple[int, ...]) -> int:
    """The axis of channels in what a layer reads or puts out; unbatched images are not followed."""
    if isinstance(layer, nn.Linear):
        return len(shape) - 1
    return 1 if isinstance(layer, Conv) and len(shape) == len(layer.kernel_size) + 2 else -1


def _mixes(layer: nn.Module) -> bool:
    """Whether all of a layer's outputs come from all of its inputs; a depthwise convolution carries channels on."""
    return isinstance(layer, nn.Linear) or (isinstance(layer, Conv) and layer.groups == 1)


def _carries(module: nn.Module) -> bool:
    """Whether every channel has weights of its own and becomes one channel."""
    depthwise = isinstance(module, Conv) and module.groups == module.in_channels == module.out_channels
    return depthwise or isinstance(module, _BatchNorm)


def _width(layer: nn.Module) -> int:
    return layer.out_features if isinstance(layer, nn.Linear) else int(layer.out_channels)  # type: ignore[arg-type]
