"""Which channels are only ever added up: the linear bottlenecks of MobileNetV2 and its kin.

Where nothing but additions lies between the layers that make channels and those that read them, any other basis of
them will do as well. So the directions that readers need most can be kept, which no choice of channels comes near to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch.fx import Node

from haloc.narrowing.graph import Graph, channel_axis, drops_positions, merges_positions, operation, shape_of, width_of
from haloc.narrowing.hidden import Stream

#: Operations that do the same to every mixture of channels: nothing, where a network is evaluated, or a mean.
_PASSING = frozenset({"dropout", "dropout_", "feature_dropout", "feature_dropout_", "clone", "contiguous", "alias"})
_AVERAGES = frozenset(f"{adaptive}avg_pool{axes}d" for adaptive in ("", "adaptive_") for axes in (1, 2, 3))
_SUMS = frozenset({"add", "add_"})


def streams_in(graph: Graph) -> Iterator[Stream]:
    """Every stream of a graph, by the first layer that reads it."""
    seen: set[Node] = set()
    for node in graph.nodes:
        source = _source(graph, node)
        if source is not None and source not in seen:
            found = _Walk(graph)
            whole = found.to_all_ends(source)
            seen |= found.values
            if whole and found.readers:
                yield found.stream()


def _source(graph: Graph, node: Node) -> Node | None:
    """Where what a layer makes enters a stream: behind its BatchNorm, if it has one."""
    if graph.mixer(node) is None:
        return None
    return next(iter(node.users)) if graph.norm_behind(node) is not None else node


@dataclass
class _Walk:
    """A way along all values that are added up with each other, and who makes and reads them."""

    graph: Graph
    values: set[Node] = field(default_factory=set)
    makers: dict[Node, str | None] = field(default_factory=dict)
    readers: set[Node] = field(default_factory=set)
    axes: set[int] = field(default_factory=set)
    averaged: bool = False

    def to_all_ends(self, source: Node) -> bool:
        """Walks as far as it goes; whether all ends are layers that can be made narrower, on the same axis."""
        ahead = [source]
        while ahead:
            value = ahead.pop()
            if value in self.values:
                continue
            self.values.add(value)
            found = self._before(value), self._behind(value)
            if found[0] is None or found[1] is None:
                return False
            ahead += [*found[0], *found[1]]
        # What an average is taken over are positions only where these come after the channels.
        return len(self.axes) == 1 and min(self.axes) > 0 and (self.axes == {1} or not self.averaged)

    def _before(self, value: Node) -> list[Node] | None:
        """The values that this one is made of; none, where a layer makes it, and nothing, where the stream ends."""
        norm = self.graph.norm(value)
        layer = value.args[0] if norm is not None else value
        if isinstance(layer, Node) and (name := self.graph.mixer(layer)) is not None:
            if norm is not None and not (len(layer.users) == 1 and getattr(self.graph.modules[norm], "affine", False)):
                return None  # others see what is before the norm, or it could not put out another scale
            self.makers[layer] = norm
            self.axes.add(channel_axis(self.graph.modules[name], shape_of(layer)))
            return []
        tensors = [arg for arg in value.args if isinstance(arg, Node)]
        return tensors if self._keeps(value, tensors) else None

    def _behind(self, value: Node) -> list[Node] | None:
        """The values that are made of this one, or nothing, where something else reads it than a sum or a layer."""
        found: list[Node] = []
        for user in value.users:
            tensors = [arg for arg in user.args if isinstance(arg, Node)]
            if (name := self.graph.mixer(user)) is not None and user.args[0] is value:
                self.readers.add(user)
                self.axes.add(channel_axis(self.graph.modules[name], shape_of(value)))
            elif self._keeps(user, tensors):
                found.append(user)
            else:
                return None
        return found

    def _keeps(self, value: Node, tensors: list[Node]) -> bool:
        """Whether an operation does the same to every mixture of channels."""
        if operation(value) in _SUMS:
            same = {shape_of(tensor) for tensor in tensors} == {shape_of(value)}
            return len(tensors) == 2 and same and not value.kwargs
        if len(tensors) != 1:
            return False
        averages = operation(value) in _AVERAGES or (operation(value) == "mean" and merges_positions(value))
        self.averaged |= averages or drops_positions(value)
        return averages or drops_positions(value) or operation(value) in _PASSING

    def stream(self) -> Stream:
        """As a plain value."""
        order = {node: place for place, node in enumerate(self.graph.nodes)}
        makers = sorted(self.makers, key=order.__getitem__)
        readers = sorted(self.readers, key=order.__getitem__)
        norms = tuple(self.makers[node] for node in makers)
        return Stream(
            consumers=tuple(str(self.graph.mixer(node)) for node in readers),
            producers=tuple(str(self.graph.mixer(node)) for node in makers),
            norms=tuple(self.graph.norm_behind(node) for node in readers),
            sources=norms,
            width=width_of(self.graph.modules[str(self.graph.mixer(makers[0]))]),
            spare=sum(2 for name in norms if name is not None),
        )
