"""This process among those that train together, through accelerate; most often it is alone."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from haloc.errors import MissingExtraError, TrainError
from haloc.training.feed import Shard

_BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Session:
    """Which of the processes this is, and what they do together.

    Gradients are averaged here rather than by DistributedDataParallel: a search uses a few of its parameters in a
    step, another few in the next, and those that were not used are simply left out. So all processes must use the same
    ones in a step, as they do when they take the same path.
    """

    shard: Shard = field(default_factory=Shard)

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes."""
        return self.shard.rank == 0

    @property
    def alone(self) -> bool:
        """Whether there is no other process."""
        return self.shard.world == 1

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if not self.alone:
            with _others_there():
                torch.distributed.all_reduce(tensor)
        return tensor

    def gather(self, value: Tensor) -> Tensor:
        """The scalars of all processes, in their order."""
        values = value.detach().new_zeros(self.shard.world)
        values[self.shard.rank] = value.detach()
        return self.sum(values)

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Gives every process what the main one has, in place."""
        if not self.alone:
            with _others_there():
                for tensor in tensors:
                    torch.distributed.broadcast(tensor.detach(), src=0)

    def agree(self, choice: bool) -> bool:
        """What the main process chose: the others' clocks are a little off, and all have to do the same."""
        if self.alone:
            return choice
        said = torch.tensor(float(choice), device=_device())
        self.share([said])
        return bool(said)

    def average(self, parameters: Iterable[nn.Parameter]) -> None:
        """Averages the gradients that there are over all processes, many small ones at a time."""
        if self.alone:
            return
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for bucket in _buckets(grads):
            flat = self.sum(torch.cat([grad.flatten() for grad in bucket])) / self.shard.world
            for grad, mean in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
                grad.copy_(mean.view_as(grad))

    def wait(self) -> None:
        """Returns when all processes are here."""
        if not self.alone:
            with _others_there():
                torch.distributed.barrier()

    def leave(self) -> None:
        """Parts from the others, at the end of a script; a thread left behind can abort a process that is ending.

        Not after an error: the others may be waiting for this process, and it must not wait for them.
        """
        if not self.alone:
            torch.distributed.destroy_process_group()


@contextmanager
def _others_there() -> Iterator[None]:
    """Says in one sentence that another process is gone; the network library's own words name sockets."""
    try:
        yield
    except RuntimeError as error:
        # Without the place in the library's source that it begins with, and its advice.
        reason = re.sub(r"^\[[^\]]*\]\s*", "", str(error).strip() or type(error).__name__).splitlines()[0]
        raise TrainError(
            "another process of this run has ended or cannot be reached; what was saved is kept, run the same command "
            f"again to go on ({reason.split('. ')[0]})"
        ) from error


def join_session(device: torch.device | str = "cpu", patience: timedelta | None = None) -> tuple[Session, torch.device]:
    """Joins the processes that ``torchrun`` or ``accelerate launch`` started, and says on which device to train.

    Without them this process is alone and ``device`` stays what it is. ``patience`` is how long the processes wait for
    each other, by default as long as PyTorch does.
    """
    device = torch.device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return Session(), device
    try:
        from accelerate import PartialState
    except ModuleNotFoundError as error:
        raise MissingExtraError("accelerate", "distributed") from error
    # Its functions have the group as a default. Imported later, as the first step of an optimiser does, they would keep
    # it and its threads alive when it is destroyed, and such a thread can abort a process that is about to end.
    import_module("torch.distributed.nn")

    given = {} if patience is None else {"timeout": patience}
    state = PartialState(cpu=device.type == "cpu", **given)
    return Session(Shard(state.process_index, state.num_processes)), state.device


@contextmanager
def synced_norms(model: nn.Module, session: Session) -> Iterator[None]:
    """Lets every BatchNorm see the whole batch, not this process's part, as training alone would."""
    if session.alone:
        yield
        return
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for norm in norms:
        norm.forward = _Synced(norm, session)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for norm in norms:
            del norm.forward


class _Synced:
    """A BatchNorm's forward whose statistics are those of all processes; PyTorch's own knows only GPUs."""

    def __init__(self, norm: _BatchNorm, session: Session) -> None:
        self._norm, self._session = norm, session

    def __call__(self, inputs: Tensor) -> Tensor:
        norm = self._norm
        if not norm.training:
            return type(norm).forward(norm, inputs)
        mean, var, count = self._statistics(inputs.float())
        self._track(mean.detach(), var.detach() * (count / (count - 1)))
        shape = (1, -1, *[1] * (inputs.dim() - 2))
        out = (inputs - mean.view(shape)) * (var + norm.eps).rsqrt().view(shape)
        if norm.affine:
            out = out * norm.weight.view(shape) + norm.bias.view(shape)
        return out.to(inputs.dtype)

    def _statistics(self, inputs: Tensor) -> tuple[Tensor, Tensor, int]:
        axes = [axis for axis in range(inputs.dim()) if axis != 1]
        count = inputs.numel() // inputs.shape[1] * self._session.shard.world
        mean = _sum_of_all(inputs.sum(axes)) / count
        shape = (1, -1, *[1] * (inputs.dim() - 2))
        var = _sum_of_all((inputs - mean.view(shape)).square().sum(axes)) / count
        return mean, var, count

    def _track(self, mean: Tensor, var: Tensor) -> None:
        norm = self._norm
        if norm.running_mean is None or norm.running_var is None or norm.num_batches_tracked is None:
            return
        norm.num_batches_tracked.add_(1)
        rate = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
        norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), rate)
        norm.running_var.lerp_(var.to(norm.running_var.dtype), rate)


class _SumOfAll(torch.autograd.Function):
    """The sum over all processes; what flows back is summed the same way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        with _others_there():
            torch.distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.clone()
        with _others_there():
            torch.distributed.all_reduce(total)
        return total


def _sum_of_all(tensor: Tensor) -> Tensor:
    return _SumOfAll.apply(tensor)  # type: ignore[no-any-return, no-untyped-call]


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.nbytes > _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def _device() -> torch.device:
    """Where the processes can exchange small values: NCCL moves nothing but what lies on a GPU."""
    return torch.device("cuda" if torch.distributed.get_backend() == "nccl" else "cpu")
