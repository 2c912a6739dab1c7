from __future__ import annotations

import math

import pytest
import torch
from torch import tensor

from haloc.methods.losses import (
    cooled,
    entropy,
    expected_cost,
    hardware_penalty,
    on_the_way,
    probability_loss,
    weight_terms,
)


def test_the_expected_cost_is_the_mean_over_the_candidates_summed_over_the_layers():
    probabilities = [tensor([0.5, 0.25, 0.25]), tensor([0.9, 0.1])]
    costs = [tensor([8.0, 4.0, 2.0]), tensor([10.0, 1.0])]
    assert float(expected_cost(probabilities, costs)) == pytest.approx((4 + 1 + 0.5) + (9 + 0.1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_costs_are_not_rounded_where_products_are(dtype):
    with torch.autocast("cpu", dtype):
        cost = expected_cost([tensor([0.3, 0.7])], [tensor([1e6, 2e6])])
    assert float(cost) == pytest.approx(1.7e6, rel=1e-6)


def test_the_gradient_of_the_expected_cost_raises_what_is_cheaper_than_the_mean():
    alpha = torch.zeros(2, requires_grad=True)
    expected_cost([alpha.softmax(0)], [tensor([6.0, 2.0])]).backward()
    assert alpha.grad.tolist() == pytest.approx([0.5 * (6 - 4), 0.5 * (2 - 4)])  # p_j (M_j − E)


@pytest.mark.parametrize(
    ("expected", "one_sided", "penalty"),
    [(6.0, False, 3 * 1.5**2), (6.0, True, 3 * 1.5**2), (2.0, False, 3 * 0.5**2), (2.0, True, 3.0), (4.0, True, 3.0)],
)
def test_the_penalty_of_being_over_and_under_budget(expected, one_sided, penalty):
    assert float(hardware_penalty([tensor(expected) / 4.0], 3.0, 2.0, one_sided)) == pytest.approx(penalty)


@pytest.mark.parametrize(("one_sided", "slope"), [(False, 2 * 0.5 / 4), (True, 0.0)])
def test_only_the_printed_penalty_pulls_a_network_that_is_within_budget(one_sided, slope):
    expected = tensor(2.0, requires_grad=True)
    hardware_penalty([expected / 4.0], 1.0, 2.0, one_sided).backward()
    assert float(expected.grad) == pytest.approx(slope)


def test_an_exponent_of_zero_is_no_penalty():
    expected = tensor(9.0, requires_grad=True)
    penalty = hardware_penalty([expected / 4.0], 1.0, 0.0, False)
    penalty.backward()
    assert (penalty.item(), expected.grad.item()) == (1.0, 0.0)


def test_the_penalties_of_several_budgets_are_multiplied():
    ratios = [tensor(1.5), tensor(0.5), tensor(2.0)]
    assert float(hardware_penalty(ratios, 1.0, 2.0, one_sided=False)) == pytest.approx((1.5 * 0.5 * 2) ** 2)
    assert float(hardware_penalty(ratios, 1.0, 2.0, one_sided=True)) == pytest.approx((1.5 * 2) ** 2)


def test_schedules_start_and_end_where_they_should():
    assert [on_the_way(0.4, 0.0, part) for part in (0.0, 0.25, 1.0)] == pytest.approx([0.4, 0.3, 0.0])
    assert [cooled(4.0, 1.0, part) for part in (0.0, 0.5, 1.0)] == pytest.approx([4.0, 2.0, 1.0])


def test_the_loss_of_the_probabilities_is_a_product():
    assert float(probability_loss(tensor(0.7), tensor(2.25))) == pytest.approx(1.575)


def test_the_loss_of_the_weights_is_a_sum():
    terms = weight_terms(tensor(0.7), tensor(3.0), 0.1)
    assert {name: float(term) for name, term in terms.items()} == pytest.approx({"cross_entropy": 0.7, "features": 0.3})


def test_entropy_is_log_m_at_first_and_nothing_in_the_end():
    assert float(entropy([torch.full((4,), 0.25), torch.full((2,), 0.5)])) == pytest.approx(1.5 * math.log(2))
    assert float(entropy([tensor([1.0, 0.0])])) == 0.0
