"""Arguments that several verbs share, and how their text becomes values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from haloc.errors import SpecError, nearest

if TYPE_CHECKING:
    from torch import Tensor, nn

    from haloc.zoo.images import Normalisation

MODEL_HELP = (
    "A model: a name of the zoo (resnet20, resnet18, mobilenet_v2, …), package.module:callable, "
    "torchvision:name or timm:name."
)
ModelArgument = Annotated[str, typer.Argument(help=MODEL_HELP, show_default=False)]
WeightsOption = Annotated[
    Path | None,
    typer.Option(help="Weights: a .safetensors file, a PyTorch state dict, or 'pretrained'.", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DataOption = Annotated[str, typer.Option(help="cifar10, digits or imagefolder.")]
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

_DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "bool")


def make_model(spec: str, weights: Path | None, classes: int | None = None) -> nn.Module:
    """Builds the model, one of the zoo for as many classes as the data have, and loads its weights."""
    from haloc.zoo.registry import create, entry_for

    entry = entry_for(spec)
    if entry is None or classes in (None, entry.classes):
        return create(spec, weights=weights)
    return create(spec, weights=weights, num_classes=classes)


def example_inputs(spec: str, texts: list[str]) -> Any:
    """The example a model is run on: what the user spelled, or what the zoo knows of the model."""
    if texts:
        named = [_named_input(text) for text in texts]
        if all(name for name, _ in named):
            return dict(named)
        if any(name for name, _ in named):
            raise SpecError("give all inputs a name (--input pixel_values=1x3x224x224) or none of them")
        return tuple(tensor for _, tensor in named)
    from haloc.zoo.registry import entry_for

    entry = entry_for(spec)
    if entry is not None:
        return _random((1, *entry.input_size), "float32")
    if spec.startswith(("torchvision:", "timm:")):
        return _random((1, 3, 224, 224), "float32")
    raise SpecError(f"what {spec!r} takes as input is not known; say it, for example --input 1x3x224x224")


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


def usable_device(name: str) -> Any:
    """A torch device that is there, or a message saying what is."""
    import torch

    try:
        chosen = torch.device(name)
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError) as error:
        there = "cpu, cuda" if torch.cuda.is_available() else "cpu"
        raise SpecError(f"device {name!r} cannot be used here; there is {there}") from error
    return chosen


def _named_input(text: str) -> tuple[str, Tensor]:
    """Reads ``[name=]1x3x224x224[:dtype]``."""
    name, _, rest = text.rpartition("=")
    extents, _, dtype = rest.partition(":")
    try:
        shape = tuple(int(part) for part in extents.lower().split("x"))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise SpecError(f"an input is spelled like 1x3x224x224 or name=1x128:int64, got {text!r}")
    dtype = dtype or "float32"
    if dtype not in _DTYPES:
        raise SpecError(
            f"unknown input dtype {dtype!r}, expected one of {', '.join(_DTYPES)}.{nearest(dtype, _DTYPES)}"
        )
    return name, _random(shape, dtype)


def _random(shape: tuple[int, ...], dtype: str) -> Tensor:
    """Random numbers, the same every time."""
    import torch

    generator = torch.Generator().manual_seed(0)
    kind: torch.dtype = getattr(torch, dtype)
    if kind.is_floating_point:
        return torch.randn(shape, generator=generator).to(kind)
    return torch.randint(0, 2, shape, generator=generator).to(kind)


def _numbers(text: str, option: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise SpecError(
            f"{option} takes numbers with commas between, such as 0.485,0.456,0.406, got {text!r}"
        ) from error
