"""A network on trial: a copy in which layers take any of their forms, and the examples that it is run on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from haloc.errors import HalocError, ModelError, SpecError
from haloc.factor.forward import call, describe, device_of, inputs_of, module_at, to_device
from haloc.factor.layers import plain_layer
from haloc.factor.modules import Factoriser
from haloc.factor.surgery import check_plan, replaced, skeleton
from haloc.forms import Dense, Form
from haloc.methods.replay import behind
from haloc.methods.task import Task
from haloc.training.feed import as_feed, batch_size, check_feed, parts
from haloc.training.objective import distillation, logits_of, total
from haloc.training.outputs import distance

#: Inputs and targets; where the user has a loss of their own, inputs and the whole batch.
Batch = tuple[Any, Any]

#: ``(outputs, original outputs, targets) -> a scalar``: how far the ones are from the others.
Divergence = Callable[[Any, Any, Any], Tensor]


class Trials:
    """A working copy of a task's network, in eval mode, whose open layers change their form from one run to the next.

    Candidates are made when they are first asked for, each layer decomposed once, and kept.

    Args:
        task: Whose network it is; that itself is not changed.
        batch_statistics: BatchNorms take mean and variance from the batch at hand, as they come out when they are
            measured anew once a plan is in effect.
    """

    def __init__(self, task: Task, *, batch_statistics: bool = False) -> None:
        offers = {name: tuple(offer) for name, offer in task.space.open_layers.items()}
        check_plan(task.model, {name: forms[-1] for name, forms in offers.items()})
        self._network = skeleton(task.model, {}).eval().requires_grad_(False)
        if batch_statistics:
            take_statistics_from_batches(self._network)
        self._offers, self._moments, self._candidate = offers, task.moments, task.candidate
        self._loss = task.own_loss
        self._dense = {name: plain_layer(module_at(self._network, name), name) for name in offers}
        self._factorisers = {name: self._factoriser(name) for name in offers}
        self._built: dict[str, dict[Form, nn.Module]] = {name: {} for name in offers}
        self._forms: dict[str, Form] = {name: Dense() for name in offers}

    def put(self, plan: Mapping[str, Form]) -> None:
        """Writes the layers that the plan names in its forms; all others stay as they are."""
        new = {name: form for name, form in plan.items() if self._forms[name] != form}
        self._network = replaced(self._network, {name: self._module(name, form) for name, form in new.items()})
        self._forms.update(new)

    @torch.no_grad()
    def outputs(self, inputs: Any) -> Any:
        """What the network says now."""
        return call(self._network, inputs)

    def logits(self, inputs: Any) -> Tensor:
        """What a classifier says now, in float32."""
        outputs = self.outputs(inputs)
        if not has_logits(outputs):
            raise ModelError(
                f"expected logits (batch, classes, …) as the model's output, got {describe(logits_of(outputs))}; "
                "for a network that puts out something else give loss="
            )
        return logits_of(outputs).float()

    @torch.no_grad()
    def loss(self, batch: Any) -> Tensor:
        """What the user's own loss says of a whole batch now."""
        if self._loss is None:
            raise SpecError("there is no loss of the user's own")
        return total(self._loss.terms(self._network, batch))

    @contextmanager
    def behind(self, name: str, run: Callable[[], Any]) -> Iterator[None]:
        """Inside the block the network runs as in ``run`` alone, and only that layer changes; so it is quicker."""
        with behind(self._network, self._module(name, self._forms[name]), run):
            yield

    def forget(self, name: str) -> None:
        """Writes a layer dense again and lets go of its candidates and decompositions, for the memory they take."""
        self.put({name: Dense()})
        self._built[name].clear()
        self._factorisers[name] = self._factoriser(name)

    def errors(self, name: str) -> tuple[float, ...]:
        """The relative error of each candidate of a layer on its own; see `Factoriser.error`."""
        return tuple(
            0.0 if isinstance(form, Dense) else self._factorisers[name].error(form) for form in self._offers[name]
        )

    def _module(self, name: str, form: Form) -> nn.Module:
        if isinstance(form, Dense):
            return self._dense[name]
        built = self._built[name]
        if form not in built:
            make = self._candidate or (lambda name, form: self._factorisers[name].build(form))
            built[form] = make(name, form).eval().requires_grad_(False)
        return built[form]

    def _factoriser(self, name: str) -> Factoriser:
        if self._moments is not None and name not in self._moments:
            raise ModelError(f"there is no calibration of layer {name!r}; calibrate all layers that are to be searched")
        try:
            return Factoriser(self._dense[name], None if self._moments is None else self._moments[name])
        except HalocError as error:
            raise ModelError(f"layer {name!r}: {error}") from error


def take_statistics_from_batches(network: nn.Module) -> None:
    """Lets BatchNorms go by the batch at hand, as they come out when they are measured anew for a plan."""
    for module in network.modules():
        if isinstance(module, _BatchNorm):
            module.train()
            module.momentum = 0.0  # what the batches are like is not kept


def examples(task: Task, count: int) -> list[Batch]:
    """The first ``count`` held-out examples, or all there are, in batches on the model's device.

    Where nothing is held out, they are training examples. One that is left over for the last batch is left out: a
    BatchNorm has no statistics of one.
    """
    whole = task.loss is not None or task.inputs is not None
    feed, device = as_feed(task.train if task.val is None else task.val, whole), device_of(task.model)
    check_feed(feed, 1, 1)
    found: list[Batch] = []
    missing = count
    for raw in feed.raw(0):
        if found and min(missing, batch_size(raw)) == 1:
            break
        batch, targets = feed.prepare(to_device(parts(raw, slice(missing)), device))
        found.append(((task.inputs or inputs_of)(batch), batch) if whole else (batch, targets))
        missing -= batch_size(raw)
        if missing <= 0:
            break
    return found


def has_logits(outputs: Any) -> bool:
    """Whether they look like a classifier's: one tensor of real numbers with an axis of classes, or named so."""
    logits = logits_of(outputs)
    return isinstance(logits, Tensor) and logits.dim() >= 2 and logits.is_floating_point()


def divergence(task: Task, temperature: float) -> Divergence:
    """How outputs are compared: as classes, or by their distance where the user has a loss of their own.

    What looks like classes may then be something else.
    """
    if task.loss is None:
        return of_classes(temperature)
    return lambda outputs, original, targets: distance(outputs, original)


def of_classes(temperature: float) -> Divergence:
    """The divergence of class probabilities; what does not look like classes is compared by its distance."""

    def apart(outputs: Any, original: Any, targets: Any) -> Tensor:
        if not has_logits(original):
            return distance(outputs, original)
        rows, before = (class_rows(logits_of(said).float(), targets) for said in (outputs, original))
        return distillation(rows, before, temperature)

    return apart


def class_rows(logits: Tensor, targets: Any) -> Tensor:
    """Logits as rows of classes, which are the second axis, or the last one where the targets say so, as of tokens."""
    tokens = isinstance(targets, Tensor) and logits.dim() > 2 and targets.shape == logits.shape[:-1]
    return (logits if tokens else logits.movedim(1, -1)).flatten(0, -2)
