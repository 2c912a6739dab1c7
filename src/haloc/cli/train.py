"""``haloc train``: trains a network on labelled images, from scratch or from weights."""

from __future__ import annotations

from typing import Annotated

import typer

from haloc.cli.groups import grouped
from haloc.cli.options import ModelArgument, WeightsOption
from haloc.cli.output import training_progress
from haloc.cli.training import (
    DataGroup,
    DataOptions,
    RunGroup,
    SettingsGroup,
    conclude,
    decisive,
    describe,
    load_images,
    load_network,
    running,
)
from haloc.training.settings import TrainSettings

SmoothingOption = Annotated[float, typer.Option(help="Share of the labels' probability spread over all classes.")]

_DATA, _SETTINGS = DataOptions(), TrainSettings()


@grouped
def run(
    model: ModelArgument,
    where: RunGroup,
    weights: WeightsOption = None,
    label_smoothing: SmoothingOption = 0.0,
    data: DataGroup = _DATA,
    settings: SettingsGroup = _SETTINGS,
) -> None:
    """Train a network; writes checkpoints, logs and weights into a folder, and goes on where it was stopped.

    Examples:
    - `haloc train resnet20 --data cifar10 --device cuda --precision bf16 --output runs/resnet20`

    - `torchrun --nproc_per_node 2 -m haloc train resnet18 --data imagefolder --data-root imagenet --device cuda
      --output runs/resnet18`
    """
    from haloc.training.baseline import train
    from haloc.training.objective import CrossEntropy

    objective = CrossEntropy(label_smoothing)
    with running("train", where) as here:
        images = load_images(model, data, settings, here)
        network = load_network(model, weights, images, settings.seed, here)
        config = describe("train", model, weights, data, images.scale, settings) | {"label_smoothing": label_smoothing}
        here.begin(config, images.train.steps)
        with training_progress(f"training {model} on {len(images.source):,} images of {data.data}") as on_progress:
            outcome = train(
                network,
                images.train,
                val=images.val,
                settings=settings,
                objective=objective,
                folder=here.folder,
                resume=where.resume,
                config=decisive(config),
                session=here.session,
                on_progress=on_progress,
            )
        conclude(network, outcome, config, images, here)
