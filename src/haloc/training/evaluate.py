"""How good a network is on a loader: a classifier's accuracy, or the mean of a user's own loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from haloc.errors import DataError, ModelError
from haloc.factor.forward import call, device_of, evaluating, to_device
from haloc.training.feed import batch_size, inputs_and_targets
from haloc.training.objective import OwnLoss, logits_of, total
from haloc.training.session import Session


@dataclass(frozen=True)
class Accuracy:
    """What a classifier scored.

    Attributes:
        top1: Share of examples whose most likely class is right.
        top5: Share of examples whose class is among the five most likely.
        loss: Mean cross-entropy.
        count: Examples seen.
    """

    top1: float
    top5: float
    loss: float
    count: int


def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    on_batch: Callable[[int], None] | None = None,
    session: Session | None = None,
) -> Accuracy:
    """Runs a classifier over ``(inputs, labels)`` batches in eval mode and leaves it as it was.

    Args:
        model: Returns logits (batch, classes), or an object that has them as ``logits``.
        batches: A loader of pairs, or of dicts with the labels in them.
        on_batch: Called with the number of examples after each batch, for a progress bar.
        session: This process among several, each of which takes its part of the batches; all get the same figures.
    """
    device, session = device_of(model), session or Session()
    sums = torch.zeros(4, dtype=torch.float64, device=device)  # right, right among five, loss, examples
    with evaluating(model):
        for batch in islice(batches, session.shard.rank, None, session.shard.world):
            inputs, labels = inputs_and_targets(batch)
            logits = _logits(model, to_device(inputs, device))
            sums += _sums(logits, _checked(labels.to(device), logits))
            if on_batch is not None:
                on_batch(len(labels))
    right1, right5, loss, count = session.sum(sums).tolist()
    if count == 0:
        raise DataError("there is nothing to evaluate on: the loader gave no batch")
    return Accuracy(right1 / count, right5 / count, loss / count, int(count))


def mean_loss(model: nn.Module, batches: Iterable[Any], loss: OwnLoss, session: Session | None = None) -> float:
    """The mean of a user's own loss over all examples; the model runs in eval mode and is left as it was.

    Args:
        model: The network.
        batches: Whatever the loss takes.
        loss: It is weighted by the size of a batch.
        session: This process among several, each of which takes its part of the batches; all get the same figure.
    """
    device, session = device_of(model), session or Session()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, examples
    with evaluating(model):
        for batch in islice(batches, session.shard.rank, None, session.shard.world):
            value, size = total(loss.terms(model, to_device(batch, device))), batch_size(batch)
            sums += torch.stack([value.double() * size, value.new_tensor(size, dtype=torch.float64)])
    summed, count = session.sum(sums).tolist()
    if count == 0:
        raise DataError("there is nothing to evaluate on: the loader gave no batch")
    return float(summed / count)


def _sums(logits: Tensor, labels: Tensor) -> Tensor:
    hits = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
    loss = F.cross_entropy(logits, labels, reduction="sum")
    return torch.stack([hits[:, 0].sum(), hits.sum(), loss, hits.new_ones((), dtype=torch.float64) * len(labels)])


def _logits(model: nn.Module, inputs: Any) -> Tensor:
    logits = logits_of(call(model, inputs))
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        got = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise ModelError(f"evaluate expects a classifier's logits (batch, classes), got {got}")
    return logits.float()


def _checked(labels: Tensor, logits: Tensor) -> Tensor:
    """Refuses labels that the model has no class for."""
    if int(labels.max()) >= logits.shape[1]:
        raise ModelError(
            f"the data have a class {int(labels.max())}, but the model tells only {logits.shape[1]} classes apart; "
            "give the data set that the model was made for"
        )
    return labels
