"""One step of the optimiser: as it is written, or captured whole as a CUDA graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from haloc.factor.forward import mapped, members, tensors_in, to_device
from haloc.training.checkpoint import random_states, set_random_states, under
from haloc.training.ema import Ema, tensors_of
from haloc.training.feed import Feed, Raw, pieces
from haloc.training.finite import NotFiniteError, first_spoilt
from haloc.training.objective import Objective
from haloc.training.session import Session
from haloc.training.settings import TrainSettings

_LOG = logging.getLogger(__name__)
_WARM_UP = 3  # steps before a capture, in which libraries choose their kernels
_MIXED = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, eq=False)
class Update:
    """What one optimiser does with one kind of batches. Training has one, a search one for weights and one for ranks.

    Attributes:
        name: how it is called in logs.
        feed: where its batches come from.
        objective: what it minimises; where it has a method ``compiled``, that gives a compiled version of it.
        optimiser: who takes the steps; its learning rate is set before each.
        lr: the learning rate, from epochs done.
        from_epoch: the first epoch it takes part in.
        every: it takes part in every so many steps.
        before_step: called with the number of the step, on the host; a search draws its path there.
        changes: why every step is different, if it is: it can then be neither captured nor compiled.
    """

    name: str
    feed: Feed
    objective: Objective
    optimiser: torch.optim.Optimizer
    lr: Callable[[float], float]
    from_epoch: int = 0
    every: int = 1
    before_step: Callable[[int], None] | None = None
    changes: str | None = None

    def steps_before(self, step: int) -> int:
        """In how many of the steps before this one it takes part, were it not for ``from_epoch``."""
        return -(-step // self.every)


class Totals:
    """Sums of what was measured since they were last read, kept on the device so that no step has to wait."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Adds a scalar."""
        if name not in self.sums:
            self.sums[name] = torch.zeros((), device=value.device)
        self.sums[name] += value.detach()

    def means(self, session: Session, steps: int) -> dict[str, float]:
        """The means over ``steps`` steps and all processes."""
        if not self.sums:
            return {}
        stacked = session.sum(torch.stack(list(self.sums.values())).double()) / (steps * session.shard.world)
        return dict(zip(self.sums, stacked.tolist(), strict=True))

    def clear(self) -> None:
        """Starts from zero, in the same tensors."""
        for total in self.sums.values():
            total.zero_()


class Stepper:
    """Takes the steps of one update."""

    def __init__(
        self, model: nn.Module, update: Update, settings: TrainSettings, session: Session, ema: Ema | None = None
    ) -> None:
        self.update, self.totals = update, Totals()
        self._model = model
        self._network: nn.Module = model
        self._objective: Objective = update.objective
        self._settings, self._session, self._ema = settings, session, ema
        self._device = next(model.parameters()).device
        self._parameters = list(model.parameters())
        own = [parameter for group in update.optimiser.param_groups for parameter in group["params"]]
        self._own: list[nn.Parameter] = own
        self._scaler = torch.amp.GradScaler(self._device.type, enabled=settings.precision == "fp16")
        self._way: Callable[[Raw], None] | None = None

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The optimiser's state and the sums, as tensors by name, and what else there is, as JSON.

        All processes have to ask for it: each has sums of its own.
        """
        tensors = {f"totals/{name}": self._session.gather(total) for name, total in self.totals.sums.items()}
        for index, state in self.update.optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser/{index}/{key}": value for key, value in state.items() if isinstance(value, Tensor)}
        return tensors, {"name": self.update.name, "scaler": self._scaler.state_dict()}

    def load(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned."""
        shard = self._session.shard
        for name, totals in under("totals", tensors).items():
            # A run may go on with another number of processes.
            own = totals[shard.rank] if len(totals) == shard.world else totals.mean()
            self.totals.sums[name] = own.to(self._device)
        states: dict[int, dict[str, Tensor]] = {}
        for name, value in under("optimiser", tensors).items():
            index, key = name.split("/")
            states.setdefault(int(index), {})[key] = _laid_out_like(self._own[int(index)], value)
        groups = self.update.optimiser.state_dict()["param_groups"]
        self.update.optimiser.load_state_dict({"state": states, "param_groups": groups})
        if facts["scaler"]:
            self._scaler.load_state_dict(facts["scaler"])

    def __call__(self, raw: Raw, step: int, epoch: float) -> None:
        """Takes one step; the first decides how all are taken."""
        for group in self.update.optimiser.param_groups:
            _set(group, self.update.lr(epoch))
        if self._ema is not None:
            self._ema.set_step(step)
        if self.update.before_step is not None:
            self.update.before_step(step)
        raw = to_device(raw, self._device)
        if self._way is None:
            self._way = self._choose(raw)
        self._way(raw)

    def _eager(self, raw: Raw) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        parts = pieces(raw, self._settings.accumulate)
        for part in parts:
            inputs, targets = self.update.feed.prepare(part)
            inputs = self._laid_out(inputs)
            with self._mixed():
                loss = self._objective(self._network, inputs, targets)
                total = loss.total / len(parts)
            self._require_number(total, inputs, targets)
            self._scaler.scale(total).backward()
            self.totals.add("loss", total)
            for name, term in loss.terms.items():
                self.totals.add(name, term / len(parts))
            if loss.accuracy is not None:
                self.totals.add("accuracy", loss.accuracy / len(parts))
        self._session.average(self._own)
        self._scaler.step(self.update.optimiser)
        self._scaler.update()
        if self._ema is not None:
            self._ema.update()

    def _require_number(self, loss: Tensor, inputs: Any, targets: Any) -> None:
        """Stops before a loss that is no number can spoil the weights, and says where it comes from.

        On a CPU alone: a GPU would have to be waited for in every step; there a run looks up every few steps.
        """
        if self._device.type != "cpu" or bool(loss.detach().isfinite()):
            return
        with self._mixed():
            where = first_spoilt(self._model, lambda: self.update.objective(self._model, inputs, targets))
        raise NotFiniteError(float(loss.detach()), where)

    def _mixed(self) -> torch.autocast:
        dtype = _MIXED.get(self._settings.precision)
        return torch.autocast(self._device.type, dtype or torch.bfloat16, enabled=dtype is not None)

    def _laid_out(self, inputs: Any) -> Any:
        if self._settings.channels_last and isinstance(inputs, Tensor) and inputs.dim() == 4:
            return inputs.contiguous(memory_format=torch.channels_last)
        return inputs

    def _choose(self, raw: Raw) -> Callable[[Raw], None]:
        speed = self._settings.speed
        if speed == "auto":
            speed = "graph" if self._device.type == "cuda" else "eager"
        if speed == "eager":
            return self._eager
        reason = self.update.changes
        if reason is None and speed == "compile":
            self._compile(raw)
            if self._device.type != "cuda":
                return self._eager
        if reason is None and self._device.type != "cuda":
            reason = f"there are graphs on CUDA alone, and the model is on {self._device.type}"
        lies_on = getattr(self.update.feed, "device", None)
        if reason is None and lies_on is not None and lies_on.type != self._device.type:
            reason = f"the images lie on {lies_on}; images.on({str(self._device)!r}) puts them beside the model"
        if reason is None and not self._session.alone:
            reason = "several processes exchange their gradients in it"
        if reason is None and self._scaler.is_enabled():
            reason = "fp16 looks at the gradients before it takes a step; bf16 need not"
        if reason is None:
            return self._captured(raw)
        _LOG.warning("the step of %s is not captured: %s", self.update.name, reason)
        return self._eager

    def _compile(self, raw: Raw) -> None:
        """Compiles the network, and tries a step with it: only then is it known whether it can be done."""
        scale = self._scaler.state_dict()
        self._network = cast(nn.Module, torch.compile(self._model))
        self._objective = getattr(self.update.objective, "compiled", lambda: self.update.objective)()
        try:
            with _undone(self._state):
                self._eager(raw)
        except Exception as error:  # there may be no compiler, or a model that it does not understand
            _LOG.warning("the network of %s is not compiled: %s", self.update.name, _first_line(error))
            self._network, self._objective = self._model, self.update.objective
        finally:
            if scale:
                self._scaler.load_state_dict(scale)

    def _captured(self, raw: Raw) -> Callable[[Raw], None]:
        try:
            return Capture(self._eager, raw, self._state)
        except Exception as error:  # a model may do anything that a graph cannot hold
            _LOG.warning("the step of %s is not captured as a CUDA graph: %s", self.update.name, _first_line(error))
            return self._eager

    def _state(self) -> list[Tensor]:
        """Everything that a step changes, for warming up without a trace."""
        kept = [*tensors_of(self._model).values(), *self.totals.sums.values()]
        kept += [value for state in self.update.optimiser.state.values() for value in state.values()]
        kept += list(self._ema.state.values()) if self._ema is not None else []
        return [tensor for tensor in kept if isinstance(tensor, Tensor)]


class Capture:
    """A step recorded once as a CUDA graph and replayed on new batches of the same shape."""

    def __init__(self, step: Callable[[Raw], None], raw: Raw, state: Callable[[], list[Tensor]]) -> None:
        self._step = step
        own = mapped(raw, torch.clone)  # where every replay finds its batch
        self._places, self._form = tensors_in(own), _form(own)
        self._graph = torch.cuda.CUDAGraph()
        with _undone(state):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP):
                    step(raw)
            torch.cuda.current_stream().wait_stream(stream)
            # On a stream of this device: the one that is taken otherwise belongs to the first device ever captured on.
            # What other threads do meanwhile is their own affair: they may be training, too.
            with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                step(own)

    def __call__(self, raw: Raw) -> None:
        """Replays the step on another batch; one of another form is gone through eagerly."""
        if _form(raw) != self._form:
            self._step(raw)
            return
        for place, tensor in zip(self._places, tensors_in(raw), strict=True):
            place.copy_(tensor)
        self._graph.replay()


@contextmanager
def _undone(state: Callable[[], list[Tensor]]) -> Iterator[None]:
    """Puts everything back that the block changed, random numbers too; what it made new starts at zero."""
    before = {id(tensor): (tensor, tensor.detach().clone()) for tensor in state()}
    random = random_states()
    try:
        yield
    finally:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        with torch.no_grad():
            for tensor in state():
                if id(tensor) in before:
                    tensor.copy_(before[id(tensor)][1])
                else:
                    tensor.zero_()
        set_random_states(random)


def _form(batch: Any) -> Any:
    """All of a batch but the numbers in its tensors: what a recorded step takes to be the same every time."""
    if isinstance(batch, Tensor):
        return batch.shape
    inside = members(batch)
    if inside or isinstance(batch, (list, tuple, dict)):
        return type(batch), [(key, _form(member)) for key, member in inside]
    return batch if batch is None or isinstance(batch, (str, int, float)) else object()  # which is like no other


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _set(group: dict[str, Any], lr: float) -> None:
    """A captured step reads its learning rate from the device; a number would be frozen into it."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def _laid_out_like(parameter: Tensor, value: Tensor) -> Tensor:
    """In the parameter's memory format: fused optimisers go through both as they lie in memory."""
    return torch.empty_like(parameter).copy_(value) if value.shape == parameter.shape else value
