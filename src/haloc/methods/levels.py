"""What the methods that look at one layer after the other share: the level of every candidate, the ranks as shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from haloc.errors import HalocError, ModelError
from haloc.factor.calibrate import InputMoments
from haloc.factor.layers import Layer
from haloc.factor.surgery import check_plan
from haloc.forms import Dense, Form, Tucker2, full_ranks, ranks
from haloc.methods.evidence import Evidence
from haloc.methods.task import Task
from haloc.shapes import Shape

#: Finds a number for each candidate of a layer, the less the better; 0 for dense.
Look = Callable[[Layer, Sequence[Form], InputMoments | None], Sequence[float]]


def level_evidence(method: str, task: Task, look: Look, **found: Any) -> Evidence:
    """Looks at every open layer in turn; the plan will have all of them at one level, the lowest that can be paid for.

    Args:
        method: The method's name.
        task: Layers and candidates.
        look: What the method thinks of a layer's candidates.
        found: What else is to be kept in the evidence.
    """
    offers = {name: tuple(offer) for name, offer in task.space.open_layers.items()}
    layers = check_plan(task.model, {name: _changed(forms)[0] for name, forms in offers.items()})
    losses: dict[str, tuple[float, ...]] = {}
    for number, (name, layer) in enumerate(layers.items(), start=1):
        try:
            losses[name] = tuple(look(layer, offers[name], _moments(task, name)))
        except HalocError as error:
            raise ModelError(f"layer {name!r}: {error}") from error
        task.step(number, len(layers))
    return Evidence(method, task.space, losses, "largest", **found)


def standard(shape: Shape, forms: Sequence[Form]) -> tuple[Form, ...]:
    """Those of a layer's forms that "Tucker" means where nothing else is said: its first form, narrow on both sides.

    Forms that are full on one side alone are among them only where the layer has no others.
    """
    changed = _changed(forms)
    first = [form for form in changed if form.name == changed[0].name]
    return tuple(form for form in first if not _one_sided(shape, form)) or tuple(first)


def shortfall(shape: Shape, form: Form) -> float:
    """How much of its full rank a form lacks, as a share; of two ranks the larger one.

    Not the mean of both: what one rank lacks would be made up for by the other, and where ranks may differ, the
    cheapest form of a given mean is as lopsided as can be.
    """
    if isinstance(form, Dense):
        return 0.0
    return max(1 - rank / full for rank, full in zip(ranks(form), full_ranks(shape, form.name), strict=True))


def _changed(forms: Sequence[Form]) -> list[Form]:
    return [form for form in forms if not isinstance(form, Dense)]


def _one_sided(shape: Shape, form: Form) -> bool:
    full = [rank == full for rank, full in zip(ranks(form), full_ranks(shape, form.name), strict=True)]
    return isinstance(form, Tucker2) and any(full) and not all(full)


def _moments(task: Task, name: str) -> InputMoments | None:
    if task.moments is not None and name not in task.moments:
        raise ModelError("there is no calibration of it; calibrate all layers that are to be searched")
    return None if task.moments is None else task.moments[name]
