from __future__ import annotations

import pytest
import torch

from haloc.factor import aware
from haloc.factor.factors import Factors


def make_problem(groups=1, out=10, into=8, taps=4, ridge=0.0):
    stack = torch.randn(groups, out, into, taps, dtype=torch.float64)
    samples = torch.randn(groups, 200, into * taps, dtype=torch.float64) * torch.logspace(0, -1.5, into * taps)
    return aware.problem(stack, samples.mT @ samples / 200, ridge=ridge)


def output_error(task: aware.Problem, factors: Factors) -> torch.Tensor:
    difference = (task.stack - factors.rebuild()).flatten(2)
    return ((difference @ task.moment) * difference).sum()


def test_a_matrix_gets_the_best_there_is():
    task = make_problem(out=12, into=9, taps=1)
    root = torch.linalg.cholesky(task.moment[0])
    values = torch.linalg.svdvals(task.stack[0, :, :, 0] @ root)
    factors = aware.fit(task, 4, 9)
    assert aware.relative_error(task, factors) == pytest.approx(float(values[4:].norm() / values.norm()), rel=1e-9)


@pytest.mark.parametrize(("rank_out", "rank_in"), [(5, 4), (10, 4), (10, 3)])
@pytest.mark.parametrize("groups", [1, 2])
def test_alternating_ends_where_no_factor_can_be_improved(rank_out, rank_in, groups):
    task = make_problem(groups)
    factors = aware.fit(task, rank_out, rank_in, tolerance=1e-12, max_sweeps=3000, cg_steps=30)
    tensors = [t.clone().requires_grad_() for t in (factors.into, factors.core, factors.out) if t is not None]
    into, core, *out = tensors
    loss = output_error(task, Factors(into, core, out[0] if out else None))
    loss.backward()
    for tensor in tensors:
        assert (tensor.grad.norm() * tensor.norm()).item() < 1e-3 * loss.item()


def test_the_energy_captured_is_the_error_saved():
    task = make_problem()
    factors, captured = aware._regress(task, aware._start(task, 4), 5)
    assert float(task.energy - captured) == pytest.approx(float(output_error(task, factors)), rel=1e-8)


def test_every_sweep_lowers_the_error():
    task = make_problem(groups=2)
    errors = [float(output_error(task, aware.fit(task, 5, 3, tolerance=0, max_sweeps=n))) for n in (1, 2, 4, 8, 16)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.995 * errors[0]


def test_conjugate_gradients_solve_a_system():
    matrix = torch.randn(6, 6, dtype=torch.float64)
    matrix = matrix @ matrix.mT + torch.eye(6, dtype=torch.float64)
    right = torch.randn(6, 2, dtype=torch.float64)
    solution = aware._conjugate_gradients(lambda x: matrix @ x, lambda x: x, torch.zeros_like(right), right, steps=50)
    assert torch.allclose(matrix @ solution, right, atol=1e-8)


def test_fewer_patches_than_dimensions_are_enough():
    torch.manual_seed(0)
    stack = torch.randn(1, 32, 24, 9, dtype=torch.float64)
    samples = torch.randn(1, 40, 24 * 9).relu()
    moment = (samples.mT @ samples).double() / 40
    task = aware.problem(stack, moment)
    for ranks in ((16, 12), (32, 12), (16, 23)):
        factors = aware.fit(task, *ranks)
        assert bool(factors.rebuild().isfinite().all())
        assert aware.relative_error(task, factors) < 0.5
        assert float(factors.rebuild().norm()) < 2 * float(stack.norm())


def test_directions_never_seen_are_kept_in_check():
    task = make_problem(ridge=1e-5)
    blind = torch.zeros_like(task.moment)
    blind[:, 0, 0] = 1.0
    factors = aware.fit(aware.problem(task.stack, blind), 5, 4)
    assert float(factors.rebuild().abs().max()) < 100 * float(task.stack.abs().max())
