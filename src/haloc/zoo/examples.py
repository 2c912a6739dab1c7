"""Example inputs from a few words: what a model is run on to see its layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from haloc.errors import SpecError, nearest
from haloc.zoo.registry import entry_for

_DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "bool")


def example_inputs(spec: str, texts: list[str]) -> Any:
    """The example a model is run on: what the user spelled, or what the zoo knows of the model."""
    if texts:
        named = [_named_input(text) for text in texts]
        if all(name for name, _ in named):
            return dict(named)
        if any(name for name, _ in named):
            raise SpecError("give all inputs a name (--input pixel_values=1x3x224x224) or none of them")
        return tuple(tensor for _, tensor in named)
    entry = entry_for(spec)
    if entry is not None:
        return _random((1, *entry.input_size), "float32")
    if spec.startswith(("torchvision:", "timm:")):
        return _random((1, 3, 224, 224), "float32")
    raise SpecError(
        f"what {spec!r} takes as input is not known; say it, as in --input 1x3x224x224, or in a recipe model.inputs"
    )


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
    generator = torch.Generator().manual_seed(0)
    kind: torch.dtype = getattr(torch, dtype)
    if kind.is_floating_point:
        return torch.randn(shape, generator=generator).to(kind)
    return torch.randint(0, 2, shape, generator=generator).to(kind)
