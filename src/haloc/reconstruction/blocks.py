"""Recovering accuracy without labels or training data: block by block, from a few hundred inputs.

Every block of the compressed network learns to put out what the same block of the dense network does, given what the
compressed blocks before it put out: errors of earlier blocks are made up for by later ones. Feature maps tell far more
per image than a label does, so few images are enough, and BatchNorm statistics stay as they are.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from math import cos, isfinite, pi
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from haloc.errors import ModelError, TrainError
from haloc.factor.forward import batch_size, call, device_of, evaluating, mapped, module_at, to_device
from haloc.factor.surgery import plan_of
from haloc.narrowing.surgery import narrowed_of
from haloc.reconstruction.inputs import bytes_of, learning_alone, own_copy, place_for, some_inputs, told_apart
from haloc.reconstruction.kept import Kept, Rebuilt
from haloc.reconstruction.settings import ReconstructionSettings
from haloc.recovery import digest
from haloc.training.feed import parts
from haloc.training.finite import first_spoilt
from haloc.training.outputs import distance, floating
from haloc.training.surroundings import own_random_numbers

_LOG = logging.getLogger(__name__)

#: ``(blocks done, blocks in all)``.
Step = Callable[[int, int], None]


def reconstruct_blocks(
    model: nn.Module,
    original: nn.Module,
    batches: Sequence[Any],
    *,
    settings: ReconstructionSettings | None = None,
    folder: str | Path | None = None,
    on_step: Step | None = None,
) -> list[Rebuilt]:
    """Lets the blocks of a compressed network learn the dense network's feature maps, in place, one after the other.

    Args:
        model: What `apply_plan` made of ``original``, perhaps with BatchNorm statistics measured anew.
        original: The dense network; it is not changed.
        batches: Inputs of the model in batches; no labels.
        settings: How.
        folder: Where the state is kept after every block; the same call goes on from there.
        on_step: Called after every block.

    Returns:
        What became of each block, in the order in which they run.
    """
    told = settings or ReconstructionSettings()
    if not told.epochs:
        return []
    inputs = some_inputs(batches, told)
    names = _in_order(original, model, inputs[0])
    of = {"settings": asdict(told), "model": digest(model), "original": digest(original), "inputs": told_apart(inputs)}
    inputs = to_device(inputs, place_for(bytes_of(inputs), device_of(model)))
    with Kept.opened(folder, of, model) as kept, learning_alone(model), own_random_numbers(told.seed):
        done = list(kept.done)
        for place, name in enumerate(names):
            if place >= len(done):
                done.append(_rebuilt(model, original, name, inputs, told))
                kept.note(done, model)
            if on_step is not None:
                on_step(place + 1, len(names))
    return done


def blocks_of(model: nn.Module) -> dict[str, list[str]]:
    """The modules that are reconstructed, each with its layers that are factorised or read fewer channels.

    Around every layer it is the smallest module that is no mere container. A layer that stands in containers alone, as
    in VGG, is a block by itself, and so is one beside other blocks, as the first layer of a network often is.
    """
    modules, narrowed = dict(model.named_modules()), narrowed_of(model)
    layers = list(dict.fromkeys([*plan_of(model).changes(), *(each.hidden.consumer for each in narrowed)]))
    around = {name: _block(name, modules) for name in layers}
    found: dict[str, list[str]] = {}
    for name, block in around.items():
        shared = any(_inside(other, block) for other in around.values())
        found.setdefault(name if shared else block, []).append(name)
    return found


def _block(name: str, modules: Mapping[str, nn.Module]) -> str:
    parent = name
    while "." in parent:
        parent = parent.rpartition(".")[0]
        if not isinstance(modules[parent], nn.Sequential | nn.ModuleList | nn.ModuleDict):
            return parent
    return name


def _inside(name: str, other: str) -> bool:
    return name != other and name.startswith(f"{other}.")


def _in_order(original: nn.Module, model: nn.Module, inputs: Any) -> list[str]:
    """The blocks in the order in which they run; layers take the place of a block that does not run just once."""
    blocks = blocks_of(model)
    names = dict.fromkeys([*blocks, *(layer for layers in blocks.values() for layer in layers)])
    run: list[str] = []
    hooks = [module_at(original, name).register_forward_hook(lambda *_, name=name: run.append(name)) for name in names]
    try:
        with evaluating(original):
            call(original, own_copy(parts(inputs, slice(1)), original))
    finally:
        for hook in hooks:
            hook.remove()
    chosen = {name for block, layers in blocks.items() for name in ([block] if run.count(block) == 1 else layers)}
    for name in chosen:
        if run.count(name) != 1:
            _LOG.warning("block %s is not reconstructed: it runs %d times", name, run.count(name))
    return [name for name in run if name in chosen and run.count(name) == 1]


# --- one block ------------------------------------------------------------------------------------------------------


class _ReachedError(BaseException):
    """Nothing after a block is needed; no `except Exception` of a model is to stop it."""


def _rebuilt(
    model: nn.Module, original: nn.Module, name: str, inputs: Sequence[Any], told: ReconstructionSettings
) -> Rebuilt:
    """Trains one block, and keeps it if it is nearer on inputs that it did not learn from."""
    block = module_at(model, name)
    judged = max(1, round(len(inputs) * told.held_out))
    room, place = told.memory_gb * 2**30, place_for(told.memory_gb * 2**30, device_of(model))

    def pairs(batches: Sequence[Any], share: float) -> list[Pair]:
        found: list[Pair] = []
        taken = 0
        for each in batches:
            found.append(to_device((_arguments(model, name, each), _outputs(original, name, each)), place))
            taken += bytes_of(found[-1])
            if taken * (1 + 1 / len(found)) > room * share:
                break
        return found

    lessons = pairs(inputs[:-judged], 1 - told.held_out)
    rest = pairs(inputs[-judged:], told.held_out)
    images = sum(map(batch_size, [*inputs[: len(lessons)], *inputs[-judged:][: len(rest)]]))
    state = copy.deepcopy(block.state_dict())
    try:
        before = _apart(block, rest)
        if not isfinite(before):
            raise ModelError("what it puts out, or the dense network's block, has values that are not finite")
        if before != _apart(block, rest):
            raise ModelError("it says something else when it is called again")
        _learn(block, lessons, told)
        after = _apart(block, rest)
    except (ModelError, RuntimeError, TypeError, ValueError, IndexError) as error:
        block.load_state_dict(state)
        _LOG.warning("block %s is not reconstructed: %s", name, (str(error).strip() or "it failed").splitlines()[0])
        return Rebuilt(name, float("nan"), float("nan"), kept=False, images=images)
    if not isfinite(after):
        spoilt = first_spoilt(block, lambda: _apart(block, rest))
        block.load_state_dict(state)
        raise TrainError(
            f"block {name} has diverged while it was reconstructed: {spoilt}; the blocks before it are kept and it is "
            f"as it was. Lower the learning rate of the reconstruction, which is {told.lr:g}"
        )
    if not after < before:
        block.load_state_dict(state)
        return Rebuilt(name, before, before, kept=False, images=images)
    return Rebuilt(name, before, after, kept=True, images=images)


#: What a block is called with, and what the dense one puts out: its tensors of real numbers.
Pair = tuple[tuple[tuple[Any, ...], dict[str, Any]], list[Tensor]]


def _arguments(model: nn.Module, name: str, inputs: Any) -> Any:
    """What a block is called with."""
    found: list[Any] = []

    def note(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        found.append((args, named))
        raise _ReachedError

    _run_to(model, name, inputs, lambda block: block.register_forward_pre_hook(note, with_kwargs=True))
    return found[0]


def _outputs(original: nn.Module, name: str, inputs: Any) -> Any:
    """What a block puts out."""
    found: list[Any] = []

    def note(_: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
        found.append(floating(outputs))
        raise _ReachedError

    _run_to(original, name, inputs, lambda block: block.register_forward_hook(note))
    return found[0]


def _run_to(model: nn.Module, name: str, inputs: Any, watch: Callable[[nn.Module], Any]) -> None:
    hook = watch(module_at(model, name))
    try:
        with evaluating(model):
            call(model, own_copy(inputs, model))
    except _ReachedError:
        pass
    finally:
        hook.remove()


def _loss(block: nn.Module, pair: Pair) -> Tensor:
    """How far the block is from what is wanted; a half-precision call is one of float32 where the block is."""
    (args, named), wanted = own_copy(pair, block)
    kind = next((parameter.dtype for parameter in block.parameters() if parameter.is_floating_point()), torch.float32)
    args, named = mapped((args, named), lambda tensor: tensor.to(kind) if tensor.is_floating_point() else tensor)
    return distance(floating(block(*args, **named)), wanted)


@torch.no_grad()
def _apart(block: nn.Module, pairs: Sequence[Pair]) -> float:
    return sum(float(_loss(block, pair)) for pair in pairs) / len(pairs)


def _learn(block: nn.Module, pairs: Sequence[Pair], told: ReconstructionSettings) -> None:
    """Adam on all of the block's weights, in float32: in half precision its steps would round to nothing."""
    half = any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in block.parameters())
    learner = copy.deepcopy(block).float() if half else block
    parameters = [parameter for parameter in learner.parameters() if parameter.is_floating_point()]
    optimiser, steps = torch.optim.Adam(parameters, told.lr), told.epochs * len(pairs)
    generator = torch.Generator().manual_seed(told.seed)
    orders = (place for _ in range(told.epochs) for place in torch.randperm(len(pairs), generator=generator).tolist())
    with torch.enable_grad():
        for step, place in enumerate(orders):
            for group in optimiser.param_groups:
                group["lr"] = told.lr * 0.5 * (1 + cos(pi * step / steps))
            optimiser.zero_grad()
            _loss(learner, pairs[place]).backward()
            optimiser.step()
    optimiser.zero_grad()
    if half:
        block.load_state_dict(learner.state_dict())
