"""`narrow`: a network with fewer hidden channels, chosen and made up for by what it says to some inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from haloc.errors import DataError, ModelError, SpecError
from haloc.factor.forward import batch_size, call, copied, device_of, evaluating, mapped, to_device
from haloc.factor.inspect import inspect
from haloc.factor.response import DAMPING
from haloc.inventory import Inventory
from haloc.methods.budget import share_or_amount
from haloc.methods.notes import Row, noted, tensors_digest
from haloc.narrowing.choose import choose_widths, filled_in
from haloc.narrowing.find import hidden_channels
from haloc.narrowing.hidden import Channels
from haloc.narrowing.interpolate import DAMPINGS, Order
from haloc.narrowing.latency import WidthCost
from haloc.narrowing.looks import Seen, seen_by
from haloc.narrowing.rotate import Basis
from haloc.narrowing.surgery import Known, narrowed_of, take
from haloc.training.feed import parts
from haloc.training.outputs import distance
from haloc.training.settings import require

#: ``(steps done, steps in all)``.
Step = Callable[[int, int], None]


@dataclass(frozen=True)
class NarrowSettings:
    """How a network is narrowed.

    Attributes:
        round_to: Widths are multiples of this, or what they were.
        images: Inputs that show what the channels look like.
        tried: Those of them, half at most, that the network is run on to see how much it minds the narrowing of each
            group. Meanwhile they are held out.
        positions: From every input at most this many places of a feature map are looked at, at random.
    """

    round_to: int = 8
    images: int = 1000
    tried: int = 256
    positions: int = 256

    def __post_init__(self) -> None:
        for name in ("round_to", "images", "tried", "positions"):
            value = getattr(self, name)
            require(name, value, type(value) is int and value >= 1, "a whole number from 1")


def narrow(
    model: nn.Module,
    example_inputs: Any,
    batches: Sequence[Any],
    *,
    budget: Mapping[str, str | float],
    cost: WidthCost | None = None,
    settings: NarrowSettings | None = None,
    folder: str | Path | None = None,
    on_step: Step | None = None,
) -> nn.Module:
    """A copy of the network with fewer hidden channels; no labels are needed, and nothing is trained.

    In every group of hidden channels those go first that the others can stand in for best. How many go where is decided
    by what the network's answers lose.

    Args:
        model: The dense network; it is not changed.
        example_inputs: What it takes.
        batches: Inputs of the model in batches, a few hundred examples or more.
        budget: What is to remain: ``{"macs": "85%"}``, ``{"params": "60%"}``, ``{"latency": "70%"}`` or ``"4 ms"``, or
            several of them.
        cost: For a budget of latency, what `measure_widths` found out.
        settings: How.
        folder: Where it is noted how much the network minds; the same network, inputs and settings go on from there,
            for another budget too.
        on_step: Called after every group.

    Raises:
        BudgetError: not even the fewest channels are few enough.
        ModelError: the model has no hidden channels that could be found.
    """
    told = settings or NarrowSettings()
    if narrowed_of(model):
        raise ModelError("the network has been narrowed before; narrow the original once, to what is to remain")
    hidden = hidden_channels(model, example_inputs)
    if not hidden:
        raise ModelError(
            "the network has no channels that only one layer makes and only one reads, or torch.export cannot follow it"
        )
    layers = inspect(model, example_inputs)
    limits = _limits(budget, layers, hidden, cost)
    inputs = _laid_out(to_device(_some(batches, max(told.images, told.tried)), device_of(model)))
    learnt, judged = _held_out(inputs, told.tried)
    seen = seen_by(model, hidden, learnt, judged, told.positions)
    with ExitStack() as stack:
        known, note = _notes(stack, folder, model, inputs, told)
        losses = _losses(model, hidden, seen, judged, known, note, on_step)
    widths = choose_widths(layers, hidden, losses, limits, told.round_to, cost)
    network = copied(model)
    for group in hidden:
        if widths[group.consumer] < group.width:
            take(network, group, *seen.in_all(group, widths[group.consumer]))
    return network


def _limits(
    budget: Mapping[str, str | float], layers: Inventory, hidden: Sequence[Channels], cost: WidthCost | None
) -> dict[str, float]:
    """What may remain, as numbers."""
    if not budget:
        raise SpecError('how narrow is it to become? Give a budget, as in {"macs": "85%"}')
    if cost is not None and "latency" not in budget:
        raise SpecError(f"there is a cost of latency and no budget for it, only for {', '.join(budget)}")
    if cost is not None and (cost.hidden, cost.layers) != (tuple(hidden), layers):
        raise SpecError("the cost of widths is of another network, or of other inputs; measure those of this one")
    whole: dict[str, float] = {"macs": layers.macs, "params": layers.params}
    for name in budget:
        if name not in (*whole, "latency"):
            raise SpecError(
                f"a network is narrowed to a share of its {', '.join(whole)} or latency, got a budget of {name!r}"
            )
    if "latency" in budget:
        if cost is None:
            raise SpecError("a budget of latency needs cost=measure_widths(…), which says what widths take on a target")
        whole["latency"] = cost.of({}).value
    units = {"latency": "ms"}
    return {name: share_or_amount(wanted, name, whole[name], units.get(name, "")) for name, wanted in budget.items()}


#: Examples that go through the network together: MobileNetV2 takes 9 to 12 ms for each of 4 to 16 pictures on two cores
#: and 23 ms for each of 50, whose feature maps no longer fit into the cache; and there is a way back, too.
_AT_ONCE = 8


def _some(batches: Sequence[Any], images: int) -> list[Any]:
    """As many inputs as are wanted, or all there are."""
    found: list[Any] = []
    missing = images
    for batch in batches:
        if missing <= 0:
            break
        some = parts(batch, slice(missing))
        found += [parts(some, slice(start, start + _AT_ONCE)) for start in range(0, batch_size(some), _AT_ONCE)]
        missing -= batch_size(some)
    if not found:
        raise DataError("there are no inputs to narrow the network by; give some batches")
    return found


def _held_out(inputs: Sequence[Any], count: int) -> tuple[list[Any], list[Any]]:
    """Inputs to learn from, and so many others, half of all at most, to see what is lost: on its own lessons little is.

    Some of every batch are held out: they may come class by class.
    """
    share = min(0.5, count / sum(map(batch_size, inputs)))
    learnt: list[Any] = []
    judged: list[Any] = []
    due = 0.0
    for batch in inputs:
        due += share * batch_size(batch)
        taken = int(due + 1e-9)
        due -= taken
        kept = batch_size(batch) - taken
        learnt += [parts(batch, slice(kept))] if kept else []
        judged += [parts(batch, slice(kept, None))] if taken else []
    return learnt, judged or learnt


def _laid_out(inputs: list[Any]) -> list[Any]:
    """Pictures on a CPU with channels last: MobileNetV2 then takes 17 instead of 31 ms for one on two cores."""

    def laid(tensor: Tensor) -> Tensor:
        pictures = tensor.dim() == 4 and tensor.device.type == "cpu"
        return tensor.contiguous(memory_format=torch.channels_last) if pictures else tensor

    laid_out: list[Any] = mapped(inputs, laid)
    return laid_out


#: What was noted before, by the name of a group: how much the network lost with so many channels gone.
Trials = dict[str, dict[int, float]]


def _notes(
    stack: ExitStack, folder: str | Path | None, model: nn.Module, inputs: Sequence[Any], told: NarrowSettings
) -> tuple[Trials, Callable[[Row], None]]:
    """What is known of the trials, and what notes another."""
    if folder is None:
        return {}, lambda row: None
    Path(folder).mkdir(parents=True, exist_ok=True)
    of = {name: value for name, value in asdict(told).items() if name != "round_to"}
    of |= {
        "trials": TRIALS,
        "dampings": (*DAMPINGS, DAMPING),
        "of": tensors_digest([model.state_dict(), list(inputs)]).hex()[:16],
    }
    rows, note = stack.enter_context(noted(Path(folder) / "trials.jsonl", of))
    known: Trials = {}
    for row in rows:
        known.setdefault(row["group"], {})[row["gone"]] = row["change"]
    return known, note


# --- what the network minds -----------------------------------------------------------------------------------------

#: The shares of a group's channels that go in the trials which tell how much the network minds.
TRIALS = (0.125, 0.25, 0.5, 0.75)


def _losses(
    model: nn.Module,
    hidden: Sequence[Channels],
    seen: Seen,
    inputs: Sequence[Any],
    known: Trials,
    note: Callable[[Row], None],
    on_step: Step | None,
) -> dict[str, list[float]]:
    """What is lost with every width of every group: tried in the whole network for some, its own errors in between."""
    with evaluating(model):
        expected = [call(model, batch) for batch in inputs]

    def change(group: Channels, gone: int, order: Order | Basis, looks: Known) -> float:
        if gone in known.get(group.consumer, {}):
            return known[group.consumer][gone]
        tried = copied(model)
        take(tried, group, order.code(group.width - gone), looks)
        with evaluating(tried):
            answers = zip(inputs, expected, strict=True)
            found = sum(float(distance(call(tried, batch), before)) for batch, before in answers) / len(inputs)
        note({"group": group.consumer, "gone": gone, "change": found})
        return found

    losses: dict[str, list[float]] = {}
    for number, group in enumerate(hidden, start=1):
        tries = sorted({min(group.width - 1, max(1, round(share * group.width))) for share in TRIALS} - {0})
        order, looks = seen.tried(group)
        losses[group.consumer] = filled_in(order.errors, {gone: change(group, gone, order, looks) for gone in tries})
        if on_step is not None:
            on_step(number, len(hidden))
    return losses
