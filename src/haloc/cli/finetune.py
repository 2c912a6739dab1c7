"""``haloc finetune``: factorises a trained network by a plan and trains its accuracy back."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from haloc.cli.groups import Group, grouped
from haloc.cli.options import CalibrateOption, ModelArgument, WeightsOption
from haloc.cli.output import training_progress
from haloc.cli.prepare import factorised, read_plan
from haloc.cli.training import (
    DataGroup,
    DataOptions,
    Here,
    Images,
    RunGroup,
    SettingsGroup,
    conclude,
    decisive,
    describe,
    load_images,
    load_network,
    running,
)
from haloc.errors import ModelError, SpecError
from haloc.training.settings import FINETUNING, RecoverySettings

if TYPE_CHECKING:
    from torch import nn

    from haloc.plan import Plan

#: Images at a time while calibrating, as `haloc evaluate` has it.
_CALIBRATION_BATCH = 250

RecoveryGroup = Annotated[
    RecoverySettings,
    Group(
        "Recovery",
        {
            "cross_entropy": "Weight of the cross-entropy with the labels.",
            "distillation": "Weight of the divergence from the teacher's output.",
            "features": "Weight of the distance between the teacher's feature maps and the student's.",
            "temperature": "Softens both outputs in the distillation.",
            "label_smoothing": "Share of the labels' probability spread over all classes.",
            "norm_between": "Train with BatchNorms between the factors, multiplied into them at the end.",
            "recalibration": "Training images on which BatchNorm statistics are measured anew at the start.",
            "pad_ranks": "Train with ranks padded to multiples of this by zeros; 8 suits GPUs in half precision.",
        },
    ),
]
PlanOption = Annotated[Path, typer.Option(help="The plan to factorise by.", show_default=False)]
TeacherOption = Annotated[
    str | None, typer.Option(help="Another network to learn from than the dense one.", show_default=False)
]
TeacherWeightsOption = Annotated[Path | None, typer.Option(help="The teacher's weights.", show_default=False)]
NoDistillationOption = Annotated[bool, typer.Option("--no-distillation", help="Learn from the labels alone.")]

_DATA, _RECOVERY = DataOptions(), RecoverySettings()


@grouped
def run(
    model: ModelArgument,
    plan: PlanOption,
    where: RunGroup,
    weights: WeightsOption = None,
    calibrate: CalibrateOption = 1000,
    teacher: TeacherOption = None,
    teacher_weights: TeacherWeightsOption = None,
    no_distillation: NoDistillationOption = False,
    recovery: RecoveryGroup = _RECOVERY,
    data: DataGroup = _DATA,
    settings: SettingsGroup = FINETUNING,
) -> None:
    """Factorise a trained network by a plan and train its accuracy back, the dense network being its teacher.

    Examples:
    - `haloc finetune resnet20 --weights pretrained --plan plan.json --output runs/small`

    - `haloc finetune resnet20 --weights pretrained --plan plan.json --teacher resnet56
      --teacher-weights resnet56.safetensors --epochs 100 --device cuda --output runs/taught`
    """
    from haloc.recovery import finetune

    others = teacher is not None or teacher_weights is not None
    goals = _goals(recovery, no_distillation, others)
    _require_weights(model, weights, "--weights")
    if others:
        _require_weights(teacher or model, teacher_weights, "--teacher-weights")
    with running("finetune", where) as here:
        images = load_images(model, data, settings, here)
        dense = load_network(model, weights, images, settings.seed, here)
        chosen = read_plan(dense, plan)
        master: nn.Module | None = None
        if goals.distillation or goals.features:
            master = load_network(teacher or model, teacher_weights, images, settings.seed, here) if others else dense
            _check_teacher(master, dense, chosen, images, goals)
        network = _student(dense, chosen, images, calibrate, here)
        config = describe("finetune", model, weights, data, images.scale, settings)
        config |= {"plan": chosen.to_dict()["layers"], "calibrate": calibrate, "recovery": asdict(goals)}
        config |= {"teacher": teacher, "teacher_weights": None if teacher_weights is None else str(teacher_weights)}
        here.begin(config, images.train.steps)
        if here.step is None and here.session.is_main:
            chosen.save(here.folder / "plan.json")
        with training_progress(f"fine-tuning {model} on {len(images.source):,} images of {data.data}") as on_progress:
            outcome = finetune(
                network,
                images.train,
                teacher=master,
                val=images.val,
                settings=settings,
                recovery=goals,
                folder=here.folder,
                resume=where.resume,
                config=decisive(config),
                session=here.session,
                on_progress=on_progress,
            )
        params = sum(parameter.numel() for parameter in dense.parameters())
        conclude(network, outcome, config, images, here, plan=str(plan), params_dense=params)


def _goals(options: RecoverySettings, no_distillation: bool, others: bool) -> RecoverySettings:
    if no_distillation and others:
        raise SpecError("--no-distillation does without a teacher; leave it out, or --teacher and --teacher-weights")
    if others and not options.distillation and not options.features:
        raise SpecError("a teacher that weighs nothing teaches nothing; give --distillation or --features a weight")
    if no_distillation and options.features:
        raise SpecError("--features needs a teacher, and --no-distillation does without one; leave one of them out")
    return options.without_teacher() if no_distillation else options


def _require_weights(spec: str, weights: Path | None, option: str) -> None:
    """Refuses a network of the zoo with random weights: nothing can be learned from it."""
    from haloc.zoo.registry import entry_for

    entry = entry_for(spec)
    if weights is None and entry is not None:
        hint = f"{option} pretrained" if entry.pretrained is not None else option
        raise SpecError(f"{spec!r} alone has random weights; say where its trained ones are, with {hint}")


def _check_teacher(teacher: nn.Module, dense: nn.Module, plan: Plan, images: Images, goals: RecoverySettings) -> None:
    """Refuses a teacher whose answers or layers are not those of the student, before anything long begins."""
    from haloc.factor.surgery import skeleton
    from haloc.recovery import factorised_layers

    told = [_answers(network, images) for network in (teacher, dense)]
    if told[0] != told[1]:
        raise ModelError(f"the teacher tells {told[0]} classes apart and the model {told[1]}; give another teacher")
    if goals.features and not factorised_layers(skeleton(dense, plan), teacher):
        raise ModelError("--features needs a teacher whose layers have the names of the factorised ones; leave it out")


def _answers(network: nn.Module, images: Images) -> int:
    """How many classes a network tells apart."""
    from haloc.factor.forward import call, device_of, evaluating, to_device
    from haloc.training.objective import logits_of

    inputs, _ = next(iter(images.source.batches(1, normalisation=images.scale, limit=1)))
    with evaluating(network):
        return logits_of(call(network, to_device(inputs, device_of(network)))).shape[1]


def _student(dense: nn.Module, plan: Plan, images: Images, calibrate: int, here: Here) -> nn.Module:
    """The factorised network, or its structure alone where its weights come from a checkpoint or another process."""
    from haloc.factor.surgery import skeleton

    if here.step is not None:
        return skeleton(dense, plan)
    if here.session.is_main:
        source, scale = images.source, images.scale
        network = factorised(dense, plan, source, scale, calibrate, _CALIBRATION_BATCH, responses=False)
    else:
        network = skeleton(dense, plan)
    # Factors are found up to their signs: every process has to have the same ones.
    here.session.share(network.state_dict().values())
    return network
