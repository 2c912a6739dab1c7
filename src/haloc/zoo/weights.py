"""Loading weights into a model: all of them fit and are finite, or the model stays as it was."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from haloc.errors import FileFormatError, WeightsError, nearest, shown
from haloc.files import check_regular

# Keys under which training scripts put the state dict beside the epoch, the optimiser and so on.
_CONTAINERS = ("state_dict", "model_state_dict", "model")
# What DataParallel and torch.compile put before every name.
_PREFIXES = ("module.", "_orig_mod.")
# BatchNorm counts its batches here; old files do not have it and inference does not need it.
_OPTIONAL = "num_batches_tracked"
_SHOWN, _LONG_NAME = 3, 200

State = dict[str, Tensor]


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Loads the weights in ``path`` into ``model``, converted to its dtypes and devices.

    Reads ``.safetensors`` files, and whatever ``torch.save`` wrote (a state dict, bare or in one of the usual
    containers) without running any code in it.

    Raises:
        FileFormatError: the file is missing, unreadable or holds no state dict.
        WeightsError: names, shapes or kinds differ, or a value is not finite; the model is untouched.
    """
    path = Path(path).expanduser()
    expected: State = model.state_dict()
    bare = next((name for name, value in expected.items() if value.is_meta), None)
    if bare is not None:
        raise WeightsError(
            f"there is no place to load {path} into: {bare!r} of the model is on the meta device; build the model on "
            "the CPU, or give it memory with model.to_empty(device='cpu') first"
        )
    found = read_weights(path, expected)
    _require_same_names(found, expected, path)
    _require_same_shapes(found, expected, path)
    converted = {name: _converted(name, value, expected[name], path) for name, value in found.items()}
    model.load_state_dict(expected | converted)


def read_weights(path: str | Path, expected: Mapping[str, Tensor]) -> State:
    """The state dict in ``path``, by the names that ``expected``, the model's own, would have for it."""
    path = Path(path).expanduser()
    return _without_prefixes(_state_dict(_read(path), path), expected)


def _read(path: Path) -> Any:
    if not path.exists() or path.is_dir():
        kind = "is a folder, not a file of weights" if path.is_dir() else "does not exist"
        raise FileFormatError(f"cannot load weights: {path} {kind}")
    check_regular(path)
    return read_safetensors(path) if path.suffix.lower() == ".safetensors" else _read_torch(path)


def read_safetensors(path: Path) -> State:
    """All tensors in a file, whatever they are called."""
    try:
        return load_file(path)
    except PermissionError as error:
        raise FileFormatError(f"cannot read {path}: {error.strerror}") from error
    # The header is a stranger's: what is wrong with it decides what is raised.
    except Exception as error:
        raise FileFormatError(
            f"{path} is no readable safetensors file: it is cut off, damaged or of another kind"
        ) from error


def _read_torch(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError as error:
        raise FileFormatError(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:  # torch.load raises nearly anything on a file that is cut off or is no pickle
        raise FileFormatError(_unreadable(path, error)) from error


def _unreadable(path: Path, error: Exception) -> str:
    """Tells an honest pickle with objects in it from bytes that are no weights at all."""
    if isinstance(error, pickle.UnpicklingError) and "global" in str(error).lower():
        return (
            f"{path} holds Python objects besides tensors, which are not loaded because they could run code; "
            "save model.state_dict() and load that; where you trust the file, in Python: "
            f"torch.save(torch.load({str(path)!r}, weights_only=False).state_dict(), 'weights.pth') "
            "(of a dict with the weights in it, ['state_dict'] in place of .state_dict())"
        )
    return f"{path} is no readable PyTorch file: it is cut off, damaged or of another kind"


def _state_dict(content: Any, path: Path) -> State:
    """Returns the state dict in ``content``, out of the containers it may be in."""
    while isinstance(content, Mapping):
        inner = next((content[key] for key in _CONTAINERS if isinstance(content.get(key), Mapping)), None)
        if inner is None:
            break
        content = inner
    if isinstance(content, Mapping) and content and all(map(_is_entry, content.items())):
        odd = next((name for name, value in content.items() if not _is_plain(value)), None)
        if odd is not None:
            raise FileFormatError(
                f"{path}: {shown(odd)} is a tensor of a kind that no layer takes (sparse, quantised, nested or without "
                "data); save a plain one"
            )
        return dict(content)
    raise FileFormatError(f"{path} holds no state dict but {_describe(content)}; save model.state_dict() and load that")


def _is_entry(item: tuple[Any, Any]) -> bool:
    return isinstance(item[0], str) and isinstance(item[1], Tensor)


def _is_plain(value: Tensor) -> bool:
    """Whether it is a block of numbers on the CPU; what is not may fail at the first look at a value."""
    strided = value.layout is torch.strided and not value.is_nested
    return strided and value.device.type == "cpu" and not value.is_quantized


def _describe(content: Any) -> str:
    if not isinstance(content, Mapping):
        return f"a {type(content).__name__}"
    keys = ", ".join(shown(key) for key in list(content)[:_SHOWN])
    return f"a dict of {keys}" if keys else "an empty dict"


def _without_prefixes(found: State, expected: Mapping[str, Tensor]) -> State:
    """Strips the wrappers' prefixes from every name, unless the model's own names have them."""
    for prefix in _PREFIXES * 2:  # either may be around the other
        ours = any(name.startswith(prefix) for name in expected)
        if not ours and all(name.startswith(prefix) for name in found):
            found = {name.removeprefix(prefix): value for name, value in found.items()}
    return found


def _require_same_names(found: State, expected: State, path: Path) -> None:
    missing = [name for name in expected if name not in found and name.split(".")[-1] != _OPTIONAL]
    unexpected = [name for name in found if name not in expected]
    if not missing and not unexpected:
        return
    parts = [f"{len(missing)} missing ({_some(missing)})"] if missing else []
    parts += [f"{len(unexpected)} unexpected ({_some(unexpected)})"] if unexpected else []
    hint = nearest(unexpected[0], missing) if unexpected else ""
    suggestion = hint and f"; for {shown(unexpected[0])}:{hint}"
    raise WeightsError(f"{path} does not fit the model: names {' and '.join(parts)}{suggestion}")


def _require_same_shapes(found: State, expected: State, path: Path) -> None:
    wrong = [name for name, value in found.items() if value.shape != expected[name].shape]
    if not wrong:
        return
    name = wrong[0]
    more = f", and {len(wrong) - 1} more differ" if len(wrong) > 1 else ""
    raise WeightsError(
        f"{path} does not fit the model: {name!r} has shape {tuple(found[name].shape)}, expected "
        f"{tuple(expected[name].shape)}{more}"
    )


def _converted(name: str, value: Tensor, wanted: Tensor, path: Path) -> Tensor:
    """Returns ``value`` in the model's dtype, if that keeps its meaning and every number is finite."""
    same_kind = value.is_floating_point() == wanted.is_floating_point()
    if not same_kind or value.is_complex() != wanted.is_complex():
        raise WeightsError(f"{path} does not fit the model: {name!r} has dtype {value.dtype}, expected {wanted.dtype}")
    converted = value.to(wanted.dtype)
    if converted.is_floating_point() and not _sound(converted, wanted):
        raise WeightsError(f"{path} cannot be used: {name!r} has values that are NaN or infinite in {wanted.dtype}")
    return converted


def _sound(value: Tensor, wanted: Tensor) -> bool:
    """Whether all numbers are finite, but for those that the model itself has infinite, as the mask of an attention."""
    finite = value.isfinite()
    return bool(finite.all()) or bool((finite | (value == wanted.to(value.device))).all())


def _some(names: Iterable[str]) -> str:
    """Returns the first few names, and how many more there are."""
    names = [name if len(name) <= _LONG_NAME else f"{name[:_LONG_NAME]}…" for name in names]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
