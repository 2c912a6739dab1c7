from __future__ import annotations

import pytest
import torch

from haloc.factor.factors import Factors, balance
from haloc.factor.svd import input_svd
from haloc.factor.tensors import as_stack, gram, unfold_in, unfold_out
from haloc.factor.tucker2 import hosvd, tucker2


def error(stack: torch.Tensor, factors: Factors) -> float:
    return float((stack - factors.rebuild()).norm() / stack.norm())


def test_unfoldings_worked_out_by_hand():
    stack = torch.arange(12.0).reshape(1, 2, 3, 2)
    assert unfold_out(stack)[0].tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert unfold_in(stack)[0].tolist() == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    assert gram(unfold_out(stack))[0].tolist() == [[55, 145], [145, 451]]


def test_stack_splits_the_groups_and_is_float64():
    weight = torch.randn(6, 2, 3, 3, dtype=torch.float16)
    stack = as_stack(weight, groups=3)
    assert stack.shape == (3, 2, 2, 9)
    assert stack.dtype == torch.float64
    assert torch.equal(stack[1, 0, 1], weight[2, 1].flatten().double())


def test_bases_are_orthonormal_and_the_error_follows_from_the_norms():
    stack = torch.randn(2, 10, 8, 9, dtype=torch.float64)
    factors = tucker2(hosvd(stack), 4, 3)
    for basis, size in ((factors.out, 4), (factors.into, 3)):
        assert torch.allclose(basis.mT @ basis, torch.eye(size, dtype=torch.float64).expand(2, -1, -1))
    by_norms = (1 - factors.core.square().sum() / stack.square().sum()).sqrt()
    assert error(stack, factors) == pytest.approx(float(by_norms), rel=1e-9)


def test_sweeps_improve_on_the_hosvd_and_more_of_them_do_no_harm():
    stack = torch.randn(1, 16, 12, 9, dtype=torch.float64)
    decomposition = hosvd(stack)
    errors = [error(stack, tucker2(decomposition, 6, 5, tolerance=0, max_sweeps=sweeps)) for sweeps in (1, 2, 5, 50)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0]


def test_weak_directions_of_an_exact_fit_are_not_lost_in_rounding():
    scales = torch.logspace(0, -5, 6, dtype=torch.float64)
    core = torch.randn(1, 6, 6, 9, dtype=torch.float64) * scales[:, None, None] * scales[:, None]
    left, right = torch.randn(1, 20, 6, dtype=torch.float64), torch.randn(1, 16, 6, dtype=torch.float64)
    stack = Factors(right, core, left).rebuild()
    assert error(stack, tucker2(hosvd(stack), 6, 6)) < 1e-9


def test_one_sided_ranks_are_the_truncated_svd_of_the_unfolding():
    stack = torch.randn(1, 9, 7, 4, dtype=torch.float64)
    for factors, unfolding in (
        (tucker2(hosvd(stack), 5, 7), unfold_out(stack)[0]),
        (tucker2(hosvd(stack), 9, 5), unfold_in(stack)[0]),
        (input_svd(stack).truncated(5), unfold_in(stack)[0]),
    ):
        values = torch.linalg.svdvals(unfolding)
        assert error(stack, factors) == pytest.approx(float(values[5:].norm() / values.norm()), rel=1e-9)


@pytest.mark.parametrize(("out", "into"), [(3, 20), (20, 3)])
def test_svd_through_either_gram_matrix_is_exact_at_full_rank(out, into):
    stack = torch.randn(2, out, into, 1, dtype=torch.float64)
    assert error(stack, input_svd(stack).truncated(3)) < 1e-7


def test_balancing_keeps_the_product():
    factors = tucker2(hosvd(torch.randn(2, 10, 8, 9, dtype=torch.float64)), 4, 3)
    balanced = balance(factors)
    assert torch.allclose(balanced.rebuild(), factors.rebuild())
    sizes = [sum(float(f.square().sum()) for f in (b.into, b.core, b.out)) for b in (balanced, factors)]
    assert sizes[0] < sizes[1]
