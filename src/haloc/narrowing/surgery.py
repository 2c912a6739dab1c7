"""Making channels fewer in a model: in all modules that have weights for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from haloc.errors import PlanError
from haloc.factor.forward import copied, module_at
from haloc.factor.layers import Conv, Layer, memory_format_of
from haloc.narrowing.hidden import Hidden, Narrowed, narrowed_from
from haloc.narrowing.interpolate import Moments, stand_ins

#: Where a narrowed network keeps what was done to it: plain values, so that copies of it need nothing of ours.
MARK = "haloc_narrowed"


def narrowed_of(model: nn.Module) -> tuple[Narrowed, ...]:
    """What of a network has been narrowed; nothing, for one as its author made it."""
    return narrowed_from(getattr(model, MARK, []))


def resized(model: nn.Module, narrowed: Iterable[Narrowed]) -> nn.Module:
    """A copy with fewer hidden channels, the first ones; for weights that are loaded afterwards."""
    model = copied(model)
    for each in narrowed:
        _check(model, each.hidden)
        take(model, each.hidden, list(range(each.kept)), None)
    return model


@torch.no_grad()
def take(model: nn.Module, hidden: Hidden, kept: Sequence[int], seen: Moments | None) -> None:
    """Leaves only some of the hidden channels, in place; the reader makes up for the others where they are known."""
    reader = module_at(model, hidden.consumer)
    assert isinstance(reader, Layer)
    index = torch.tensor(kept, device=reader.weight.device)
    if seen is not None:
        _let_stand_in(model, hidden, reader, kept, seen)
    else:
        _set(reader, "weight", reader.weight.index_select(1, index))
    _extent(reader, "in", len(kept))
    maker = module_at(model, hidden.producer)
    assert isinstance(maker, Layer)
    _select(maker, ("weight", "bias"), index)
    _extent(maker, "out", len(kept))
    for name in hidden.carriers:
        _carry(module_at(model, name), index)
    setattr(model, MARK, [*getattr(model, MARK, []), Narrowed(hidden, len(kept)).to_dict()])


def reader_rows(model: nn.Module, hidden: Hidden) -> Tensor:
    """The reader's weights as rows over the hidden channels, at the scale on which its output is seen."""
    reader = module_at(model, hidden.consumer)
    assert isinstance(reader, Layer)
    rows = reader.weight.detach().double().flatten(2) if reader.weight.dim() > 2 else reader.weight.detach().double()
    if hidden.norm is not None:
        scale = _scale(module_at(model, hidden.norm)).to(rows)
        rows = rows * scale.reshape(-1, *(1,) * (rows.dim() - 1))
    return rows if rows.dim() == 2 else rows.movedim(1, 2).flatten(0, 1)


def _scale(norm: nn.Module) -> Tensor:
    assert isinstance(norm, _BatchNorm)
    assert norm.running_var is not None
    deviation = (norm.running_var + norm.eps).sqrt()
    return 1 / deviation if norm.weight is None else norm.weight.detach() / deviation


def _let_stand_in(model: nn.Module, hidden: Hidden, reader: Layer, kept: Sequence[int], seen: Moments) -> None:
    """New weights of the reader for those that stay; what does not depend on them goes to its bias, or to its norm."""
    told, rest = stand_ins(seen, kept)
    weight = reader.weight.double().flatten(2) if reader.weight.dim() > 2 else reader.weight.double().unsqueeze(2)
    told, rest = told.to(weight), rest.to(weight)
    shift = torch.einsum("oct,c->o", weight, rest)
    new = torch.einsum("oct,ck->okt", weight, told)
    _set(reader, "weight", new.reshape(reader.weight.shape[0], len(kept), *reader.weight.shape[2:]))
    if reader.bias is not None:
        reader.bias += shift.to(reader.bias)
    elif hidden.norm is not None:
        norm = module_at(model, hidden.norm)
        assert isinstance(norm, _BatchNorm)
        assert norm.running_mean is not None
        norm.running_mean -= shift.to(norm.running_mean)


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


def _check(model: nn.Module, hidden: Hidden) -> None:
    """Refuses a model that has other channels there than were narrowed."""
    for name, side in ((hidden.producer, "out"), (hidden.consumer, "in")):
        module = module_at(model, name)
        found = getattr(module, f"{side}_features", getattr(module, f"{side}_channels", None))
        if not isinstance(module, Layer) or found != hidden.width:
            raise PlanError(
                f"the network was narrowed at layer {name!r}, which had {hidden.width} channels there; this model's "
                f"has {found if found is not None else 'none'}"
            )
