"""The stages that bring accuracy back: new statistics, blocks that imitate the dense ones, training."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from haloc.artifact.store import save
from haloc.errors import TrainError
from haloc.files import write_json
from haloc.methods.task import Rehearsal
from haloc.pipeline.settings import decisive, finetuning, reconstruction
from haloc.pipeline.stage import Stage, digests, remove, saved
from haloc.pipeline.work import (
    APPLIED,
    FINETUNE,
    FINETUNED,
    RECALIBRATED,
    RECONSTRUCT,
    RECONSTRUCTED,
    Work,
)
from haloc.reconstruction import reconstruct_blocks
from haloc.recovery import finetune, recalibrate

# recalibrate


def _norms(work: Work) -> str | None:
    if not work.recipe.recalibrate.images:
        return "recalibrate.images is 0"
    if work.job.train is None:
        return "there are no training data"
    has = any(isinstance(module, _BatchNorm) for module in work.job.model.modules())
    return None if has else "the network has no BatchNorm"


def _recalibrate(work: Work) -> None:
    network = work.saved(APPLIED)
    _remeasure(work, network)
    save(work.file(RECALIBRATED), network, plan=work.plan)


def _remeasure(work: Work, network: nn.Module) -> None:
    recalibrate(network, work.job.samples(work.recipe.recalibrate.images), inputs=lambda inputs: inputs)


def _factorised(work: Work) -> str:
    """The folder of the network that nothing was learnt by yet."""
    return APPLIED if _norms(work) else RECALIBRATED


# reconstruct


def _reconstruct_inputs(work: Work) -> Any:
    told = reconstruction(work.recipe)
    files = digests(work, *saved(_factorised(work))[:2])
    settings = None if told is None else asdict(told)
    return [work.weights, files, settings, work.recipe.recalibrate.images, work.job.identity]


def _reconstruct_idle(work: Work) -> str | None:
    if reconstruction(work.recipe) is None:
        return f"reconstruct.epochs is {work.recipe.reconstruct.get('epochs', 'not given')}"
    return untrained(work)


def _reconstruct(work: Work) -> None:
    job, told = work.job, reconstruction(work.recipe)
    assert told is not None
    network = work.saved(_factorised(work)).to(next(job.model.parameters()).device)
    with work.listener.steps("reconstructing blocks") as step:
        found = reconstruct_blocks(
            network,
            job.model,
            job.samples(told.images),
            settings=told,
            folder=work.file(RECONSTRUCT),
            on_step=step,
        )
    if _norms(work) is None:  # what blocks put out has changed, and with it what comes after them
        _remeasure(work, network)
    save(work.file(RECONSTRUCTED), network, plan=work.plan)
    write_json(work.file(f"{RECONSTRUCT}/outcome.json"), {"blocks": [asdict(block) for block in found]})


def _begun_with(work: Work) -> str:
    """The folder of the network that fine-tuning starts from."""
    return _factorised(work) if _reconstruct_idle(work) else RECONSTRUCTED


# finetune


def _finetune_inputs(work: Work) -> Any:
    told = finetuning(work.recipe, work.job.loss is not None)
    settings = None if told is None else [decisive(told[0]), asdict(told[1])]
    files, lessons = digests(work, *saved(_begun_with(work))[:2]), work.job.lessons
    return [work.weights, files, settings, work.job.identity, work.job.teaching, lessons and lessons.identity]


def _finetune_idle(work: Work) -> str | None:
    return "finetune.epochs is 0" if finetuning(work.recipe, work.job.loss is not None) is None else untrained(work)


def untrained(work: Work) -> str | None:
    """Why the network cannot be trained, or None."""
    return "there are no training data" if work.job.train is None else None


def _finetune(work: Work) -> None:
    job, told = work.job, finetuning(work.recipe, work.job.loss is not None)
    assert told is not None
    network = work.saved(_begun_with(work)).to(next(job.model.parameters()).device)
    with work.listener.working("fine-tuning") as (_, on_progress):
        outcome = finetune(
            network,
            job.lessons or job.train,
            teacher=job.teacher or job.model,
            val=_validation(work),
            loss=job.loss,
            inputs=None if job.loss is None else job.inputs,
            settings=told[0],
            recovery=told[1],
            folder=work.file(FINETUNE),
            session=work.session,
            on_progress=on_progress,
        )
    if not outcome.finished:
        raise TrainError(
            f"the time of finetune.minutes was up after {outcome.epochs:.1f} epochs; what was done is kept: give more "
            "minutes, or none, and run it again"
        )
    if not work.session.is_main:
        return
    save(work.file(FINETUNED), network, plan=work.plan)
    write_json(work.file(f"{FINETUNE}/outcome.json"), {"history": outcome.history, "seconds": outcome.seconds})


def rehearsal(work: Work) -> Rehearsal | None:
    """How a network will be fine-tuned, for a search that tries it; on what is not held out from the search."""
    job, told = work.job, finetuning(work.recipe, work.job.loss is not None)
    if told is None or job.train is None:
        return None
    training, recovery = told

    def run(network: nn.Module, epochs: int) -> None:
        share = epochs / training.epochs
        finetune(
            network,
            job.train,
            teacher=job.teacher or job.model,
            loss=job.loss,
            inputs=None if job.loss is None else job.inputs,
            settings=replace(training, epochs=epochs, warmup_epochs=training.warmup_epochs * share, minutes=None),
            recovery=recovery,
            session=work.session,
        )

    return Rehearsal(run, {"training": decisive(training), "recovery": asdict(recovery), "teacher": job.teaching})


def _validation(work: Work) -> Any:
    """Held-out batches for a classifier; for another task its score, which is only written down."""
    job = work.job
    if job.lessons is not None:
        return None  # nothing is held out
    if job.loss is None and job.val is not None:
        return job.val
    return (lambda model: {"score": job.judge(model)}) if job.score is not None else None


def finished(work: Work) -> str:
    """The folder of the network at the end."""
    return _begun_with(work) if _finetune_idle(work) else FINETUNED


def networks(work: Work) -> dict[str, str]:
    """The compressed networks on the way by name, each with its folder; stages that are idle leave none."""
    places = {"applied": APPLIED, "recalibrated": _factorised(work), "reconstructed": _begun_with(work)}
    places["finetuned"] = finished(work)
    first = {place: name for name, place in reversed(places.items())}
    return {name: place for name, place in places.items() if first[place] == name}


RECOVERY_STAGES = (
    Stage(
        "recalibrate",
        "measuring BatchNorm statistics anew",
        lambda work: [digests(work, *saved(APPLIED)[:2]), work.recipe.recalibrate.images, work.job.identity],
        _recalibrate,
        lambda work: saved(RECALIBRATED),
        idle=_norms,
        clear=lambda work: remove(work, RECALIBRATED),
    ),
    Stage(
        "reconstruct",
        "letting blocks learn what the dense ones put out",
        _reconstruct_inputs,
        _reconstruct,
        lambda work: [*saved(RECONSTRUCTED), f"{RECONSTRUCT}/outcome.json"],
        idle=_reconstruct_idle,
        clear=lambda work: remove(work, RECONSTRUCT, RECONSTRUCTED),
    ),
    Stage(
        "finetune",
        "training the accuracy back",
        _finetune_inputs,
        _finetune,
        lambda work: [*saved(FINETUNED), f"{FINETUNE}/outcome.json"],
        idle=_finetune_idle,
        clear=lambda work: remove(work, FINETUNE, FINETUNED),
        shared=lambda work: True,
    ),
)
