"""What a run is about: the network, its data, its loss and its score; from a recipe's names or from Python."""

from __future__ import annotations

import copy
import hashlib
import inspect as python
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from haloc.errors import HalocError, ModelError, SpecError
from haloc.factor.forward import (
    call,
    describe,
    device_of,
    evaluating,
    inputs_of,
    to_device,
    usable_device,
)
from haloc.pipeline.recipe import DataPart, Recipe
from haloc.pipeline.stamps import fingerprint
from haloc.training.evaluate import evaluate
from haloc.training.feed import Feed, as_feed, batch_size, parts
from haloc.training.surroundings import own_random_numbers
from haloc.zoo.examples import example_inputs
from haloc.zoo.registry import create, entry_for, find

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
        test: What a classifier is judged on, or None.
        loss: What is minimised, or None for a classifier's cross-entropy.
        score: How good a network is, or None for a classifier's accuracy.
        inputs: Takes the model's inputs out of a batch.
        labels: What things are called, for the report.
        identity: What decides loaders, loss and score, as far as it can be known.
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
        """Inputs of about so many training examples, in batches; the same ones every time."""
        found: list[Any] = []
        with own_random_numbers(0):
            for batch in () if self.train is None else _first_epoch(self.train):
                missing = count - sum(map(batch_size, found))
                if missing <= 0:
                    break
                found.append(parts(self.inputs(batch), slice(missing)))
        return found


def job_from(recipe: Recipe) -> Job:
    """Loads what a recipe names; everything is tried on one batch before anything long begins."""
    name = recipe.model.name
    if name is None:
        raise SpecError('the recipe names no model; give one, as in [model] name = "resnet20"')
    device = usable_device(recipe.run.device)
    loaders, data_labels, classes = _loaders(recipe)
    entry = entry_for(name)
    if entry is not None and recipe.model.weights is None:
        hint = ' = "pretrained"' if entry.pretrained is not None else ""
        raise SpecError(f"{name!r} alone has random weights; say where its trained ones are, with model.weights{hint}")
    extra = {"num_classes": classes} if entry is not None and classes not in (None, entry.classes) else {}
    model = create(name, weights=recipe.model.weights, **extra).to(device)
    task, labelled = recipe.task, {"name": name, "weights": recipe.model.weights}
    names: dict[str, Any] = {"model": labelled, "data": data_labels, "score": task.score_name}
    return make_job(
        model,
        _example(recipe, loaders.get("train"), task.inputs),
        **loaders,
        loss=_named(task.loss, "task.loss"),
        score=_named(task.score, "task.score"),
        inputs=_named(task.inputs, "task.inputs"),
        labels=names,
        sources={
            spec: code_of(find(spec)) for spec in (name, recipe.data.loaders) if spec is not None and _is_own(spec)
        },
    )


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
    loss: Loss | None = None,
    score: Score | None = None,
    inputs: Callable[[Any], Any] | None = None,
    labels: Mapping[str, Any] | None = None,
    sources: Mapping[str, Any] | None = None,
) -> Job:
    """A job from what a user has in Python; ``sources`` tell of code that made it, which may be edited."""
    feeds = {"train": train, "val": val}
    identity: dict[str, Any] = {
        name: None if given is None else as_feed(given, whole=loss is not None).identity
        for name, given in feeds.items()
    }
    functions = {"loss": loss, "score": score, "inputs": inputs}
    identity |= {name: code_of(function) for name, function in functions.items()}
    names = {"model": {"name": type(model).__name__}, "data": None, "score": "score"} | dict(labels or {})
    job = Job(
        model.eval(), to_device(example, device_of(model)), train, val, test, loss, score, inputs or inputs_of, names,
        identity | {"example": describe(example), "data": names["data"], "sources": dict(sources or {})},
    )  # fmt: skip
    _try(job)
    return job


def weights_digest(model: nn.Module) -> str:
    """A short text that is another one for any other network or weights."""
    found = hashlib.sha256(repr(model).encode())
    for name, value in model.state_dict().items():
        found.update(name.encode())
        if isinstance(value, Tensor):
            found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
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
    """Runs the model on its example, and on a batch as the stages will."""
    with evaluating(job.model):
        call(job.model, job.example)
        for inputs in job.samples(2):
            call(job.model, to_device(inputs, device_of(job.model)))


def _named(spec: str | None, key: str) -> Any:
    """The function that ``package.module:callable`` names, found from the current folder too."""
    if spec is None:
        return None
    found = find(spec)
    if not callable(found):
        raise SpecError(f"{key}: {spec!r} is a {type(found).__name__}, expected a function")
    return found


def _example(recipe: Recipe, train: Any, inputs: str | None) -> Any:
    """What the recipe spells, else what the zoo says, else one example of the training data."""
    name = recipe.model.name or ""
    if recipe.model.inputs or entry_for(name) is not None or train is None:
        return example_inputs(name, list(recipe.model.inputs))
    take = _named(inputs, "task.inputs") or inputs_of
    return parts(take(next(_first_epoch(train))), slice(1))


def _loaders(recipe: Recipe) -> tuple[dict[str, Any], dict[str, Any] | None, int | None]:
    """Train, val and test batches, what they are called, and how many classes they have."""
    data = recipe.data
    if data.loaders is not None:
        if data.name is not None:
            raise SpecError("data.name and data.loaders are two sources; leave one of them out")
        return _user_loaders(data.loaders), {"name": data.loaders}, None
    if data.name is None:
        return {}, None, None
    return _zoo_loaders(recipe, data)


def _user_loaders(spec: str) -> dict[str, Any]:
    try:
        made = _named(spec, "data.loaders")()
    except HalocError:
        raise
    except Exception as error:
        raise SpecError(f"calling {spec!r} raised {type(error).__name__}: {error}") from error
    if isinstance(made, Mapping):
        unknown = set(made) - {"train", "val", "test"}
        if unknown or "train" not in made:
            raise SpecError(f"{spec!r} must return loaders named train, val and test, got {', '.join(map(str, made))}")
        return dict(made)
    if isinstance(made, tuple | list) and 1 <= len(made) <= 3:
        return dict(zip(("train", "val", "test"), made, strict=False))
    raise SpecError(
        f"{spec!r} must return two or three loaders (train, val[, test]), or a dict of them, got {type(made).__name__}"
    )


def _zoo_loaders(recipe: Recipe, data: DataPart) -> tuple[dict[str, Any], dict[str, Any], int]:
    from haloc.zoo.data import load_data
    from haloc.zoo.images import Normalisation

    assert data.name is not None
    if bool(data.mean) != bool(data.std) or len(data.mean) != len(data.std):
        raise SpecError(f"data.mean and data.std take equally many numbers, got {data.mean} and {data.std}")
    splits, entry = load_data(data.name, root=data.root, workers=data.workers), entry_for(recipe.model.name or "")
    given = Normalisation(data.mean, data.std) if data.mean else None
    scale = given or (entry.normalisation if entry is not None else splits.normalisation)
    device, seed = recipe.run.device, recipe.run.seed
    train, val, test = (part.on(device) for part in (splits.train, splits.val, splits.test))
    size = min(data.batch_size, len(val))
    found = {
        "train": train.batches(
            data.batch_size, normalisation=scale, augment=True, shuffle=True, seed=seed, limit=data.images
        ),
        "val": val.batches(size, normalisation=scale, shuffle=True, seed=seed, limit=data.images),
        "test": test.batches(data.batch_size, normalisation=scale, limit=data.test_images),
    }
    tested = len(test) if data.test_images is None else min(data.test_images, len(test))
    counts = {"train": len(train), "val": len(val), "test": tested}
    return found, {"name": data.name, **counts}, len(splits.train.classes)
