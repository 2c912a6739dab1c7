"""The over-parameterised network of the paper's Step 1: every open layer with all its candidates, one of which runs."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from haloc.errors import HalocError, ModelError
from haloc.factor.calibrate import InputMoments
from haloc.factor.layers import Layer
from haloc.factor.modules import Factoriser, described_as
from haloc.factor.surgery import check_plan, replaced
from haloc.forms import Form
from haloc.space import RankSpace


class Choice(nn.Module):
    """The candidates of one layer (the paper's T_i, made of τ_ij), how likely each is, and the one that runs.

    Attributes:
        forms: What the candidates are, in order.
        candidates: The layer, written in each of the forms.
        alpha: p_i = softmax(α_i); all candidates are equally likely at first.
        active: The number of the candidate that runs.
        gated: Whether the output depends on α too, see `gated_output`.
    """

    def __init__(self, candidates: Mapping[Form, nn.Module]) -> None:
        super().__init__()
        self.forms = tuple(candidates)
        self.candidates = nn.ModuleList(candidates.values())
        device = next(self.candidates.parameters()).device
        self.alpha = nn.Parameter(torch.zeros(len(self.forms), device=device))
        self.active = 0
        self.gated = False

    @property
    def probabilities(self) -> Tensor:
        """p_i = softmax(α_i)."""
        return self.alpha.softmax(0)

    @property
    def best(self) -> int:
        """The number of the most probable candidate, the first of several: the end of the paper's Step 2."""
        return int(self.alpha.detach().cpu().numpy().argmax())

    def forward(self, input: Tensor) -> Tensor:
        """Runs the active candidate; where the gates are open, the others only tell what they would have said."""
        output: Tensor = self.candidates[self.active](input)
        if not self.gated:
            return output
        with torch.no_grad():
            answers = [output if j == self.active else tau(input) for j, tau in enumerate(self.candidates)]
        return gated_output(output, answers, self.probabilities)


def gated_output(output: Tensor, answers: Sequence[Tensor], probabilities: Tensor) -> Tensor:
    """The active candidate's output to the last bit, through which every probability gets its gradient.

    The paper does not say how α gets a gradient from a single path. Here the output is taken for Σ_j p_j τ_j(x), of
    which the path drawn is a sample: ∂L/∂p_j = ⟨∂L/∂y, τ_j(x)⟩. A gate on the active candidate alone would be cheaper,
    but says whether more of its output would do good, not whether another's would do better; and where a BatchNorm
    comes next, which undoes every scale, it says nothing at all.
    """
    for p, answer in zip(probabilities, answers, strict=True):
        output = output + (p - p.detach()) * answer.detach()  # in brackets a zero to the last bit
    return output


def supernet(model: nn.Module, space: RankSpace, moments: Mapping[str, InputMoments] | None = None) -> nn.Module:
    """A copy of the model with a `Choice` in the place of every open layer of the space.

    Args:
        model: The dense model; it is not changed.
        space: What its layers may become. Layers that must be left alone are refused as `apply_plan` refuses them.
        moments: What the layers' inputs look like, from `calibrate`, for candidates that start closer to the layer.
    """
    offers = space.open_layers
    layers = check_plan(model, {name: next(iter(offer.grids[0])) for name, offer in offers.items()})
    built = {name: _choice(name, layer, offers[name], moments) for name, layer in layers.items()}
    return replaced(copy.deepcopy(model), built)


def choices(network: nn.Module) -> dict[str, Choice]:
    """All choices by the names of their layers."""
    return {name: module for name, module in network.named_modules() if isinstance(module, Choice)}


def draw_paths(network: nn.Module, step: int, seed: int, stream: int = 0) -> None:
    """Makes one candidate of every choice the active one, each as likely as its probability.

    What is drawn hangs on ``(seed, step, stream)`` and the probabilities alone. So all processes of a run take the same
    path, and so does a run that goes on from a checkpoint, with nothing to be saved.
    """
    own = choices(network).values()
    draws = np.random.default_rng((seed, step, stream)).random(len(own))
    alphas = torch.cat([choice.alpha.detach() for choice in own]).cpu().double()  # one wait for the device, not many
    for choice, alpha, draw in zip(own, alphas.split([len(choice.forms) for choice in own]), draws, strict=True):
        below = int((alpha.softmax(0).cumsum(0) <= draw).sum())
        choice.active = min(below, len(choice.forms) - 1)  # the sum of all may fall short of 1 by a rounding


@contextmanager
def gates_open(network: nn.Module) -> Iterator[None]:
    """Inside the block the output depends on the alphas, and on them alone: weights ask for no gradient.

    They will not be stepped, and their gradients are half the work of going backwards.
    """
    own = choices(network).values()
    alphas = {id(choice.alpha) for choice in own}
    weights = [weight for weight in network.parameters() if weight.requires_grad and id(weight) not in alphas]
    _set(own, weights, gated=True)
    try:
        yield
    finally:
        _set(own, weights, gated=False)


def _set(own: Iterable[Choice], weights: Iterable[nn.Parameter], gated: bool) -> None:
    for choice in own:
        choice.gated = gated
    for weight in weights:
        weight.requires_grad = not gated


def _choice(name: str, layer: Layer, forms: Iterable[Form], moments: Mapping[str, InputMoments] | None) -> Choice:
    """Decomposes a layer once and writes it in each of the forms."""
    if moments is not None and name not in moments:
        raise ModelError(f"there is no calibration of layer {name!r}; calibrate all layers that are to be searched")
    try:
        factoriser = Factoriser(layer, None if moments is None else moments[name])
        choice = Choice({form: factoriser.build(form) for form in forms})
    except HalocError as error:
        raise ModelError(f"layer {name!r}: {error}") from error
    return described_as(layer, choice)
