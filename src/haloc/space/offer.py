"""`rank_space`: what every layer of a network may become."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from haloc.errors import SpecError, nearest
from haloc.forms import FORMS, SCALINGS, Form, Tucker2, full_ranks, ranks
from haloc.inventory import Inventory, LayerInfo
from haloc.space.grids import Grid, LayerChoices, RankSpace
from haloc.space.ratio import along, paper_step, ratio_settings, widths
from haloc.space.stairs import TOLERANCE, Prices, measured_grids


def rank_space(
    layers: Inventory,
    *,
    forms: Sequence[str] = ("tucker2", "svd"),
    round_to: int | str = "paper",
    equal: bool = True,
    names: Iterable[str] | None = None,
    dense: bool = True,
    ratio: float | None = None,
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
        ratio: The share of the parameters that is to remain, the paper's 1/α. Then only ranks near those that leave
            this share of each layer are on offer (Algorithm 1). It has pairs of equal ranks and pairs scaled with the
            channels, so both are there whatever ``equal`` says.
        cost: For ``round_to="auto"``, a table measured on a fine grid of ranks.
        tolerance: For ``round_to="auto"``, see `staircase`.
    """
    scalings = _checked_forms(forms)
    chosen = _checked_names(layers, names)
    step = _checked_step(round_to, cost)
    _check_ratio(ratio, cost)
    open_layers = [layer for layer in layers if layer.name in chosen and _open(layer, scalings)]
    widest = max((width for layer in open_layers for width in widths(layer.shape)), default=0)

    def grids(layer: LayerInfo) -> tuple[Grid, ...]:
        own = _open(layer, scalings)
        if cost is not None:
            return measured_grids(layer, own, equal, cost, tolerance)
        multiple = step or paper_step(layer.shape, widest)
        return _grids(layer, own, multiple, equal, ratio, worth=_worth(layer) if dense else _always)

    # Networks repeat their layers, and what is on offer follows from the calls.
    found = {layer.calls: grids(layer) for layer in {layer.calls: layer for layer in open_layers}.values()}
    choices = {layer.name: LayerChoices(layer.calls) for layer in layers if layer.calls}
    for layer in open_layers:
        offer = found[layer.calls]
        choices[layer.name] = LayerChoices(layer.calls, offer, dense or not offer)
    return RankSpace(choices, _outside(layers, choices))


def _outside(layers: Inventory, choices: Mapping[str, LayerChoices]) -> dict[str, int]:
    """What of the network is in none of the shapes: a layer's weights count once, its multiply-adds call by call."""
    # From the shapes, as prices are: a parametrised layer has other parameters than those its shape tells of.
    macs = sum(call.macs for layer in choices.values() for call in layer.calls)
    params = sum(layer.calls[0].params for layer in choices.values())
    return {"macs": layers.macs - macs, "params": layers.params - params}


def _open(layer: LayerInfo, scalings: Sequence[str]) -> list[str]:
    """Those of the scalings that are open to a layer."""
    return [scaling for scaling in scalings if SCALINGS[scaling][0] in layer.families and layer.calls]


def _always(form: Form) -> bool:
    return True


def _worth(layer: LayerInfo) -> Callable[[Form], bool]:
    """Whether a form saves multiply-adds or parameters; never at full rank, where it has at least those of dense."""

    def saves(form: Form) -> bool:
        return layer.macs_as(form) < layer.macs or layer.params_as(form) < layer.params

    return saves


def _grids(
    layer: LayerInfo,
    scalings: Iterable[str],
    step: int,
    equal: bool,
    ratio: float | None,
    worth: Callable[[Form], bool],
) -> tuple[Grid, ...]:
    """One grid per scaling, each without the settings of those before it."""
    found: list[Grid] = []
    for scaling in scalings:
        family, shrinks = SCALINGS[scaling]
        fulls = full_ranks(layer.shape, family)
        if all(shrinks) and len(shrinks) == 2 and not equal and ratio is None:
            grid = _plane(fulls, step, worth)
        else:
            settings = ratio_settings(layer.shape, scaling, ratio, step) if ratio else _line(fulls, shrinks, step)
            forms = (FORMS[family](*setting) for setting in settings)
            taken = [form for form in forms if worth(form) and not any(form in other for other in found)]
            grid = Grid.of(family, map(ranks, taken))
        found += [grid] if len(grid) else []
    return tuple(found)


def _line(fulls: tuple[int, ...], shrinks: tuple[bool, ...], step: int) -> list[tuple[int, ...]]:
    """Settings along one rank: it moves the modes that shrink together, up to the smallest of them."""
    multiples = _multiples(min(full for full, shrink in zip(fulls, shrinks, strict=True) if shrink), step)
    return [along(fulls, shrinks, rank) for rank in multiples]


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


def _check_ratio(ratio: Any, cost: Prices | None) -> None:
    if ratio is None:
        return
    if cost is not None:
        raise SpecError('ratio and round_to="auto" exclude each other: the ranks follow from the one or from the other')
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise SpecError(f"ratio is the share of the parameters that is to remain, above 0 and at most 1; got {ratio!r}")
