"""What a search by method haloc is made of: frozen values, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from haloc.forms import FORMS, Dense
from haloc.methods.estimators import ESTIMATORS
from haloc.methods.losses import cooled, on_the_way
from haloc.training.settings import require

#: What the candidates' weights may be.
WEIGHTS = ("own", "shared")

#: What the probabilities may begin as.
STARTS = ("alike", "sensitivity")

#: How finalists may be tried.
TRIALS = ("taught", "finetuned")

#: Methods that may name a finalist: they need no training of their own. So may forms.
NOMINATING = ("sensitivity", "alds", "energy", "vbmf", "uniform")
NOMINATORS = (*NOMINATING, *(name for name in FORMS if name != Dense.name))


@dataclass(frozen=True)
class SearchSettings:
    """What a search is made of, besides `TrainSettings`. The paper gives none of these numbers.

    Attributes:
        gradient: How α gets its gradient: "all" candidates are asked, a "pair" is compared, the "single" path is gated,
            or a Gumbel-softmax "mixture" runs (see `haloc.methods.estimators`).
        weights: "own" for every candidate, or "shared": smaller ranks are parts of larger ones.
        eta: the paper's η, by which the loss on held-out data is multiplied throughout.
        theta: the paper's θ: how steeply a network over budget is penalised; 0 does without a penalty.
        one_sided: no reward for a network that is under the budget already; the printed equation has one.
        lam: the paper's λ, the weight of the distance to the feature maps of the uncompressed network.
        lam_end: where λ goes until the end, at a constant rate; None leaves it as it is.
        temperature: T in p = softmax(α / T), which is 1 in the paper: the higher, the more alike are all candidates.
        temperature_end: what T cools down to by the end. Cold, the mean cost that is held to the budget is that of the
            likeliest network; at 1, where all begin alike, a network of cheap candidates may be likeliest while the
            mean is made of dear ones.
        alpha_lr: learning rate of Adam on α.
        alpha_betas: Adam's decays. A short memory, since most of what moves α in a step hangs on the path taken.
        alpha_every: α takes a step after every so many steps of the weights; it asks all candidates and takes longer.
        warmup_epochs: epochs in which only weights learn, and probabilities stay as they begin.
        start: what the probabilities begin as: all "alike", as in the paper, or what the method "sensitivity" makes of
            the candidates, so that the first paths are good networks within the budget already.
        start_spread: for the latter, the entropy to begin with, as a share of the most that the budget allows.
        soft: the cross-entropy of the probabilities is taken against what the uncompressed network says, not labels;
            where the user has a loss of their own, the distance to its outputs takes that loss's place.
        rounds: how often, once the weights are trained, networks within the budget are drawn and run as a whole, and
            the probabilities moved towards the best of them; 0: not at all, as in the paper.
        networks: how many at once.
        images: held-out examples that they are run on, and finalists are judged on.
        finalists: how many plans are fine-tuned briefly in the end, from the one that the probabilities began with to
            the one they ended with; the best is taken. 0: the last is taken as it is, as in the paper.
        nominees: who names further finalists: each of these methods one, and each of these forms the best plan of that
            form alone, as the probabilities began.
        trial: how finalists are tried: "taught" by the uncompressed network alone, and judged by how near they come to
            it; or "finetuned" as the network will be in the end, which has to be known, and judged by the labels.
        trial_epochs: for how many epochs.
        moves: how often the best of them is changed, by exchanging ranks between layers as the network says that was
            fine-tuned, and tried again; the best is taken.
    """

    gradient: str = "all"
    weights: str = "shared"
    eta: float = 1.0
    theta: float = 2.0
    one_sided: bool = True
    lam: float = 0.1
    lam_end: float | None = None
    temperature: float = 1.0
    temperature_end: float = 1.0
    alpha_lr: float = 0.03
    alpha_betas: tuple[float, float] = (0.5, 0.999)
    alpha_every: int = 4
    warmup_epochs: int = 5
    start: str = "sensitivity"
    start_spread: float = 0.5
    soft: bool = False
    rounds: int = 0
    networks: int = 48
    images: int = 1024
    finalists: int = 0
    nominees: tuple[str, ...] = ()
    trial: str = "taught"
    trial_epochs: int = 4
    moves: int = 0

    def __post_init__(self) -> None:
        for name, known in (("gradient", ESTIMATORS), ("weights", WEIGHTS), ("start", STARTS), ("trial", TRIALS)):
            require(name, getattr(self, name), getattr(self, name) in known, f"one of {', '.join(known)}")
        for name in ("eta", "alpha_lr", "temperature", "temperature_end"):
            require(name, getattr(self, name), _between(getattr(self, name), 0, inf, open_below=True), "above 0")
        for name in ("theta", "lam"):
            require(name, getattr(self, name), _between(getattr(self, name), 0, inf), "0 or more")
        require("lam_end", self.lam_end, self.lam_end is None or _between(self.lam_end, 0, inf), "0 or more")
        whole = {"warmup_epochs": 0, "rounds": 0, "alpha_every": 1, "networks": 2, "images": 1}
        for name, least in {**whole, "finalists": 0, "trial_epochs": 1, "moves": 0}.items():
            value = getattr(self, name)
            require(name, value, type(value) is int and value >= least, f"a whole number, {least} or more")
        for name, none in (("moves", 0), ("nominees", ())):
            value = getattr(self, name)
            require(
                name, value, self.finalists > 0 or value == none, f"{none} where there are no finalists to begin with"
            )
        names = isinstance(self.nominees, tuple | list) and all(name in NOMINATORS for name in self.nominees)
        require("nominees", self.nominees, names, f"some of {', '.join(NOMINATORS)}")
        inside = _between(self.start_spread, 0, 1, open_below=True)
        require("start_spread", self.start_spread, inside, "between 0 and 1")
        pair = isinstance(self.alpha_betas, tuple | list) and len(self.alpha_betas) == 2
        decays = pair and all(_between(beta, 0, 1) for beta in self.alpha_betas)
        require("alpha_betas", self.alpha_betas, decays, "two numbers from 0 to below 1")

    def lam_at(self, progress: float) -> float:
        """λ at a part of the search."""
        return on_the_way(self.lam, self.lam if self.lam_end is None else self.lam_end, progress)

    def temperature_at(self, epoch: float, epochs: int) -> float:
        """T at a time of a search of so many epochs: it cools down from the end of the warm-up on."""
        progress = max(0.0, (epoch - self.warmup_epochs) / (epochs - self.warmup_epochs))
        return cooled(self.temperature, self.temperature_end, progress)


def _between(value: Any, low: float, high: float, open_below: bool = False) -> bool:
    """Whether it is a number from ``low`` to below ``high``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return low < value < high if open_below else low <= value < high
