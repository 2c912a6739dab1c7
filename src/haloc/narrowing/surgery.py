"""Making channels fewer in a model: in all modules that have weights for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from haloc.errors import PlanError
from haloc.factor.forward import copied, device_of, module_at
from haloc.factor.layers import Conv, Layer, memory_format_of
from haloc.narrowing.hidden import Channels, Narrowed, Stream, narrowed_from
from haloc.narrowing.interpolate import Moments, Raw, stand_ins

#: Where a narrowed network keeps what was done to it: plain values, so that copies of it need nothing of ours.
MARK = "haloc_narrowed"


def narrowed_of(model: nn.Module) -> tuple[Narrowed, ...]:
    """What of a network has been narrowed; nothing, for one as its author made it."""
    return narrowed_from(getattr(model, MARK, []))


@dataclass(frozen=True, eq=False)
class Known:
    """What is known of the channels that are made fewer.

    Attributes:
        read: What they look like to each of their readers.
        made: What each of their makers puts out that has a BatchNorm behind it, for a stream.
    """

    read: Mapping[str, Moments]
    made: Mapping[str, Raw]


def resized(model: nn.Module, narrowed: Iterable[Narrowed]) -> nn.Module:
    """A copy with fewer channels, the first ones; for weights that are loaded afterwards."""
    model = copied(model)
    with torch.no_grad():
        for each in narrowed:
            _check(model, each.hidden)
            index = torch.arange(each.kept, device=device_of(model))
            for name in each.hidden.readers:
                reader = layer_at(model, name)
                _set(reader, "weight", reader.weight.index_select(1, index))
                _extent(reader, "in", each.kept)
            _choose(model, each.hidden, index)
            _mark(model, each)
    return model


@torch.no_grad()
def take(model: nn.Module, channels: Channels, code: Tensor, known: Known) -> None:
    """Leaves only some of the channels, in place; the readers make up for the others.

    Args:
        model: The network.
        channels: Which of its channels.
        code: What is left of them, (left, channels): rows of the identity where they are hidden, any rows where they
            are a stream.
        known: What they look like.
    """
    for name, norm in channels.readers.items():
        _let_stand_in(model, name, norm, code, known.read[name])
        _extent(layer_at(model, name), "in", len(code))
    if isinstance(channels, Stream):
        _turn(model, channels, code, known.made)
    else:
        _choose(model, channels, code.argmax(1).to(device_of(model)))
    _mark(model, Narrowed(channels, len(code)))


def layer_at(model: nn.Module, name: str) -> Layer:
    """The layer of that name."""
    found = module_at(model, name)
    assert isinstance(found, Layer)
    return found


def _mark(model: nn.Module, done: Narrowed) -> None:
    setattr(model, MARK, [*getattr(model, MARK, []), done.to_dict()])


def _choose(model: nn.Module, channels: Channels, index: Tensor) -> None:
    """Makers and carriers have only these channels left."""
    for name in channels.makers:
        _select(layer_at(model, name), ("weight", "bias"), index)
        _extent(layer_at(model, name), "out", len(index))
    for name in channels.carriers:
        _carry(module_at(model, name), index)


def _turn(model: nn.Module, stream: Stream, code: Tensor, made: Mapping[str, Raw]) -> None:
    """Makers put out mixtures of what they did.

    A norm scales channels, so that goes into the layer before it. What is left of the norm has the statistics of the
    mixtures and takes them back at once: it stays right when statistics are measured anew.
    """
    for name, source in zip(stream.producers, stream.sources, strict=True):
        maker = layer_at(model, name)
        mixture = code.to(device_of(model))
        if source is not None:
            mixture = mixture * _scale(module_at(model, source)).to(mixture)
            _turn_norm(module_at(model, source), code.to(mixture), mixture, made[name])
        weight = mixture @ maker.weight.to(mixture).flatten(1)
        _set(maker, "weight", weight.reshape(len(code), *maker.weight.shape[1:]))
        if maker.bias is not None:
            _set(maker, "bias", mixture @ maker.bias.to(mixture))
        _extent(maker, "out", len(code))


def _turn_norm(norm: nn.Module, code: Tensor, mixture: Tensor, made: Raw) -> None:
    assert isinstance(norm, _BatchNorm)
    assert norm.running_mean is not None
    mean, second = made.mean.to(mixture), made.second.to(mixture)
    variance = (mixture @ (second - torch.outer(mean, mean)) * mixture).sum(1).clamp_min(0)
    added = code @ norm.bias.to(code) - mixture @ norm.running_mean.to(mixture)
    _set(norm, "running_mean", mixture @ mean)
    _set(norm, "running_var", variance)
    _set(norm, "weight", (variance + norm.eps).sqrt())
    _set(norm, "bias", added + mixture @ mean)
    norm.num_features = len(code)


def reader_rows(model: nn.Module, name: str, norm: str | None, root: Tensor | None = None) -> Tensor:
    """A reader's weights as rows over the channels, at the scale on which its output is seen.

    Args:
        model: The network.
        name: The reader.
        norm: The BatchNorm right behind it.
        root: By what its outputs are weighted, see `haloc.factor.response.rooted`; they count alike otherwise.
    """
    weight = layer_at(model, name).weight.detach().double()
    rows = weight.flatten(2) if weight.dim() > 2 else weight.unsqueeze(2)
    if norm is not None:
        rows = rows * _scale(module_at(model, norm)).to(rows).reshape(-1, 1, 1)
    if root is not None:
        rows = torch.einsum("po,oct->pct", root.to(rows), rows)
    return rows.movedim(1, 2).flatten(0, 1)


def _scale(norm: nn.Module) -> Tensor:
    assert isinstance(norm, _BatchNorm)
    assert norm.running_var is not None
    deviation = (norm.running_var + norm.eps).sqrt()
    return 1 / deviation if norm.weight is None else norm.weight.detach() / deviation


def _let_stand_in(model: nn.Module, name: str, norm: str | None, code: Tensor, seen: Moments) -> None:
    """New weights of a reader for those that stay; what does not depend on them goes to its bias, or to its norm."""
    reader = layer_at(model, name)
    told, rest = stand_ins(seen, code)
    weight = reader.weight.double().flatten(2) if reader.weight.dim() > 2 else reader.weight.double().unsqueeze(2)
    told, rest = told.to(weight), rest.to(weight)
    shift = torch.einsum("oct,c->o", weight, rest)
    new = torch.einsum("oct,ck->okt", weight, told)
    _set(reader, "weight", new.reshape(reader.weight.shape[0], len(code), *reader.weight.shape[2:]))
    if reader.bias is not None:
        reader.bias += shift.to(reader.bias)
    elif norm is not None:
        behind = module_at(model, norm)
        assert isinstance(behind, _BatchNorm)
        assert behind.running_mean is not None
        behind.running_mean -= shift.to(behind.running_mean)


def _carry(module: nn.Module, index: Tensor) -> None:
    if isinstance(module, _BatchNorm):
        _select(module, ("weight", "bias", "running_mean", "running_var"), index)
        module.num_features = len(index)
        return
    assert isinstance(module, Conv)
    _select(module, ("weight", "bias"), index)
    module.in_channels = module.out_channels = module.groups = len(index)


def _select(module: nn.Module, names: Iterable[str], index: Tensor) -> None:
    for name in names:
        value = getattr(module, name)
        if value is not None:
            _set(module, name, value.index_select(0, index))


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    """Another value for a parameter or a buffer, of the same kind and in the same layout."""
    old: Any = getattr(module, name)
    new = value.to(old.dtype).contiguous(memory_format=memory_format_of(old)).clone()
    is_parameter = isinstance(old, nn.Parameter)
    setattr(module, name, nn.Parameter(new, requires_grad=old.requires_grad) if is_parameter else new)


def _extent(layer: Layer, side: str, width: int) -> None:
    name = f"{side}_features" if isinstance(layer, nn.Linear) else f"{side}_channels"
    setattr(layer, name, width)


def _check(model: nn.Module, channels: Channels) -> None:
    """Refuses a model that has other channels there than were narrowed."""
    sides = [*((name, "out") for name in channels.makers), *((name, "in") for name in channels.readers)]
    for name, side in sides:
        module = module_at(model, name)
        found = getattr(module, f"{side}_features", getattr(module, f"{side}_channels", None))
        if not isinstance(module, Layer) or found != channels.width:
            raise PlanError(
                f"the network was narrowed at layer {name!r}, which had {channels.width} channels there; this model's "
                f"has {found if found is not None else 'none'}"
            )
