"""Recovering accuracy after factorisation: BatchNorm recalibration, then training with a teacher's help."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from haloc.cost.deploy import fold_batchnorm
from haloc.errors import DataError, ModelError, SpecError
from haloc.factor.between import fold_norms, insert_norms, norms_between
from haloc.factor.forward import call, device_of, evaluating, inputs_of, to_device
from haloc.factor.layers import Layer
from haloc.factor.modules import written_form
from haloc.factor.padding import cut_ranks, pad_ranks
from haloc.training.baseline import validation, weights_update, write_weights
from haloc.training.ema import tensors_of
from haloc.training.feed import Feed, as_feed, pieces
from haloc.training.loop import Outcome, fit
from haloc.training.objective import (
    Loss,
    LossFunction,
    Objective,
    OwnLoss,
    accuracy,
    cross_entropy,
    distillation,
    feature_map_loss,
    logits_of,
    onlooker,
    recording,
)
from haloc.training.outputs import answers, distance, listening
from haloc.training.run import Progress
from haloc.training.session import Session
from haloc.training.settings import FINETUNING, OWN_LOSS, RecoverySettings, TrainSettings
from haloc.training.surroundings import numerics

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Recovery:
    """Cross-entropy, logit distillation and the paper's feature-map loss (Eq. L_weight), each by its weight."""

    teacher: nn.Module | None
    settings: RecoverySettings = field(default_factory=RecoverySettings)
    layers: tuple[str, ...] = ()

    def __call__(self, model: nn.Module, inputs: Any, targets: Tensor) -> Loss:
        """Returns the weighted terms; what weighs nothing is not computed."""
        weights, layers = self.settings, self.layers if self.settings.features else ()
        with recording(model, layers) as maps:
            logits = logits_of(call(model, inputs))
        terms = {}
        if weights.cross_entropy:
            plain = cross_entropy(logits, targets, weights.label_smoothing)
            terms["cross_entropy"] = weights.cross_entropy * plain
        if self.teacher is not None and (weights.distillation or layers):
            with torch.no_grad(), recording(self.teacher, layers) as original:
                taught = logits_of(call(self.teacher, inputs))
            if weights.distillation:
                terms["distillation"] = weights.distillation * distillation(logits, taught, weights.temperature)
            if layers:
                terms["features"] = weights.features * _map_distance(layers, maps, original)
        return Loss(terms, accuracy(logits, targets))

    def compiled(self) -> Recovery:
        """The same with a compiled teacher."""
        return self if self.teacher is None else replace(self, teacher=cast(nn.Module, torch.compile(self.teacher)))


@dataclass(frozen=True, eq=False)
class OwnRecovery(Recovery):
    """The user's own loss, the distance to the teacher's outputs, whatever they are, and the feature-map loss.

    The teacher is called as the loss calls the model.
    """

    loss: OwnLoss = field(kw_only=True)

    def __call__(self, model: nn.Module, inputs: Any, targets: Any = None) -> Loss:
        """Returns the weighted terms of a batch, which takes the inputs' place."""
        weights, layers = self.settings, self.layers if self.settings.features else ()
        with recording(model, layers) as maps, listening(model) as calls:
            said = self.loss.terms(model, inputs)
        terms = {name: weights.cross_entropy * term for name, term in said.items()} if weights.cross_entropy else {}
        if self.teacher is not None and (weights.distillation or layers):
            with recording(self.teacher, layers) as original:
                taught = answers(self.teacher, calls)
            if weights.distillation:
                apart = [distance(own.outputs, other) for own, other in zip(calls, taught, strict=True)]
                terms["distillation"] = weights.distillation * torch.stack(apart).sum()
            if layers:
                terms["features"] = weights.features * _map_distance(layers, maps, original)
        return Loss(terms)


def _map_distance(layers: tuple[str, ...], maps: Mapping[str, Tensor], original: Mapping[str, Tensor]) -> Tensor:
    """The feature-map loss over the layers that ran in both networks."""
    run = [name for name in layers if name in maps and name in original]
    return feature_map_loss(*([outputs[name] for name in run] for outputs in (maps, original)))


def finetune(
    model: nn.Module,
    data: Any,
    *,
    teacher: nn.Module | None = None,
    val: Any = None,
    settings: TrainSettings | None = None,
    recovery: RecoverySettings | None = None,
    loss: LossFunction | None = None,
    inputs: Callable[[Any], Any] | None = None,
    folder: str | Path | None = None,
    resume: bool = True,
    config: Mapping[str, Any] | None = None,
    session: Session | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Outcome:
    """Brings a factorised network's accuracy back, in place.

    Args:
        model: What `apply_plan` returned.
        data: Training batches, shuffled and augmented: a data set's ``batches(…)``, or any loader of
            ``(inputs, targets)``; with a ``loss`` any loader at all.
        teacher: The uncompressed network, or any other that answers the same question; it is not changed. Without it
            the labels alone teach, with the weight of both.
        val: Held-out batches to evaluate on after epochs; or a function from the model, in eval mode, to a score or to
            named figures.
        settings: How to train; `FINETUNING` unless told otherwise.
        recovery: What to learn from; `OWN_LOSS` unless told otherwise where there is a ``loss``.
        loss: What the network was trained by, ``loss(model, batch)``: a scalar, or scalars by name whose sum it is. The
            batch is what the loader gave, on the model's device. Cross-entropy unless told otherwise.
        inputs: Takes the model's inputs out of a batch of a ``loss``, for BatchNorm statistics; by default the first
            of a tuple or list, and a dict as it is without its labels.
        folder: Where checkpoints, logs and the final weights go; without it nothing is written.
        resume: Go on from the folder's newest checkpoint, if there is one.
        config: What else decides the run, to be kept in its checkpoints and compared when it goes on.
        session: This process among several, from `join_session`.
        on_progress: Called every few steps, for a progress bar.
    """
    if loss is None and inputs not in (None, inputs_of):
        raise SpecError("inputs= takes apart what loss=(model, batch) is handed whole; give both, or neither")
    own = None if loss is None else OwnLoss(loss)
    settings, session = settings or FINETUNING, session or Session()
    recovery = recovery or (RecoverySettings() if own is None else OWN_LOSS)
    feed, names = as_feed(data, whole=own is not None), factorised_layers(model, teacher)
    if teacher is None:
        recovery = recovery.without_teacher() if own is None else recovery.with_the_loss_alone()
    if recovery.features and settings.speed == "compile":
        _LOG.warning("the network is not compiled: the feature-map loss looks at its layers one by one")
        settings = replace(settings, speed="auto")
    objective = _objective(teacher, settings, feed, recovery, names, own)
    _check(recovery, names)
    known = {"recovery": asdict(recovery), "teacher_digest": None if teacher is None else digest(teacher)}
    if own is not None:
        known["loss"] = own.name
    taken = _as_they_are if own is None else inputs or inputs_of
    padded = pad_ranks(model, _written(model), recovery.pad_ranks)
    if recovery.norm_between:
        insert_norms(model, _chains(model))
    try:
        outcome = fit(
            model,
            [weights_update(model, feed, objective, settings)],
            settings,
            validate=validation(val, session, own),
            folder=folder,
            resume=resume,
            config={**(config or {}), **known},
            session=session,
            on_start=partial(_start, model, partial(_some_inputs, feed, settings.accumulate, taken), recovery),
            on_progress=on_progress,
        )
    finally:
        fold_norms(model)  # whatever happens, a plain network is handed back
        cut_ranks(model, padded)
    write_weights(model, folder, session)
    return outcome


def recalibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    inputs: Callable[[Any], Any] = inputs_of,
    keep: Collection[nn.Module] = (),
) -> int:
    """Measures the BatchNorm statistics anew, in place, and returns how many BatchNorms there were.

    After factorisation every layer's input is a little off; statistics taken on the factorised network bring means
    and variances back into place. **Use batches augmented as in training.** Statistics belong to the images they were
    taken on: a ResNet-20 trained on padded crops loses three points when recalibrated on plain images.

    Only BatchNorms run in training mode; dropout and all else stay in eval mode, and all modes are put back.

    Args:
        model: The factorised model.
        batches: About 2,000 training images, in batches of 100 or more.
        inputs: Takes the model's inputs out of a batch.
        keep: BatchNorms to leave as they are.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    norms = [norm for norm in norms if all(norm is not kept for kept in keep)]
    if not norms:
        return 0
    device = device_of(model)
    with evaluating(model), _averaging(norms):
        for batch in batches:
            call(model, to_device(inputs(batch), device))
    return len(norms)


@contextmanager
def _averaging(norms: list[_BatchNorm]) -> Iterator[None]:
    """Lets BatchNorms gather plain averages over all batches, from zero; puts the old statistics back on failure."""
    before = [(copy.deepcopy(norm._buffers), norm.momentum) for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    try:
        yield
        if any(int(norm.num_batches_tracked or 0) == 0 for norm in norms):
            raise DataError("recalibration saw no batch for some BatchNorm; give batches that reach all of the model")
    except BaseException:
        for norm, (buffers, _) in zip(norms, before, strict=True):
            norm._buffers.update(buffers)
        raise
    finally:
        for norm, (_, momentum) in zip(norms, before, strict=True):
            norm.momentum = momentum


def factorised_layers(model: nn.Module, teacher: nn.Module | None) -> tuple[str, ...]:
    """The layers that are a chain of factors in the model and one layer, of as many outputs, in the teacher."""
    if teacher is None:
        return ()
    own = dict(model.named_modules())
    pairs = ((name, own.get(name), module) for name, module in teacher.named_modules() if isinstance(module, Layer))
    return tuple(name for name, chain, layer in pairs if isinstance(chain, nn.Sequential) and _alike(chain, layer))


def _alike(chain: nn.Sequential, layer: nn.Module) -> bool:
    """Whether their feature maps have as many channels; another network may have layers of the same names."""
    last = chain[-1] if len(chain) else chain
    outputs = [getattr(one, "out_channels", getattr(one, "out_features", None)) for one in (last, layer)]
    return outputs[0] == outputs[1]


def _chains(model: nn.Module) -> list[str]:
    """Every chain that `apply_plan` wrote in a layer's place, which it lets answer for the layer's extents."""
    chains = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Sequential))
    ours = ((name, chain) for name, chain in chains if hasattr(chain, "in_channels"))
    return [name for name, chain in ours if all(isinstance(factor, Layer) for factor in chain)]


def _written(model: nn.Module) -> list[str]:
    """Every layer that is a chain of factors now, linear ones too."""
    chains = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Sequential))
    return [name for name, chain in chains if written_form(chain) and all(isinstance(each, Layer) for each in chain)]


def _objective(
    teacher: nn.Module | None,
    settings: TrainSettings,
    feed: Feed,
    recovery: RecoverySettings,
    layers: tuple[str, ...],
    loss: OwnLoss | None,
) -> Objective:
    if loss is not None:
        return OwnRecovery(None if teacher is None else onlooker(teacher, settings), recovery, layers, loss=loss)
    master = None if teacher is None else _prepared(teacher, settings, feed, recovery.features > 0)
    return Recovery(master, recovery, layers)


def _check(recovery: RecoverySettings, layers: tuple[str, ...]) -> None:
    if recovery.features and not layers:
        raise ModelError(
            "the feature-map loss needs a teacher whose layers have the names of the factorised ones; "
            "give the uncompressed network, or features=0"
        )


def _prepared(teacher: nn.Module, settings: TrainSettings, feed: Feed, maps: bool) -> nn.Module:
    """A copy of the teacher whose answers cost as little as they can."""
    still = onlooker(teacher, settings)
    if maps or not feed.seekable or not feed.steps:
        return still  # somebody asks what single layers put out, or a look at a batch would cost one
    inputs = to_device(feed.prepare(pieces(next(feed.raw(0)), settings.accumulate)[0])[0], device_of(still))
    with numerics("fp32"):  # folding is checked on the outputs, which must not differ by rounding to TF32
        return onlooker(fold_batchnorm(still, inputs), settings)


def digest(model: nn.Module) -> str:
    """Tells one network's weights from another's."""
    found = hashlib.sha256()
    for name, tensor in tensors_of(model).items():
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _start(model: nn.Module, some: Callable[[int], Iterable[Any]], recovery: RecoverySettings) -> None:
    """What is done once, before the first step; ``some`` gives the inputs of about so many examples."""
    between = norms_between(model)
    if recovery.recalibration:
        recalibrate(model, some(recovery.recalibration), inputs=_as_they_are, keep=between)
    if between:
        _settle(model, between, some(recovery.recalibration))


def _settle(model: nn.Module, norms: list[_BatchNorm], batches: Iterable[Any]) -> None:
    """Gives fresh norms the statistics of what flows through them, and scales and shifts that undo the norming.

    So the network computes the same when it begins to train as it did without them.
    """
    watchers = [_watcher(norm) for norm in norms]
    hooks = [
        norm.register_forward_pre_hook(lambda _, inputs, watcher=watcher: [watcher(*inputs), None][1])
        for norm, watcher in zip(norms, watchers, strict=True)
    ]
    try:
        with evaluating(model):
            for inputs in batches:
                call(model, to_device(inputs, device_of(model)))
    finally:
        for hook in hooks:
            hook.remove()
    for norm, watcher in zip(norms, watchers, strict=True):
        _undo_norming(norm, watcher)


def _watcher(norm: _BatchNorm) -> _BatchNorm:
    """A norm of its own that only averages what it sees."""
    watcher = copy.deepcopy(norm)
    watcher.reset_running_stats()
    watcher.momentum = None
    return watcher.train()


@torch.no_grad()
def _undo_norming(norm: _BatchNorm, seen: _BatchNorm) -> None:
    norm.load_state_dict(seen.state_dict())
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.weight.copy_((norm.running_var + norm.eps).sqrt())
    norm.bias.copy_(norm.running_mean)


def _as_they_are(inputs: Any) -> Any:
    return inputs


def _some_inputs(feed: Feed, accumulate: int, inputs: Callable[[Any], Any], images: int) -> Iterator[Any]:
    """Inputs of the first epoch, about so many, as training will see them: no more at a time than it can hold."""
    batches = max(1, -(-images // feed.batch_size))
    for raw in islice(feed.raw(0), min(batches, feed.steps)):
        yield from (inputs(feed.prepare(piece)[0]) for piece in pieces(raw, accumulate))
