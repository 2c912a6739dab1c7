"""Models by name: the zoo's own, a user's callable, torchvision's and timm's."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from haloc.errors import HalocError, MissingExtraError, SpecError, nearest
from haloc.zoo.compressed import Compressed
from haloc.zoo.convnext import convnext_tiny
from haloc.zoo.images import IMAGENET, Normalisation
from haloc.zoo.mobilenet import mobilenet_v2
from haloc.zoo.resnet import resnet18, resnet18_cifar, resnet34, resnet50
from haloc.zoo.resnet_cifar import resnet20, resnet32, resnet44, resnet56
from haloc.zoo.vgg_cifar import vgg16_bn_cifar
from haloc.zoo.vit import deit_small, deit_tiny
from haloc.zoo.weights import load_weights

#: Where the trained weights are that come with the package.
_PACKAGED = Path(__file__).parent / "pretrained"


@dataclass(frozen=True)
class Entry:
    """A model of the zoo and what it is usually fed.

    Attributes:
        name: the name ``create`` knows it by.
        build: returns the model with random weights; takes ``num_classes``.
        input_size: channels, height and width of an image.
        classes: how many classes it tells apart unless told otherwise.
        normalisation: what its published weights were trained with.
        data: the data set it is meant for.
        base: the name of the dense network that it was compressed from, for one that was.
    """

    name: str
    build: Callable[..., nn.Module]
    input_size: tuple[int, ...]
    classes: int
    normalisation: Normalisation
    data: str
    base: str | None = None

    @property
    def pretrained(self) -> Path | None:
        """The file of trained weights that comes with the package, if one does."""
        path = self.build.weights if isinstance(self.build, Compressed) else _PACKAGED / f"{self.name}.safetensors"
        return path if path.is_file() else None


def _cifar(build: Callable[..., nn.Module]) -> Entry:
    # ImageNet's normalisation: the published CIFAR weights were trained with it, and one rule is enough.
    return Entry(build.__name__, build, (3, 32, 32), 10, IMAGENET, "cifar10")


def _imagenet(build: Callable[..., nn.Module]) -> Entry:
    return Entry(build.__name__, build, (3, 224, 224), 1000, IMAGENET, "imagenet")


_CIFAR: tuple[Callable[..., nn.Module], ...] = (resnet20, resnet32, resnet44, resnet56, resnet18_cifar, vgg16_bn_cifar)
_IMAGENET: tuple[Callable[..., nn.Module], ...] = (
    resnet18,
    resnet34,
    resnet50,
    mobilenet_v2,
    deit_tiny,
    deit_small,
    convnext_tiny,
)
_DENSE: dict[str, Entry] = {entry.name: entry for entry in (*map(_cifar, _CIFAR), *map(_imagenet, _IMAGENET))}
#: Compressed networks and what they were compressed from; there is one where there is a folder of its name.
_COMPRESSED = {"resnet20-haloc": "resnet20", "vgg16-haloc": "vgg16_bn_cifar"}


def compressed_entry(name: str, dense: Entry, folder: Path) -> Entry:
    """The entry of the network that `haloc.save` wrote to ``folder``; it is fed what the dense one is fed."""
    return replace(dense, name=name, build=Compressed(name, dense.build, folder), base=dense.name)


ENTRIES: dict[str, Entry] = _DENSE | {
    name: compressed_entry(name, _DENSE[base], _PACKAGED / name)
    for name, base in _COMPRESSED.items()
    if (_PACKAGED / name).is_dir()
}

#: Stands in the place of a file for the weights that come with the package.
PRETRAINED = "pretrained"


def names() -> tuple[str, ...]:
    """Returns the names of the zoo's own models."""
    return tuple(ENTRIES)


def entry_for(spec: str) -> Entry | None:
    """Returns what is known of the model that ``spec`` names, or None for one from outside the zoo."""
    return ENTRIES.get(spec)


def create(spec: str, *, weights: str | Path | None = None, **kwargs: Any) -> nn.Module:
    """Returns the model that ``spec`` names, in eval mode.

    Args:
        spec: a name of the zoo, ``package.module:callable`` (found from the current folder too),
            ``torchvision:name`` or ``timm:name``.
        weights: a file to load the weights from, or "pretrained" for those that come with the package; without it
            they are random.
        kwargs: given to whatever builds the model.

    Raises:
        SpecError: ``spec`` names nothing, or what it names does not build a model.
        MissingExtraError: torchvision or timm is not installed.
        WeightsError: the weights are those of another model, or of another plan.
    """
    path = _pretrained(spec) if str(weights) == PRETRAINED else weights
    entry = entry_for(spec)
    if path is not None and entry is not None and isinstance(entry.build, Compressed):
        return _called(spec, partial(entry.build.restored, path), kwargs)
    model = _build(spec, kwargs)
    if path is not None:
        load_weights(model, path)
    return model.eval()


def find(spec: str) -> Any:
    """Returns what ``package.module:name`` names, whatever that is; the current folder is looked in too."""
    source, _, name = spec.partition(":")
    with _current_folder_importable():
        return _attribute(spec, source, name)


def _pretrained(spec: str) -> Path:
    """The weights that come with the package."""
    entry = entry_for(spec)
    if entry is not None and entry.pretrained is not None:
        return entry.pretrained
    known = ", ".join(entry.name for entry in ENTRIES.values() if entry.pretrained is not None)
    raise SpecError(f"there are no pretrained weights of {spec!r} in the package, only of {known}; give a file of them")


def _build(spec: str, kwargs: dict[str, Any]) -> nn.Module:
    source, colon, name = spec.partition(":")
    if not colon:
        return _called(spec, _zoo_builder(spec), kwargs)
    if source in _EXTRAS:
        return _called(spec, _EXTRAS[source](name), kwargs)
    with _current_folder_importable():
        return _called(spec, _attribute(spec, source, name), kwargs)


def _zoo_builder(name: str) -> Callable[..., nn.Module]:
    if name in ENTRIES:
        return ENTRIES[name].build
    raise SpecError(
        f"there is no model {name!r} in the zoo, which has {', '.join(ENTRIES)}; give one of these, "
        f"'package.module:callable', 'torchvision:name' or 'timm:name'.{nearest(name, ENTRIES)}"
    )


def _torchvision_builder(name: str) -> Callable[..., nn.Module]:
    models = _extra("torchvision", "torchvision.models")
    _require_listed(name, models.list_models(), "torchvision")
    builder: Callable[..., nn.Module] = models.get_model_builder(name)
    return builder


def _timm_builder(name: str) -> Callable[..., nn.Module]:
    timm = _extra("timm", "timm")
    # timm's names may carry a tag after a dot, which only its own is_model knows how to read.
    if not timm.is_model(name):
        _require_listed(name, timm.list_models(), "timm")
    return lambda **kwargs: timm.create_model(name, **kwargs)


_EXTRAS: dict[str, Callable[[str], Callable[..., nn.Module]]] = {
    "torchvision": _torchvision_builder,
    "timm": _timm_builder,
}


def _extra(package: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == package:
            raise MissingExtraError(package, package) from error
        raise SpecError(f"importing {module!r} raised {_told(error)}") from error
    except Exception as error:
        raise SpecError(f"importing {module!r} raised {_told(error)}; does it match the torch?") from error


def _require_listed(name: str, known: list[str], package: str) -> None:
    if name not in known:
        raise SpecError(f"{package} has no model {name!r}.{nearest(name, known)}")


@contextmanager
def _current_folder_importable() -> Iterator[None]:
    """Puts the current folder first among those that modules are looked for in, as ``python -m`` does."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    importlib.invalidate_caches()  # the file may be younger than the last look at its folder
    try:
        yield
    finally:
        with suppress(ValueError):  # the module may have taken it out itself
            sys.path.remove(folder)


def _attribute(spec: str, module_name: str, name: str) -> Any:
    if not module_name or not name:
        raise SpecError(f"what a module has is written 'package.module:callable', got {spec!r}")
    module = _module(module_name)
    if not hasattr(module, name):
        raise SpecError(f"the module {module_name!r} has no {name!r}.{nearest(name, vars(module))}")
    return getattr(module, name)


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise SpecError(f"importing {name!r} raised {_told(error)}") from error
        raise SpecError(_not_found(name)) from error
    except (Exception, SystemExit) as error:  # a script run by importing it may well exit
        raise SpecError(f"importing {name!r} raised {_told(error)}") from error


def _not_found(name: str) -> str:
    dotted = name.removesuffix(".py").replace("/", ".").strip(".")
    hint = f" Did you mean {dotted!r}?" if dotted != name else ""
    return f"there is no module {name!r} in {Path.cwd()} or among the installed packages.{hint}"


def _called(spec: str, build: Any, kwargs: dict[str, Any]) -> nn.Module:
    if not callable(build):
        raise SpecError(f"{spec!r} is a {type(build).__name__}, expected something that returns a model")
    try:
        model = build(**kwargs)
    except HalocError:
        raise
    except (Exception, SystemExit) as error:
        given = f"with {', '.join(kwargs)}" if kwargs else "without arguments"
        raise SpecError(f"calling {spec!r} {given} raised {_told(error)}") from error
    if not isinstance(model, nn.Module):
        raise SpecError(f"{spec!r} returned a {type(model).__name__}, expected a torch.nn.Module")
    return model


def _told(error: BaseException) -> str:
    """Returns the kind and the first line of what was raised."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
