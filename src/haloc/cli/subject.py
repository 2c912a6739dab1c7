"""What a search is about: the network, its data, and the ranks on offer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from haloc.cli import complete
from haloc.cli.costs import fine_table
from haloc.cli.options import MeanOption, RootOption, StdOption, example_inputs, make_model, normalisation
from haloc.cli.output import Tracked, progress
from haloc.cli.prepare import load_splits, training_batches
from haloc.cli.training import Here, Images, load_network
from haloc.training.settings import TrainSettings

if TYPE_CHECKING:
    from torch import nn

    from haloc.factor.calibrate import InputMoments
    from haloc.inventory import Inventory
    from haloc.space import RankSpace
    from haloc.zoo.data import ImageSource
    from haloc.zoo.images import Normalisation

#: Images at a time while calibrating, as `haloc evaluate` has it.
CALIBRATION_BATCH = 250


@dataclass(frozen=True)
class SearchData:
    """What is searched on."""

    data: Annotated[
        str | None,
        typer.Option(
            help="cifar10, digits, tiny-imagenet or imagefolder; some methods need none.",
            show_default=False,
            autocompletion=complete.among(complete.DATA),
        ),
    ] = None
    data_root: RootOption = None
    batch_size: Annotated[int, typer.Option(min=1, help="Images in a step, over all processes together.")] = 256
    workers: Annotated[int, typer.Option(min=0, help="Processes that read the pictures of an imagefolder.")] = 0
    mean: MeanOption = None
    std: StdOption = None


@dataclass(frozen=True)
class SpaceOptions:
    """What is on offer."""

    forms: Annotated[str, typer.Option(help="Forms on offer: tucker2, tucker2-out, tucker2-in, spatial, svd.")] = (
        "tucker2,svd"
    )
    round_to: Annotated[
        str,
        typer.Option(help="Ranks are multiples of this; 'paper' for its Algorithm 1, 'auto' for what --cost feels."),
    ] = "paper"
    ratio: Annotated[
        float | None,
        typer.Option(help="Only ranks that leave about this share of a layer's weights.", show_default=False),
    ] = None
    unequal: Annotated[bool, typer.Option("--unequal", help="Tucker-2 ranks may differ from each other.")] = False
    layer: Annotated[
        list[str] | None,
        typer.Option("--layer", help="Only this layer; the others stay dense. Repeat it.", show_default=False),
    ] = None

    def over(self, layers: Inventory, tables: Mapping[str, Path]) -> RankSpace:
        """The space that they are for a network."""
        from haloc.space import rank_space

        step: int | str = int(self.round_to) if self.round_to.isdecimal() else self.round_to
        forms = [form.strip() for form in self.forms.split(",") if form.strip()]
        table = fine_table(tables) if step == "auto" else None
        return rank_space(
            layers, forms=forms, round_to=step, equal=not self.unequal, names=self.layer, ratio=self.ratio, cost=table
        )


@dataclass(frozen=True, eq=False)
class Subject:
    """The network to be searched, and its data where there are any.

    Attributes:
        network: The dense network, on its device.
        example: What it is run on to see its layers.
        images: Its data, the held-out images in shuffled batches; or None.
    """

    network: nn.Module
    example: Any
    images: Images | None = None


def load_subject(
    model: str, weights: Path | None, inputs: list[str], data: SearchData, training: TrainSettings, here: Here
) -> Subject:
    """Loads the network, and its data where a data set is named; without ``inputs`` it is run on one of the images."""
    if data.data is None:
        return Subject(make_model(model, weights).to(here.device), example_inputs(model, inputs))
    images = _images(model, data.data, data, training, here)
    network = load_network(model, weights, images, training.seed, here)
    if inputs:
        return Subject(network, example_inputs(model, inputs), images)
    example, _ = next(iter(images.source.batches(1, normalisation=images.scale, limit=1)))
    return Subject(network, example, images)


def _images(model: str, name: str, data: SearchData, training: TrainSettings, here: Here) -> Images:
    from haloc.training.feed import check_feed

    splits, scale = load_splits(model, name, data.data_root, normalisation(data.mean, data.std), data.workers)
    source, val = splits.train.on(here.device), splits.val.on(here.device)
    parts = here.session.shard.world * training.accumulate
    train = source.batches(data.batch_size, normalisation=scale, augment=True, shuffle=True, seed=training.seed)
    check_feed(train, here.session.shard.world, training.accumulate)
    size = min(data.batch_size, len(val) // parts * parts)  # there are fewer of them, perhaps less than a batch
    held = val.batches(max(size, parts), normalisation=scale, shuffle=True, seed=training.seed)
    return Images(source, splits.test, scale, train, held, data.batch_size // parts)


def calibrated(
    network: nn.Module, source: ImageSource, scale: Normalisation, names: Iterable[str], images: int, responses: bool
) -> dict[str, InputMoments] | None:
    """What the inputs of these layers look like on so many training images; None without any."""
    if not images:
        return None
    from haloc.factor.calibrate import calibrate

    with progress("calibrating on training images", images) as advance:
        some = training_batches(source, scale, images, CALIBRATION_BATCH)
        return calibrate(network, Tracked(some, advance), names, responses=responses)
