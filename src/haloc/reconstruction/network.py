"""The network as a whole learns what the dense one says, from a few hundred inputs and no labels.

Blocks make up for their own errors one by one; what is left of them adds up on the way to the answer. The network
learns in eval mode: with the statistics of its BatchNorms it says of a blend of two pictures what it would say of it in
use, and that is what the dense network is asked, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from math import cos, isfinite, pi
from pathlib import Path
from typing import Any

import torch
from numpy.random import SeedSequence
from torch import Tensor, nn
from torch.nn import functional as F

from haloc.errors import FileFormatError, SpecError, TrainError
from haloc.factor.forward import batch_size, call, device_of, evaluating, mapped, to_device
from haloc.reconstruction.inputs import bytes_of, learning_alone, own_copy, place_for, some_inputs, told_apart
from haloc.reconstruction.kept import Rebuilt
from haloc.reconstruction.settings import ReconstructionSettings
from haloc.recovery import digest
from haloc.training.checkpoint import Checkpoint, Store, under
from haloc.training.outputs import distance, floating
from haloc.training.surroundings import own_random_numbers

#: What the whole is called among blocks.
NETWORK = "the network"

#: Sides below which a tensor is not taken for an image, the least part of a side, and the share that is blended.
_SMALLEST, _LEAST, _BLENDED = 8, 0.6, 0.5

#: ``(epochs done, epochs in all)``.
Step = Callable[[int, int], None]


def reconstruct_network(
    model: nn.Module,
    original: nn.Module,
    batches: Sequence[Any],
    *,
    settings: ReconstructionSettings,
    folder: str | Path | None = None,
    on_step: Step | None = None,
) -> Rebuilt | None:
    """Lets a compressed network learn the dense network's answers, in place; None where it has no epochs to.

    Args:
        model: What `reconstruct_blocks` left, with BatchNorm statistics that fit.
        original: The dense network; it is not changed.
        batches: Inputs of the model in batches; no labels.
        settings: How.
        folder: Where the state is kept after every epoch; the same call goes on from there.
        on_step: Called after every epoch.
    """
    if not settings.network_epochs:
        return None
    inputs = some_inputs(batches, settings)
    of = {"settings": asdict(settings), "model": digest(model), "original": digest(original)}
    told = {"network": {**of, "inputs": told_apart(inputs)}}
    inputs = to_device(inputs, place_for(bytes_of(inputs), device_of(model)))
    judged = max(1, round(len(inputs) * settings.held_out))
    lessons, rest, images = inputs[:-judged], inputs[-judged:], sum(map(batch_size, inputs))
    with learning_alone(model), own_random_numbers(settings.seed), evaluating(original):
        course = _Course(model, original, rest, settings, None if folder is None else Store(folder), told)
        for epoch in range(course.begun(), settings.network_epochs):
            course.learn(lessons, epoch)
            if on_step is not None:
                on_step(epoch + 1, settings.network_epochs)
        return course.ended(images)


class _Course:
    """What is learnt, and how it went; of all epochs the one counts whose answers to held-out inputs were nearest."""

    def __init__(
        self,
        model: nn.Module,
        original: nn.Module,
        rest: Sequence[Any],
        told: ReconstructionSettings,
        store: Store | None,
        config: Mapping[str, Any],
    ) -> None:
        self._model, self._original, self._rest, self._told = model, original, rest, told
        self._store, self._config = store, config
        self._optimiser = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], told.network_lr)
        self._before = self._nearest = _apart(model, original, rest)
        self._best = copied_state(model)

    def begun(self) -> int:
        """Takes up what was learnt before by the same work; returns how many epochs that were."""
        found = None
        if self._store is not None:
            with suppress(FileFormatError, SpecError):  # of another work, or damaged: it is begun afresh
                found = self._store.newest(self._config)
            if found is None:
                self._store.clear()
        if found is None:
            return 0
        self._model.load_state_dict(under("model", found.tensors))
        self._best = under("best", found.tensors)
        self._before, self._nearest = float(found.facts["before"]), float(found.facts["nearest"])
        states: dict[int, dict[str, Tensor]] = {}
        for name, value in under("optimiser", found.tensors).items():
            index, _, key = name.partition("/")
            states.setdefault(int(index), {})[key] = value
        groups = self._optimiser.state_dict()["param_groups"]
        self._optimiser.load_state_dict({"state": states, "param_groups": groups})
        return found.step

    def learn(self, lessons: Sequence[Any], epoch: int) -> None:
        """One epoch; where that is not worse than all before, it is what counts."""
        generator = torch.Generator().manual_seed(int(SeedSequence((self._told.seed, epoch)).generate_state(1)[0]))
        steps = self._told.network_epochs * len(lessons)
        for number, place in enumerate(torch.randperm(len(lessons), generator=generator).tolist()):
            done = (epoch * len(lessons) + number) / steps
            for group in self._optimiser.param_groups:
                group["lr"] = self._told.network_lr * 0.5 * (1 + cos(pi * done))
            self._optimiser.zero_grad()
            with torch.enable_grad():
                _loss(self._model, self._original, random_versions(lessons[place], generator)).backward()
            self._optimiser.step()
        self._optimiser.zero_grad()
        apart = _apart(self._model, self._original, self._rest)
        if not isfinite(apart):
            self._model.load_state_dict(self._best)
            raise TrainError(
                f"the network has diverged in epoch {epoch + 1} of learning the dense one's answers; it is as it was "
                f"best. Lower the learning rate reconstruct.network_lr, which is {self._told.network_lr:g}"
            )
        if apart < self._nearest:
            self._nearest, self._best = apart, copied_state(self._model)
        if self._store is not None:
            self._store.save(Checkpoint(epoch + 1, self._tensors(), self._facts()))

    def ended(self, images: int) -> Rebuilt:
        """Leaves the best in the model."""
        self._model.load_state_dict(self._best)
        return Rebuilt(NETWORK, self._before, self._nearest, kept=self._nearest < self._before, images=images)

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"model/{name}": value for name, value in self._model.state_dict().items()}
        tensors |= {f"best/{name}": value for name, value in self._best.items()}
        for index, state in self._optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser/{index}/{key}": value for key, value in state.items()}
        return tensors

    def _facts(self) -> dict[str, Any]:
        return {"config": self._config, "before": self._before, "nearest": self._nearest}


def copied_state(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model as they are now."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _loss(model: nn.Module, original: nn.Module, inputs: Any) -> Tensor:
    """How far the answers are apart; where they are classes' scores, by what they make of the classes."""
    with torch.no_grad():
        wanted = floating(call(original, own_copy(inputs, original)))
    found = floating(call(model, own_copy(inputs, model)))
    if len(found) == 1 and found[0].dim() == 2 and found[0].shape[1] > 1 and found[0].shape == wanted[0].shape:
        said, meant = (F.log_softmax(tensor.float(), 1) for tensor in (found[0], wanted[0]))
        return F.kl_div(said, meant, reduction="batchmean", log_target=True)
    return distance(found, wanted)


@torch.no_grad()
def _apart(model: nn.Module, original: nn.Module, batches: Sequence[Any]) -> float:
    return sum(float(_loss(model, original, batch)) for batch in batches) / len(batches)


def random_versions(inputs: Any, generator: torch.Generator) -> Any:
    """Random parts of images, scaled back and mirrored at random, through half of which another image shines.

    What is no batch of images is left as it is. A blend has no label, and needs none where networks are compared.
    """
    return mapped(inputs, lambda tensor: _versions(tensor, generator) if _are_images(tensor) else tensor)


def _are_images(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dim() == 4 and min(tensor.shape[2:]) >= _SMALLEST


def _versions(images: Tensor, generator: torch.Generator) -> Tensor:
    side, top, left, mirrored, chosen, weight = torch.rand(6, len(images), generator=generator).to(images)
    half = _LEAST + (1 - _LEAST) * side  # of the part, in units of half the image
    middle_y, middle_x = ((1 - half) * (2 * place - 1) for place in (top, left))
    none = torch.zeros_like(half)
    across = torch.where(mirrored < 0.5, -half, half)  # from right to left it is mirrored
    rows = torch.stack([torch.stack([across, none, middle_x], 1), torch.stack([none, half, middle_y], 1)], 1)
    grid = F.affine_grid(rows, list(images.shape), align_corners=False)
    parts = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
    others = torch.randperm(len(images), generator=generator).to(images.device)
    share = torch.where(chosen < _BLENDED, weight / 2, none)[:, None, None, None]
    return torch.lerp(parts, parts[others], share)
