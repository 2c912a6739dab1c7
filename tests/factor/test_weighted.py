"""Factors whose errors are weighted by what comes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import haloc
from haloc.errors import ModelError
from haloc.factor.modules import Factoriser, merge
from haloc.factor.response import rooted
from haloc.forms import Spatial, Svd, Tucker2

FORMS = [Tucker2(4, 3), Tucker2(8, 3), Tucker2(4, 6), Spatial(5)]


def layer(groups: int = 1, *, bias: bool = True) -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(6 * groups, 8 * groups, 3, padding=1, groups=groups, bias=bias)


def moments(of: nn.Module, *, responses: bool = True) -> haloc.InputMoments:
    """What it sees, and random weights of its outputs, some of which matter far more than others."""
    channels = of.in_features if isinstance(of, nn.Linear) else of.in_channels
    generator = torch.Generator().manual_seed(1)
    seen = (
        torch.randn(64, channels, generator=generator)
        if isinstance(of, nn.Linear)
        else torch.randn(16, channels, 8, 8, generator=generator)
    )
    found = haloc.calibrate(nn.Sequential(of), [seen], ["0"])["0"]
    outputs = of.weight.shape[0]
    rows = torch.randn(outputs, outputs, generator=generator, dtype=torch.float64) * torch.logspace(0, -2, outputs)
    return replace(found, response=rows.T @ rows) if responses else found


def weighted_error(of: nn.Conv2d, other: nn.Module, known: haloc.InputMoments) -> float:
    """The error of what comes of the outputs, group by group, written out; the bias takes what it can."""
    groups, outputs = of.groups, of.out_channels // of.groups
    merged = merge(other) if isinstance(other, nn.Sequential) else other
    difference = (merged.weight - of.weight).detach().double().reshape(groups, outputs, -1)
    seen = known.covariance() if of.bias is not None else known.second
    total = 0.0
    for group in range(groups):
        cut = slice(group * outputs, (group + 1) * outputs)
        lost = rooted(known.response[cut, cut]) @ difference[group]
        total += float((lost @ seen[group] * lost).sum())
    return total


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_no_other_factors_of_these_ranks_lose_less(form, groups, bias):
    of = layer(groups, bias=bias)
    known = moments(of)
    plain, weighted = (Factoriser(of, some).build(form) for some in (replace(known, response=None), known))
    assert weighted_error(of, weighted, known) < 0.95 * weighted_error(of, plain, known)


def test_for_a_matrix_it_is_the_singular_values_of_what_matters():
    torch.manual_seed(0)
    of = nn.Linear(10, 8, bias=False)
    known = moments(of)
    root, seen = rooted(known.response), torch.linalg.cholesky(known.second[0])
    values = torch.linalg.svdvals(root @ of.weight.detach().double() @ seen)
    error = Factoriser(of, known).error(Svd(3))
    assert error == pytest.approx(float((values[3:].square().sum() / values.square().sum()).sqrt()), rel=1e-3)


@pytest.mark.parametrize("groups", [1, 2])
def test_full_ranks_are_exact_and_errors_fall(groups):
    of = layer(groups)
    known = Factoriser(of, moments(of))
    whole = known.build(Tucker2(8, 6))
    assert torch.allclose(whole.weight, of.weight, atol=1e-5)
    errors = [known.error(Tucker2(rank, rank)) for rank in (1, 2, 4, 6)]
    assert errors == sorted(errors, reverse=True)
    nested = known.build(Tucker2(4, 3), nested=True)
    x = torch.randn(2, of.in_channels, 6, 6)
    assert torch.allclose(nested(x), known.build(Tucker2(4, 3))(x), atol=1e-4), "another order of the same channels"


def test_outputs_that_count_alike_change_nothing():
    of = layer()
    known = moments(of)
    alike = replace(known, response=3.0 * torch.eye(8, dtype=torch.float64))
    first, second = (Factoriser(of, each).build(Tucker2(4, 3)) for each in (replace(known, response=None), alike))
    x = torch.randn(2, 6, 8, 8)
    assert torch.allclose(first(x), second(x), atol=1e-3)


class Net(nn.Module):
    """Half of what the second layer puts out hardly reaches the end."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 5)
        with torch.no_grad():
            self.head.weight[:, 8:] *= 0.01

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(x).relu()).relu().mean((2, 3)))


def test_a_network_is_nearer_to_the_dense_one():
    model, pictures = Net().eval(), [torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(1))] * 2
    plan = {"two": Tucker2(6, 8)}
    found = [
        haloc.apply_plan(model, plan, moments=haloc.calibrate(model, pictures, plan, responses=told))
        for told in (False, True)
    ]
    with torch.no_grad():
        plain, weighted = (float((each(pictures[0]) - model(pictures[0])).square().mean()) for each in found)
    assert weighted < 0.5 * plain


def test_a_calibration_of_another_layer_is_refused():
    of = layer()
    known = replace(moments(of), response=torch.eye(5, dtype=torch.float64))
    with pytest.raises(ModelError, match=r"of another layer: its responses have shape \(5, 5\), expected \(8, 8\)"):
        Factoriser(of, known)
