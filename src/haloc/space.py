"""The ranks on offer: which settings every layer may take, and how many there are in all.

The paper's two design principles make a space that can be searched out of one that cannot. Principle 1: ranks are
multiples of a step that the hardware can feel. Principle 2: the two ranks of a Tucker-2 layer are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

from haloc.errors import SpecError
from haloc.forms import FORMS, Form, Tucker2, full_ranks
from haloc.inventory import Inventory
from haloc.shapes import Shape

#: Algorithm 1's steps for 16, 32, 64, 128, 256 and 512 channels; wider layers take the last.
STEPS = (4, 8, 16, 16, 32, 32)


@dataclass(frozen=True)
class LayerSpace:
    """The rank settings of one layer in one form.

    Attributes:
        family: The form's name.
        ranks: The ranks on offer along every mode (two for Tucker-2, one otherwise).
        equal: Whether the modes move together: the first rank of each, the second of each, and so on.
    """

    family: str
    ranks: tuple[tuple[int, ...], ...]
    equal: bool

    def __len__(self) -> int:
        return len(self.ranks[0]) if self.equal else prod(map(len, self.ranks))

    def __iter__(self) -> Iterator[Form]:
        settings = zip(*self.ranks, strict=True) if self.equal else product(*self.ranks)
        return (FORMS[self.family](*setting) for setting in settings)


@dataclass(frozen=True)
class RankSpace:
    """The rank settings of a network: one choice per layer."""

    layers: Mapping[str, LayerSpace]

    @property
    def size(self) -> int:
        """How many different networks the space holds, as an exact integer."""
        return prod(map(len, self.layers.values()))


def rank_space(
    layers: Inventory,
    *,
    form: str = Tucker2.name,
    round_to: int | str = "paper",
    equal: bool = True,
    names: Iterable[str] | None = None,
) -> RankSpace:
    """The rank settings of every layer that ``form`` is open to.

    Args:
        layers: What `inspect` returned.
        form: The form whose ranks are chosen.
        round_to: Ranks are multiples of this; "paper" takes the steps of its Algorithm 1, coarser for wider layers.
        equal: Principle 2, the two ranks of a Tucker-2 layer are the same.
        names: Only these layers.
    """
    chosen = set(names) if names is not None else {layer.name for layer in layers}
    open_layers = [layer for layer in layers if form in layer.families and layer.name in chosen]
    widest = max((full for layer in open_layers for full in full_ranks(layer.shape, form)), default=0)
    step = _checked_step(round_to)
    return RankSpace(
        {
            layer.name: _layer_space(layer.shape, form, step or paper_step(layer.shape, form, widest), equal)
            for layer in open_layers
        }
    )


def paper_step(shape: Shape, form: str, widest: int) -> int:
    """Algorithm 1's step: 4 throughout in networks narrower than 128 channels, otherwise by the layer's width."""
    if widest < 128:
        return STEPS[0]
    # The paper indexes its list with t/16 − 1; the list itself is in powers of two.
    doublings = (min(full_ranks(shape, form)) // 16).bit_length() - 1
    return STEPS[min(max(doublings, 0), len(STEPS) - 1)]


def _layer_space(shape: Shape, form: str, step: int, equal: bool) -> LayerSpace:
    fulls = full_ranks(shape, form)
    if equal:
        fulls = (min(fulls),) * len(fulls)
    return LayerSpace(form, tuple(tuple(range(min(step, full), full + 1, step)) for full in fulls), equal)


def _checked_step(round_to: int | str) -> int | None:
    if round_to == "paper":
        return None
    if isinstance(round_to, int) and round_to > 0:
        return round_to
    raise SpecError(f'round_to takes a positive whole number or "paper", got {round_to!r}')
