"""How good a network is that was tried: by what the uncompressed one says, or by labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from haloc.errors import SpecError
from haloc.factor.forward import call
from haloc.methods.task import Task
from haloc.methods.trials import Batch, Divergence, class_rows, has_logits
from haloc.training.feed import batch_size
from haloc.training.objective import logits_of, total

#: How bad a network is, in the mode that it is in.
Judge = Callable[[nn.Module], float]


def by_original(original: nn.Module, apart: Divergence, held_out: Sequence[Batch]) -> Judge:
    """How far a network's answers are from the uncompressed one's."""

    @torch.no_grad()
    def judge(network: nn.Module) -> float:
        return _mean(
            [float(apart(call(network, inputs), call(original, inputs), targets)) for inputs, targets in held_out],
            held_out,
        )

    return judge


def by_labels(task: Task, held_out: Sequence[Batch]) -> Judge:
    """What a network's answers are worth: the user's own loss, or the cross-entropy of a classifier's, calibrated."""
    own = task.own_loss

    @torch.no_grad()
    def judge(network: nn.Module) -> float:
        if own is not None:
            return _mean([float(total(own.terms(network, whole))) for _, whole in held_out], held_out)
        said = [(_rows(call(network, inputs), targets), targets) for inputs, targets in held_out]
        return calibrated_loss(torch.cat([rows for rows, _ in said]), torch.cat([each.flatten() for _, each in said]))

    return judge


def _rows(outputs: object, targets: object) -> Tensor:
    labelled = isinstance(targets, Tensor) and not targets.is_floating_point()
    if not labelled or not has_logits(outputs):
        raise SpecError(
            "finalists are judged by labels, which are whole numbers beside logits here; give loss=, or try them with "
            'trial="taught"'
        )
    return class_rows(logits_of(outputs).float(), targets)


def calibrated_loss(logits: Tensor, targets: Tensor) -> float:
    """The cross-entropy at the temperature that suits it best: what answers tell, however sure they sound.

    Networks that fit their training examples more closely are surer of themselves, also where they are wrong. That is
    mended by one number, and says nothing of which of them is right more often.
    """
    low, high = -3.0, 3.0  # of the logarithm of what logits are multiplied by; in that, there is one least value

    def loss(exponent: float) -> float:
        return float(F.cross_entropy(logits * 2.0**exponent, targets))

    if not isfinite(loss(0.0)):
        return float("inf")
    for _ in range(_NARROWED):
        third = (high - low) / 3
        low, high = (low, high - third) if loss(low + third) < loss(high - third) else (low + third, high)
    return loss((low + high) / 2)


#: Each time a third of the range goes; what is left does not change a loss by a millionth.
_NARROWED = 20


def _mean(values: Sequence[float], held_out: Sequence[Batch]) -> float:
    """Over all examples; no number is as bad as can be."""
    sizes = [batch_size(batch) for batch in held_out]
    found = sum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)
    return found if isfinite(found) else float("inf")
