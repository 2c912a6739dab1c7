"""Layers that a model reaches in other ways than as its modules: in plain lists, in objects, in functions.

Whoever holds a layer like that goes on calling it after another module has been put in its place.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from inspect import getattr_static
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

#: Where every module keeps its parts and hooks; whatever else it has was put there by its author.
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))

#: How deep attributes are followed; a model that hides a layer deeper than this does so on purpose.
_DEEPEST = 6

_CONTAINERS = (list, tuple, set, frozenset, deque)

#: What cannot hold a layer; most attributes are of these kinds.
_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, Tensor)

#: Where a module was found, by the module that holds it and the attribute it was found in.
Found = tuple[nn.Module, str, nn.Module]


def is_layer(module: object) -> bool:
    """Whether it is a convolution or a linear layer."""
    return isinstance(module, (nn.Linear, _ConvNd))


def held_layers(model: nn.Module) -> dict[int, str]:
    """Layers of the model that something else than its parent holds too, by id, and the reason to leave them alone."""
    known = {id(module) for module in model.modules()}
    # A block that is a module of the model has its layers replaced wherever it is held; one that is none keeps its own.
    reasons = {
        id(layer): f"{type(holder).__name__} also holds it outside of its modules"
        for holder, _, module in _held(model)
        for layer in ([module] if id(module) in known else module.modules())
        if is_layer(layer)
    }
    for module in model.modules():
        for layer in _closed_over(module):
            # Functions are not copied with the model: the copy would call the layers of the original.
            reasons.setdefault(id(layer), "a function reaches it past the model, and a copy of the model shares that")
    return reasons


def hidden_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Layers that are no modules of the model, though an attribute of one holds them, by where they are."""
    known = {id(module) for module in model.modules()}
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[str, nn.Module] = {}
    for holder, attribute, module in _held(model):
        if id(module) not in known:
            place = ".".join(filter(None, (names[id(holder)], attribute)))
            inner = module.named_modules()
            strangers = ((name, child) for name, child in inner if is_layer(child) and id(child) not in known)
            found |= {".".join(filter(None, (place, name))): child for name, child in strangers}
    return found


def _held(model: nn.Module) -> Iterator[Found]:
    """Every module that an attribute of some module leads to, with that module and the attribute."""
    for holder in model.modules():
        for attribute, value in vars(holder).items():
            if attribute not in _MODULE_ATTRIBUTES and not _theirs(value):
                for path, module in _modules_in(value, attribute, set(), 0):
                    yield holder, path, module


def _modules_in(value: Any, path: str, seen: set[int], depth: int) -> Iterator[tuple[str, nn.Module]]:
    """The modules in a nest of containers, partials, methods and objects; what is inside of modules is theirs."""
    if isinstance(value, nn.Module):
        yield path, value
        return
    if isinstance(value, _LEAVES) or id(value) in seen or depth > _DEEPEST:
        return
    seen.add(id(value))
    for place, item in _parts(value):
        yield from _modules_in(item, path + place, seen, depth + 1)


def _parts(value: Any) -> list[tuple[str, Any]]:
    """What a value that is no module holds, each with its place in it."""
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", item) for key, item in list(value.items()) if not isinstance(item, _LEAVES)]
    if isinstance(value, _CONTAINERS):
        return [(f"[{number}]", item) for number, item in enumerate(value) if not isinstance(item, _LEAVES)]
    if isinstance(value, partial):
        return [("", item) for item in (value.func, *value.args, *value.keywords.values())]
    if isinstance(value, types.MethodType):
        return [("", value.__self__)] if is_layer(value.__self__) else []
    if _theirs(value) or isinstance(value, types.FunctionType):
        return []
    return [(f".{name}", item) for name, item in getattr(value, "__dict__", {}).items()]


def _theirs(value: object) -> bool:
    """Whether it is a thing of PyTorch's own, such as what torch.compile and DistributedDataParallel keep."""
    home = value.__module__ if isinstance(value, types.FunctionType) else type(value).__module__
    return not isinstance(value, nn.Module) and str(home).split(".")[0] in ("torch", "numpy")


def _closed_over(module: nn.Module) -> Iterator[nn.Module]:
    """Layers that functions of a module reach through variables from where they were written."""
    own = {name: value for name, value in vars(module).items() if name not in _MODULE_ATTRIBUTES}
    for name, function in {"forward": getattr_static(type(module), "forward", None), **own}.items():
        if isinstance(function, types.FunctionType) and not _theirs(function):
            for cell in function.__closure__ or ():
                yield from _reached(function, _content(cell), whole=name == "forward")


def _reached(function: types.FunctionType, value: Any, *, whole: bool) -> Iterator[nn.Module]:
    """The layers a function may call: all of a module that a forward closes over, else those it has the names of."""
    if not isinstance(value, nn.Module):
        return
    named = function.__code__.co_names
    parts = [value] if whole or is_layer(value) else [child for name, child in value.named_children() if name in named]
    yield from (layer for part in parts for layer in part.modules() if is_layer(layer))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable was never set
        return None
