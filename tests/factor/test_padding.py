"""Ranks padded with channels of zero, and cut off again."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from haloc.errors import SpecError
from haloc.factor.between import fold_norms, insert_norms
from haloc.factor.padding import cut_ranks, pad_ranks
from haloc.factor.surgery import apply_plan
from haloc.forms import Spatial, Svd, Tucker2
from haloc.plan import Plan

PLAN = Plan({"0": Tucker2(5, 3), "2": Spatial(6), "4": Tucker2(8, 16), "6": Tucker2(3, 3), "10": Svd(3)})
NAMES = ("0", "2", "4", "6", "10")


def squeezed() -> nn.Module:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(16, 12, 3, padding=1), nn.ReLU(),
        nn.Conv2d(12, 16, 3, padding=1, bias=False), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 10),
    )  # fmt: skip
    return apply_plan(network, PLAN)


def test_ranks_become_multiples_and_outputs_stay():
    network, x = squeezed(), torch.randn(2, 16, 6, 6)
    before, shapes = network(x), {name: tuple(value.shape) for name, value in network.state_dict().items()}
    padded = pad_ranks(network, NAMES, 8)
    assert padded == {"0": (3, 5), "2": (6,), "10": (3,)}, "4 has such ranks already, 6 is in groups"
    assert network[0][0].weight.shape == (8, 16, 1, 1)
    assert network[0][1].weight.shape == (8, 8, 3, 3)
    assert network[0][2].weight.shape == (12, 8, 1, 1)
    assert (network[0][0].out_channels, network[0][1].in_channels, network[10][0].out_features) == (8, 8, 8)
    torch.testing.assert_close(network(x), before)
    cut_ranks(network, padded)
    assert {name: tuple(value.shape) for name, value in network.state_dict().items()} == shapes
    assert torch.equal(network(x), before)


def trained(network: nn.Module, multiple: int, norms: bool) -> nn.Module:
    """Ten steps with momentum and decay, in float64 so that no rounding hides a difference."""
    padded = pad_ranks(network, NAMES, multiple)
    if norms:
        insert_norms(network, NAMES)
    optimiser = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9, weight_decay=0.01, nesterov=True)
    generator = torch.Generator().manual_seed(1)
    for _ in range(10):
        x = torch.randn(8, 16, 6, 6, generator=generator, dtype=torch.float64)
        loss = nn.functional.cross_entropy(network.train()(x), torch.arange(8))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    fold_norms(network)
    cut_ranks(network, padded)
    return network.eval()


@pytest.mark.parametrize("norms", [False, True])
def test_a_padded_network_learns_what_it_would_have_learnt_without(norms):
    first = squeezed().double()
    plain, padded = (trained(copy.deepcopy(first), multiple, norms) for multiple in (1, 8))
    moved = (plain[0][0].weight - first[0][0].weight).abs().max()
    assert moved > 1e-3
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(padded.state_dict()[name], value, rtol=1e-9, atol=1e-11, msg=name)


def test_what_was_frozen_stays_frozen():
    network = squeezed().requires_grad_(False)
    cut_ranks(network, pad_ranks(network, NAMES, 8))
    assert not any(parameter.requires_grad for parameter in network.parameters())


def test_a_multiple_that_is_none():
    with pytest.raises(SpecError, match="1 or more, got 0"):
        pad_ranks(squeezed(), NAMES, 0)
