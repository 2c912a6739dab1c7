"""The over-parameterised network of the paper's Step 1: every open layer with all its candidates, one of which runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from haloc.errors import HalocError, ModelError
from haloc.factor.calibrate import InputMoments
from haloc.factor.forward import copied
from haloc.factor.layers import Layer
from haloc.factor.modules import Factoriser, described_as
from haloc.factor.surgery import check_plan, replaced
from haloc.forms import Form
from haloc.space import RankSpace


class Choice(nn.Module):
    """The candidates of one layer (the paper's T_i, made of τ_ij), how likely each is, and the one that runs.

    Attributes:
        forms: What the candidates are, in order.
        alpha: p_i = softmax(α_i / T); all candidates are equally likely at first.
        start: The logarithms of the probabilities that a search began with, but for a constant.
        trace: The probabilities at the end of each epoch, in a row; those to come are NaN.
        active: The number of the candidate that runs.
        other: The number of a second one, drawn from the rest.
        noise: The Gumbel noise that both were drawn with.
        temperature: T, which is 1 in the paper: the higher, the more alike are all candidates.
        estimate: Where it is set, what runs in the place of the active candidate so that α gets a gradient.
    """

    alpha: nn.Parameter
    start: Tensor
    trace: Tensor

    def __init__(self, forms: Iterable[Form], device: torch.device) -> None:
        super().__init__()
        self.forms = tuple(forms)
        self.alpha = nn.Parameter(torch.zeros(len(self.forms), device=device))
        self.register_buffer("start", torch.zeros_like(self.alpha.data))
        self.register_buffer("trace", torch.empty(0, len(self.forms), device=device))
        self.active = self.other = 0
        self.noise = np.zeros(len(self.forms))
        self.temperature = 1.0
        self.estimate: Callable[[Choice, Tensor], Tensor] | None = None
        self._chances: Tensor | None = None

    @property
    def probabilities(self) -> Tensor:
        """p_i = softmax(α_i / T)."""
        return (self.alpha / self.temperature).softmax(0) if self._chances is None else self._chances

    def keep_probabilities(self, keep: bool) -> None:
        """Computes the probabilities now and no more until they are to be let go of: a step asks for them twice."""
        self._chances = None
        self._chances = self.probabilities if keep else None

    @property
    def log_probabilities(self) -> Tensor:
        """The logarithms, in double: even what is next to impossible has one."""
        return (self.alpha.detach().double() / self.temperature).log_softmax(0)

    def answer(self, number: int, input: Tensor) -> Tensor:
        """What a candidate makes of an input."""
        raise NotImplementedError

    def products(self, input: Tensor, grad: Tensor, numbers: Sequence[int]) -> Tensor:
        """⟨grad, what a candidate makes of the input⟩, for each of the candidates."""
        answers = (self.answer(number, input) for number in numbers)
        return torch.stack([(grad * answer).sum(dtype=torch.float32) for answer in answers])

    def forward(self, input: Tensor) -> Tensor:
        """Runs the active candidate, or what the estimator of α makes of all."""
        return self.answer(self.active, input) if self.estimate is None else self.estimate(self, input)


class OwnWeights(Choice):
    """Candidates that have nothing in common: each is the layer in its form, with weights of its own."""

    def __init__(self, candidates: Mapping[Form, nn.Module]) -> None:
        modules = nn.ModuleList(candidates.values())
        super().__init__(candidates, next(modules.parameters()).device)
        self.candidates = modules

    @classmethod
    def of(cls, factoriser: Factoriser, forms: Iterable[Form]) -> OwnWeights:
        """Writes a layer in each of the forms."""
        return cls({form: factoriser.build(form) for form in forms})

    def answer(self, number: int, input: Tensor) -> Tensor:
        """Runs that candidate."""
        output: Tensor = self.candidates[number](input)
        return output


class Alone(nn.Module):
    """One candidate of a choice as a layer of its own; the weights stay the choice's, and as they are."""

    def __init__(self, choice: Choice, form: Form) -> None:
        super().__init__()
        self._answer = partial(choice.answer, choice.forms.index(form))
        described_as(choice, self)

    def forward(self, input: Tensor) -> Tensor:
        """Runs that candidate."""
        return self._answer(input)


Build = Callable[[Factoriser, Iterable[Form]], Choice]


def supernet(
    model: nn.Module,
    space: RankSpace,
    moments: Mapping[str, InputMoments] | None = None,
    build: Build = OwnWeights.of,
) -> nn.Module:
    """A copy of the model with a `Choice` in the place of every open layer of the space.

    Args:
        model: The dense model; it is not changed.
        space: What its layers may become. Layers that must be left alone are refused as `apply_plan` refuses them.
        moments: What the layers' inputs look like, from `calibrate`, for candidates that start closer to the layer.
        build: Makes the choice of one layer: candidates with weights of their own, or with shared ones.
    """
    offers = space.open_layers
    layers = check_plan(model, {name: next(iter(offer.grids[0])) for name, offer in offers.items()})
    built = {name: _choice(name, layer, offers[name], moments, build) for name, layer in layers.items()}
    network = replaced(copied(model), built)
    _KNOWN[network] = _Parts(choices(network), tuple(network.parameters()))
    return network


@dataclass(frozen=True, eq=False)
class _Parts:
    """What every step asks for: to walk through thousands of modules for it would take longer than the step."""

    choices: Mapping[str, Choice]
    parameters: tuple[nn.Parameter, ...]


_KNOWN: WeakKeyDictionary[nn.Module, _Parts] = WeakKeyDictionary()


def choices(network: nn.Module) -> Mapping[str, Choice]:
    """All choices by the names of their layers."""
    if network in _KNOWN:
        return _KNOWN[network].choices
    return {name: module for name, module in network.named_modules() if isinstance(module, Choice)}


def draw_paths(network: nn.Module, step: int, seed: int, stream: int = 0, temperature: float = 1.0) -> None:
    """Makes one candidate of every choice the active one, each as likely as its probability.

    By the Gumbel trick: the largest of α/T plus noise is a draw from softmax(α/T), and the next largest one from what
    is left. What is drawn hangs on ``(seed, step, stream)``, T and the alphas alone. So all processes of a run take the
    same path, and so does a run that goes on from a checkpoint, with nothing to be saved.
    """
    set_temperature(network, temperature)
    own = list(choices(network).values())
    alphas = torch.cat([choice.alpha.detach() for choice in own]).cpu().double().numpy()  # one wait for the device
    noise = np.random.default_rng((seed, step, stream)).gumbel(size=len(alphas))
    ends = np.cumsum([len(choice.forms) for choice in own])[:-1]
    for choice, alpha, gumbel in zip(own, np.split(alphas, ends), np.split(noise, ends), strict=True):
        order = np.argsort(-(alpha / temperature + gumbel), kind="stable")
        choice.active, choice.other = int(order[0]), int(order[min(1, len(order) - 1)])
        choice.noise = gumbel


def set_temperature(network: nn.Module, temperature: float) -> None:
    """Sets T everywhere."""
    for choice in choices(network).values():
        choice.temperature = temperature


@contextmanager
def gates_open(network: nn.Module, estimate: Callable[[Choice, Tensor], Tensor]) -> Iterator[None]:
    """Inside the block the output depends on the alphas, and on them alone: weights ask for no gradient.

    They will not be stepped, and their gradients are half the work of going backwards.
    """
    own = choices(network).values()
    alphas = {id(choice.alpha) for choice in own}
    parameters = _KNOWN[network].parameters if network in _KNOWN else network.parameters()
    weights = [weight for weight in parameters if weight.requires_grad and id(weight) not in alphas]
    _set(own, weights, estimate)
    try:
        yield
    finally:
        _set(own, weights, None)


def make_room(network: nn.Module, epochs: int) -> None:
    """Makes room for noting the probabilities ``epochs`` times; a checkpoint then holds what was noted."""
    for choice in choices(network).values():
        choice.trace = choice.alpha.new_full((epochs, len(choice.forms)), float("nan"))


def note_probabilities(network: nn.Module) -> None:
    """Notes the probabilities of this moment."""
    for choice in choices(network).values():
        choice.trace[len(noted(choice))] = choice.probabilities.detach()


def noted(choice: Choice) -> Tensor:
    """What was noted so far, a row each time."""
    return choice.trace[~choice.trace[:, 0].isnan()]


def _set(own: Iterable[Choice], weights: Sequence[nn.Parameter], estimate: Callable[..., Tensor] | None) -> None:
    for choice in own:
        choice.estimate = estimate
        choice.keep_probabilities(estimate is not None)
    for weight in weights:
        weight.requires_grad = estimate is None


def _choice(
    name: str, layer: Layer, forms: Iterable[Form], moments: Mapping[str, InputMoments] | None, build: Build
) -> Choice:
    """Decomposes a layer once and writes it in each of the forms."""
    if moments is not None and name not in moments:
        raise ModelError(f"there is no calibration of layer {name!r}; calibrate all layers that are to be searched")
    try:
        choice = build(Factoriser(layer, None if moments is None else moments[name]), forms)
    except HalocError as error:
        raise ModelError(f"layer {name!r}: {error}") from error
    return described_as(layer, choice)
