"""The forms a layer can be written in, and what each costs. Pure arithmetic, no torch.

The one idea here is `stages`: a form turns one layer into a short chain of plain layers, each of which is a shape
again. Everything that is counted is a sum over that chain, and everything that is built follows it.

Ranks of grouped convolutions are per group, the same for all groups.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from math import prod
from typing import Any, ClassVar

from haloc.errors import FileFormatError, SpecError, nearest, shown
from haloc.shapes import MOST, ConvShape, LinearShape, Shape

#: The smallest rank worth offering: the finest step of the paper's Algorithm 1.
MIN_RANK = 4


@dataclass(frozen=True)
class Dense:
    """The layer as it is."""

    name: ClassVar[str] = "dense"

    def __str__(self) -> str:
        return "dense"


@dataclass(frozen=True)
class Tucker2:
    """1×1 to ``rank_in`` channels, the k×k core, 1×1 from ``rank_out`` channels (the paper's Eq. 1 to 4).

    A rank that equals its full mode leaves that 1×1 out, so the two-layer forms are covered too.
    """

    name: ClassVar[str] = "tucker2"
    rank_out: int
    rank_in: int

    def __str__(self) -> str:
        return f"tucker2 {self.rank_out}/{self.rank_in}"


@dataclass(frozen=True)
class Spatial:
    """A kernel along the first axis into ``rank`` channels, then one along the remaining axes."""

    name: ClassVar[str] = "spatial"
    rank: int

    def __str__(self) -> str:
        return f"spatial {self.rank}"


@dataclass(frozen=True)
class Svd:
    """Two thin matrices through ``rank`` channels, for 1×1 convolutions and linear layers."""

    name: ClassVar[str] = "svd"
    rank: int

    def __str__(self) -> str:
        return f"svd {self.rank}"


Form = Dense | Tucker2 | Spatial | Svd
FORMS: dict[str, type[Form]] = {form.name: form for form in (Dense, Tucker2, Spatial, Svd)}

#: Ways to scale a form by one number: the form, and which of its ranks shrink. The one-sided ways keep one 1×1 out.
SCALINGS: dict[str, tuple[str, tuple[bool, ...]]] = {
    "tucker2": (Tucker2.name, (True, True)),
    "tucker2-out": (Tucker2.name, (True, False)),
    "tucker2-in": (Tucker2.name, (False, True)),
    "spatial": (Spatial.name, (True,)),
    "svd": (Svd.name, (True,)),
}


def stages(shape: Shape, form: Form) -> tuple[Shape, ...]:
    """Returns the plain layers, in order, that ``shape`` becomes when it is written in ``form``."""
    problem = misfit(shape, form)
    if problem:
        raise SpecError(f"{form} does not fit: {problem}")
    match shape, form:
        case _, Dense():
            return (shape,)
        case LinearShape(), Svd(rank):
            return (replace(shape, out_features=rank, bias=False), replace(shape, in_features=rank))
        case ConvShape(), Svd(rank):
            return _svd_stages(shape, rank)
        case ConvShape(), Tucker2(rank_out, rank_in):
            return _tucker2_stages(shape, rank_out, rank_in)
        case ConvShape(), Spatial(rank):
            return _spatial_stages(shape, rank)
    raise AssertionError("misfit lets nothing else through")


def params(shape: Shape, form: Form) -> int:
    """Weights and biases of a layer written in ``form``."""
    return sum(stage.params for stage in stages(shape, form))


def macs(shape: Shape, form: Form) -> int:
    """Multiply-adds per example of a layer written in ``form``."""
    return sum(stage.macs for stage in stages(shape, form))


def families(shape: Shape) -> tuple[str, ...]:
    """The names of the forms, besides dense, that a layer of this shape can be written in at all."""
    if isinstance(shape, LinearShape) or shape.pointwise:
        return (Svd.name,)
    two_sided = shape.kernel[0] > 1 and prod(shape.kernel[1:]) > 1
    return (Tucker2.name, Spatial.name) if two_sided else (Tucker2.name,)


def full_ranks(shape: Shape, family: str) -> tuple[int, ...]:
    """The ranks beyond which a form cannot gain accuracy: (out, in) for Tucker-2, one number otherwise."""
    if isinstance(shape, LinearShape):
        return (min(shape.in_features, shape.out_features),)
    if family == Tucker2.name:
        return (shape.group_out, shape.group_in)
    if family == Spatial.name:
        return (min(shape.group_in * shape.kernel[0], shape.group_out * prod(shape.kernel[1:])),)
    return (min(shape.group_in, shape.group_out),)


def full_form(shape: Shape, family: str) -> Form:
    """The form of ``family`` at full rank."""
    return FORMS[family](*full_ranks(shape, family))


def scaled_form(shape: Shape, scaling: str, fraction: float, round_to: int = 1) -> Form:
    """The form whose ranks are ``fraction`` of the full ones, rounded to multiples of ``round_to``, at least one.

    ``scaling`` is one of `SCALINGS`; the ranks that it does not shrink stay full.
    """
    family, shrinks = SCALINGS[scaling]

    def scaled(full: int) -> int:
        return min(full, max(round_to, round(fraction * full / round_to) * round_to))

    fulls = full_ranks(shape, family)
    return FORMS[family](*(scaled(full) if shrink else full for full, shrink in zip(fulls, shrinks, strict=True)))


def smallest_form(shape: Shape, family: str, min_rank: int = MIN_RANK) -> Form:
    """The form of ``family`` at ``min_rank`` (or full rank, where that is less)."""
    return FORMS[family](*(min(min_rank, full) for full in full_ranks(shape, family)))


def gains(shape: Shape, form: Form) -> bool:
    """Whether ``form`` saves multiply-adds or parameters against the dense layer."""
    return macs(shape, form) < shape.macs or params(shape, form) < shape.params


def misfit(shape: Shape, form: Form) -> str | None:
    """Says in a few words why ``form`` cannot be used for ``shape``, or returns None when it can."""
    if isinstance(form, Dense):
        return None
    if form.name not in families(shape):
        return f"{_describe(shape)} takes {' or '.join(families(shape))}, not {form.name}"
    for name, rank, full in zip(_rank_names(form), ranks(form), full_ranks(shape, form.name), strict=True):
        if not 1 <= rank <= full:
            return f"{name} {rank} is outside 1..{full}"
    return None


def ranks(form: Form) -> tuple[int, ...]:
    """The ranks of a form as plain numbers, in the order of its fields."""
    return tuple(getattr(form, name) for name in _rank_names(form))


def form_to_dict(form: Form) -> dict[str, Any]:
    """Writes a form as plain JSON values."""
    return {"form": form.name, **asdict(form)}


def form_from_dict(value: Any) -> Form:
    """Reads what `form_to_dict` wrote, or says what is wrong with it."""
    if not isinstance(value, dict) or not isinstance(value.get("form"), str):
        raise FileFormatError(f'expected a form such as {{"form": "svd", "rank": 8}}, got {shown(value)}')
    name = value["form"]
    if name not in FORMS:
        raise FileFormatError(f"unknown form {shown(name)}; the forms are {', '.join(FORMS)}.{nearest(name, FORMS)}")
    given = {key: rank for key, rank in value.items() if key != "form"}
    expected = _RANK_NAMES[name]
    if set(given) != set(expected) or not all(type(rank) is int and 0 < rank <= MOST for rank in given.values()):
        wanted = " and ".join(expected) or "no rank"
        raise FileFormatError(f"form {name!r} takes {wanted} (positive whole numbers), got {shown(given)}")
    return FORMS[name](**given)


def _svd_stages(shape: ConvShape, rank: int) -> tuple[Shape, ...]:
    """Stride and padding go first: the second matrix then only sees the positions that are kept."""
    channels = rank * shape.groups
    return (replace(shape, out_channels=channels, bias=False), _pointwise(shape, channels, shape.out_channels))


def _tucker2_stages(shape: ConvShape, rank_out: int, rank_in: int) -> tuple[Shape, ...]:
    """The core keeps kernel, stride, padding and dilation; a 1×1 at full rank is left out."""
    narrow_in, narrow_out = rank_in < shape.group_in, rank_out < shape.group_out
    inner, outer = rank_in * shape.groups, rank_out * shape.groups
    core = replace(shape, in_channels=inner, out_channels=outer, bias=shape.bias and not narrow_out)
    chain: list[Shape] = [core]
    if narrow_in:
        chain.insert(0, replace(_pointwise(shape, shape.in_channels, inner), input_size=shape.input_size, bias=False))
    if narrow_out:
        chain.append(_pointwise(shape, outer, shape.out_channels))
    return tuple(chain)


def _spatial_stages(shape: ConvShape, rank: int) -> tuple[Shape, ...]:
    """Every axis keeps its own kernel, stride, padding and dilation, in whichever of the two layers it falls."""
    axes = len(shape.kernel)

    def only(keep: slice, values: tuple[int, ...], rest: int) -> tuple[int, ...]:
        kept = range(axes)[keep]
        return tuple(value if axis in kept else rest for axis, value in enumerate(values))

    def along(keep: slice) -> dict[str, Any]:
        padding = shape.padding if isinstance(shape.padding, str) else only(keep, shape.padding, 0)
        return {
            "kernel": only(keep, shape.kernel, 1),
            "stride": only(keep, shape.stride, 1),
            "dilation": only(keep, shape.dilation, 1),
            "padding": padding,
        }

    channels = rank * shape.groups
    first = replace(shape, out_channels=channels, bias=False, **along(slice(0, 1)))
    second = replace(shape, in_channels=channels, input_size=first.output_size, **along(slice(1, None)))
    return (first, second)


def _pointwise(shape: ConvShape, in_channels: int, out_channels: int) -> ConvShape:
    """A 1×1 with the groups and bias of ``shape``, over its output positions."""
    ones = (1,) * len(shape.kernel)
    return replace(
        shape,
        in_channels=in_channels,
        out_channels=out_channels,
        kernel=ones,
        stride=ones,
        dilation=ones,
        padding=(0,) * len(ones),
        padding_mode="zeros",
        input_size=shape.output_size,
    )


def _rank_names(form: Form) -> tuple[str, ...]:
    return _RANK_NAMES[form.name]


#: The names of every form's ranks, looked up once per row of a table, of which there may be many.
_RANK_NAMES = {name: tuple(field.name for field in fields(form)) for name, form in FORMS.items()}


def _describe(shape: Shape) -> str:
    if isinstance(shape, LinearShape):
        return f"a linear layer {shape.in_features}→{shape.out_features}"
    kernel = "×".join(map(str, shape.kernel))
    return f"a {kernel} convolution {shape.in_channels}→{shape.out_channels}"
