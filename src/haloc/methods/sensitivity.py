"""Every candidate priced by how much the network's output changes when that layer alone is replaced; then a knapsack.

The plan has the least sum of these losses. That takes the layers' errors to add up, as errors do that are small and
have nothing to do with each other. Losses measured around a network that is compressed already were no better on
ResNet-20: what one layer's error does then hangs on the errors of the others, and the next network has other ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import inf, isfinite
from typing import Any

from torch import Tensor

from haloc.errors import SpecError
from haloc.factor.forward import describe
from haloc.forms import Dense, Form
from haloc.methods.evidence import Evidence
from haloc.methods.notes import fingerprint, notes
from haloc.methods.task import Method, Task
from haloc.methods.trials import Batch, Trials, class_rows, divergence, examples
from haloc.training.feed import batch_size
from haloc.training.objective import cross_entropy
from haloc.training.settings import require

MEASURES = ("kl", "loss")

#: ``(batch) -> answer`` and ``(answer, answer of the uncompressed network, batch) -> what was lost``.
Run = Callable[[Batch], Any]
Compare = Callable[[Any, Any, Batch], float]


@dataclass(frozen=True)
class SensitivitySettings:
    """How the change of the output is measured.

    Attributes:
        images: examples that the network is run on with every candidate.
        measure: "kl", the divergence of the output from the uncompressed network's: of classes, or where the user has
            a loss of their own or the output is no tensor of classes, the mean square of the difference as a share of
            the output's; or "loss", how much the loss grows, the user's own or the cross-entropy with the labels.
        temperature: softens both outputs for "kl" of classes. At 1 a few examples that the network is in doubt about
            decide; the higher it is, the more all classes of all examples have their say, and the fewer examples it
            takes.
    """

    images: int = 192
    measure: str = "kl"
    temperature: float = 4.0

    def __post_init__(self) -> None:
        require("images", self.images, type(self.images) is int and self.images >= 1, "a whole number from 1")
        require("measure", self.measure, self.measure in MEASURES, f"one of {', '.join(MEASURES)}")
        require("temperature", self.temperature, 0 < self.temperature < inf, "above 0")


def find(task: Task, settings: SensitivitySettings) -> Evidence:
    """Measures all candidates, layer by layer; what was measured in an earlier run is not measured again."""
    offers = {name: tuple(offer) for name, offer in task.space.open_layers.items()}
    batches, trials = examples(task, settings.images), Trials(task, batch_statistics=True)
    run, compare = _measure(task, settings, trials)
    work = _Work(trials, run, compare, batches, [run(batch) for batch in batches])
    done, total = 0, len(batches) * sum(map(len, offers.values()))
    losses: dict[str, tuple[float, ...]] = {}

    def step() -> None:
        nonlocal done
        done += 1
        task.step(done, total)

    of = {**asdict(settings), "task": fingerprint(task, batches)}
    with notes(task, METHOD.name, of) as (rows, note):
        known = {row["layer"]: row["losses"] for row in rows}
        for name, forms in offers.items():
            if name in known:
                losses[name] = tuple(inf if loss is None else float(loss) for loss in known[name])
                done += len(batches) * len(forms)
                continue
            losses[name] = work.losses(name, forms, step)
            note({"layer": name, "losses": losses[name]})
    return Evidence(METHOD.name, task.space, losses, settings=asdict(settings))


def _measure(task: Task, settings: SensitivitySettings, trials: Trials) -> tuple[Run, Compare]:
    """What is asked of the network for a batch, and how much of it an answer has lost."""
    if settings.measure == "kl":
        apart = divergence(task, settings.temperature)
        return lambda batch: trials.outputs(batch[0]), lambda now, before, batch: float(apart(now, before, batch[1]))
    if task.loss is not None:
        return lambda batch: trials.loss(batch[1]), lambda now, before, batch: float(now - before)
    return lambda batch: trials.logits(batch[0]), _grown


def _grown(logits: Tensor, original: Tensor, batch: Batch) -> float:
    """How much the cross-entropy has grown."""
    _, targets = batch
    if not isinstance(targets, Tensor):
        raise SpecError(
            f"measure 'loss' needs targets that are a tensor of classes, got {describe(targets)}; give loss=, or take "
            "measure 'kl'"
        )
    rows, before = (class_rows(said, targets) for said in (logits, original))
    return float(cross_entropy(rows, targets.flatten()) - cross_entropy(before, targets.flatten()))


@dataclass(frozen=True, eq=False)
class _Work:
    """The network, what it is asked and how answers are compared, and what it says uncompressed."""

    trials: Trials
    run: Run
    compare: Compare
    batches: Sequence[Batch]
    expected: Sequence[Any]

    def losses(self, name: str, forms: Sequence[Form], step: Callable[[], None]) -> tuple[float, ...]:
        """The mean change of the output over all examples, for each of a layer's forms."""
        sums = dict.fromkeys(forms, 0.0)
        for batch, expected in zip(self.batches, self.expected, strict=True):
            with self.trials.behind(name, partial(self.run, batch)):
                for form in forms:
                    if not isinstance(form, Dense):
                        self.trials.put({name: form})
                        sums[form] += self.compare(self.run(batch), expected, batch) * batch_size(batch)
                    step()
                self.trials.put({name: Dense()})
        self.trials.forget(name)
        count = sum(map(batch_size, self.batches))
        return tuple(change / count if isfinite(change) else inf for change in sums.values())


METHOD = Method(
    "sensitivity",
    "least sum of what the network's output loses when each layer is replaced on its own",
    find,
    SensitivitySettings,
    needs=("val|train",),
)
