"""The methods' own settings as options, each with the method's name before it.

The classes themselves live beside their methods and wait for torch; a test holds these to them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from haloc.cli.groups import Group
from haloc.errors import SpecError

if TYPE_CHECKING:
    from haloc.methods.task import Method

#: Settings that hold unless their option says the contrary.
DENIED = {"two_sided": "one_sided"}


def _option(text: str, default: object, metavar: str | None = None) -> Any:
    return typer.Option(help=text, show_default=str(default), metavar=metavar)


def _flag(name: str, text: str) -> Any:
    """An option that is given or not: one that can be denied takes up the room of two."""
    return typer.Option(name, help=text, show_default=False)


@dataclass(frozen=True)
class HalocOptions:
    """`haloc.SearchSettings`."""

    haloc_gradient: Annotated[str | None, _option("How α gets its gradient: all, pair, single or mixture.", "all")] = (
        None
    )
    haloc_weights: Annotated[
        str | None, _option("own for every candidate, or shared between the ranks of a layer.", "shared")
    ] = None
    haloc_eta: Annotated[float | None, _option("The paper's η: what the cross-entropy is multiplied by.", 1.0)] = None
    haloc_theta: Annotated[
        float | None, _option("The paper's θ: how steeply a network over budget is penalised; 0: not.", 2.0)
    ] = None
    haloc_two_sided: Annotated[
        bool | None, _flag("--haloc-two-sided", "Reward networks under the budget, as the printed equation does.")
    ] = None
    haloc_lam: Annotated[
        float | None, _option("The paper's λ: weight of the distance to the dense network's feature maps.", 0.1)
    ] = None
    haloc_lam_end: Annotated[float | None, _option("Where λ goes until the end.", "as it is")] = None
    haloc_temperature: Annotated[float | None, _option("T in p = softmax(α / T).", 1.0)] = None
    haloc_temperature_end: Annotated[float | None, _option("What T cools down to by the end.", 1.0)] = None
    haloc_alpha_lr: Annotated[float | None, _option("Learning rate of Adam on α.", 0.03)] = None
    haloc_alpha_betas: Annotated[tuple[float, float] | None, _option("Adam's decays.", "0.5 0.999", "A B")] = None
    haloc_alpha_every: Annotated[
        int | None, _option("Steps of the weights between two steps of the probabilities.", 4)
    ] = None
    haloc_warmup_epochs: Annotated[int | None, _option("Epochs in which only weights learn.", 5)] = None
    haloc_start: Annotated[
        str | None, _option("What the probabilities begin as: sensitivity, or alike.", "sensitivity")
    ] = None
    haloc_start_spread: Annotated[
        float | None, _option("With sensitivity: the entropy to begin with, as a share of all alike.", 0.5)
    ] = None
    haloc_soft: Annotated[
        bool | None, _flag("--haloc-soft", "Probabilities learn from the dense network's answers, not from labels.")
    ] = None
    haloc_rounds: Annotated[
        int | None, _option("At the end, rounds of networks drawn within the budget and run as a whole; 0: none.", 0)
    ] = None
    haloc_networks: Annotated[int | None, _option("Networks of such a round.", 48)] = None
    haloc_images: Annotated[
        int | None, _option("Held-out images that they are run on, and finalists judged on.", 1024)
    ] = None
    haloc_finalists: Annotated[
        int | None, _option("Plans that are fine-tuned briefly in the end, of which the best is taken; 0: none.", 0)
    ] = None
    haloc_nominees: Annotated[
        list[str] | None, _option("Another finalist, named by this method or of this form alone; repeat it.", "")
    ] = None
    haloc_trial: Annotated[
        str | None,
        _option("How they are tried: taught by the dense network, or finetuned (haloc compress).", "taught"),
    ] = None
    haloc_trial_epochs: Annotated[int | None, _option("For how many epochs.", 4)] = None
    haloc_moves: Annotated[
        int | None, _option("How often the best of them exchanges ranks between its layers and is tried again.", 0)
    ] = None


@dataclass(frozen=True)
class SensitivityOptions:
    """`haloc.methods.sensitivity.SensitivitySettings`."""

    sensitivity_images: Annotated[int | None, _option("Images that every candidate is tried on.", 192)] = None
    sensitivity_measure: Annotated[
        str | None, _option("kl: divergence from the dense network; loss: growth of the cross-entropy.", "kl")
    ] = None
    sensitivity_temperature: Annotated[float | None, _option("Softens both outputs for kl.", 4.0)] = None


@dataclass(frozen=True)
class GeneticOptions:
    """`haloc.methods.genetic.GeneticSettings`."""

    genetic_population: Annotated[int | None, _option("Networks of a generation.", 24)] = None
    genetic_generations: Annotated[int | None, _option("How many generations there are.", 20)] = None
    genetic_images: Annotated[int | None, _option("Held-out images that every network is run on.", 256)] = None
    genetic_mutation: Annotated[float | None, _option("How likely a layer is to change by chance.", 0.1)] = None
    genetic_seed: Annotated[int | None, _option("Decides everything that is drawn.", 0)] = None


@dataclass(frozen=True)
class LcOptions:
    """`haloc.methods.lc.LcSettings`."""

    lc_rounds: Annotated[int | None, _option("Times that ranks are chosen anew.", 30)] = None
    lc_mu: Annotated[float | None, _option("Weight of the distance to low rank at the start.", 0.001)] = None
    lc_mu_end: Annotated[float | None, _option("Its weight at the end.", 1.0)] = None


@dataclass(frozen=True)
class RandomOptions:
    """`haloc.methods.random.RandomSettings`."""

    random_seed: Annotated[int | None, _option("Decides the draw.", 0)] = None


#: The options of every method that has any.
PANELS: dict[str, type] = {
    "haloc": HalocOptions,
    "sensitivity": SensitivityOptions,
    "genetic": GeneticOptions,
    "lc": LcOptions,
    "random": RandomOptions,
}

HalocGroup = Annotated[HalocOptions, Group("--method haloc")]
SensitivityGroup = Annotated[SensitivityOptions, Group("--method sensitivity")]
GeneticGroup = Annotated[GeneticOptions, Group("--method genetic")]
LcGroup = Annotated[LcOptions, Group("--method lc")]
RandomGroup = Annotated[RandomOptions, Group("--method random")]


def settings_for(method: Method, groups: Iterable[Any]) -> Any:
    """What the method is told, from the options that are its own; those of other methods are refused."""
    told = {name: value for group in groups for name, value in asdict(group).items() if value is not None}
    prefix = f"{method.name}_"
    for name in told:
        if not name.startswith(prefix):
            owner = name.partition("_")[0]
            raise SpecError(f"--{name.replace('_', '-')} is a setting of method {owner!r}, not of {method.name!r}")
    own = {name.removeprefix(prefix): value for name, value in told.items()}
    own = {name: tuple(value) if isinstance(value, list) else value for name, value in own.items()}
    own |= {DENIED[name]: not own.pop(name) for name in DENIED if name in own}
    return None if method.settings is None else method.settings(**own)
