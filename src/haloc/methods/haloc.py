"""The paper's search: weights and selection probabilities learn in turns, and every layer keeps its likeliest form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from haloc.cost.model import CostModel
from haloc.errors import SpecError
from haloc.factor.calibrate import InputMoments
from haloc.factor.forward import call, device_of
from haloc.forms import Form
from haloc.methods.losses import entropy, expected_cost, hardware_penalty, probability_loss, weight_terms
from haloc.methods.prices import PriceList
from haloc.methods.supernet import Choice, choices, draw_paths, gates_open, supernet
from haloc.plan import Plan
from haloc.space import RankSpace
from haloc.training.feed import Feed, as_feed
from haloc.training.loop import Outcome, fit
from haloc.training.objective import Loss, accuracy, cross_entropy, feature_map_loss, logits_of, onlooker, recording
from haloc.training.optimiser import sgd
from haloc.training.run import Progress, Validate
from haloc.training.schedule import learning_rate
from haloc.training.session import Session
from haloc.training.settings import TrainSettings, require
from haloc.training.step import Update

_CHANGES = "a search takes another path in every step"

#: The draws for weights and for probabilities: in the same step they take different paths.
_WEIGHTS, _PROBABILITIES = 1, 2


@dataclass(frozen=True)
class SearchSettings:
    """What a search is made of, besides `TrainSettings`. The paper gives none of these numbers.

    Attributes:
        eta: the paper's η, by which the cross-entropy on held-out data is multiplied throughout.
        theta: the paper's θ: how steeply a network over budget is penalised; 0 does without a penalty.
        one_sided: no reward for a network that is under the budget already; the printed equation has one.
        lam: the paper's λ, the weight of the distance to the feature maps of the uncompressed network.
        alpha_lr: learning rate of Adam on α.
        alpha_betas: Adam's decays. A short memory, since most of what moves α in a step hangs on the path taken.
        warmup_epochs: epochs in which only weights learn, and all candidates are equally likely.
    """

    eta: float = 1.0
    theta: float = 2.0
    one_sided: bool = True
    lam: float = 0.1
    alpha_lr: float = 0.01
    alpha_betas: tuple[float, float] = (0.5, 0.999)
    warmup_epochs: int = 5

    def __post_init__(self) -> None:
        for name in ("eta", "alpha_lr"):
            require(name, getattr(self, name), 0 < getattr(self, name) < float("inf"), "above 0")
        for name in ("theta", "lam", "warmup_epochs"):
            require(name, getattr(self, name), 0 <= getattr(self, name) < float("inf"), "0 or more")
        require("warmup_epochs", self.warmup_epochs, isinstance(self.warmup_epochs, int), "a whole number")
        require("alpha_betas", self.alpha_betas, all(0 <= beta < 1 for beta in self.alpha_betas), "from 0 to below 1")


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        plan: the most probable candidate of every open layer.
        probabilities: of all candidates, layer by layer.
        forms: what these candidates are.
        cost: what the network costs under the plan, in the cost model's unit. It may be over the budget, to which the
            search holds the expected cost, and that softly.
        budget: the budget in the same unit.
        history: a row of figures for every epoch; ``val_expected_cost`` and ``val_entropy`` (0 once all is decided) say
            how far the search has come.
        finished: whether all epochs were done; False when the time was up.
    """

    plan: Plan
    probabilities: Mapping[str, Sequence[float]]
    forms: Mapping[str, Sequence[Form]]
    cost: float
    budget: float
    history: list[dict[str, Any]]
    finished: bool


def search(
    model: nn.Module,
    space: RankSpace,
    cost: CostModel,
    budget: float,
    *,
    train: Any,
    val: Any,
    settings: SearchSettings | None = None,
    training: TrainSettings | None = None,
    moments: Mapping[str, InputMoments] | None = None,
    folder: str | Path | None = None,
    resume: bool = True,
    session: Session | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> SearchResult:
    """Chooses a form for every open layer of a space by the paper's differentiable search.

    Every step draws a path through the over-parameterised network and updates its weights by L_weight on a training
    batch; then it draws another and updates all selection probabilities by L_prob on a held-out batch.

    Args:
        model: The trained dense network, on the device to search on; it is not changed.
        space: What its layers may become, from `rank_space`.
        cost: Prices every candidate: a measured table, a predictor or a count.
        budget: What all layers may cost together, in the unit of ``cost``; below 1, the share of what they cost now.
        train: Training batches: a data set's ``batches(…)``, or any loader of ``(inputs, targets)``.
        val: Held-out batches, shuffled, for the probabilities; not what the result will be judged by.
        settings: What to search by.
        training: How the weights are trained, and for how long.
        moments: From `calibrate`, for candidates that start closer to the network.
        folder: Where checkpoints and logs go; without it nothing is written.
        resume: Go on from the folder's newest checkpoint, if there is one.
        session: This process among several, from `join_session`.
        on_progress: Called every few steps, for a progress bar.
    """
    settings, training = settings or SearchSettings(), training or TrainSettings()
    _check(space, settings, training)
    prices = PriceList.of(space, cost)
    limit = prices.budget(budget)
    network = supernet(model, space, moments)
    hardware = Hardware(_costs(network, prices), prices.rest, limit, settings)
    outcome = fit(
        network,
        [
            path_update(network, onlooker(model, training), as_feed(train), settings, training),
            probabilities_update(network, hardware, as_feed(val), settings, training),
        ],
        training,
        validate=_figures(hardware),
        folder=folder,
        resume=resume,
        config=_config(prices, limit, settings),
        session=session,
        on_progress=on_progress,
    )
    return _result(choices(network), prices, limit, outcome)


@dataclass(frozen=True, eq=False)
class WeightObjective:
    """L_weight (Eq. child_loss) of the active path, against the feature maps of the uncompressed network."""

    original: nn.Module
    layers: tuple[str, ...]
    lam: float

    def __call__(self, model: nn.Module, inputs: Any, targets: Tensor) -> Loss:
        """Returns both terms; feature maps that weigh nothing are not computed."""
        with recording(model, self.layers if self.lam else ()) as maps:
            logits = logits_of(call(model, inputs))
        plain = cross_entropy(logits, targets)
        terms = weight_terms(plain, self._approach(maps, inputs), self.lam) if maps else {"cross_entropy": plain}
        return Loss(terms, accuracy(logits, targets))

    def _approach(self, maps: Mapping[str, Tensor], inputs: Any) -> Tensor:
        """L_approach (Eq. min_interfere)."""
        with torch.no_grad(), recording(self.original, maps) as original:
            call(self.original, inputs)
        return feature_map_loss(maps.values(), [original[name] for name in maps])


@dataclass(frozen=True, eq=False)
class Hardware:
    """What the hardware makes of the selection probabilities.

    Attributes:
        costs: M_ij, layer by layer, on the device.
        rest: What the layers with nothing to choose cost.
        budget: ε, for all layers together.
        settings: η, θ and which sides the penalty has.
    """

    costs: tuple[Tensor, ...]
    rest: float
    budget: float
    settings: SearchSettings

    def expected(self, probabilities: Sequence[Tensor]) -> Tensor:
        """What the whole network costs in the mean over all paths."""
        return self.rest + expected_cost(probabilities, self.costs)

    def penalty(self, probabilities: Sequence[Tensor]) -> Tensor:
        """The factor of Eq. nas_2."""
        own = self.settings
        return hardware_penalty(self.expected(probabilities), self.budget, own.eta, own.theta, own.one_sided)


@dataclass(frozen=True, eq=False)
class ProbabilityObjective:
    """L_prob (Eq. nas_2) of the active path."""

    hardware: Hardware

    def __call__(self, model: nn.Module, inputs: Any, targets: Tensor) -> Loss:
        """Returns the one term, whose gradient reaches the alphas alone."""
        with gates_open(model):
            logits = logits_of(call(model, inputs))
        penalty = self.hardware.penalty(_probabilities(model))
        return Loss({"penalised": probability_loss(cross_entropy(logits, targets), penalty)}, accuracy(logits, targets))


def path_update(
    network: nn.Module, original: nn.Module, feed: Feed, settings: SearchSettings, training: TrainSettings
) -> Update:
    """SGD on the weights of the path drawn; candidates that did not run have no gradient and stay as they are."""
    own = choices(network)
    return Update(
        "weights",
        feed,
        WeightObjective(original, tuple(own), settings.lam),
        sgd(network, training, skip=_alphas(network)),
        learning_rate(training),
        before_step=partial(draw_paths, network, seed=training.seed, stream=_WEIGHTS),
        changes=_CHANGES,
    )


def probabilities_update(
    network: nn.Module, hardware: Hardware, feed: Feed, settings: SearchSettings, training: TrainSettings
) -> Update:
    """Adam on the alphas of all layers, once the weights have had their warm-up."""
    return Update(
        "alpha",
        feed,
        ProbabilityObjective(hardware),
        torch.optim.Adam(_alphas(network), settings.alpha_lr, settings.alpha_betas),
        lambda epoch: settings.alpha_lr,
        from_epoch=settings.warmup_epochs,
        before_step=partial(draw_paths, network, seed=training.seed, stream=_PROBABILITIES),
        changes=_CHANGES,
    )


def _alphas(network: nn.Module) -> list[nn.Parameter]:
    return [choice.alpha for choice in choices(network).values()]


def _probabilities(network: nn.Module) -> list[Tensor]:
    return [choice.probabilities for choice in choices(network).values()]


def _costs(network: nn.Module, prices: PriceList) -> tuple[Tensor, ...]:
    """The prices in the order of the network's choices, which need not be that of the space."""
    rows = (prices.prices[name] for name in choices(network))
    return tuple(torch.tensor(row, dtype=torch.float32, device=device_of(network)) for row in rows)


def _figures(hardware: Hardware) -> Validate:
    """What is told of the probabilities after an epoch."""

    @torch.no_grad()
    def figures(network: nn.Module) -> dict[str, float]:
        own = _probabilities(network)
        return {"expected_cost": float(hardware.expected(own)), "entropy": float(entropy(own))}

    return figures


def _config(prices: PriceList, budget: float, settings: SearchSettings) -> dict[str, Any]:
    """What decides a search besides its training, for a checkpoint to compare."""
    forms = {name: [str(form) for form in row] for name, row in prices.forms.items()}
    return {"search": asdict(settings), "budget": budget, "candidates": forms, "prices": prices.prices}


def _result(own: Mapping[str, Choice], prices: PriceList, budget: float, outcome: Outcome) -> SearchResult:
    plan = Plan({name: choice.forms[choice.best] for name, choice in own.items()})
    probabilities = {name: choice.probabilities.tolist() for name, choice in own.items()}
    return SearchResult(
        plan, probabilities, prices.forms, prices.cost_of(plan), budget, outcome.history, outcome.finished
    )


def _check(space: RankSpace, settings: SearchSettings, training: TrainSettings) -> None:
    """Refuses searches in which nothing would be found."""
    if not space.open_layers:
        raise SpecError("the space has nothing to choose from: no layer has another form than dense on offer")
    if settings.warmup_epochs >= training.epochs:
        raise SpecError(
            f"warmup_epochs must be below the {training.epochs} epochs of the search, got {settings.warmup_epochs}: "
            "the probabilities would learn nothing"
        )
    if training.ema:
        raise SpecError(f"a search keeps no moving average, ema must be 0, got {training.ema}")
