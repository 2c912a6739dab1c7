"""`measure_widths`: what a network's widths cost on a target, by a table of its layers and a few whole networks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from haloc.cost.deploy import fold_batchnorm
from haloc.cost.machine import environment
from haloc.cost.measure import Progress, check_available, measure, same_machine
from haloc.cost.network import PLANS, take_turns
from haloc.cost.predict import completed
from haloc.cost.sampling import schedule_of
from haloc.cost.target import Target
from haloc.errors import ModelError, SpecError
from haloc.factor.forward import module_at
from haloc.factor.inspect import inspect
from haloc.inventory import Inventory
from haloc.locks import file_at_work
from haloc.narrowing.hidden import Channels, Narrowed, Stream
from haloc.narrowing.latency import WidthCost, WidthTiming, WidthTimings, network_digest, sample_widths, width_rows
from haloc.narrowing.surgery import resized


def measure_widths(
    model: nn.Module,
    example_inputs: Any,
    hidden: Sequence[Channels],
    target: Target,
    *,
    round_to: int,
    path: str | Path | None = None,
    networks: int = PLANS,
    on_progress: Progress | None = None,
) -> WidthCost:
    """Measures what a network takes by the widths of its hidden channels.

    Every distinct layer is measured as it is, and those that have hidden channels at three quarters, half and a quarter
    of them, too; what lies in between is predicted. Besides, the network and some random narrower ones are timed as a
    whole. With a ``path`` the work is kept as it goes, as `measure` does.

    Args:
        model: The dense network; it is not changed.
        example_inputs: What it takes.
        hidden: What `hidden_channels` found.
        target: Where it is to run. The model of a chip has no clock: its layers' sum is all that counts.
        round_to: Widths are multiples of this, or what they were.
        path: The table file; timings of whole networks go beside it (``table.json``, ``table.network.json``).
        networks: How many whole networks are timed, the dense one among them.
        on_progress: Called with the visits done and to be done.
    """
    if not hidden:
        raise ModelError("the network has no hidden channels that were found, so there are no widths to measure")
    hidden, layers = tuple(hidden), inspect(model, example_inputs)
    timed = 0 if target.device == "asic" else networks
    rounds = 0 if timed == 0 else timed * schedule_of(target.to_dict(), networks=True).rounds
    steps = _Steps(on_progress, behind=rounds)
    table = measure(width_rows(layers, hidden, round_to), target, path=path, on_progress=steps.count)
    steps.turn()
    wanted = sample_widths(hidden, round_to, timed)
    beside = None if path is None else networks_file(path)
    timings = time_widths(model, example_inputs, layers, hidden, wanted, target, path=beside, on_progress=steps.count)
    return WidthCost(layers, hidden, completed(table), timings)


def networks_file(table: str | Path) -> Path:
    """Where timings of whole networks lie beside a table."""
    return Path(table).with_suffix(".network.json")


@dataclass
class _Steps:
    """Two pieces of work shown as one."""

    on_progress: Progress | None
    behind: int
    before: int = 0
    total: int = 0

    def count(self, done: int, total: int) -> None:
        self.total = total
        if self.on_progress is not None:
            self.on_progress(self.before + done, self.before + total + self.behind)

    def turn(self) -> None:
        self.before, self.behind = self.total, 0


def time_widths(
    model: nn.Module,
    example_inputs: Any,
    layers: Inventory,
    hidden: Sequence[Channels],
    wanted: Sequence[Mapping[str, int]],
    target: Target,
    *,
    path: str | Path | None = None,
    on_progress: Progress | None = None,
) -> tuple[WidthTiming, ...]:
    """Times whole networks of these widths, as deployed; what the file has of this very network is not timed again."""
    if not wanted:
        return ()
    check_available(target)
    machine = environment(target.to_dict())
    of = network_digest(layers, hidden)
    with nullcontext() if path is None else file_at_work(Path(path)):
        known = _known(path, target, machine, of)
        # By what they are: a killed run may leave times of another network of the same layers' names.
        missing = {_label(of, widths): widths for widths in wanted if widths not in [each.widths for each in known]}
        timed = _timed(model, example_inputs, hidden, missing, target, machine, path, on_progress) if missing else ()
        found = WidthTimings(target, of, (*known, *timed), machine)
        if path is not None:
            found.save(path)
            Path(f"{path}.rows").unlink(missing_ok=True)
    return tuple(next(each for each in found.timings if each.widths == widths) for widths in wanted)


def _timed(
    model: nn.Module,
    example_inputs: Any,
    hidden: Sequence[Channels],
    missing: Mapping[str, Mapping[str, int]],
    target: Target,
    machine: dict[str, Any],
    path: str | Path | None,
    on_progress: Progress | None,
) -> tuple[WidthTiming, ...]:
    folded = fold_batchnorm(model, example_inputs)
    left = [_as_folded(folded, group) for group in hidden]

    def build(label: str) -> nn.Module:
        return resized(folded, [Narrowed(group, missing[label][group.consumer]) for group in left])

    results = take_turns(list(missing), build, example_inputs, target, machine, path, on_progress)
    return tuple(WidthTiming(dict(widths), **results[label]) for label, widths in missing.items())


def _as_folded(folded: nn.Module, group: Channels) -> Channels:
    """The channels in a network whose BatchNorms have become part of its layers."""

    def left(names: Iterable[str | None]) -> tuple[str | None, ...]:
        return tuple(None if name is None or _folded_away(folded, name) else name for name in names)

    if isinstance(group, Stream):
        return replace(group, norms=left(group.norms), sources=left(group.sources))
    return replace(group, carriers=tuple(name for name in left(group.carriers) if name), norm=left([group.norm])[0])


def _folded_away(folded: nn.Module, name: str) -> bool:
    return isinstance(module_at(folded, name), nn.Identity)


def _label(network: str, widths: Mapping[str, int]) -> str:
    return hashlib.sha256(json.dumps([network, dict(widths)], sort_keys=True).encode()).hexdigest()[:16]


def _known(
    path: str | Path | None, target: Target, machine: Mapping[str, Any], network: str
) -> tuple[WidthTiming, ...]:
    """What the file has of this network; timings of another one are of no use, and give way."""
    if path is None or not Path(path).exists():
        return ()
    found = WidthTimings.load(path)
    if found.target != target:
        raise SpecError(f"{path} holds timings for {found.target}, not for {target}; choose another file")
    same_machine(path, found.environment, machine)
    return found.timings if found.network == network else ()
