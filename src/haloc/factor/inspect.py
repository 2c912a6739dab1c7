"""`inspect`: every layer of a model, what it costs, what can be done with it, and why not."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize
from torch.utils.flop_counter import FlopCounterMode

from haloc.errors import ModelError, SpecError
from haloc.factor.forward import batch_size, call, copied, describe, evaluating, own_numbers, unmoved
from haloc.factor.holders import held_layers, hidden_layers, is_layer
from haloc.factor.layers import Layer, conv_shape
from haloc.forms import MIN_RANK, families, gains, smallest_form
from haloc.inventory import Inventory, LayerInfo
from haloc.shapes import LinearShape, Shape

#: Modules of PyTorch that hand their children's weights to fused kernels instead of calling the children.
WEIGHT_READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)

#: Classes of layers, by which those are known that are of another class now.
KINDS = frozenset(f"{kind}{axes}d" for kind in ("Conv", "ConvTranspose") for axes in (1, 2, 3)) | {"Linear"}

#: Why a layer that an attribute holds and no module is left alone.
UNSEEN = "held outside of its modules, where PyTorch does not see it; keep it in an nn.ModuleList"

#: What a plain layer has and the Sequential in its place has not (its stride and the like it has, see `modules`).
_PARAMETERS = frozenset({"weight", "bias"})


def inspect(model: nn.Module, example_inputs: Any, *, min_rank: int = MIN_RANK) -> Inventory:
    """Runs the model once and lists its convolutions and linear layers.

    Args:
        model: Any module; it runs in eval mode without gradients and is left as it was.
        example_inputs: A tensor, a tuple or list of positional arguments, or a dict of named ones. Counts are per
            example: a batch of several is divided by its size.
        min_rank: A layer is too small to gain if it saves neither multiply-adds nor parameters at this rank.

    Returns:
        One row per layer with the shape of each call, costs, the forms open to it, or why it is left alone.
    """
    if min_rank < 1:
        raise SpecError(f"min_rank must be at least 1, got {min_rank}")
    batch = batch_size(example_inputs)
    if batch == 0:
        raise ModelError(f"the example inputs are empty ({describe(example_inputs)}); give at least one example")
    others = _other_layers(model)
    model = _initialisable(model)
    layers = {name: module for name, module in model.named_modules() if is_layer(module)}
    reasons = static_reasons(model)
    with ExitStack() as spies, _countable(), _frozen(model), FlopCounterMode(display=False) as counter:
        watches = {name: spies.enter_context(_watching(layer)) for name, layer in layers.items()}
        with own_numbers(model), unmoved(model), evaluating(model):
            call(model, example_inputs)

    def rows(batch: int) -> tuple[LayerInfo, ...]:
        return tuple(
            _row(name, layer, watches[name], reasons.get(name), batch, min_rank) for name, layer in layers.items()
        )

    # Only what is outside of the rows is divided here: a row may hold work done once for the whole batch.
    elsewhere = max(0, counter.get_total_flops() // 2 - sum(row.macs for row in rows(1))) // batch
    layer_rows = rows(batch)
    return Inventory((*layer_rows, *others), elsewhere + sum(row.macs for row in layer_rows), _count(model))


def _initialisable(model: nn.Module) -> nn.Module:
    """The model, or a copy where its first run would give layers the shapes they do not have yet."""
    return copied(model) if any(isinstance(p, UninitializedParameter) for p in model.parameters()) else model


def _other_layers(model: nn.Module) -> tuple[LayerInfo, ...]:
    """Layers that are no layers of PyTorch's any more, or that PyTorch does not see: rows that only say so."""
    found = {name: (module, reason) for name, module in model.named_modules() if (reason := _converted(module))}
    found |= {name: (module, UNSEEN) for name, module in hidden_layers(model).items()}
    return tuple(
        LayerInfo(name, _kind(module), (), _count(module), 0, (), reason) for name, (module, reason) in found.items()
    )


def _converted(module: nn.Module) -> str | None:
    """Why what was a layer once cannot be factorised any more."""
    if isinstance(module, torch.jit.ScriptModule):
        return "compiled by torch.jit.script or trace; give the Python model" if _kind(module) in KINDS else None
    quantised = type(module).__module__.startswith("torch.ao.nn.") and not is_layer(module)
    return "quantised; factorise first and quantise then" if quantised and _kind(module) in KINDS else None


def _kind(module: nn.Module) -> str:
    return str(getattr(module, "original_name", type(module).__name__))


def static_reasons(model: nn.Module) -> dict[str, str]:
    """Why layers must be left alone, as far as can be seen without running the model."""
    owners = Counter(_memory(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    reader_of = {
        id(child): type(module).__name__
        for module in model.modules()
        if isinstance(module, WEIGHT_READERS)
        for child in module.children()
    }
    holder_of = held_layers(model)
    found = {}
    for name, module in model.named_modules():
        if is_layer(module):
            reader = reader_of.get(id(module))
            reason = f"used inside {reader}, which reads its weight" if reader else _static_reason(module, owners)
            reason = reason or holder_of.get(id(module))
            if reason:
                found[name] = reason
    return found


def _memory(parameter: Tensor) -> int:
    """Tells parameters apart that have memory of their own: two may be one and the same in all but name."""
    if isinstance(parameter, UninitializedParameter) or parameter.is_meta or not parameter.numel():
        return id(parameter)
    try:
        return parameter.data_ptr() or id(parameter)
    except RuntimeError:  # a tensor of some other kind, with no memory that could be asked for
        return id(parameter)


def _static_reason(module: nn.Module, owners: Counter[int]) -> str | None:
    weight = module._parameters.get("weight")
    if isinstance(module, _ConvTransposeNd):
        return "transposed convolution"
    if parametrize.is_parametrized(module) or weight is None:
        return "parametrised weight"
    if "bias" not in module._parameters:
        return "parametrised bias"
    if isinstance(weight, UninitializedParameter):
        return "not initialised yet; run the model once"
    if not isinstance(module, Layer) or _overrides_forward(module):
        return f"{type(module).__name__} has a forward of its own"
    if owners[_memory(weight)] > 1:
        return "tied weight: another module has the same one"
    if not weight.is_floating_point():
        return f"{str(weight.dtype).removeprefix('torch.')} weight"
    if isinstance(module, nn.Linear):
        return None
    return "depthwise" if conv_shape(module).depthwise else None


def _overrides_forward(module: nn.Module) -> bool:
    """Whether a subclass computes something else than the layer it derives from."""
    base = next(cls for cls in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d) if isinstance(module, cls))
    own = type(module)
    changed = own.forward is not base.forward or "forward" in vars(module)
    return changed or getattr(own, "_conv_forward", None) is not getattr(base, "_conv_forward", None)


@contextmanager
def _countable() -> Iterator[None]:
    """Attention in plain products: the fused kernels would hide their multiply-adds from the counter."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No parameter asks for gradients: the counter fails where a view of one that does is a module's input."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad = False
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad = True


@dataclass
class _Watch:
    """What was seen of one layer: the inputs' extents of every call, and who read its parameters from outside."""

    inputs: list[tuple[int, ...]] = field(default_factory=list)
    readers: dict[str, str] = field(default_factory=dict)
    depth: int = 0


@contextmanager
def _watching(layer: nn.Module) -> Iterator[_Watch]:
    """Records calls of a layer, and reads of its parameters from outside of its own forward.

    A Sequential in the layer's place would have no ``weight``. Whoever reads it (attention modules, dtype look-ups)
    would fail, and nothing but watching the reads tells. So the layer is given, inside the block only, a class that
    looks.
    """
    watch, original = _Watch(), type(layer)
    if isinstance(layer, LazyModuleMixin):  # it takes a class of its own choice when it first runs
        yield watch
        return

    class Watched(original):  # type: ignore[misc, valid-type]
        def __getattribute__(self, name: str) -> Any:
            if name in _PARAMETERS and watch.depth == 0:
                watch.readers.setdefault(_reader(sys._getframe(1)), name)
            return super().__getattribute__(name)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            watch.inputs.append(tuple(tensors[0].shape) if tensors else ())
            watch.depth += 1
            try:
                return super().forward(*args, **kwargs)
            finally:
                watch.depth -= 1

    Watched.__name__, Watched.__qualname__ = original.__name__, original.__qualname__
    layer.__class__ = Watched
    try:
        yield watch
    finally:
        layer.__class__ = original


def _reader(frame: Any) -> str:
    """Names who runs in a stack frame: the class of its ``self``, else the function."""
    owner = frame.f_locals.get("self")
    return type(owner).__name__ if owner is not None else str(frame.f_code.co_name)


def _row(name: str, layer: nn.Module, watch: _Watch, reason: str | None, batch: int, min_rank: int) -> LayerInfo:
    if isinstance(layer, _ConvTransposeNd):
        macs = sum(_transposed_macs(layer, extents, batch) for extents in watch.inputs)
        return LayerInfo(name, type(layer).__name__, (), _count(layer), macs, (), reason)
    calls = tuple(_call_shape(layer, extents, batch) for extents in watch.inputs)
    reason = reason or _seen_reason(watch)
    open_to = () if reason else _open_families(calls[0], min_rank)
    if not reason and not open_to:
        reason = "too small to gain"
    return LayerInfo(name, type(layer).__name__, calls, _count(layer), sum(c.macs for c in calls), open_to, reason)


def _seen_reason(watch: _Watch) -> str | None:
    """Why a layer must be left alone as the run has shown."""
    if watch.readers:
        reader, attribute = next(iter(watch.readers.items()))
        return f"{reader} reads its {attribute}"
    return None if watch.inputs else "not called in this forward pass"


def _open_families(shape: Shape, min_rank: int) -> tuple[str, ...]:
    return tuple(family for family in families(shape) if gains(shape, smallest_form(shape, family, min_rank)))


def _call_shape(layer: nn.Module, extents: tuple[int, ...], batch: int) -> Shape:
    if isinstance(layer, nn.Linear):
        return LinearShape(
            layer.in_features, layer.out_features, layer.bias is not None, _per_example(prod(extents[:-1]), batch)
        )
    assert isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    axes = len(layer.kernel_size)
    images = extents[0] if len(extents) == axes + 2 else 1
    return conv_shape(layer, extents[-axes:], _per_example(images, batch))


def _per_example(count: int, batch: int) -> int:
    """Divides what grows with the batch; what does not divide is work done once for all of it."""
    return count // batch if count % batch == 0 else count


def _transposed_macs(layer: _ConvTransposeNd, extents: tuple[int, ...], batch: int) -> int:
    axes = len(layer.kernel_size)
    positions = prod(extents[-axes:]) * _per_example(extents[0] if len(extents) == axes + 2 else 1, batch)
    return positions * layer.in_channels * (layer.out_channels // layer.groups) * prod(layer.kernel_size)


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if not isinstance(p, UninitializedParameter))
