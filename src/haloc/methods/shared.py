"""Candidates that share their weights: a smaller rank is the first channels of a larger one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
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

    places: Tensor

    def __init__(self, forms: Iterable[Form], chains: Iterable[nn.Module], parts: Iterable[Part]) -> None:
        layers = [nn.ModuleList(chain if isinstance(chain, nn.Sequential) else [chain]) for chain in chains]
        super().__init__(forms, next(layers[0].parameters()).device)
        self.chains = nn.ModuleList(layers)
        self.parts = tuple(parts)
        places = torch.tensor(_places([_layers(chain) for chain in layers], self.parts), device=self.alpha.device)
        self.register_buffer("places", places, persistent=False)

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
        for layer, widths in zip(_layers(self.chains[part.chain]), part.widths, strict=True):
            input = _narrowed(layer, input, *widths)
        return input

    def products(self, input: Tensor, grad: Tensor, numbers: Sequence[int]) -> Tensor:
        """⟨grad, what a candidate makes of the input⟩; where all are asked for, all ranks of a chain at once."""
        if tuple(numbers) != tuple(range(len(self.forms))):
            return super().products(input, grad, numbers)
        return torch.cat([_sums_of_parts(_layers(chain), input, grad) for chain in self.chains])[self.places]


def _layers(chain: nn.Module) -> Sequence[Layer]:
    return cast(Sequence[Layer], chain)


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
    weight, groups = layer.weight, _groups(layer)
    if weight.shape[1] > width_in:
        weight = weight[:, :width_in]
    if weight.shape[0] > width_out * groups:
        weight = weight.unflatten(0, (groups, -1))[:, :width_out].flatten(0, 1) if groups > 1 else weight[:width_out]
    return _with_weight(layer, input, weight, layer.bias)


def _sums_of_parts(layers: Sequence[Layer], input: Tensor, grad: Tensor) -> Tensor:
    """⟨grad, output⟩ of the chain cut down to every number of channels that its second layer may have.

    That product is linear in the second layer's weight, so it is the sum of weight times gradient over that layer, and
    over the channels that are left of it where the chain is cut down.

    Returns:
        A row, where `_places` finds the parts.
    """
    if len(layers) == 1:
        output = _with_weight(layers[0], input, layers[0].weight, layers[0].bias)
        return (grad * output).sum(dtype=torch.float32)[None]
    first, second, *rest = layers
    hidden = _with_weight(first, input, first.weight)
    behind = _back(rest[0], grad) if rest else grad
    shares = (second.weight * _slope(second, hidden, behind)).unflatten(0, (_groups(second), -1))
    taps = range(3, shares.dim())
    channels = shares.sum(dim=(0, *taps) if rest else (0, 1, *taps))
    sums: Tensor = channels.cumsum(0).cumsum(1).flatten() if rest else channels.cumsum(0)
    bias = layers[-1].bias
    return sums if bias is None else sums + (_per_channel(layers[-1], grad) * bias).sum()


def _places(chains: Sequence[Sequence[Layer]], parts: Sequence[Part]) -> list[int]:
    """Where the sum of each part stands in the rows of all chains.

    The second of two layers has all its outputs whatever the rank: there is a sum for every number of its inputs. The
    second of three has one for every number of outputs, each with every number of inputs.
    """
    shapes = [_sizes(chain[1]) if len(chain) > 1 else (1, 1) for chain in chains]
    rows = [outputs if len(chain) == 3 else 1 for chain, (outputs, _) in zip(chains, shapes, strict=True)]
    starts = [0, *accumulate(count * inputs for count, (_, inputs) in zip(rows, shapes, strict=True))]

    def place(part: Part) -> int:
        if len(part.widths) == 1:
            return 0
        outputs, inputs = part.widths[1]
        return (outputs - 1 if rows[part.chain] > 1 else 0) * shapes[part.chain][1] + inputs - 1

    return [starts[part.chain] + place(part) for part in parts]


def _sizes(layer: Layer) -> tuple[int, int]:
    """Outputs and inputs of a group."""
    return layer.weight.shape[0] // _groups(layer), layer.weight.shape[1]


def _back(layer: Layer, grad: Tensor) -> Tensor:
    """The gradient before the last of three layers, which looks at single places with stride 1."""
    channels = layer.weight.shape[1] * _groups(layer)
    before = grad.new_empty(grad.shape[0], channels, *grad.shape[2:])  # for its shape alone
    return _backwards(layer, grad, before, layer.weight.to(grad.dtype), layer.padding, (True, False))[0]


def _slope(layer: Layer, input: Tensor, grad: Tensor) -> Tensor:
    """The gradient of ⟨grad, output⟩ by the layer's weight. The output is not computed."""
    if isinstance(layer, nn.Linear):
        return grad.reshape(-1, grad.shape[-1]).T @ input.reshape(-1, input.shape[-1])
    shape = layer.weight.new_empty(layer.weight.shape, dtype=grad.dtype)
    padding = layer.padding
    if layer.padding_mode != "zeros" or isinstance(padding, str):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        input, padding = F.pad(input, layer._reversed_padding_repeated_twice, mode), (0,) * len(layer.stride)
    # Autocast may pad in float32.
    return _backwards(layer, grad, input.to(grad.dtype), shape, padding, (False, True))[1]


def _backwards(
    layer: Any, grad: Tensor, input: Tensor, weight: Tensor, padding: Any, wanted: tuple[bool, bool]
) -> Sequence[Tensor]:
    """The gradients of a convolution by its input and its weight."""
    found: Sequence[Tensor] = torch.ops.aten.convolution_backward(
        grad, input, weight, None, layer.stride, padding, layer.dilation, False, [0] * len(layer.stride), layer.groups,
        [*wanted, False],
    )  # fmt: skip
    return found


def _per_channel(layer: Layer, grad: Tensor) -> Tensor:
    """Summed over everything but the channels that a bias belongs to."""
    channels = grad if isinstance(layer, nn.Linear) else grad.movedim(1, -1)
    return channels.reshape(-1, channels.shape[-1]).sum(0, dtype=torch.float32)


def _groups(layer: Layer) -> int:
    return 1 if isinstance(layer, nn.Linear) else layer.groups


def _with_weight(layer: Layer, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if isinstance(layer, nn.Linear):
        return F.linear(input, weight, bias)
    output: Tensor = layer._conv_forward(input, weight, bias)
    return output
