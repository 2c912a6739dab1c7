"""The methods that put all layers on one level: uniform, random, energy, vbmf, alds."""

from __future__ import annotations

from collections import OrderedDict
from math import inf

import numpy as np
import pytest
import torch
from torch import nn

from haloc.cost.count import Count
from haloc.errors import BudgetError, ModelError, PlanError, SpecError
from haloc.factor.calibrate import calibrate
from haloc.factor.inspect import inspect
from haloc.factor.modules import Factoriser
from haloc.forms import Dense, Spatial, Svd, Tucker2, ranks
from haloc.methods.alds import spectral_errors
from haloc.methods.energy import lost_energies
from haloc.methods.levels import shortfall, standard
from haloc.methods.prices import PriceList
from haloc.methods.random import RandomSettings
from haloc.methods.search import search
from haloc.methods.vbmf import evbmf_rank, goal_ranks, ways_gone
from haloc.shapes import ConvShape
from haloc.space import Grid, LayerChoices, RankSpace, rank_space
from haloc.zoo import create

IMAGE = torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)
ALL = ("tucker2", "tucker2-out", "tucker2-in", "spatial", "svd")
CONV = ConvShape(16, 32, (3, 3), (8, 8), (1, 1), (1, 1), (1, 1))


@pytest.fixture(scope="module")
def resnet():
    torch.manual_seed(0)
    return create("resnet20")


@pytest.fixture(scope="module")
def space(resnet):
    return rank_space(inspect(resnet, IMAGE), forms=ALL, round_to=2)


def planted(rows: int, columns: int, rank: int, noise: float, seed: int = 0) -> np.ndarray:
    """Singular values of a matrix of that rank, 1 per entry, under noise."""
    draw = np.random.default_rng(seed)
    low = draw.normal(size=(rows, rank)) @ draw.normal(size=(rank, columns)) / max(rank, 1) ** 0.5
    return np.linalg.svd(low + noise * draw.normal(size=(rows, columns)), compute_uv=False)


def low_rank_conv(rank_out: int, rank_in: int, noise: float, **options) -> nn.Conv2d:
    """A 3×3 convolution 32→48 whose weight is a Tucker-2 of these ranks under noise."""
    layer = nn.Conv2d(32, 48, 3, **options)
    out_channels, in_channels = layer.weight.shape[:2]
    sides = torch.randn(out_channels, rank_out), torch.randn(rank_in, in_channels)
    weight = torch.einsum("or,rskl,si->oikl", sides[0], torch.randn(rank_out, rank_in, 3, 3), sides[1])
    layer.weight.data = weight / weight.std() + noise * torch.randn_like(weight)
    return layer


class TestSharedParts:
    def test_what_a_form_lacks_is_the_larger_of_both_sides(self):
        assert shortfall(CONV, Tucker2(8, 8)) == 0.75  # 8 of 32, and 8 of 16
        assert shortfall(CONV, Tucker2(8, 16)) == 0.75
        assert shortfall(CONV, Tucker2(32, 4)) == 0.75
        assert shortfall(CONV, Spatial(12)) == 0.75
        assert shortfall(CONV, Dense()) == shortfall(CONV, Tucker2(32, 16)) == 0

    def test_standard_is_the_first_form_narrow_on_both_sides(self):
        forms = [Dense(), Tucker2(8, 8), Tucker2(16, 16), Tucker2(32, 8), Tucker2(32, 16), Spatial(8)]
        assert standard(CONV, forms) == (Tucker2(8, 8), Tucker2(32, 16))
        assert standard(CONV, [Dense(), Tucker2(32, 8), Tucker2(8, 16), Spatial(4)]) == (Tucker2(32, 8), Tucker2(8, 16))
        assert standard(CONV, [Spatial(4), Tucker2(8, 8)]) == (Spatial(4),)

    @pytest.mark.parametrize("method", ["energy", "vbmf", "alds"])
    def test_layers_are_counted_and_wrong_ones_named(self, method):
        model = nn.Sequential(OrderedDict(a=nn.Linear(16, 16), b=nn.Linear(16, 16)))
        space = rank_space(inspect(model, torch.zeros(1, 16)), round_to=2)
        steps: list = []
        search(model, space, budget=0.9, method=method, on_step=lambda *step: steps.append(step))
        assert steps == [(1, 2), (2, 2)]
        model.b.weight.data[0] = float("nan")
        with pytest.raises(ModelError, match="layer 'b': its weight holds NaN"):
            search(model, space, budget=0.9, method=method)
        with pytest.raises(PlanError, match="no layer 'a'"):
            search(nn.Sequential(nn.Linear(16, 16)), space, budget=0.9, method=method)

    @pytest.mark.parametrize("method", ["energy", "alds"])
    def test_a_layer_of_zeros_has_nothing_to_lose(self, method):
        model = nn.Sequential(OrderedDict(a=nn.Linear(16, 16), b=nn.Linear(16, 16)))
        model.b.weight.data.zero_()
        space = rank_space(inspect(model, torch.zeros(1, 16)), round_to=2)
        plan = search(model, space, budget=0.9, method=method).plan
        assert plan == {"a": Dense(), "b": Svd(2)}


class TestUniform:
    @pytest.mark.parametrize("budget", [0.3, 0.5, 0.8])
    def test_no_layer_lacks_more_than_the_budget_asks_of_all(self, resnet, space, budget):
        found = search(resnet, space, budget=budget, method="uniform")
        level = max(shortfall(space.layers[name].calls[0], form) for name, form in found.plan.items())
        prices = PriceList.of(space, Count("macs"))
        lower = {}  # the cheapest network in which no layer lacks as much
        for name, offer in space.open_layers.items():
            shape = offer.calls[0]
            open_to = [Dense(), *(f for f in standard(shape, tuple(offer)) if shortfall(shape, f) < level)]
            lower[name] = min(open_to, key=lambda form, shape=shape: Count("macs").price(shape, form).value)
        assert prices.cost_of(lower) > found.spending[0].budget
        assert found.spending[0].cost > 0.97 * found.spending[0].budget
        assert {type(form) for form in found.plan.values()} <= {Dense, Tucker2, Svd}

    def test_forms_that_are_not_standard_are_taken_where_there_are_no_others(self, resnet):
        space = rank_space(inspect(resnet, IMAGE), forms=("tucker2-in", "spatial"), round_to=4)
        plan = search(resnet, space, budget=0.7, method="uniform").plan
        assert {form.rank_out for name, form in plan.items() if name.startswith("layer3")} == {64}
        assert {form.name for form in plan.values()} == {"dense", "tucker2"}

    def test_full_ranks_stand_for_dense_where_dense_is_not_on_offer(self, resnet):
        space = rank_space(inspect(resnet, IMAGE), equal=False, round_to=8, dense=False)
        found = search(resnet, space, budget=1e12, method="uniform")
        assert found.plan["layer2.1.conv1"] == Tucker2(32, 32)
        assert found.plan["layer2.0.conv1"] == Tucker2(32, 16)

    def test_what_only_other_forms_reach_is_refused_with_what_these_reach(self, resnet):
        grids = (Grid.of("tucker2", [(8, 8)]), Grid.of("spatial", [(1,)]))
        layers = inspect(resnet, IMAGE)
        space = RankSpace({x.name: LayerChoices(x.calls, grids if x.name.startswith("layer3") else ()) for x in layers})
        cheapest = PriceList.of(space, Count("macs")).cheapest
        assert search(resnet, space, budget=cheapest, method="random").spending[0].cost == cheapest
        with pytest.raises(BudgetError) as caught:
            search(resnet, space, budget=cheapest, method="uniform")
        least = caught.value.reachable["macs"]
        assert least > cheapest
        assert search(resnet, space, budget=least, method="uniform").spending[0].cost == least


class TestRandom:
    def test_every_seed_has_a_plan_of_its_own_near_the_budget(self, resnet, space):
        found = [search(resnet, space, budget=0.5, method="random", settings=RandomSettings(s)) for s in range(12)]
        assert len({result.plan for result in found}) == 12
        assert all(0.45 < result.spending[0].remains <= 0.5 for result in found)
        again = search(resnet, space, budget=0.5, method="random", settings=RandomSettings(3))
        assert again.plan == found[3].plan
        assert search(resnet, space, budget=0.5, method="random").plan == found[0].plan

    def test_all_kinds_of_forms_come_up(self, resnet, space):
        plans = [search(resnet, space, budget=0.4, method="random", settings=RandomSettings(s)).plan for s in range(5)]
        forms = [plan["layer2.1.conv1"] for plan in plans] + [plan["layer3.1.conv1"] for plan in plans]
        narrow = {
            (form.name, *(rank < full for rank, full in zip(ranks(form), (64, 64), strict=False))) for form in forms
        }
        assert {name for name, *_ in narrow} >= {"tucker2", "spatial"}
        assert len(narrow) >= 4

    def test_whatever_the_space_reaches_is_reached(self, resnet, space):
        limits = search(resnet, space, budget=0.5, method="random").spending
        dense = limits[0].dense
        with pytest.raises(BudgetError) as caught:
            search(resnet, space, budget=1000.0, method="random")
        least = caught.value.reachable["macs"]
        assert least < 0.1 * dense
        assert (
            search(resnet, space, budget=least, method="random", settings=RandomSettings(7)).spending[0].cost == least
        )

    @pytest.mark.parametrize("seed", [-1, 2**32, 1.5, True, "1"])
    def test_wrong_seeds_are_refused(self, seed):
        with pytest.raises(SpecError, match="seed must be a whole number"):
            RandomSettings(seed)


class TestEnergy:
    def test_it_is_the_tail_of_the_squared_singular_values(self):
        layer = nn.Linear(12, 20)
        squares = torch.linalg.svdvals(layer.weight.detach().double()).square()
        lost = lost_energies(layer, [Dense(), *(Svd(rank) for rank in range(1, 13))])
        expected = [0.0, *(float(squares[rank:].sum() / squares.sum()) for rank in range(1, 13))]
        assert lost == pytest.approx(expected, abs=1e-9)

    def test_it_is_that_of_the_output_where_inputs_are_known(self):
        torch.manual_seed(1)
        layer = nn.Linear(6, 6, bias=False)
        inputs = torch.randn(500, 6) * torch.tensor([10, 10, 1e-3, 1e-3, 1e-3, 1e-3])
        moments = calibrate(nn.Sequential(OrderedDict(fc=layer)), [inputs], ["fc"])["fc"]
        assert lost_energies(layer, [Svd(2)], moments)[0] < 1e-5 < 0.05 < lost_energies(layer, [Svd(2)])[0]

    def test_layers_without_moments_are_named(self, resnet, space):
        with pytest.raises(ModelError, match=r"layer 'conv1': there is no calibration"):
            search(resnet, space, budget=0.5, method="energy", moments={})

    def test_every_layer_takes_the_cheapest_form_that_keeps_the_share(self):
        torch.manual_seed(0)
        model = nn.Sequential(OrderedDict(flat=low_rank_conv(48, 6, 0.1), lean=nn.Conv2d(48, 32, 3)))
        layers = inspect(model, torch.zeros(1, 32, 9, 9))
        space = rank_space(layers, forms=ALL, round_to=2)
        found = search(model, space, budget=0.5, method="energy")
        losses = {name: dict(zip(space.layers[name], row, strict=True)) for name, row in found.evidence.losses.items()}
        level = max(losses[name][form] for name, form in found.plan.items())
        for name, form in found.plan.items():
            open_to = [other for other, loss in losses[name].items() if loss <= level]
            assert layers[name].macs_as(form) == min(map(layers[name].macs_as, open_to))
        # What is of low rank on one side is written so, though other forms are on offer.
        assert found.plan["flat"].rank_in == 6


class TestVbmf:
    @pytest.mark.parametrize("shape", [(60, 60), (40, 200), (200, 40), (30, 1000)])
    @pytest.mark.parametrize("rank", [1, 5, 12])
    def test_the_planted_rank_and_its_noise_are_found(self, shape, rank):
        for noise in (0.01, 0.1, 0.2):
            found, variance = evbmf_rank(planted(*shape, rank, noise), shape)
            assert found == rank
            assert variance == pytest.approx(noise**2, rel=0.1)

    @pytest.mark.parametrize("seed", range(20))
    def test_noise_alone_has_no_rank(self, seed):
        found, variance = evbmf_rank(planted(50, 120, 0, 3.0, seed), (50, 120))
        assert found == 0
        assert variance == pytest.approx(9.0, rel=0.1)

    def test_scale_order_and_transposition_do_not_matter(self):
        values = planted(40, 90, 7, 0.3)
        expected = evbmf_rank(values, (40, 90))
        assert evbmf_rank(values[::-1], (90, 40)) == expected
        assert evbmf_rank(1e-6 * values, (40, 90)) == (expected[0], pytest.approx(1e-12 * expected[1]))

    def test_matrices_without_noise_keep_all_they_have(self):
        assert evbmf_rank(planted(40, 90, 7, 0.0), (40, 90))[0] == 7
        assert evbmf_rank([3.0, 2.0], (10, 10))[0] == 2
        assert evbmf_rank([0.0] * 10, (10, 10)) == (0, 0.0)
        assert evbmf_rank([], (10, 10)) == (0, 0.0)

    @pytest.mark.parametrize(("rows", "columns"), [(100, 100), (100, 400)])
    def test_components_are_kept_from_where_theory_says(self, rows, columns):
        """A component of size s shows at x = (1 + s²/M)(1 + L/s²); so τ̲ ≈ 2.5129 √α asks for s² ≈ 2.5129 √(L·M)."""
        draw = np.random.default_rng(0)
        left, right = np.linalg.qr(draw.normal(size=(rows, 1)))[0], np.linalg.qr(draw.normal(size=(columns, 1)))[0]
        noise = draw.normal(size=(rows, columns))
        kept = []
        for strength in (1.5, 2.0, 3.5, 4.0):
            matrix = noise + (strength * (rows * columns) ** 0.5) ** 0.5 * left @ right.T
            kept.append(evbmf_rank(np.linalg.svd(matrix, compute_uv=False), matrix.shape)[0])
        assert kept == [0, 0, 1, 1]

    def test_goals_of_a_layer(self):
        torch.manual_seed(0)
        assert goal_ranks(low_rank_conv(9, 5, 0.05), "tucker2") == (9, 5)
        assert goal_ranks(nn.Conv2d(32, 48, 3), "tucker2") == (1, 1)
        matrix = nn.Linear(30, 50)
        matrix.weight.data = torch.randn(50, 4) @ torch.randn(4, 30) + 0.05 * torch.randn(50, 30)
        assert goal_ranks(matrix, "svd") == (4,)
        spatial = nn.Conv2d(16, 16, (3, 5))
        two = torch.einsum("oly,yik->oikl", torch.randn(16, 5, 6), torch.randn(6, 16, 3))
        spatial.weight.data = two + 0.02 * torch.randn_like(two)
        assert goal_ranks(spatial, "spatial") == (6,)

    def test_the_group_that_needs_most_decides(self):
        torch.manual_seed(0)
        layer = nn.Conv2d(60, 80, 1, groups=2)
        parts = [torch.randn(40, rank) @ torch.randn(rank, 30) for rank in (2, 7)]
        layer.weight.data = (torch.cat(parts) + 0.05 * torch.randn(80, 30)).reshape(80, 30, 1, 1)
        assert goal_ranks(layer, "svd") == (7,)

    def test_the_way_is_counted_from_full_rank_to_the_goal(self):
        torch.manual_seed(0)
        layer = low_rank_conv(8, 12, 0.05)
        forms = [Dense(), Tucker2(8, 12), Tucker2(28, 22), Tucker2(28, 12), Tucker2(8, 22), Tucker2(4, 4), Spatial(4)]
        forms.append(Tucker2(8, 32))
        ways = ways_gone(layer, forms)
        assert ways == pytest.approx([0, 1, 0.5, 1, 1, 1.4, inf, inf])

    def test_a_side_with_nothing_to_leave_out_does_not_count(self):
        layer = nn.Conv2d(1, 17, 3)
        layer.weight.data += 2 * torch.randn(17, 1, 1, 1)
        assert goal_ranks(layer, "tucker2") == (1, 1)
        assert ways_gone(layer, [Tucker2(9, 1), Tucker2(1, 1)]) == [0.5, 1.0]


class TestAlds:
    @pytest.mark.parametrize(
        ("layer", "forms"),
        [
            (nn.Conv2d(8, 12, 3), [Tucker2(4, 4), Tucker2(12, 3), Tucker2(5, 8), Spatial(7)]),
            (nn.Conv2d(16, 24, 3, groups=4), [Tucker2(2, 2), Spatial(3)]),
            (nn.Conv1d(6, 4, 5), [Tucker2(2, 3)]),
            (nn.Linear(30, 7), [Svd(1), Svd(6)]),
        ],
    )
    def test_it_is_the_spectral_norm_of_the_error(self, layer, forms):
        with torch.no_grad():
            for form, found in zip(forms, spectral_errors(layer, forms), strict=True):
                difference = layer.weight.double() - _dense_weight(layer, form)
                groups = getattr(layer, "groups", 1)
                blocks = [part.flatten(1) for part in difference.chunk(groups)]
                whole = [part.flatten(1).double() for part in layer.weight.chunk(groups)]
                norm = max(torch.linalg.matrix_norm(block, 2) for block in blocks)
                assert found == pytest.approx(
                    float(norm / max(torch.linalg.matrix_norm(w, 2) for w in whole)), rel=1e-5
                )

    def test_of_a_matrix_it_is_the_first_singular_value_that_is_cut_off(self):
        layer = nn.Linear(9, 14)
        values = torch.linalg.svdvals(layer.weight.detach().double())
        errors = spectral_errors(layer, [Dense(), *(Svd(rank) for rank in range(1, 9))])
        assert errors == pytest.approx([0, *(float(values[rank] / values[0]) for rank in range(1, 9))])

    def test_data_do_not_matter(self, resnet, space):
        moments = calibrate(resnet, [torch.randn(4, 3, 32, 32)], space.open_layers)
        small = RankSpace({name: space.layers[name] for name in ("conv1", "linear")})
        first = search(resnet, small, budget=0.8, method="alds")
        assert search(resnet, small, budget=0.8, method="alds", moments=moments).evidence == first.evidence

    @pytest.mark.parametrize("budget", [0.3, 0.5, 0.7])
    def test_the_largest_error_is_least(self, budget):
        torch.manual_seed(0)
        model = nn.Sequential(OrderedDict(low=low_rank_conv(4, 4, 0.3), high=nn.Conv2d(48, 32, 3)))
        forms = [Dense(), *(Tucker2(rank, rank) for rank in range(2, 30, 2))]
        grids = (Grid.of("tucker2", map(ranks, forms[1:])),)
        layers = inspect(model, torch.zeros(1, 32, 9, 9))
        space = RankSpace({layer.name: LayerChoices(layer.calls, grids) for layer in layers})
        plan = search(model, space, budget=budget, method="alds").plan
        errors = {layer.name: dict(zip(forms, spectral_errors(model.get_submodule(layer.name), forms), strict=True))
                  for layer in layers}  # fmt: skip
        pairs = ({"low": low, "high": high} for low in forms for high in forms)
        fitting = [pair for pair in pairs if layers.macs_of(pair) <= budget * layers.macs]
        least = min(max(errors[name][form] for name, form in pair.items()) for pair in fitting)
        assert max(errors[name][form] for name, form in plan.items()) == least
        assert shortfall(layers["low"].shape, plan["low"]) > shortfall(layers["high"].shape, plan["high"])


def _dense_weight(layer: nn.Module, form) -> torch.Tensor:
    return Factoriser(layer).factors(form).rebuild().reshape(layer.weight.shape)
