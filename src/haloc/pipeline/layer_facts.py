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
    layers: Inventory, space: RankSpace, plan: Mapping[str, Form], cost: CostModel | NetworkCost | None
) -> list[dict[str, Any]]:
    """A row per layer, in the order of the network."""
    rows = cost.rows if isinstance(cost, NetworkCost) else cost
    return [_layer(layer, space, plan.get(layer.name, Dense()), rows) for layer in layers]


def _layer(layer: LayerInfo, space: RankSpace, form: Form, rows: CostModel | None) -> dict[str, Any]:
    is_open = layer.name in space.open_layers
    dense = isinstance(form, Dense)
    return {
        "name": layer.name,
        "kind": layer.kind,
        "shape": shape_text(layer.calls[0]) if layer.calls else "",
        "calls": len(layer.calls),
        "form": str(form),
        "form_kind": form.name,
        "ranks": list(ranks(form)),
        "full_ranks": [] if dense else list(full_ranks(layer.shape, form.name)),
        "macs": [layer.macs, layer.macs_as(form) if layer.calls else layer.macs],
        "params": [layer.params, layer.params_as(form) if layer.calls else layer.params],
        "latency_ms": _latency(layer, form, rows),
        "open": is_open,
        "reason": _reason(layer, is_open, dense),
    }


def _latency(layer: LayerInfo, form: Form, rows: CostModel | None) -> list[float] | None:
    if rows is None or rows.unit != "ms" or not layer.calls:
        return None
    try:
        return [sum(rows.price(call, each).value for call in layer.calls) for each in (Dense(), form)]
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
