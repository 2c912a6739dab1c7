"""Ranks moved from layers that can spare them to layers that want them, as a network says that was fine-tuned briefly.

What a layer loses when it is factorised tells little of what it still lacks once training has made up for most of it.
So each layer of a trained network is asked what the network would lose by a step of rank less and by another; what
it would gain by a step more follows, falling as the losses rise. The best exchange within the budgets is then exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import inf, isfinite

from torch import nn

from haloc.factor.forward import module_at
from haloc.factor.modules import Factoriser, merge
from haloc.factor.surgery import replaced
from haloc.forms import Dense, Form, ranks
from haloc.methods.budget import Limit
from haloc.methods.solve import least_sum
from haloc.plan import Plan

#: Steps down that a layer is asked about, and the most that it moves at once.
REACH = 2

Offers = Mapping[str, Sequence[Form]]

#: What a network loses by a step of rank less in a layer, and by one more after that.
Lost = Mapping[str, tuple[float, ...]]


def steps(form: Form, offer: Sequence[Form], count: int, *, up: bool) -> list[Form]:
    """The next larger or smaller candidates of the same form, one after the other."""
    found: list[Form] = []
    for _ in range(count):
        ahead = [other for other in offer if _beyond(form, other, up)]
        if not ahead:
            break
        form = (min if up else max)(ahead, key=lambda other: sum(ranks(other)))
        found.append(form)
    return found


def _beyond(form: Form, other: Form, up: bool) -> bool:
    if type(other) is not type(form) or other == form:
        return False
    pairs = zip(ranks(form), ranks(other), strict=True)
    return all(b >= a if up else b <= a for a, b in pairs)


def lost(network: nn.Module, plan: Mapping[str, Form], offers: Offers, loss: Callable[[nn.Module], float]) -> Lost:
    """Asks every factorised layer of a network; it is left as it was.

    Args:
        network: One that was written by ``plan``, and trained.
        plan: Its forms.
        offers: What there is to choose from, of the layers that are to be asked.
        loss: How bad a network is.
    """
    found: dict[str, tuple[float, ...]] = {}
    for name, offer in offers.items():
        chain, form = module_at(network, name), plan.get(name, Dense())
        smaller = steps(form, offer, REACH, up=False)
        if not smaller or not isinstance(chain, nn.Sequential):
            continue
        # Training with norms between the factors leaves biases there, which no dense layer can have at its borders. So
        # all ranks are compared as they come out of one, the layer's own too.
        whole = Factoriser(merge(chain, borders=False))
        try:
            losses = [loss(replaced(network, {name: whole.build(rank)})) for rank in (form, *smaller)]
        finally:
            replaced(network, {name: chain})
        found[name] = tuple(max(0.0, b - a) for a, b in pairwise(losses))
    return found


def moved(plan: Mapping[str, Form], less: Lost, offers: Offers, limits: Sequence[Limit], reach: int) -> Plan:
    """The best network within the limits whose ranks are at most ``reach`` steps away.

    Args:
        plan: A network.
        less: What `lost` says of it; layers that it does not name stay.
        offers: What there is to choose from, for every open layer.
        limits: What the network may cost.
        reach: 1 or 2.
    """
    losses = {name: _row(plan.get(name, Dense()), offer, less.get(name, ()), reach) for name, offer in offers.items()}
    return least_sum(losses, limits)


def _row(form: Form, offer: Sequence[Form], less: Sequence[float], reach: int) -> list[float]:
    """What every candidate of a layer is expected to lose against the one it has."""
    known = {form: 0.0}
    if less and all(map(isfinite, less)):
        for count, smaller in enumerate(steps(form, offer, min(reach, len(less)), up=False), 1):
            known[smaller] = sum(less[:count])
        gain = less[0]
        ratio = min(1.0, less[0] / less[1]) if len(less) > 1 and less[1] > 0 else 0.5
        total = 0.0
        for larger in steps(form, offer, reach, up=True):
            gain *= ratio
            total -= gain
            known[larger] = total
    least = min(known.values())
    return [known.get(other, inf) - least for other in offer]
