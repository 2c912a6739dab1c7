"""How much a network minds errors in what its layers put out: what comes of them in its own outputs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from haloc.errors import ModelError
from haloc.factor.forward import batch_size, call, cut, device_of, evaluating, module_at, tensors_in, to_device, unmoved

_LOG = logging.getLogger(__name__)

#: What is added to the weights of a layer's outputs, as a part of the mean: what a few hundred examples show of
#: directions that hardly matter is not all true. Of 0.01, 0.1 and 1 this was the best for ResNet-18, by little.
DAMPING = 0.1

#: Examples that go through the network together: all that its layers put out is kept for the way back.
AT_ONCE = 8


def output_weights(model: nn.Module, batches: Iterable[Any], names: Iterable[str]) -> dict[str, Tensor] | None:
    """For every named module E[g gᵀ] over its channels, g being what a change there does to the network's outputs.

    With J the derivative of all outputs by the channels at one place of a feature map, the outputs' squared change is
    eᵀ JᵀJ e for a small error e, and JᵀJ is the mean of g gᵀ for g = Jᵀε with random ε: one pass back for each batch,
    whatever the outputs are. Outputs of several tensors count alike. Errors at different positions are taken to have
    nothing to do with each other.

    Args:
        model: Any module; it runs in eval mode and is left as it was.
        batches: Inputs of the model; a few hundred examples are enough.
        names: The modules whose outputs are looked at: convolutions, linear layers, BatchNorms.

    Returns:
        A matrix (channels, channels) in float64 for each, or nothing at all, with a line in the log, where the model
        cannot be differentiated.
    """
    sums: dict[str, Tensor] = {}
    examples = 0
    generator = torch.Generator().manual_seed(0)
    try:
        with ExitStack() as stack:
            caught = stack.enter_context(_catching(model, names))
            stack.enter_context(unmoved(model))
            stack.enter_context(evaluating(model))
            stack.enter_context(torch.enable_grad())
            for batch in batches:
                for start in range(0, batch_size(batch), AT_ONCE):
                    some = to_device(cut(batch, slice(start, start + AT_ONCE)), device_of(model))
                    examples += _add(sums, model, some, caught, generator)
    except (RuntimeError, ModelError) as error:
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        _LOG.warning("all outputs of a layer count alike, the model cannot be differentiated: %s", text)
        return None
    return {name: total / examples for name, total in sums.items()} if examples else None


def rooted(weights: Tensor) -> Tensor:
    """R with RᵀR = the weights, damped: errors e of a layer's outputs matter as |R e|² does."""
    mean = weights.diagonal().mean()
    added = DAMPING * mean if bool(mean > 0) else torch.ones_like(mean)
    eye = torch.eye(len(weights), dtype=weights.dtype, device=weights.device)
    root: Tensor = torch.linalg.cholesky(weights + added * eye).mT
    return root


#: What modules have put out in one run of the model, by name.
Caught = dict[str, list[Tensor]]


def _add(sums: dict[str, Tensor], model: nn.Module, batch: Any, caught: Caught, generator: torch.Generator) -> int:
    """Adds what one batch shows to the sums; how many examples it has."""
    for values in caught.values():
        values.clear()
    outputs = [tensor for tensor in tensors_in(call(model, batch)) if tensor.requires_grad and tensor.numel()]
    if not outputs:
        raise ModelError("its outputs do not depend on its layers")
    owners = [(name, value) for name, values in caught.items() for value in values]
    probed = torch.stack([_probed(output, generator) for output in outputs]).sum()
    found = torch.autograd.grad(probed, [value for _, value in owners], allow_unused=True, materialize_grads=True)
    for (name, _), gradient in zip(owners, found, strict=True):
        axis = -1 if isinstance(module_at(model, name), nn.Linear) else 1
        rows = gradient.movedim(axis, -1).flatten(0, -2).double()
        sums[name] = sums.get(name, torch.zeros((), dtype=rows.dtype, device=rows.device)) + rows.mT @ rows
    return batch_size(batch)


def _probed(output: Tensor, generator: torch.Generator) -> Tensor:
    """The output along a random direction, as a share of its size."""
    direction = torch.randn(output.shape, generator=generator).to(output.device)
    size = output.detach().float().norm() + torch.finfo(torch.float32).tiny
    along: Tensor = (output.float() * direction).sum() * (len(output) ** 0.5 / size)
    return along


@contextmanager
def _catching(model: nn.Module, names: Iterable[str]) -> Iterator[Caught]:
    """Inside the block, what each named module puts out is in the lists that this yields, ready to be derived by."""
    caught: Caught = {name: [] for name in names}

    def catcher(values: list[Tensor]) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        def catch(_: nn.Module, args: Any, output: Tensor) -> Tensor:
            values.append(output if output.requires_grad else output.detach().requires_grad_())
            return values[-1].clone()  # what comes next may work in place

        return catch

    with ExitStack() as hooks:
        for name, values in caught.items():
            handle = module_at(model, name).register_forward_hook(catcher(values))
            hooks.callback(handle.remove)
        yield caught
