"""The simplest method: the same fraction of the full rank everywhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import inf

from haloc.errors import BudgetError, SpecError, nearest
from haloc.forms import SCALINGS, Dense, Form, scaled_form
from haloc.inventory import Inventory, LayerInfo
from haloc.methods.evidence import Evidence
from haloc.methods.levels import shortfall, standard
from haloc.methods.task import Method, Task
from haloc.plan import Plan
from haloc.space import LayerChoices


def uniform_plan(
    layers: Inventory,
    *,
    macs: float | None = None,
    fraction: float | None = None,
    forms: Sequence[str] = ("tucker2", "svd"),
    round_to: int = 1,
    skip: Collection[str] = (),
) -> Plan:
    """Gives every layer the same fraction of its full rank.

    Args:
        layers: What `inspect` returned.
        macs: The share of the network's multiply-adds that is to remain; the largest fraction that keeps to it is used.
        fraction: The fraction itself, instead of ``macs``.
        forms: For each layer the first of these that is open to it; a layer with none stays dense. Besides "tucker2",
            "spatial" and "svd" there are "tucker2-out" (k×k to fewer channels, then 1×1) and "tucker2-in" (1×1 to
            fewer channels, then k×k).
        round_to: Ranks are multiples of this.
        skip: Layers to leave dense, the first and the last one often.
    """
    share = _checked_share(macs, fraction)
    _check(layers, forms, round_to, skip)

    def plan_at(part: float) -> Plan:
        return Plan({layer.name: _form(layer, part, forms, round_to, skip) for layer in layers})

    if macs is None:
        return plan_at(share)
    return plan_at(_largest_fraction(lambda part: layers.macs_of(plan_at(part)) / max(1, layers.macs), macs))


def find(task: Task) -> Evidence:
    """Standard Tucker: how much of its full rank every candidate lacks; the plan has all layers lack the same share."""
    losses = {name: _shortfalls(offer) for name, offer in task.space.open_layers.items()}
    task.step(len(losses), len(losses))
    return Evidence(METHOD.name, task.space, losses, "largest")


def _shortfalls(offer: LayerChoices) -> tuple[float, ...]:
    """By form; what is not `standard` is out of the question."""
    shape, forms = offer.calls[0], tuple(offer)
    own = (Dense(), *standard(shape, forms))
    return tuple(shortfall(shape, form) if form in own else inf for form in forms)


def _checked_share(macs: float | None, fraction: float | None) -> float:
    """The one of the two that was given."""
    given = [share for share in (macs, fraction) if share is not None]
    if len(given) != 1:
        raise SpecError("give either macs, the share that is to remain, or fraction, the part of the full ranks")
    if not 0 < given[0] <= 1:
        raise SpecError(f"a share must lie above 0 and not above 1, got {given[0]}")
    return given[0]


def _check(layers: Inventory, forms: Sequence[str], round_to: int, skip: Collection[str]) -> None:
    """Refuses words that would silently do nothing."""
    names = [layer.name for layer in layers]
    for form in forms:
        if form not in SCALINGS:
            raise SpecError(f"unknown form {form!r}, expected some of {', '.join(SCALINGS)}.{nearest(form, SCALINGS)}")
    for name in skip:
        if name not in names:
            raise SpecError(f"there is no layer {name!r} to skip.{nearest(name, names)}")
    if round_to < 1:
        raise SpecError(f"round_to must be at least 1, got {round_to}")


def _largest_fraction(remaining: Callable[[float], float], macs: float) -> float:
    """Bisects for the largest fraction whose plan leaves at most ``macs`` of the multiply-adds."""
    if remaining(0.0) > macs:
        raise BudgetError(
            f"{macs:.1%} of the multiply-adds cannot be reached with uniform ranks: "
            f"the smallest ranks still leave {remaining(0.0):.1%}"
        )
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if remaining(middle) <= macs else (low, middle)
    return low


def _form(layer: LayerInfo, fraction: float, forms: Sequence[str], round_to: int, skip: Collection[str]) -> Form:
    """The layer's form at ``fraction``, or dense where that would not save multiply-adds."""
    scaling = next((form for form in forms if SCALINGS[form][0] in layer.families), None)
    if scaling is None or layer.name in skip:
        return Dense()
    form = scaled_form(layer.shape, scaling, fraction, round_to)
    return form if layer.macs_as(form) < layer.macs else Dense()


METHOD = Method("uniform", "the same share of the full rank everywhere: standard Tucker", find)
