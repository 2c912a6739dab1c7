"""Every layer as the report shows it: what it was, what became of it, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from haloc.cost.model import CostModel
from haloc.cost.network import NetworkCost
from haloc.errors import CostError
from haloc.forms import Dense, Form, full_ranks, ranks
from haloc.inventory import Inventory, LayerInfo
from haloc.shapes import ConvShape, Shape
from haloc.space import RankSpace


def layer_facts(
    layers: Inventory,
    space: RankSpace,
    plan: Mapping[str, Form],
    cost: CostModel | NetworkCost | None,
    original: Inventory,
) -> list[dict[str, Any]]:
    """A row per layer, in the order of the network; ``original`` has them as they were before narrowing."""
    rows = cost.rows if isinstance(cost, NetworkCost) else cost
    before = {layer.name: layer for layer in original}
    return [_layer(layer, before[layer.name], space, plan.get(layer.name, Dense()), rows) for layer in layers]


def _layer(layer: LayerInfo, before: LayerInfo, space: RankSpace, form: Form, rows: CostModel | None) -> dict[str, Any]:
    is_open = layer.name in space.open_layers
    narrower, dense = layer.calls != before.calls, isinstance(form, Dense)
    return {
        "name": layer.name,
        "kind": layer.kind,
        "shape": shape_text(before.calls[0]) if before.calls else "",
        "calls": len(layer.calls),
        "form": _form_text(form) if narrower else str(form),
        "form_kind": "narrow" if narrower and dense else form.name,
        "width": shape_text(layer.calls[0]).partition(",")[0] if narrower else None,
        "ranks": list(ranks(form)),
        "full_ranks": [] if dense else list(full_ranks(layer.shape, form.name)),
        "macs": [before.macs, layer.macs_as(form) if layer.calls else layer.macs],
        "params": [before.params, layer.params_as(form) if layer.calls else layer.params],
        "latency_ms": _latency(layer, before, form, rows),
        "open": is_open,
        "reason": None if narrower else _reason(layer, is_open, dense),
    }


def _form_text(form: Form) -> str:
    """What became of a layer that reads or makes fewer channels."""
    return "narrowed" if isinstance(form, Dense) else f"narrowed, {form}"


def _latency(layer: LayerInfo, before: LayerInfo, form: Form, rows: CostModel | None) -> list[float] | None:
    if rows is None or rows.unit != "ms" or not layer.calls:
        return None
    try:
        each = ((before.calls, Dense()), (layer.calls, form))
        return [sum(rows.price(call, written).value for call in calls) for calls, written in each]
    except CostError:
        return None


def _reason(layer: LayerInfo, is_open: bool, dense: bool) -> str | None:
    if not dense:
        return None
    if layer.reason:
        return layer.reason
    return "dense in the plan, though other forms were on offer" if is_open else "no other form was on offer"


def shape_text(shape: Shape) -> str:
    """A shape in a few words: 16→16, 3×3, at 32×32."""
    if not isinstance(shape, ConvShape):
        return f"{shape.in_features}→{shape.out_features}"
    words = [f"{shape.in_channels}→{shape.out_channels}", "×".join(map(str, shape.kernel))]
    words += [f"stride {'×'.join(map(str, shape.stride))}"] if set(shape.stride) != {1} else []
    words += [f"{shape.groups} groups"] if shape.groups > 1 else []
    return ", ".join([*words, f"at {'×'.join(map(str, shape.input_size))}"])
