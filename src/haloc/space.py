"""The settings on offer: which forms and ranks every layer may take, and how many networks that makes in all.

The paper's two design principles make a space that can be searched out of one that cannot. Principle 1: ranks are
multiples of a step that the hardware can feel. Principle 2: the two ranks of a Tucker-2 layer are equal. Where a layer
has been measured rank by rank, `staircase` finds the ranks that the hardware can feel instead of assuming a step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

from haloc.errors import CostError, SpecError, nearest
from haloc.forms import FORMS, SCALINGS, Dense, Form, Tucker2, families, full_ranks, ranks
from haloc.inventory import Inventory, LayerInfo
from haloc.plan import Plan
from haloc.shapes import Shape, as_deployed

#: Algorithm 1's steps for 16, 32, 64, 128, 256 and 512 channels; wider layers take the last.
STEPS = (4, 8, 16, 16, 32, 32)

#: By how much a lower rank has to be cheaper before it counts as another step of the staircase.
TOLERANCE = 0.03

#: How much of a random plan stays dense, and how far its layers stray from their common level.
DENSE_SHARE, JITTER = 0.25, 0.15


class Price(Protocol):
    """A number with a unit of its own; `haloc.cost` has them with an error."""

    @property
    def value(self) -> float:
        """The number."""


class Prices(Protocol):
    """A cost model that can say which forms it has prices for, such as a measured table."""

    def forms_of(self, shape: Shape) -> Iterable[Form]:
        """The forms of a layer that have a price."""

    def price(self, shape: Shape, form: Form) -> Price:
        """What a layer costs in a form."""


@dataclass(frozen=True)
class Grid:
    """Rank settings of one layer in one form.

    Attributes:
        family: The form's name.
        runs: The settings, in rising order, as runs in which only the last rank changes: the ranks before it and the
            values that it takes. A run may be a ``range``, so that even a grid of all ranks is small.
    """

    family: str
    runs: tuple[tuple[tuple[int, ...], Sequence[int]], ...]

    @classmethod
    def of(cls, family: str, settings: Iterable[Sequence[int]]) -> Grid:
        """The grid of exactly these settings."""
        heads: dict[tuple[int, ...], list[int]] = {}
        for *head, last in sorted(set(map(tuple, settings))):
            heads.setdefault(tuple(head), []).append(last)
        return cls(family, tuple((head, tuple(values)) for head, values in heads.items()))

    def __len__(self) -> int:
        return sum(len(values) for _, values in self.runs)

    def __iter__(self) -> Iterator[Form]:
        return (FORMS[self.family](*(*head, last)) for head, values in self.runs for last in values)

    def __contains__(self, form: object) -> bool:
        if not isinstance(form, FORMS[self.family]):
            return False
        *head, last = ranks(form)
        return any(before == tuple(head) and last in values for before, values in self.runs)

    def near(self, level: Callable[[], float]) -> Form:
        """A form whose place in the grid is, rank by rank, what ``level`` says: 0 for the smallest, 1 the largest."""
        head, values = self.runs[_place(level(), len(self.runs))]
        return FORMS[self.family](*(*head, values[_place(level(), len(values))]))


@dataclass(frozen=True)
class LayerChoices:
    """What one layer may become.

    Attributes:
        calls: The shape of every call in one forward pass.
        grids: The ranks on offer; no setting is in two of them.
        dense: Whether the layer may also stay as it is.
    """

    calls: tuple[Shape, ...]
    grids: tuple[Grid, ...] = ()
    dense: bool = True

    def __len__(self) -> int:
        return self.dense + sum(map(len, self.grids))

    def __iter__(self) -> Iterator[Form]:
        """All candidates, dense first."""
        if self.dense:
            yield Dense()
        for grid in self.grids:
            yield from grid

    def __contains__(self, form: object) -> bool:
        return (self.dense and form == Dense()) or any(form in grid for grid in self.grids)


@dataclass(frozen=True)
class RankSpace:
    """The settings of a network: one choice per layer. Layers with nothing to choose are in it too, as dense ones."""

    layers: Mapping[str, LayerChoices]

    @property
    def size(self) -> int:
        """How many different networks the space holds, as an exact integer."""
        return prod(map(len, self.layers.values()))

    @property
    def open_layers(self) -> dict[str, LayerChoices]:
        """The layers that have something else than dense on offer."""
        return {name: choices for name, choices in self.layers.items() if choices.grids}

    def rows(self) -> tuple[tuple[Shape, Form], ...]:
        """Everything that has to be priced: each distinct layer, as deployed, in each of its forms.

        The forms of one layer stand together with dense first: it is what all others are compared with, so it is there
        whether it may be chosen or not.
        """
        found: dict[Shape, dict[Form, None]] = {}
        for choices in self.layers.values():
            for shape in map(as_deployed, choices.calls):
                found.setdefault(shape, {Dense(): None}).update(dict.fromkeys(choices))
        return tuple((shape, form) for shape, forms in found.items() for form in forms)


def rank_space(
    layers: Inventory,
    *,
    forms: Sequence[str] = ("tucker2", "svd"),
    round_to: int | str = "paper",
    equal: bool = True,
    names: Iterable[str] | None = None,
    dense: bool = True,
    cost: Prices | None = None,
    tolerance: float = TOLERANCE,
) -> RankSpace:
    """The settings of every layer of a network.

    Args:
        layers: What `inspect` returned; layers that were not called have no shape and are left out.
        forms: What is on offer where it is open to a layer: "tucker2", "svd", "spatial", and "tucker2-out" (k×k to
            fewer channels, then 1×1) and "tucker2-in" (1×1 to fewer channels, then k×k).
        round_to: Ranks are multiples of this; "paper" takes the steps of its Algorithm 1, coarser for wider layers;
            "auto" takes the ranks that ``cost`` has prices for and keeps the edges of their `staircase`.
        equal: Principle 2, the two ranks of a Tucker-2 layer are the same.
        names: Only these layers; the others stay dense.
        dense: Whether layers may stay dense. Settings that save neither multiply-adds nor parameters are then left
            out, full rank among them: dense is better.
        cost: For ``round_to="auto"``, a table measured on a fine grid of ranks.
        tolerance: For ``round_to="auto"``, see `staircase`.
    """
    scalings = _checked_forms(forms)
    chosen = _checked_names(layers, names)
    step = _checked_step(round_to, cost)
    open_layers = [layer for layer in layers if layer.name in chosen and _open(layer, scalings)]
    widest = max((width for layer in open_layers for width in _widths(layer.shape)), default=0)

    def grids(layer: LayerInfo) -> tuple[Grid, ...]:
        if cost is not None:
            return _measured_grids(layer, _open(layer, scalings), equal, cost, tolerance)
        multiple = step or paper_step(layer.shape, widest)
        return _grids(layer, _open(layer, scalings), multiple, equal, worth=_worth(layer) if dense else _always)

    # Networks repeat their layers, and what is on offer follows from the calls.
    found = {layer.calls: grids(layer) for layer in {layer.calls: layer for layer in open_layers}.values()}
    choices = {layer.name: LayerChoices(layer.calls) for layer in layers if layer.calls}
    for layer in open_layers:
        offer = found[layer.calls]
        choices[layer.name] = LayerChoices(layer.calls, offer, dense or not offer)
    return RankSpace(choices)


def paper_step(shape: Shape, widest: int) -> int:
    """Algorithm 1's step: 4 throughout in networks narrower than 128 channels, otherwise by the layer's width."""
    if widest < 128:
        return STEPS[0]
    # The paper indexes its list with t/16 − 1; the list itself is in powers of two.
    doublings = (min(_widths(shape)) // 16).bit_length() - 1
    return STEPS[min(max(doublings, 0), len(STEPS) - 1)]


def staircase(prices: Mapping[int, float], dense: float, tolerance: float = TOLERANCE) -> tuple[int, ...]:
    """The ranks at the edges of the steps that latency climbs as the rank grows, in rising order.

    Walks from dense over the largest rank down. A rank is kept where it is cheaper than what was kept last by more
    than ``tolerance`` (0.03: 3% of its own price); otherwise the larger rank does better for no more. So every rank
    kept is cheaper than dense, and there may be none.
    """
    kept = edges({(rank,): price for rank, price in prices.items()}, dense, tolerance)
    return tuple(rank for (rank,) in kept)


def edges(
    prices: Mapping[tuple[int, ...], float], dense: float, tolerance: float = TOLERANCE
) -> tuple[tuple[int, ...], ...]:
    """`staircase` for settings of several ranks: none of those kept is as large as another one for no less.

    A setting is dropped where dense, or a setting kept with no rank below its own, costs no more than 1 + ``tolerance``
    times as much.
    """
    if not 0 <= tolerance < float("inf"):
        raise SpecError(f"tolerance is a share such as 0.03, not below 0; got {tolerance}")
    kept: dict[tuple[int, ...], float] = {}
    # Falling by their sum, settings come after all those that are larger in every rank.
    for setting in sorted(prices, key=lambda setting: (sum(setting), setting), reverse=True):
        limit = prices[setting] * (1 + tolerance)
        larger = (price for other, price in kept.items() if all(a >= b for a, b in zip(other, setting, strict=True)))
        if limit < dense and all(limit < price for price in larger):
            kept[setting] = prices[setting]
    return tuple(sorted(kept))


def random_plan(space: RankSpace, seed: int) -> Plan:
    """A network of the space: all layers at about the same level between smallest and largest, some of them dense.

    The level is drawn too, so that plans of many seeds spread over everything from the smallest network to nearly the
    dense one. The same seed gives the same plan.
    """
    draw = random.Random(seed)
    level = draw.random()

    def around() -> float:
        return level + draw.uniform(-JITTER, JITTER)

    def choice(choices: LayerChoices) -> Form:
        if choices.dense and draw.random() < DENSE_SHARE:
            return Dense()
        return draw.choice(choices.grids).near(around)

    return Plan({name: choice(choices) for name, choices in space.open_layers.items()})


def _place(level: float, count: int) -> int:
    """The index in 0..count−1 at ``level`` of the way; what lies beyond is the first or the last."""
    return min(max(int(level * count), 0), count - 1)


def _open(layer: LayerInfo, scalings: Sequence[str]) -> list[str]:
    """Those of the scalings that are open to a layer."""
    return [scaling for scaling in scalings if SCALINGS[scaling][0] in layer.families and layer.calls]


def _widths(shape: Shape) -> tuple[int, ...]:
    """The ranks of a layer's channels: what its width is measured by, in whichever form it is written."""
    return full_ranks(shape, families(shape)[0])


def _always(form: Form) -> bool:
    return True


def _worth(layer: LayerInfo) -> Callable[[Form], bool]:
    """Whether a form saves multiply-adds or parameters; never at full rank, where it has at least those of dense."""

    def saves(form: Form) -> bool:
        return layer.macs_as(form) < layer.macs or layer.params_as(form) < layer.params

    return saves


def _grids(
    layer: LayerInfo, scalings: Iterable[str], step: int, equal: bool, worth: Callable[[Form], bool]
) -> tuple[Grid, ...]:
    """One grid per scaling, each without the settings of those before it."""
    found: list[Grid] = []
    for scaling in scalings:
        family, shrinks = SCALINGS[scaling]
        fulls = full_ranks(layer.shape, family)
        if all(shrinks) and len(shrinks) == 2 and not equal:
            grid = _plane(fulls, step, worth)
        else:
            settings = _line(fulls, shrinks, step)
            forms = (FORMS[family](*setting) for setting in settings)
            taken = [form for form in forms if worth(form) and not any(form in other for other in found)]
            grid = Grid.of(family, map(ranks, taken))
        found += [grid] if len(grid) else []
    return tuple(found)


def _line(fulls: tuple[int, ...], shrinks: tuple[bool, ...], step: int) -> list[tuple[int, ...]]:
    """Settings along one rank: it moves the modes that shrink together, up to the smallest of them."""
    multiples = _multiples(min(full for full, shrink in zip(fulls, shrinks, strict=True) if shrink), step)
    return [tuple(rank if shrink else full for full, shrink in zip(fulls, shrinks, strict=True)) for rank in multiples]


def _plane(fulls: tuple[int, ...], step: int, worth: Callable[[Form], bool]) -> Grid:
    """All settings of two ranks that are worth it, without looking at each: a layer may have millions.

    Costs grow with each rank as long as it is below its mode, so the settings that are worth it end at a line that
    falls, and walking along that line is enough. At full rank a 1×1 falls away, which makes it a case of its own.
    """
    full_out, full_in = fulls
    outer, inner = _multiples(full_out, step), _multiples(full_in, step)
    below = inner[:-1] if inner[-1] == full_in else inner
    runs: list[tuple[tuple[int, ...], Sequence[int]]] = []
    count = len(below)
    for rank_out in outer:
        if rank_out == full_out:
            count = len(below)
        while count and not worth(Tucker2(rank_out, below[count - 1])):
            count -= 1
        whole = inner[-1] == full_in and worth(Tucker2(rank_out, full_in))
        if whole and count == len(below):
            runs.append(((rank_out,), inner))
            continue
        runs += [((rank_out,), below[:count])] if count else []
        runs += [((rank_out,), (full_in,))] if whole else []
    return Grid(Tucker2.name, tuple(runs))


def _multiples(full: int, step: int) -> range:
    """The multiples of ``step`` up to ``full``, or just ``full`` where it is less than one step."""
    return range(min(step, full), full + 1, step)


def _measured_grids(
    layer: LayerInfo, scalings: Sequence[str], equal: bool, cost: Prices, tolerance: float
) -> tuple[Grid, ...]:
    """The edges of what ``cost`` has prices for, form by form; prices are sums over the layer's calls."""
    known = set.intersection(*(set(cost.forms_of(call)) for call in layer.calls))
    offered = {form for form in known if any(_offers(layer.shape, scaling, equal, form) for scaling in scalings)}
    if known != {Dense()} and not offered:
        raise CostError(
            f"there are no prices for layer {layer.name!r} as {' or '.join(scalings)}{' with equal ranks' * equal}; "
            "measure the layer on a fine grid of ranks first, or leave it out of names"
        )

    def price(form: Form) -> float:
        return sum(cost.price(call, form).value for call in layer.calls)

    dense = price(Dense())
    grids = []
    for family in dict.fromkeys(SCALINGS[scaling][0] for scaling in scalings):
        kept = edges({ranks(form): price(form) for form in offered if form.name == family}, dense, tolerance)
        grids += [Grid.of(family, kept)] if kept else []
    return tuple(grids)


def _offers(shape: Shape, scaling: str, equal: bool, form: Form) -> bool:
    """Whether ``form`` is a setting of ``scaling``: full where that does not shrink, equal ranks where they must be."""
    family, shrinks = SCALINGS[scaling]
    if form.name != family:
        return False
    own, fulls = ranks(form), full_ranks(shape, family)
    still = all(rank == full for rank, full, shrink in zip(own, fulls, shrinks, strict=True) if not shrink)
    moving = {rank for rank, shrink in zip(own, shrinks, strict=True) if shrink}
    return still and (len(moving) == 1 or not equal)


def _checked_forms(forms: Sequence[str]) -> list[str]:
    """The scalings asked for, each once, in the order of `SCALINGS`: two-sided Tucker-2 before the one-sided."""
    words = [forms] if isinstance(forms, str) else list(forms)
    for word in words:
        if word not in SCALINGS:
            raise SpecError(f"unknown form {word!r}, expected some of {', '.join(SCALINGS)}.{nearest(word, SCALINGS)}")
    return [scaling for scaling in SCALINGS if scaling in words]


def _checked_names(layers: Inventory, names: Iterable[str] | None) -> set[str]:
    known = [layer.name for layer in layers]
    chosen = known if names is None else [names] if isinstance(names, str) else list(names)
    for name in chosen:
        if name not in known:
            raise SpecError(f"there is no layer {name!r}.{nearest(name, known)}")
    return set(chosen)


def _checked_step(round_to: Any, cost: Prices | None) -> int | None:
    """The step as a number; None for the steps of the paper and for those that follow from prices."""
    if (round_to == "auto") != (cost is not None):
        raise SpecError('round_to="auto" and cost belong together: the ranks follow from measured prices')
    if round_to in ("paper", "auto"):
        return None
    if type(round_to) is int and round_to > 0:
        return round_to
    raise SpecError(f'round_to takes a positive whole number, "paper" or "auto", got {round_to!r}')
