"""What verbs with data and plans do before their own work: load, check, calibrate, factorise."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from haloc.cli.output import Tracked, progress

if TYPE_CHECKING:
    from torch import nn

    from haloc.plan import Plan
    from haloc.zoo.batches import Batches
    from haloc.zoo.data import ImageSource, Splits
    from haloc.zoo.images import Normalisation


def load_splits(
    model: str, data: str, root: Path | None, given: Normalisation | None, workers: int = 0
) -> tuple[Splits, Normalisation]:
    """The data set, and the normalisation: the user's, else the model's, else the data's."""
    from haloc.zoo.data import load_data
    from haloc.zoo.registry import entry_for

    splits, entry = load_data(data, root=root, workers=workers), entry_for(model)
    return splits, given or (entry.normalisation if entry is not None else splits.normalisation)


def read_plan(network: nn.Module, path: Path) -> Plan:
    """Reads the plan and checks it against the network before anything long begins."""
    from haloc.factor.surgery import check_plan
    from haloc.plan import Plan

    plan = Plan.load(path)
    check_plan(network, plan)
    return plan


def factorised(
    network: nn.Module,
    plan: Plan,
    source: ImageSource,
    scale: Normalisation,
    images: int,
    batch_size: int,
    *,
    responses: bool,
) -> nn.Module:
    """The network by the plan, activation-aware from so many training images; 0 looks at the weights alone.

    With ``responses`` errors are weighted by what comes of them, which suits a network that is not trained afterwards.
    """
    from haloc.factor.calibrate import calibrate
    from haloc.factor.surgery import apply_plan

    moments, changes = None, plan.changes()
    if images:
        with progress("calibrating on training images", images) as advance:
            batches = Tracked(training_batches(source, scale, images, batch_size), advance)
            moments = calibrate(network, batches, changes, responses=responses)
    with progress("factorising layers", len(changes)) as advance:
        return apply_plan(network, plan, moments=moments, on_layer=lambda _: advance(1))


def training_batches(source: ImageSource, scale: Normalisation, images: int, batch_size: int) -> Batches:
    """So many images as training sees them: shuffled and augmented."""
    return source.batches(batch_size, normalisation=scale, augment=True, shuffle=True, limit=images)
