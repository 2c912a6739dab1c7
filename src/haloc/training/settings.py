"""How to train and how to recover accuracy: frozen values, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass, replace

from haloc.errors import SpecError, nearest
from haloc.training.schedule import SCHEDULES

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
OPTIMISERS = ("sgd", "adamw")
SPEEDS = ("auto", "eager", "graph", "compile")


@dataclass(frozen=True)
class TrainSettings:
    """What a training run is made of, apart from model, data and loss.

    Attributes:
        epochs: times the training data are gone through.
        lr: learning rate at its highest.
        optimiser: "sgd", or "adamw", which transformers and ConvNeXt are trained with, at a learning rate of about
            0.001 and a weight decay of about 0.05.
        momentum: Nesterov momentum of SGD; of AdamW how slowly gradients are forgotten.
        weight_decay: on weights alone; biases and the scales and shifts of normalisations go without.
        schedule: "cosine", "steps" (the paper's: ×``step_factor`` every ``step_epochs``) or "constant".
        warmup_epochs: epochs in which the learning rate rises from nearly nothing to ``lr``.
        step_epochs: epochs between the steps of "steps".
        step_factor: what the learning rate is multiplied by at each of them.
        precision: "fp32", "tf32", or mixed with "bf16" or "fp16".
        accumulate: parts in which a batch goes through the network, where memory is short. BatchNorm sees a part.
        channels_last: keep images as NHWC, which tensor cores like.
        ema: decay per step of a moving average of the weights, which is then evaluated and kept; 0 does without.
        minutes: stop after so much training time, with a checkpoint to go on from; None never stops.
        speed: "graph" captures the whole step as a CUDA graph, "compile" also compiles the network, "eager" does
            neither, "auto" is graph on CUDA and eager elsewhere. What cannot be done is logged and done eagerly.
        evaluate_every: epochs between evaluations; the last epoch is always evaluated.
        save_every_s: seconds between checkpoints, at the least; the end of the run is always saved.
        seed: decides dropout and the like; the order of the data hangs on the seed of the data.
    """

    epochs: int = 200
    lr: float = 0.1
    optimiser: str = "sgd"
    momentum: float = 0.9
    weight_decay: float = 5e-4
    schedule: str = "cosine"
    warmup_epochs: float = 5.0
    step_epochs: int = 55
    step_factor: float = 0.2
    precision: str = "fp32"
    accumulate: int = 1
    channels_last: bool = False
    ema: float = 0.0
    minutes: float | None = None
    speed: str = "auto"
    evaluate_every: int = 1
    save_every_s: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        known = {"optimiser": OPTIMISERS, "schedule": SCHEDULES, "precision": PRECISIONS, "speed": SPEEDS}
        for name, options in known.items():
            _require_known(name, getattr(self, name), options)
        for name in ("epochs", "accumulate", "step_epochs", "evaluate_every"):
            require(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        for name in ("momentum", "weight_decay", "warmup_epochs", "save_every_s"):
            require(name, getattr(self, name), getattr(self, name) >= 0, "0 or more")
        require("lr", self.lr, 0 < self.lr < float("inf"), "above 0")
        require("momentum", self.momentum, self.optimiser == "sgd" or self.momentum < 1, "below 1 for adamw")
        require("step_factor", self.step_factor, 0 < self.step_factor <= 1, "above 0 and at most 1")
        require("ema", self.ema, 0 <= self.ema < 1, "at least 0 and below 1")
        require("minutes", self.minutes, self.minutes is None or self.minutes > 0, "above 0, or None for no limit")
        require("seed", self.seed, 0 <= self.seed < 2**32, "from 0 to 2**32 - 1")


@dataclass(frozen=True)
class RecoverySettings:
    """What a factorised network learns from when it is fine-tuned, besides `TrainSettings`.

    Attributes:
        cross_entropy: weight of the cross-entropy with the labels, or of the user's own loss where there is one.
        distillation: weight of the divergence from the teacher's output: of classes, or where the user has a loss of
            their own, the mean square of the difference as a share of the output's.
        features: weight (the paper's λ) of the distance between the teacher's feature maps and the student's, layer
            by layer.
        temperature: softens both outputs in the distillation of classes.
        label_smoothing: share of the labels' probability that is spread over all classes, in the cross-entropy.
        norm_between: train with BatchNorms between the factors, which are multiplied into them at the end.
        recalibration: training images on which BatchNorm statistics are measured anew before the first step.
        pad_ranks: train with ranks padded to multiples of this by channels of zero, which stay zero and are cut off at
            the end: 8 suits GPUs in half precision. What is learnt stays the same, but for rounding.
    """

    cross_entropy: float = 0.1
    distillation: float = 0.9
    features: float = 0.0
    temperature: float = 4.0
    label_smoothing: float = 0.0
    norm_between: bool = True
    recalibration: int = 2048
    pad_ranks: int = 1

    def __post_init__(self) -> None:
        weights = (self.cross_entropy, self.distillation, self.features)
        if not all(weight >= 0 for weight in weights) or not any(weights):
            raise SpecError(f"the weights of the losses must be 0 or more and not all 0, got {weights}")
        if not self.temperature > 0:
            raise SpecError(f"temperature must be above 0, got {self.temperature}")
        if not 0 <= self.label_smoothing < 1:
            raise SpecError(f"label_smoothing must be at least 0 and below 1, got {self.label_smoothing}")
        if self.recalibration < 0:
            raise SpecError(f"recalibration must be 0 images or more, got {self.recalibration}")
        require("pad_ranks", self.pad_ranks, self.pad_ranks >= 1, "at least 1")

    def without_teacher(self) -> RecoverySettings:
        """The same where nobody teaches but the labels, which take the weight of both."""
        return replace(self, cross_entropy=self.cross_entropy + self.distillation, distillation=0.0)

    def with_the_loss_alone(self) -> RecoverySettings:
        """The same where nobody teaches but a loss of the user's own: it keeps its weight, if it has one."""
        return replace(self, cross_entropy=self.cross_entropy or self.distillation, distillation=0.0)


def _require_known(name: str, value: str, options: tuple[str, ...]) -> None:
    if value not in options:
        raise SpecError(f"there is no {name} {value!r}, expected one of {', '.join(options)}.{nearest(value, options)}")


def require(name: str, value: object, holds: bool, expected: str) -> None:
    """Refuses a setting that does not hold, in one sentence."""
    if not holds:
        raise SpecError(f"{name} must be {expected}, got {value}")


#: Training that suits a factorised network: it starts near its goal.
FINETUNING = TrainSettings(epochs=60, lr=0.05, weight_decay=1e-4, warmup_epochs=2.0)


#: What a network learns from where the user has a loss of their own. Its weight is 1 beside a distance that is a share,
#: so that a learning rate which suited the training suits the recovery.
OWN_LOSS = RecoverySettings(cross_entropy=1.0, distillation=1.0)


#: What may differ besides when a run goes on that has diverged.
GENTLER = ("lr", "warmup_epochs", "precision", "alpha_lr")


#: What may differ when a run goes on: it does not change what comes out.
FREE = ("minutes", "evaluate_every", "save_every_s")
