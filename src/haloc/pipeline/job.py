"""What a run is about: the network, its data, its loss and its score; from a recipe's names or from Python."""

from __future__ import annotations

import copy
import hashlib
import inspect as python
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from haloc.errors import DataError, HalocError, ModelError, SpecError
from haloc.factor.forward import (
    call,
    describe,
    device_of,
    evaluating,
    inputs_of,
    tensors_in,
    to_device,
    usable_device,
)
from haloc.pipeline.data import loaders_of, named
from haloc.pipeline.recipe import Recipe
from haloc.pipeline.stamps import fingerprint
from haloc.training.evaluate import evaluate
from haloc.training.feed import Feed, as_feed, batch_size, inputs_and_targets, parts
from haloc.training.objective import OwnLoss
from haloc.training.surroundings import own_random_numbers
from haloc.zoo.examples import example_inputs
from haloc.zoo.registry import create, entry_for, find

if TYPE_CHECKING:
    pass

Loss = Callable[[nn.Module, Any], Any]
Score = Callable[[nn.Module], float]


@dataclass(frozen=True, eq=False)
class Job:
    """The network to be compressed and what it is for.

    Attributes:
        model: The dense network, in eval mode, on the device that is trained on.
        example: What it is run on to see its layers.
        train: Shuffled, augmented training batches, or None.
        val: Held-out batches, or None.
        lessons: What is fine-tuned on where that is more than ``train``: held-out examples too.
        teacher: Who teaches in the fine-tuning, or None for the dense network.
        test: What a classifier is judged on, or None.
        loss: What is minimised, or None for a classifier's cross-entropy.
        score: How good a network is, or None for a classifier's accuracy.
        inputs: Takes the model's inputs out of a batch.
        labels: What things are called, for the report.
        identity: What decides training batches and loss, as far as it can be known.
        judging: What decides test batches and score.
    """

    model: nn.Module
    example: Any
    train: Any = None
    val: Any = None
    test: Any = None
    loss: Loss | None = None
    score: Score | None = None
    inputs: Callable[[Any], Any] = inputs_of
    labels: Mapping[str, Any] = field(default_factory=dict)
    identity: Mapping[str, Any] = field(default_factory=dict)
    judging: Mapping[str, Any] = field(default_factory=dict)
    lessons: Any = None
    teacher: nn.Module | None = None

    @property
    def teaching(self) -> str | None:
        """What tells a teacher from others."""
        return None if self.teacher is None else weights_digest(self.teacher)

    def on_cpu(self) -> tuple[nn.Module, Any]:
        """The network and its example on the CPU, for what is timed and exported; copies where they are elsewhere."""
        model = self.model if device_of(self.model).type == "cpu" else copy.deepcopy(self.model).cpu()
        return model, to_device(self.example, torch.device("cpu"))

    @property
    def judged(self) -> bool:
        """Whether there is something to judge networks by."""
        return self.score is not None or (self.loss is None and self.test is not None)

    def judge(self, model: nn.Module, on_batch: Callable[[int], None] | None = None) -> float:
        """How good a network is, the higher the better: the user's score, or the share of right answers."""
        if self.score is None:
            return evaluate(model, self.test, on_batch=on_batch).top1
        with evaluating(model):
            try:
                return float(self.score(model))
            except HalocError:
                raise
            except Exception as error:
                raise ModelError(f"the score function raised {type(error).__name__}: {error}") from error

    def samples(self, count: int) -> list[Any]:
        """Inputs of so many training examples or a few more, in whole batches; the same ones every time."""
        found: list[Any] = []
        with own_random_numbers(0):
            for batch in () if self.train is None else _first_epoch(self.train):
                found.append(self.taken(batch))
                if sum(map(batch_size, found)) >= count:
                    break
        return found

    def taken(self, batch: Any) -> Any:
        """The model's inputs out of a batch."""
        try:
            return self.inputs(batch)
        except HalocError:
            raise
        except Exception as error:
            raise SpecError(f"the function inputs raised {type(error).__name__} on a batch: {error}") from error


def job_from(recipe: Recipe) -> Job:
    """Loads what a recipe names; everything is tried on one batch before anything long begins."""
    name = recipe.model.name
    if name is None:
        raise SpecError('the recipe names no model; give one, as in [model] name = "resnet20"')
    device = usable_device(recipe.run.device)
    loaders, data_labels, classes = loaders_of(recipe)
    model = _trained("model", name, recipe.model.weights, classes).to(device)
    master = recipe.teacher
    if master.weights is not None and master.name is None:
        raise SpecError("teacher.weights are of no teacher; give teacher.name too")
    teacher = None if master.name is None else _trained("teacher", master.name, master.weights, classes).to(device)
    task, labelled = recipe.task, {"name": name, "weights": recipe.model.weights}
    names: dict[str, Any] = {"model": labelled, "data": data_labels, "score": task.score_name}
    return make_job(
        model,
        _example(recipe, loaders.get("train"), task.inputs),
        **loaders,
        teacher=teacher,
        loss=named(task.loss, "task.loss"),
        score=named(task.score, "task.score"),
        inputs=named(task.inputs, "task.inputs"),
        labels=names,
        sources={"root": _place(recipe.data.root), "test_root": _place(recipe.data.test_root)}
        | {
            spec: code_of(find(spec))
            for spec in (name, master.name, recipe.data.loaders)
            if spec is not None and _is_own(spec)
        },
    )


def _place(root: str | None) -> str | None:
    """Which folder it is: another one has other pictures."""
    return None if root is None else str(Path(root).expanduser().resolve())


def _trained(section: str, name: str, weights: str | None, classes: int | None) -> nn.Module:
    """A network with its weights; one of the zoo without any is refused."""
    entry = entry_for(name)
    if entry is not None and weights is None:
        hint = ' = "pretrained"' if entry.pretrained is not None else ""
        raise SpecError(
            f"{name!r} alone has random weights; say where its trained ones are, with {section}.weights{hint}"
        )
    extra = {"num_classes": classes} if entry is not None and classes not in (None, entry.classes) else {}
    return create(name, weights=weights, **extra)


def _is_own(spec: str) -> bool:
    """Whether a name is that of something in a module of the user's."""
    return ":" in spec and not spec.startswith(("torchvision:", "timm:"))


def make_job(
    model: nn.Module,
    example: Any,
    *,
    train: Any = None,
    val: Any = None,
    test: Any = None,
    lessons: Any = None,
    teacher: nn.Module | None = None,
    loss: Loss | None = None,
    score: Score | None = None,
    inputs: Callable[[Any], Any] | None = None,
    labels: Mapping[str, Any] | None = None,
    sources: Mapping[str, Any] | None = None,
) -> Job:
    """A job from what a user has in Python; ``sources`` tell of code that made it, which may be edited."""
    if teacher is not None and not isinstance(teacher, nn.Module):
        raise SpecError(f"a teacher is a torch.nn.Module, got a {type(teacher).__name__}")
    if teacher is not None and device_of(teacher) != device_of(model):
        raise SpecError(f"the teacher is on {device_of(teacher)} and the model on {device_of(model)}; move one of them")
    feeds = {"train": train, "val": val}
    identity: dict[str, Any] = {
        name: None if given is None else as_feed(given, whole=loss is not None).identity
        for name, given in feeds.items()
    }
    names = {"model": {"name": type(model).__name__}, "data": None, "score": "score"} | dict(labels or {})
    identity |= {"loss": code_of(loss), "inputs": code_of(inputs), "example": describe(example)}
    identity |= {"data": (names["data"] or {}).get("name"), "sources": dict(sources or {})}
    job = Job(
        model.eval(), to_device(example, device_of(model)), train, val, test, loss, score, inputs or inputs_of, names,
        identity, {"score": code_of(score), "test": _first_digest(test), "count": (names["data"] or {}).get("test")},
        lessons, None if teacher is None else teacher.eval(),
    )  # fmt: skip
    _try(job)
    return job


def _first_digest(batches: Any) -> list[Any] | None:
    """What tells test batches from others: their number, where it is known, and the content of the first."""
    if batches is None:
        return None
    if not isinstance(batches, Iterable):
        raise SpecError(f"test data must be batches or a loader of them, got {type(batches).__name__}")
    found = hashlib.sha256()
    with own_random_numbers(0):
        for tensor in tensors_in(next(iter(batches), None)):
            found.update(_bytes_of(tensor))
    return [len(batches) if isinstance(batches, Sized) else None, found.hexdigest()[:24]]


def _bytes_of(tensor: Tensor) -> bytes:
    flat: Tensor = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""


def weights_digest(model: nn.Module) -> str:
    """A short text that is another one for any other network or weights."""
    found = hashlib.sha256(repr(model).encode())
    for name, value in model.state_dict().items():
        found.update(name.encode())
        if isinstance(value, Tensor):
            found.update(_bytes_of(value))
    return found.hexdigest()[:24]


def code_of(function: Any) -> str | None:
    """A function's name and a digest of its source, where that can be had: what it does may have been edited."""
    if function is None:
        return None
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    with suppress(OSError, TypeError):
        return f"{name} {fingerprint(python.getsource(function))[:12]}"
    return name


def _first_epoch(train: Any) -> Iterator[Any]:
    """The batches of the first epoch, as training sees them, without any effect on later ones."""
    return (train.prepare(raw) for raw in train.raw(0)) if isinstance(train, Feed) else iter(train)


def _try(job: Job) -> None:
    """Runs model and loss on a batch as the stages will, and looks whether they can use the others."""
    with evaluating(job.model):
        call(job.model, job.example)
        for inputs in job.samples(1):
            _compare(call(job.model, to_device(inputs, device_of(job.model))), job.teacher, inputs)
        if job.loss is not None and job.train is not None:
            OwnLoss(job.loss).terms(job.model, to_device(_one_of(job.train), device_of(job.model)))
    if job.loss is None:
        if job.train is not None:
            inputs_and_targets(_one_of(job.train))
        if job.test is not None and job.score is None:
            inputs_and_targets(next(iter(job.test), None))


def _compare(outputs: Any, teacher: nn.Module | None, inputs: Any) -> None:
    """Refuses a teacher who answers another question."""
    if teacher is None:
        return
    with evaluating(teacher):
        try:
            told = describe(call(teacher, to_device(inputs, device_of(teacher))))
        except ModelError as error:
            raise ModelError(f"the teacher cannot be asked: {error}") from error
    if told != describe(outputs):
        said = f"the teacher answers with {told} and the model with {describe(outputs)}"
        raise ModelError(f"{said}; give another teacher")


def _one_of(train: Any) -> Any:
    """A training batch, to be tried; data that give none are refused."""
    with own_random_numbers(0):
        batch = next(_first_epoch(train), None)
    if batch is None:
        raise DataError(
            "the data give no full batch: give more examples, smaller batches, or a loader that starts again"
        )
    return batch


def _example(recipe: Recipe, train: Any, inputs: str | None) -> Any:
    """What the recipe spells, else what the zoo says, else one example of the training data."""
    name = recipe.model.name or ""
    if recipe.model.inputs or entry_for(name) is not None or train is None:
        return example_inputs(name, list(recipe.model.inputs))
    take = named(inputs, "task.inputs") or inputs_of
    return parts(Job(nn.Identity(), None, inputs=take).taken(_one_of(train)), slice(1))
