from __future__ import annotations

import copy
from itertools import pairwise, product

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from haloc.errors import ModelError, PlanError
from haloc.factor.between import fold_norms, insert_norms
from haloc.factor.inspect import inspect
from haloc.factor.layers import layer_shape
from haloc.factor.modules import Factoriser, merge
from haloc.factor.surgery import apply_plan, reconstruct
from haloc.forms import Dense, Spatial, Svd, Tucker2, families, full_ranks
from haloc.methods.uniform import uniform_plan
from haloc.plan import Plan
from haloc.zoo.resnet_cifar import resnet20
from tests.factor.layers import GRID, KERNELS, deviation, make_conv, make_input

BORDERS = [
    dict(zip(("kernel", "stride", "padding", "dilation", "groups", "bias", "padding_mode"), values, strict=True))
    for values in product(
        KERNELS[::2], (1, 2), (1, "same"), (1, 2), (1, 2), (False, True), ("reflect", "replicate", "circular")
    )
    if values[1:3] != (2, "same")
]


def forms_of(layer: nn.Module) -> list:
    """Every way to write the layer as a chain, the one-sided ones too."""
    shape = layer_shape(layer)
    if "svd" in families(shape):
        return [Svd(2)]
    full_out, full_in = full_ranks(shape, "tucker2")
    forms = [Tucker2(2, 2), Tucker2(full_out, 2), Tucker2(2, full_in)]
    return [*forms, Spatial(3)] if "spatial" in families(shape) else forms


def train(model: nn.Module, inputs: torch.Tensor, steps: int = 2) -> None:
    """Steps long enough that means, variances, weights and biases of the norms are nothing special any more."""
    model.train()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.momentum = 0.7
    optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(steps):
        optimiser.zero_grad()
        outputs = model(inputs + 0.5)
        (outputs - torch.linspace(-1, 1, outputs.numel()).to(outputs).view_as(outputs)).square().mean().backward()
        optimiser.step()
    model.eval()


def chain_with_norms(layer: nn.Module, form) -> tuple[nn.Sequential, torch.Tensor]:
    """In the norms there is whatever training might leave there."""
    chain = Factoriser(layer).build(form).eval()
    assert insert_norms(chain, [""]) == (len(chain) // 2)
    for norm in chain[1::2]:
        for tensor, least, most in ((norm.running_mean, -2, 2), (norm.running_var, 0.3, 3), (norm.bias, -2, 2)):
            tensor.data.uniform_(least, most)
        norm.weight.data.uniform_(-2, 2)
    return chain, make_input(layer).to(layer.weight.dtype)


def far_from_trivial(norm: _BatchNorm) -> bool:
    """Nothing is asked of mean and bias: between two BatchNorms they can be zero for good."""
    away = [norm.running_var - 1, norm.weight - 1]
    return all(float(tensor.detach().abs().max()) > 1e-3 for tensor in away)


# In float32 every seventh case will do: any two values of two options still meet.
@pytest.mark.parametrize(("dtype", "tolerance", "step"), [(torch.float32, 1e-5, 7), (torch.float64, 1e-12, 1)])
@pytest.mark.parametrize("cases", [GRID, BORDERS], ids=["grid", "borders"])
def test_folding_is_exact_over_the_whole_grid(cases, dtype, tolerance, step):
    worst, folded = 0.0, 0
    for case in cases[::step]:
        layer = make_conv(**case).to(dtype)
        for form in forms_of(layer):
            chain, inputs = chain_with_norms(layer, form)
            expected = chain(inputs)
            assert all(map(far_from_trivial, chain[1::2]))
            assert min(chain[1].running_mean.abs().max(), chain[-2].bias.detach().abs().max()) > 0.01
            folded += fold_norms(chain)
            assert list(dict(chain.named_children())) == [str(number) for number in range(len(chain))]
            worst = max(worst, deviation(expected, chain(inputs)))
    assert folded > 150
    assert worst < tolerance


@pytest.mark.parametrize("form", [Tucker2(4, 3), Tucker2(8, 3), Tucker2(4, 6), Spatial(5)])
@pytest.mark.parametrize("kernel", [(3,), (3, 3), (3, 3, 3)])
def test_a_fresh_norm_changes_nothing_in_eval_mode(kernel, form):
    if len(kernel) == 1 and isinstance(form, Spatial):
        return
    layer = make_conv(kernel, padding=1).double()
    chain = Factoriser(layer).build(form).eval()
    inputs = make_input(layer).double()
    expected, parameters = chain(inputs), list(chain.parameters())
    assert insert_norms(chain, [""]) == len(parameters) - 2
    assert deviation(expected, chain(inputs)) < 1e-14
    assert all(any(p is q for q in chain.parameters()) for p in parameters)
    assert deviation(expected, chain.train()(inputs)) > 1e-3


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 24, 3, stride=2, padding=1, bias=False), nn.ReLU(),
        nn.Conv2d(24, 16, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


PLAN = Plan({"0": Tucker2(8, 3), "2": Tucker2(12, 8), "4": Svd(6), "7": Svd(4)})


def test_where_norms_go_and_what_is_kept():
    model = apply_plan(make_model(), PLAN)
    seen = []
    model[2].register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
    model[2].eval()
    chain = model[2]
    assert insert_norms(model, PLAN) == 1 + 2 + 1
    assert model[2] is chain
    assert list(dict(chain.named_children())) == ["0", "norm0", "1", "norm1", "2"]
    assert [type(module) for module in model[7]] == [nn.Linear] * 2
    assert chain.stride == (2, 2)
    assert not chain.training
    model(torch.randn(2, 3, 8, 8))
    assert seen == [24]
    assert insert_norms(model, PLAN) == 0
    assert fold_norms(model) == 4
    assert list(dict(chain.named_children())) == ["0", "1", "2"]
    assert (chain.stride, len(chain._forward_hooks), fold_norms(model)) == ((2, 2), 1, 0)


@pytest.mark.parametrize(
    ("kernel", "kind"), [((3,), nn.BatchNorm1d), ((3, 3), nn.BatchNorm2d), ((3, 1, 3), nn.BatchNorm3d)]
)
def test_norms_are_like_the_factor_before_them(kernel, kind):
    layer = make_conv(kernel, padding=1).to(torch.bfloat16).eval()
    layer.weight.requires_grad_(False)
    chain = Factoriser(layer).build(Tucker2(4, 3))
    insert_norms(chain, [""])
    assert [type(chain[1]), type(chain[3])] == [kind] * 2
    assert [chain[1].num_features, chain[3].num_features] == [3, 4]
    assert {p.dtype for p in chain.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for name, p in chain.named_parameters() if name != "2.bias")
    assert not any(module.training for module in chain)
    assert fold_norms(chain) == 2
    assert not chain[0].bias.requires_grad
    assert chain[0].bias.dtype == torch.bfloat16


def test_a_copy_is_folded_like_the_model():
    model = apply_plan(make_model(), PLAN)
    insert_norms(model, PLAN)
    image = torch.randn(4, 3, 8, 8)
    train(model, image)
    other = copy.deepcopy(model)
    assert fold_norms(other) == 4
    assert sum(isinstance(module, _BatchNorm) for module in model.modules()) == 4
    assert deviation(model(image), other(image)) < 1e-5


def test_norms_of_another_class_are_still_ours():
    model = apply_plan(make_model(), PLAN)
    insert_norms(model, PLAN)
    assert fold_norms(nn.SyncBatchNorm.convert_sync_batchnorm(model)) == 4


def test_gradients_flow_through_norms_and_through_folded_factors():
    model = apply_plan(make_model(), PLAN)
    insert_norms(model, PLAN)
    image = torch.randn(4, 3, 8, 8)
    for _ in range(2):
        model.zero_grad()
        model.train()(image).square().sum().backward()
        assert all(p.grad is not None and bool(p.grad.abs().max() > 0) for p in model.parameters())
        fold_norms(model)


def test_models_without_our_norms_are_untouched():
    own = {"conv0": nn.Conv2d(3, 4, 1), "norm0": nn.BatchNorm2d(4), "relu0": nn.ReLU(), "1": nn.Conv2d(4, 4, 1)}
    model = nn.Sequential(nn.Sequential())
    for name, module in own.items():
        model[0].add_module(name, module)
    before = copy.deepcopy(model.state_dict())
    assert fold_norms(model) == 0
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("form", "options", "biases"),
    [
        # Behind the core comes a 1×1 that has a bias; before it a border of zeros stands in the way.
        (Tucker2(4, 3), {"padding": 1}, [True, False, True]),
        (Tucker2(4, 3), {"padding": 1, "bias": False}, [True, True, False]),
        (Tucker2(4, 3), {"padding": "same"}, [True, False, True]),
        (Tucker2(4, 3), {"padding": 0}, [False, False, True]),
        (Tucker2(4, 3), {"padding": "valid", "bias": False}, [False, True, False]),
        (Tucker2(4, 3), {"padding": 1, "padding_mode": "reflect"}, [False, False, True]),
        (Tucker2(8, 3), {"padding": 1}, [True, True]),
        (Tucker2(4, 6), {"padding": 1}, [False, True]),
        (Spatial(4), {"padding": (1, 0)}, [False, True]),
        (Spatial(4), {"padding": (0, 1)}, [True, True]),
    ],
)
def test_a_bias_moves_on_where_that_is_exact_and_costs_nothing(form, options, biases):
    chain, inputs = chain_with_norms(make_conv((3, 3), **options), form)
    expected = chain(inputs)
    fold_norms(chain)
    assert [factor.bias is not None for factor in chain] == biases
    assert deviation(expected, chain(inputs)) < 1e-5


def test_norms_can_be_put_in_again_after_folding():
    layer = make_conv((3, 3), padding=1)
    chain, inputs = chain_with_norms(layer, Tucker2(4, 3))
    fold_norms(chain)
    assert insert_norms(chain, [""]) == 2
    train(chain, inputs)
    expected = chain(inputs)
    assert fold_norms(chain) == 2
    assert deviation(expected, chain(inputs)) < 1e-5


def test_a_shared_layer_and_a_layer_that_is_one_module():
    conv = nn.Conv2d(8, 8, 3, padding=1)
    model = nn.Sequential(conv, nn.ReLU(), nn.Sequential(conv), nn.Conv2d(8, 8, 3))
    small = apply_plan(model, {"0": Tucker2(4, 4), "3": Tucker2(8, 8)})
    assert insert_norms(small, ["0", "2.0", "3"]) == 2
    assert fold_norms(small) == 2


def test_chains_with_linear_layers_are_left_alone():
    chain = nn.Sequential(nn.Conv1d(4, 4, 1), nn.Linear(8, 4))
    assert insert_norms(nn.Sequential(chain), ["0"]) == 0
    assert [type(module) for module in chain] == [nn.Conv1d, nn.Linear]


def test_what_is_no_factorised_layer_is_refused_and_nothing_changed():
    model = nn.Sequential(apply_plan(make_model(), PLAN), nn.Sequential(nn.Conv2d(10, 10, 1), nn.ReLU()))
    with pytest.raises(ModelError, match=r"'1\.1' is a ReLU, expected a Conv1d"):
        insert_norms(model, ["0.2", "1"])
    with pytest.raises(PlanError, match="no layer '0.22'"):
        insert_norms(model, ["0.2", "0.22"])
    assert not any(isinstance(module, _BatchNorm) for module in model.modules())


def test_a_whole_network_trained_with_norms_gives_the_same_logits_without():
    model = resnet20()
    plan = uniform_plan(inspect(model, torch.randn(1, 3, 32, 32)), macs=0.5)
    small = apply_plan(model, plan)
    names = list(small.state_dict())
    count = insert_norms(small, plan.changes())
    assert count == sum(len(small.get_submodule(n)) // 2 for n in plan.changes() if n != "linear")
    assert count > 20
    images, labels = torch.randn(16, 3, 32, 32), torch.arange(16) % 10
    optimiser = torch.optim.SGD(small.train().parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(6):
        optimiser.zero_grad()
        loss = F.cross_entropy(small(images), labels)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(far_from_trivial(module) for name, module in small.named_modules() if "norm" in name)
    expected = small.eval()(images)
    assert fold_norms(small) == count
    assert deviation(expected, small(images)) < 1e-5
    assert [name for name in small.state_dict() if name in names] == names
    assert all(name.endswith("bias") for name in small.state_dict() if name not in names)


@pytest.mark.parametrize(
    ("form", "options"),
    [
        (Tucker2(4, 3), {"groups": 2, "padding": 0, "bias": False}),
        (Tucker2(4, 3), {"padding": 1, "padding_mode": "circular"}),
        (Tucker2(4, 6), {"padding": 1, "bias": False}),
        (Spatial(4), {"padding": (1, 0), "stride": 2}),
    ],
)
def test_folded_factors_are_merged_to_one_layer_where_that_is_exact(form, options):
    groups = options.get("groups", 1)
    form = Tucker2(form.rank_out // groups, form.rank_in // groups) if groups > 1 else form
    chain, inputs = chain_with_norms(make_conv((3, 3), **options), form)
    fold_norms(chain)
    merged = merge(chain)
    assert merged.bias.requires_grad
    assert deviation(chain(inputs), merged(inputs)) < 1e-5


def test_a_bias_before_a_border_of_zeros_is_not_merged():
    plan = {"2": Tucker2(12, 8), "4": Svd(6), "0": Dense()}
    model = apply_plan(make_model(), plan)
    insert_norms(model, plan)
    image = torch.randn(4, 3, 8, 8)
    train(model, image)
    fold_norms(model)
    with pytest.raises(ModelError, match="layer '2': a bias between the factors cannot be written as one dense layer"):
        reconstruct(model, plan)
    assert deviation(model(image), reconstruct(model, {"4": Svd(6)})(image)) < 1e-5


def test_linear_factors_with_biases_are_merged():
    chain = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 4, bias=False), nn.Linear(4, 5))
    assert all(first.out_features == second.in_features for first, second in pairwise(chain))
    assert deviation(chain(torch.ones(2, 6)), merge(chain)(torch.ones(2, 6))) < 1e-5


def test_a_bias_between_factors_is_merged_but_for_the_borders():
    torch.manual_seed(0)
    chain = nn.Sequential(nn.Conv2d(6, 4, 1), nn.Conv2d(4, 3, 3, padding=1, bias=False), nn.Conv2d(3, 8, 1)).eval()
    images = torch.randn(2, 6, 7, 7)
    with pytest.raises(ModelError, match="a bias between the factors"):
        merge(chain)
    outputs, expected = merge(chain, borders=False)(images), chain(images)
    assert torch.allclose(outputs[..., 1:-1, 1:-1], expected[..., 1:-1, 1:-1], atol=1e-5)
    assert not torch.allclose(outputs, expected, atol=1e-3)
