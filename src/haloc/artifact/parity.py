"""Whether a file computes what the model does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from haloc.errors import ExportError
from haloc.factor.forward import call, tensors_in

#: How far outputs may be from the model's, as a part of its largest; a precision with fewer digits allows more.
TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
#: The share of whole numbers (classes, indices) that may differ: a draw can end either way.
DIFFERENT_WHOLE = 0.01


@dataclass(frozen=True)
class Parity:
    """How far a file is from the model it was exported from, over all inputs that were compared.

    Attributes:
        max_abs: The largest difference between outputs.
        relative: The largest difference of an output as a part of its largest value.
        same_answer: The share of examples (or positions) where the first output has the same largest channel: the same
            class, say.
    """

    max_abs: float
    relative: float
    same_answer: float

    def worst(self, other: Parity) -> Parity:
        """The worse of both in every respect."""
        return Parity(
            max(self.max_abs, other.max_abs),
            max(self.relative, other.relative),
            min(self.same_answer, other.same_answer),
        )


EXACT = Parity(0.0, 0.0, 1.0)


@torch.no_grad()
def compare(model: nn.Module, exported: nn.Module, inputs: Iterable[Any], *, strict: bool = True) -> Parity:
    """Runs both on all inputs.

    Args:
        model: What outputs are meant to be.
        exported: What they are.
        inputs: A tensor, tuple or dict each.
        strict: Raise an `ExportError` where outputs are further apart than rounding explains.
    """
    found = EXACT
    answers: list[tuple[Tensor, Tensor]] = []
    for values in inputs:
        wanted, got = tensors_in(call(model, values)), tensors_in(_called(exported, values))
        _check_shapes(wanted, got)
        for expected, other in zip(wanted, got, strict=True):
            found = found.worst(_difference(expected, other, strict))
        answers += [(_answer(wanted[0]), _answer(got[0]))] if wanted else []
    return replace(found, same_answer=_share_of_same(answers))


def _called(exported: nn.Module, values: Any) -> Any:
    """Exporters may leave a file that cannot be run."""
    try:
        return call(exported, values)
    except Exception as error:
        raise ExportError(f"the file written cannot be run: {error}") from error


def _check_shapes(wanted: list[Tensor], got: list[Tensor]) -> None:
    shapes, others = ([tuple(tensor.shape) for tensor in tensors] for tensors in (wanted, got))
    if shapes != others:
        raise ExportError(f"the file written returns tensors of shapes {others}, the model {shapes}")


def _difference(wanted: Tensor, got: Tensor, strict: bool) -> Parity:
    if not wanted.numel():
        return EXACT
    if not wanted.is_floating_point():
        if strict:
            _check_whole(wanted, got)
        return EXACT
    first, second = wanted.double(), got.double()
    same = (first == second) | (first.isnan() & second.isnan())  # infinite on both sides, say
    largest = float(torch.where(same, 0.0, (first - second).abs()).amax())
    scale = float(first[first.isfinite()].abs().amax()) if bool(first.isfinite().any()) else 0.0
    relative = largest / scale if scale else float(largest > 0)
    if strict and not relative <= TOLERANCES.get(wanted.dtype, 1e-3):
        raise ExportError(
            f"the file written does not compute what the model does: outputs differ by {largest:.3g}, {relative:.1%} "
            "of the largest"
        )
    return Parity(largest, relative, 1.0)


def _check_whole(wanted: Tensor, got: Tensor) -> None:
    differing = float((wanted != got).double().mean())
    if differing > DIFFERENT_WHOLE:
        raise ExportError(
            f"the file written does not compute what the model does: {differing:.1%} of the whole numbers that it "
            "returns are others"
        )


def _answer(output: Tensor) -> Tensor:
    """Where the output is largest for each example and position; whole numbers are answers themselves."""
    if not output.is_floating_point():
        return output
    return output.argmax(1) if output.dim() > 1 and output.shape[1] else output.new_zeros(0)


def _share_of_same(answers: list[tuple[Tensor, Tensor]]) -> float:
    pairs = sum(first.numel() for first, _ in answers)
    return sum(int((first == second).sum()) for first, second in answers) / pairs if pairs else 1.0
