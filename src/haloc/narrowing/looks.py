"""What channels look like to the layers that read them, and what that says of which can go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from haloc.factor.calibrate import Sums
from haloc.factor.forward import call, evaluating, unmoved
from haloc.factor.layers import Layer
from haloc.factor.response import output_weights, rooted
from haloc.narrowing.hidden import Channels, Stream
from haloc.narrowing.interpolate import DAMPINGS, Moments, Order, Raw, removal_order, suitable_damping
from haloc.narrowing.rotate import Basis, principal
from haloc.narrowing.surgery import Known, layer_at, reader_rows

#: The share of the channels that stays when it is seen which damping suits.
_STAYS = 0.75


@dataclass(frozen=True, eq=False)
class Seen:
    """What channels look like, by the names of those that read them, and how much of that is to be relied on.

    Attributes:
        rows: The readers' weights over the channels, scaled to what their outputs matter.
        learnt: What they see in inputs that stand-ins are found by while something is tried.
        whole: What they see in all inputs.
        made: What makers put out that have a BatchNorm behind them, in all inputs.
        dampings: What suits each reader.
    """

    rows: Mapping[str, Tensor]
    learnt: Mapping[str, Raw]
    whole: Mapping[str, Raw]
    made: Mapping[str, Raw]
    dampings: Mapping[str, float]

    def tried(self, group: Channels) -> tuple[Order | Basis, Known]:
        """In which order channels go, and how others stand in, where that is tried on inputs that were held out."""
        known = self._known(group, self.learnt)
        return ordered(group, self.rows, known.read), known

    def in_all(self, group: Channels, width: int) -> tuple[Tensor, Known]:
        """What stays of the channels when so many do, and how these stand in for the others, by all inputs."""
        known = self._known(group, self.whole)
        return ordered(group, self.rows, known.read, group.width - width).code(width), known

    def _known(self, group: Channels, raw: Mapping[str, Raw]) -> Known:
        return Known({name: raw[name].damped(self.dampings[name]) for name in group.readers}, self.made)


def seen_by(
    model: nn.Module, groups: Sequence[Channels], learnt: Sequence[Any], judged: Sequence[Any], positions: int
) -> Seen:
    """What channels look like in these inputs; the second ones show how much of what the first show is true.

    Args:
        model: The network.
        groups: Its channels.
        learnt: Inputs to learn from.
        judged: Others.
        positions: From every input at most this many places of a feature map are looked at, at random.
    """
    first, other = (_Gathered.over(model, groups, inputs, positions) for inputs in (learnt, judged))
    both = first + other
    some, rest, whole = (each.read(model, groups) for each in (first, other, both))
    rows = _rows(model, groups, learnt, some)
    dampings: dict[str, float] = {}
    for group in groups:
        plain = {name: some[name].damped(DAMPINGS[0]) for name in group.readers}
        left = max(1, round(_STAYS * group.width))
        code = ordered(group, rows, plain, group.width - left).code(left)
        dampings |= {name: suitable_damping(rows[name], some[name], rest[name], code) for name in group.readers}
    return Seen(rows, some, whole, both.made(groups), dampings)


def ordered(
    group: Channels, rows: Mapping[str, Tensor], seen: Mapping[str, Moments], gone: int | None = None
) -> Order | Basis:
    """In which order channels go, or directions of them; of channels only so many, if told."""
    if isinstance(group, Stream):
        return principal([(rows[name], seen[name]) for name in group.readers])
    return removal_order(rows[group.consumer], seen[group.consumer], gone)


def _rows(
    model: nn.Module, groups: Sequence[Channels], inputs: Sequence[Any], seen: Mapping[str, Raw]
) -> dict[str, Tensor]:
    """The readers' weights, scaled to what comes of their outputs in the network's, as far as that can be told."""
    readers = {name: norm for group in groups for name, norm in group.readers.items()}
    weights = output_weights(model, inputs, [norm or name for name, norm in readers.items()])
    if weights is not None:
        return {name: reader_rows(model, name, norm, rooted(weights[norm or name])) for name, norm in readers.items()}
    return {name: _of_one(reader_rows(model, name, norm), seen[name]) for name, norm in readers.items()}


def _of_one(rows: Tensor, seen: Raw) -> Tensor:
    """Scaled so that all that the reader puts out has a size of 1: as much as what others put out."""
    energy = float((rows.T @ rows * seen.damped(DAMPINGS[0]).covariance).sum())
    return rows / energy**0.5 if energy > 0 else rows


@dataclass(frozen=True, eq=False)
class _Gathered:
    """Sums over what readers see and what makers put out."""

    inputs: Mapping[str, Sums]
    outputs: Mapping[str, Sums]

    @classmethod
    def over(cls, model: nn.Module, groups: Sequence[Channels], inputs: Sequence[Any], positions: int) -> _Gathered:
        read = {name: Sums() for group in groups for name in group.readers}
        made = {name: Sums() for name in _normed(groups)}
        with ExitStack() as hooks:
            for name, sums in read.items():
                hooks.enter_context(_gathering(layer_at(model, name), sums, positions, behind=False))
            for name, sums in made.items():
                hooks.enter_context(_gathering(layer_at(model, name), sums, positions, behind=True))
            hooks.enter_context(unmoved(model))
            hooks.enter_context(evaluating(model))
            for batch in inputs:
                call(model, batch)
        return cls(read, made)

    def __add__(self, other: _Gathered) -> _Gathered:
        return _Gathered(
            {name: sums + other.inputs[name] for name, sums in self.inputs.items()},
            {name: sums + other.outputs[name] for name, sums in self.outputs.items()},
        )

    def read(self, model: nn.Module, groups: Iterable[Channels]) -> dict[str, Raw]:
        """What readers see."""
        norms = {name: norm for group in groups for name, norm in group.readers.items()}
        return {
            name: _raw(sums, name, layer_at(model, name).bias is not None or norms[name] is not None)
            for name, sums in self.inputs.items()
        }

    def made(self, groups: Iterable[Channels]) -> dict[str, Raw]:
        """What makers put out."""
        return {name: _raw(self.outputs[name], name, True) for name in _normed(groups)}


def _normed(groups: Iterable[Channels]) -> list[str]:
    """The makers of streams that have a BatchNorm behind them."""
    streams = [group for group in groups if isinstance(group, Stream)]
    pairs = (pair for stream in streams for pair in zip(stream.producers, stream.sources, strict=True))
    return [name for name, source in pairs if source is not None]


def _raw(sums: Sums, name: str, shifts: bool) -> Raw:
    found = sums.moments(name)
    return Raw(found.mean[0], found.second[0], shifts)


@contextmanager
def _gathering(layer: Layer, sums: Sums, positions: int, *, behind: bool) -> Iterator[None]:
    """Adds up what reaches a layer inside the block, or what it puts out."""
    generator = torch.Generator().manual_seed(0)

    def gather(value: Tensor) -> None:
        rows = value.detach().float()
        axis = rows.dim() - 1 if isinstance(layer, nn.Linear) else 1
        rows = rows.movedim(axis, -1).flatten(1, -2) if rows.dim() > 2 else rows.unsqueeze(1)
        if rows.shape[1] > positions:
            rows = rows[:, torch.randperm(rows.shape[1], generator=generator)[:positions].to(rows.device)]
        sums.add(rows.flatten(0, 1).unsqueeze(0))

    handle = (
        layer.register_forward_hook(lambda _, args, output: gather(output))
        if behind
        else layer.register_forward_pre_hook(lambda _, args: gather(args[0]))
    )
    try:
        yield
    finally:
        handle.remove()
