"""Activation-aware factors: the least error of the layer's *output*, given what its inputs look like.

With Σ the second moment of the input patches, the squared error of the output is ``tr((W − Ŵ) Σ (W − Ŵ)ᵀ)``. On the
output side alone the minimum is in closed form: the leading eigenvectors of the output's second moment ``W Σ Wᵀ``.
A matrix on the input side is shared by all taps, so it has no closed form; it alternates with the rest (whose best
value, for a given input side, is a reduced-rank regression), each step lowering the error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from haloc.factor.factors import Factors
from haloc.factor.tensors import eigenvectors, unfold_out

LinearMap = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Problem:
    """A weight and the second moment of the patches it is applied to.

    Attributes:
        stack: The weight, (groups, out, in, taps).
        moment: Σ, (groups, in * taps, in * taps).
        target: W·Σ, (groups, out, in * taps); what Ŵ·Σ should come near to.
        energy: tr(W Σ Wᵀ), the squared norm of the output, for the relative error.
        out_basis: Eigenvectors of W Σ Wᵀ, the principal directions of the output, largest first.
    """

    stack: Tensor
    moment: Tensor
    target: Tensor
    energy: Tensor
    out_basis: Tensor


def problem(stack: Tensor, moment: Tensor, ridge: float = 1e-5) -> Problem:
    """Prepares a layer once for all ranks.

    ``ridge`` times the mean variance keeps directions never seen in check; a layer that saw nothing but zeros is left
    with the error of its weight.
    """
    damped = _damped(moment, ridge)
    target = unfold_out(stack) @ damped
    outputs = target @ unfold_out(stack).mT
    _, out_basis = eigenvectors(outputs)
    return Problem(stack, damped, target, outputs.diagonal(dim1=-2, dim2=-1).sum(), out_basis)


def regrouped(task: Problem, stack: Tensor) -> Problem:
    """The same problem with the weight's input channels and taps divided differently, in the same order."""
    return replace(task, stack=stack)


def relative_error(task: Problem, factors: Factors) -> float:
    """The norm of the output's error over the norm of the output."""
    difference = unfold_out(task.stack) - unfold_out(factors.rebuild())
    error = ((difference @ task.moment) * difference).sum().clamp_min(0)
    return float((error / task.energy).sqrt()) if bool(task.energy > 0) else 0.0


def fit(
    task: Problem, rank_out: int, rank_in: int, *, tolerance: float = 1e-3, max_sweeps: int = 30, cg_steps: int = 4
) -> Factors:
    """The factors of the given ranks with the least output error that alternating steps find.

    Args:
        task: What `problem` prepared.
        rank_out: Rank on the output side; full leaves that side out.
        rank_in: Rank on the input side; full leaves that side out.
        tolerance: Alternating ends when a sweep lowers the squared error by less than this part of it.
        max_sweeps: Alternating ends here at the latest.
        cg_steps: Conjugate-gradient steps for the input side within a sweep.
    """
    _, out_full, in_full, _ = task.stack.shape
    if rank_in == in_full:
        return _output_side(task, rank_out) if rank_out < out_full else Factors(None, task.stack, None)
    into, error = _start(task, rank_in), task.energy
    for _ in range(max_sweeps):
        factors, captured = _regress(task, into, rank_out)
        previous, error = error, task.energy - captured
        # The second term is rounding: an exact fit has no error left to lower.
        if previous - error <= tolerance * error.clamp_min(0) + 1e-13 * task.energy:
            break
        into = _improve_into(task, factors, cg_steps)
    return factors


def _output_side(task: Problem, rank_out: int) -> Factors:
    """Projects the output on its principal directions: exact for one-sided forms and matrices."""
    out = task.out_basis[..., :rank_out]
    return Factors(None, torch.einsum("gock,gor->grck", task.stack, out), out)


def _start(task: Problem, rank_in: int) -> Tensor:
    """An input side from the HOSVD of the weight with its input channels whitened, all taps taken alike."""
    groups, _, channels, taps = task.stack.shape
    split = task.moment.reshape(groups, channels, taps, channels, taps)
    values, vectors = eigenvectors(torch.einsum("gckdk->gcd", split))
    scale = values.clamp_min(values[..., :1] * 1e-12).sqrt()[:, None, :]
    coloured = torch.einsum("gock,gcd->gdok", task.stack, vectors * scale).flatten(2)
    _, leading = eigenvectors(coloured @ coloured.mT)
    return _orthonormal((vectors / scale) @ leading[..., :rank_in])


def _regress(task: Problem, into: Tensor, rank_out: int) -> tuple[Factors, Tensor]:
    """The best core and output side for a given input side, and the energy of the output they capture.

    A reduced-rank regression of the output on the narrowed patches: with N their second moment and B their
    covariance with the output, the unrestricted answer is B N⁻¹, and its best output side are the leading
    eigenvectors of B N⁻¹ Bᵀ.
    """
    groups, out_full, channels, taps = task.stack.shape
    rank_in = into.shape[-1]
    narrowed = torch.einsum("gcr,gckx->grkx", into, task.moment.unflatten(1, (channels, taps)))
    second = torch.einsum("gcs,grkcl->grksl", into, narrowed.unflatten(3, (channels, taps)))
    second = second.reshape(groups, rank_in * taps, rank_in * taps)
    cross = torch.einsum("gock,gcr->gork", task.target.unflatten(2, (channels, taps)), into).flatten(2)
    answer = _solve(second, cross.mT).mT
    if rank_out == out_full:
        return Factors(into, answer.unflatten(2, (rank_in, taps)), None), (answer * cross).sum()
    values, vectors = eigenvectors(answer @ cross.mT)
    out = vectors[..., :rank_out]
    core = (out.mT @ answer).unflatten(2, (rank_in, taps))
    return Factors(into, core, out), values[..., :rank_out].sum()


def _improve_into(task: Problem, factors: Factors, steps: int) -> Tensor:
    """Preconditioned conjugate gradients on the input side, from where it is, with core and output side held.

    The error is quadratic in the input side V; its normal matrix never has to be formed, since multiplying by it is
    widening V to Ŵ, multiplying by Σ and narrowing again. The preconditioner takes Σ and the core's Gram matrix as if
    taps did not interact, which leaves one small inverse on either side of V.
    """
    assert factors.into is not None
    groups, _, channels, taps = task.stack.shape
    core, into = factors.core, factors.into
    target = task.target if factors.out is None else factors.out.mT @ task.target
    channel_moment = torch.einsum("gckdk->gcd", task.moment.reshape(groups, channels, taps, channels, taps))
    rank_moment = torch.einsum("gork,gosk->grs", core, core)

    def narrow(outputs: Tensor) -> Tensor:
        return torch.einsum("gock,gork->gcr", outputs.unflatten(2, (channels, taps)), core)

    def apply(direction: Tensor) -> Tensor:
        return narrow(torch.einsum("gcr,gork->gock", direction, core).flatten(2) @ task.moment)

    def precondition(gradient: Tensor) -> Tensor:
        return _solve(rank_moment, _solve(channel_moment, gradient).mT).mT

    residual = narrow(target) - apply(into)
    return _orthonormal(_conjugate_gradients(apply, precondition, into, residual, steps))


def _conjugate_gradients(
    apply: LinearMap, precondition: LinearMap, start: Tensor, residual: Tensor, steps: int
) -> Tensor:
    """Solves ``apply(x) = b`` from ``start``, where ``residual`` is ``b − apply(start)``."""
    solution, direction = start, precondition(residual)
    slope = (residual * direction).sum()
    for _ in range(steps):
        image = apply(direction)
        curvature = (direction * image).sum()
        if curvature <= 0:
            break
        step = slope / curvature
        solution, residual = solution + step * direction, residual - step * image
        preconditioned = precondition(residual)
        previous, slope = slope, (residual * preconditioned).sum()
        direction = preconditioned + (slope / previous) * direction
    return solution


def _orthonormal(into: Tensor) -> Tensor:
    """Another basis of the same space, which is all that matters; regressions on it are as well-conditioned as Σ."""
    basis: Tensor = torch.linalg.qr(into).Q
    return basis


def _solve(symmetric: Tensor, right: Tensor) -> Tensor:
    """Solves a positive semidefinite system, with as little damping as makes it definite in floating point."""
    for part in (1e-12, 1e-9, 1e-6, 1e-3):
        factor, failures = torch.linalg.cholesky_ex(_damped(symmetric, part))
        if not bool(failures.any()):
            break
    return torch.cholesky_solve(right, factor)


def _damped(symmetric: Tensor, part: float) -> Tensor:
    """Adds ``part`` of the mean diagonal to the diagonal; a matrix of zeros becomes the identity."""
    diagonal = symmetric.diagonal(dim1=-2, dim2=-1)
    mean = diagonal.mean(-1, keepdim=True)
    damping = torch.where(mean > 0, part * mean, torch.ones_like(mean))
    return symmetric + torch.diag_embed(damping.expand_as(diagonal))
