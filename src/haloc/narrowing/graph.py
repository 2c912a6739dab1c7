"""The graph of operations that `torch.export` writes of a model, and which of its modules they are."""

from __future__ import annotations

import copy
import logging
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.nn.modules.batchnorm import _BatchNorm

from haloc.factor.forward import evaluating, to_device
from haloc.factor.inspect import static_reasons
from haloc.factor.layers import Conv, Layer

_CONVS = frozenset(f"conv{axes}d" for axes in (1, 2, 3))


@dataclass
class Graph:
    """The operations of a model, and which module a parameter in them is of.

    Attributes:
        model: The model.
        nodes: Its operations, in the order in which they run.
        parameters: The names of parameters, by those that they have in the graph.
    """

    model: nn.Module
    nodes: tuple[Node, ...]
    parameters: dict[str, str]
    modules: dict[str, nn.Module] = field(init=False)
    _closed: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self._closed = {name: why for name, why in static_reasons(self.model).items() if why != "depthwise"}
        self.modules = dict(self.model.named_modules())

    def layer(self, node: Node) -> str | None:
        """The name of the layer that an operation is, if it is one that runs once and may be changed."""
        if operation(node) not in _CONVS | {"linear"}:
            return None
        name = self._owner(node, 1, "weight")
        module = None if name is None else self.modules.get(name)
        return name if isinstance(module, Layer) and name not in self._closed else None

    def mixer(self, node: Node) -> str | None:
        """The same for a layer all of whose outputs come from all of its inputs; a depthwise one carries them on."""
        name = self.layer(node)
        return name if name is not None and mixes(self.modules[name]) else None

    def norm(self, node: Node) -> str | None:
        """The name of the BatchNorm that an operation is, if it has statistics of its own."""
        if operation(node) != "batch_norm":
            return None
        name = self._owner(node, 1, "weight")
        module = None if name is None else self.modules.get(name)
        return name if isinstance(module, _BatchNorm) and module.running_mean is not None else None

    def norm_behind(self, node: Node) -> str | None:
        """The BatchNorm that alone reads what an operation puts out."""
        behind = list(node.users)
        return self.norm(behind[0]) if len(behind) == 1 else None

    def _owner(self, node: Node, place: int, kind: str) -> str | None:
        """The module whose weight an operation takes, where nothing else takes it."""
        weight = node.args[place] if len(node.args) > place else None
        if not isinstance(weight, Node) or len(weight.users) != 1:
            return None
        owner, _, own = self.parameters.get(weight.name, "").rpartition(".")
        return owner if own == kind else None


def graph_of(model: nn.Module, example_inputs: Any) -> Graph | None:
    """The graph of a model, or nothing, with a line in the log, where `torch.export` cannot follow it."""
    # On the CPU: what is asked for is the graph, and a copy of it need not take room elsewhere.
    alone = copy.deepcopy(model).cpu()
    inputs = to_device(example_inputs, torch.device("cpu"))
    args, named = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    try:
        with evaluating(alone), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(alone, args, named, strict=False)
    except Exception as error:
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        logging.getLogger(__name__).warning("no hidden channels can be found, the model cannot be exported: %s", text)
        return None
    nodes = tuple(node for node in program.graph.nodes if node.op == "call_function")
    return Graph(model, nodes, dict(program.graph_signature.inputs_to_parameters))


def operation(node: Node) -> str:
    """What an operation is called in ATen, without its overload."""
    name = getattr(node.target, "_opname", None)
    return str(name) if name is not None else ""


def shape_of(node: Any) -> tuple[int, ...]:
    """The extents of what an operation puts out."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def channel_axis(layer: nn.Module, shape: tuple[int, ...]) -> int:
    """The axis of channels in what a layer reads or puts out; unbatched images are not followed."""
    if isinstance(layer, nn.Linear):
        return len(shape) - 1
    return 1 if isinstance(layer, Conv) and len(shape) == len(layer.kernel_size) + 2 else -1


def mixes(layer: nn.Module) -> bool:
    """Whether all of a layer's outputs come from all of its inputs."""
    return isinstance(layer, nn.Linear) or (isinstance(layer, Conv) and layer.groups == 1)


def width_of(layer: nn.Module) -> int:
    """How many channels a layer makes."""
    return layer.out_features if isinstance(layer, nn.Linear) else int(layer.out_channels)  # type: ignore[arg-type]


def merges_positions(node: Node) -> bool:
    """Whether a mean is taken over positions alone, which come after examples and channels."""
    axes, over = len(shape_of(node.args[0])), node.args[1] if len(node.args) > 1 else None
    return isinstance(over, (list, tuple)) and all(isinstance(a, int) and a % axes > 1 for a in over) and len(over) > 0


def drops_positions(node: Node) -> bool:
    """Whether (batch, channels, 1, 1) becomes (batch, channels): channels stay where they are."""
    before, after = shape_of(node.args[0]), shape_of(node)
    return (
        operation(node) in ("flatten", "view", "reshape", "squeeze")
        and len(after) == 2
        and tuple(before[:2]) == tuple(after)
        and all(extent == 1 for extent in before[2:])
    )
