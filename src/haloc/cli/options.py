"""Arguments that several verbs share, and how their text becomes values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from haloc.cli import complete
from haloc.errors import SpecError

if TYPE_CHECKING:
    from torch import nn

    from haloc.zoo.images import Normalisation

MODEL_HELP = (
    "A model: a name of the zoo (resnet20, resnet18, mobilenet_v2, …), package.module:callable, "
    "torchvision:name or timm:name."
)
ModelArgument = Annotated[
    str, typer.Argument(help=MODEL_HELP, show_default=False, autocompletion=complete.among(complete.MODELS))
]
#: Where a verb can do without.
OptionalModel = Annotated[
    str | None, typer.Argument(help=MODEL_HELP, show_default=False, autocompletion=complete.among(complete.MODELS))
]
WeightsOption = Annotated[
    Path | None,
    typer.Option(help="Weights: a .safetensors file, a PyTorch state dict, or 'pretrained'.", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DataOption = Annotated[
    str,
    typer.Option(help="cifar10, digits, tiny-imagenet or imagefolder.", autocompletion=complete.among(complete.DATA)),
]
RootOption = Annotated[Path | None, typer.Option(help="Folder the data set lies in.", show_default=False)]
MeanOption = Annotated[
    str | None,
    typer.Option(help="Normalisation, such as 0.485,0.456,0.406; the zoo's models know their own.", show_default=False),
]
StdOption = Annotated[str | None, typer.Option(help="Normalisation, such as 0.229,0.224,0.225.", show_default=False)]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")]
CalibrateOption = Annotated[
    int, typer.Option(min=0, help="With a plan: make it activation-aware, from so many training images; 0: don't.")
]


def make_model(spec: str, weights: Path | None, classes: int | None = None) -> nn.Module:
    """Builds the model, one of the zoo for as many classes as the data have, and loads its weights."""
    from haloc.zoo.registry import create, entry_for

    entry = entry_for(spec)
    if entry is None or classes in (None, entry.classes):
        return create(spec, weights=weights)
    return create(spec, weights=weights, num_classes=classes)


def base_of(spec: str) -> str | None:
    """What a compressed network of the zoo was made from; None for any other network."""
    from haloc.zoo.registry import entry_for

    entry = entry_for(spec)
    return None if entry is None else entry.base


def kind_of(spec: str) -> str:
    """What a network is before anything is done to it, for a title."""
    base = base_of(spec)
    return "dense" if base is None else f"compressed {base}"


def example_inputs(spec: str, texts: list[str]) -> Any:
    """The example a model is run on: what the user spelled, or what the zoo knows of the model."""
    from haloc.zoo import examples

    return examples.example_inputs(spec, texts)


def normalisation(mean: str | None, std: str | None) -> Normalisation | None:
    """The normalisation spelled as two lists of numbers, or None where none was."""
    if mean is None and std is None:
        return None
    if mean is None or std is None:
        raise SpecError("--mean and --std belong together: give both or neither")
    from haloc.zoo.images import Normalisation

    means, stds = _numbers(mean, "--mean"), _numbers(std, "--std")
    if len(means) != len(stds) or min(stds) <= 0:
        raise SpecError(f"--mean and --std take equally many numbers, std above 0, got {mean!r} and {std!r}")
    return Normalisation(means, stds)


def was_given(context: typer.Context, name: str) -> bool:
    """Whether an option was written down, be it with its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def usable_device(name: str) -> Any:
    """A torch device that is there, or a message saying what is."""
    from haloc.factor import forward

    return forward.usable_device(name)


def _numbers(text: str, option: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise SpecError(
            f"{option} takes numbers with commas between, such as 0.485,0.456,0.406, got {text!r}"
        ) from error
