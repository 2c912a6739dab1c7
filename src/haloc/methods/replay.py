"""Running a network again behind one of its layers: what it does before that layer is handed out, not computed.

Everything that a network computes before it comes to a layer is the same whatever stands in that layer's place. So the
outputs of the modules that are done by then are recorded once. Nothing has to be known of the network for that, but
that it does the same again on the same inputs; and this is tried before it is trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from haloc.errors import ModelError
from haloc.factor.forward import mapped, tensors_in

#: How far a network that is run behind a layer may be from the whole one, as a share of its largest output.
TOLERANCE = 1e-4

#: What it returns may be a tensor, or any nest of them.
Run = Callable[[], Any]


@dataclass(eq=False)
class _Record:
    """What a module put out in one of its calls, and the copies that were handed out while it was not known to be safe.

    Attributes:
        written: Whether somebody writes into what is handed out, so that every run needs a copy of its own.
    """

    module: nn.Module
    output: Any
    written: bool = True
    copies: list[Any] = field(default_factory=list)

    def hand_out(self) -> Any:
        if not self.written:
            return self.output
        self.copies = [mapped(self.output, Tensor.clone)]
        return self.copies[0]

    def settle(self) -> None:
        """Looks whether anybody has written into the last copy; PyTorch counts that."""
        self.written = any(tensor._version for tensor in tensors_in(self.copies))
        self.copies = []


@contextmanager
def behind(network: nn.Module, layer: nn.Module, run: Run) -> Iterator[None]:
    """Inside the block, ``run`` computes only what comes after the first call of ``layer``.

    Args:
        network: In eval mode and without gradients; inside the block nothing but ``layer`` is exchanged.
        layer: One of its modules, or what stands in its place.
        run: Runs the network on the same inputs every time. A network that does not do the same twice, or does more
            than compute its output, is run as a whole.
    """
    records: list[_Record] = []
    with _recording(network, layer, records):
        expected = run()
    with _handing_out(network, records):
        sound = _repeats(run, expected)
    for record in records:
        record.settle()
    with _handing_out(network, records if sound else ()):
        yield


def _repeats(run: Run, expected: Any) -> bool:
    try:
        again, before = tensors_in(run()), tensors_in(expected)
    except ModelError:  # a module that was not called left something undone
        return False
    return len(again) == len(before) and all(map(_is_close, again, before))


def _is_close(again: Tensor, before: Tensor) -> bool:
    if again.shape != before.shape:
        return False
    if not before.numel() or not before.is_floating_point():
        return torch.equal(again, before)
    return bool((again - before).abs().max() <= TOLERANCE * before.abs().max())


@contextmanager
def _recording(network: nn.Module, layer: nn.Module, records: list[_Record]) -> Iterator[None]:
    """Gathers the outputs of the modules that are done when ``layer`` is first called, without those inside of others.

    Calls are nested. Each has a list of what was done within it, and once it ends itself its one output stands for all
    of that. When the layer is reached, the lists of the calls that have not ended are what there is to record.
    """
    open_calls: list[list[_Record]] = [[]]
    reached = False

    def begin(module: nn.Module, _: Any) -> None:
        nonlocal reached
        reached = reached or module is layer
        if not reached:
            open_calls.append([])

    def end(module: nn.Module, _: Any, output: Any) -> None:
        if reached:
            return
        within = open_calls.pop()
        whole = _is_plain(output) and not isinstance(module, torch.jit.ScriptModule)
        open_calls[-1] += [_Record(module, mapped(output, Tensor.clone))] if whole else within

    with ExitStack() as hooks:
        for module in network.modules():
            hooks.callback(module.register_forward_pre_hook(begin).remove)
            hooks.callback(module.register_forward_hook(end).remove)
        yield
    records += [record for within in open_calls for record in within]


@contextmanager
def _handing_out(network: nn.Module, records: Sequence[_Record]) -> Iterator[None]:
    """Inside the block, the recorded calls return what was recorded; later calls of the same modules are computed."""
    queues = {record.module: [other for other in records if other.module is record.module] for record in records}
    left: dict[nn.Module, Iterator[_Record]] = {}

    def start(*_: Any) -> None:
        left.update({module: iter(queue) for module, queue in queues.items()})

    with ExitStack() as stack:
        if records:
            stack.callback(network.register_forward_pre_hook(start).remove)
        for module in queues:
            stack.enter_context(_forward_of(module, left))
        yield


@contextmanager
def _forward_of(module: nn.Module, left: dict[nn.Module, Iterator[_Record]]) -> Iterator[None]:
    """Lets a module take what is left for it before it computes anything."""
    own, forward = module.__dict__.get("forward"), module.forward

    def recorded_or_computed(*args: Any, **kwargs: Any) -> Any:
        record = next(left[module], None)
        return forward(*args, **kwargs) if record is None else record.hand_out()

    module.__dict__["forward"] = recorded_or_computed
    try:
        yield
    finally:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own


def _is_plain(output: Any) -> bool:
    """Whether it is tensors and nothing that could be changed beside them: other outputs are computed anew."""
    return isinstance(output, Tensor) or (type(output) is tuple and all(map(_is_plain, output)))
