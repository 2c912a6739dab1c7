"""Candidates that share their weights: a smaller rank is the first channels of a larger one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from haloc.factor.layers import Layer
from haloc.factor.modules import Factoriser
from haloc.forms import FORMS, Dense, Form, full_ranks, ranks, stages
from haloc.methods.supernet import Choice
from haloc.shapes import LinearShape, Shape


@dataclass(frozen=True)
class Part:
    """Where a candidate is found: in which chain, and how many channels of each of its layers it uses, per group."""

    chain: int
    widths: tuple[tuple[int, int], ...]


class SharedWeights(Choice):
    """One chain of layers for every kind of form, at the largest rank on offer, of which all smaller ranks are parts.

    So the memory hangs on the kinds of forms, not on the number of candidates, and what one rank learns the others
    learn too. The factors are ordered at first (`Factoriser.build(nested=True)`), so that parts are good factors.
    """

    def __init__(self, forms: Iterable[Form], chains: Iterable[nn.Module], parts: Iterable[Part]) -> None:
        layers = [nn.ModuleList(chain if isinstance(chain, nn.Sequential) else [chain]) for chain in chains]
        super().__init__(forms, next(layers[0].parameters()).device)
        self.chains = nn.ModuleList(layers)
        self.parts = tuple(parts)

    @classmethod
    def of(cls, factoriser: Factoriser, forms: Iterable[Form]) -> SharedWeights:
        """Writes a layer in the largest form of each kind."""
        forms = tuple(forms)
        kinds: dict[tuple[str, ...], list[Form]] = {}
        for form in forms:
            kinds.setdefault(_kind(factoriser.shape, form), []).append(form)
        numbers = {form: number for number, members in enumerate(kinds.values()) for form in members}
        chains = [factoriser.build(_largest(members), nested=True) for members in kinds.values()]
        return cls(forms, chains, [Part(numbers[form], _widths(factoriser.shape, form)) for form in forms])

    def answer(self, number: int, input: Tensor) -> Tensor:
        """Runs the part of a chain that the candidate is."""
        part = self.parts[number]
        for layer, widths in zip(cast(Iterable[Layer], self.chains[part.chain]), part.widths, strict=True):
            input = _narrowed(layer, input, *widths)
        return input


def _kind(shape: Shape, form: Form) -> tuple[str, ...]:
    """What forms of one chain have in common: the family, and which of its layers are left out."""
    fulls = full_ranks(shape, form.name) if not isinstance(form, Dense) else ()
    return (form.name, *("full" if rank == full else "low" for rank, full in zip(ranks(form), fulls, strict=True)))


def _largest(forms: Iterable[Form]) -> Form:
    """The form that has every other one of its kind as a part."""
    forms = list(forms)
    return FORMS[forms[0].name](*map(max, zip(*map(ranks, forms), strict=True)))


def _widths(shape: Shape, form: Form) -> tuple[tuple[int, int], ...]:
    return tuple(_channels(stage) for stage in stages(shape, form))


def _channels(stage: Shape) -> tuple[int, int]:
    """Outputs and inputs, per group."""
    if isinstance(stage, LinearShape):
        return stage.out_features, stage.in_features
    return stage.group_out, stage.group_in


def _narrowed(layer: Layer, input: Tensor, width_out: int, width_in: int) -> Tensor:
    """The layer with the first channels of every group alone; only layers at the end of a chain have a bias."""
    weight = layer.weight
    groups = 1 if isinstance(layer, nn.Linear) else layer.groups
    if weight.shape[0] > width_out * groups or weight.shape[1] > width_in:
        weight = weight.unflatten(0, (groups, -1))[:, :width_out, :width_in].flatten(0, 1)
    if isinstance(layer, nn.Linear):
        return F.linear(input, weight, layer.bias)
    output: Tensor = layer._conv_forward(input, weight, layer.bias)
    return output
