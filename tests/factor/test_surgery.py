from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from haloc.errors import ModelError, PlanError
from haloc.factor.calibrate import calibrate
from haloc.factor.inspect import inspect
from haloc.factor.surgery import apply_plan, reconstruct
from haloc.forms import Dense, Spatial, Svd, Tucker2
from haloc.methods.uniform import uniform_plan
from haloc.plan import Plan
from haloc.zoo import create
from tests.factor.layers import deviation
from tests.processes import FORKED

IMAGE = torch.randn(2, 3, 16, 16)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 24, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU(),
        nn.Conv2d(24, 16, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    ).eval()  # fmt: skip


PLAN = Plan({"0": Spatial(6), "3": Tucker2(12, 8), "6": Svd(6), "9": Svd(4), "1": Dense()})


def test_a_copy_is_returned_and_the_model_given_is_untouched():
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    written = []
    small = apply_plan(model, PLAN, on_layer=written.append)
    assert written == ["0", "3", "6", "9"]
    assert [type(small[i]) for i in (0, 3, 6, 9)] == [nn.Sequential] * 4
    assert [len(small[i]) for i in (0, 3, 6, 9)] == [2, 3, 2, 2]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert small(IMAGE).shape == (2, 10)
    assert small[1] is not model[1]
    assert apply_plan(model, PLAN, inplace=True) is model
    assert torch.equal(model(IMAGE), small(IMAGE))


def test_counts_are_those_of_the_plan():
    model = make_model()
    dense, small = inspect(model, IMAGE), inspect(apply_plan(model, PLAN), IMAGE)
    assert small.macs == dense.macs_of(PLAN)
    assert small.params == dense.params_of(PLAN)


@pytest.mark.parametrize("aware", [False, True])
def test_reconstruct_gives_a_dense_network_with_the_same_outputs(aware):
    model = make_model()
    small = apply_plan(model, PLAN, moments=calibrate(model, [IMAGE], PLAN.changes()) if aware else None)
    dense = reconstruct(small, PLAN)
    assert [type(layer) for layer in dense] == [type(layer) for layer in model]
    assert dense.state_dict().keys() == model.state_dict().keys()
    assert deviation(small(IMAGE), dense(IMAGE)) < 1e-5
    assert type(small[0]) is nn.Sequential


def test_activation_aware_is_nearer_to_the_model():
    model = make_model()
    images = torch.randn(64, 3, 16, 16).cumsum(3)
    moments = calibrate(model, [images], PLAN.changes())
    plain, aware = apply_plan(model, PLAN), apply_plan(model, PLAN, moments=moments)
    assert (aware(images) - model(images)).norm() < 0.7 * (plain(images) - model(images)).norm()


def test_dtype_layout_mode_and_requires_grad_are_kept():
    model = make_model().to(torch.bfloat16).to(memory_format=torch.channels_last)
    model[3].weight.requires_grad_(False)
    model[0].bias.requires_grad_(False)
    model[0].train()
    small = apply_plan(model, PLAN)
    assert {p.dtype for p in small.parameters()} == {torch.bfloat16}
    assert all(layer.weight.is_contiguous(memory_format=torch.channels_last) for layer in small[3])
    assert [p.requires_grad for p in small[3].parameters()] == [False] * 3
    assert [layer.weight.requires_grad for layer in small[0]] == [True, True]
    assert not small[0][1].bias.requires_grad
    assert small[0].training
    assert all(layer.training for layer in small[0])
    assert not any(layer.training for layer in (small, small[3], *small[3]))


def test_hooks_stay_on_replaced_layers_and_on_everything_else():
    model = make_model()
    seen = []
    model[3].register_forward_hook(lambda module, args, output: seen.append(("new", output.shape[1])))
    model[6].register_forward_pre_hook(lambda module, args, kwargs: seen.append("pre"), with_kwargs=True)
    model[4].register_forward_hook(lambda module, args, output: seen.append("norm"))
    apply_plan(model, PLAN)(IMAGE)
    assert seen == [("new", 24), "norm", "pre"]


def test_a_shared_module_is_replaced_wherever_it_is_used():
    conv = nn.Conv2d(8, 8, 3, padding=1)
    model = nn.Sequential(conv, nn.ReLU(), nn.Sequential(conv))
    small = apply_plan(model, {"2.0": Tucker2(4, 4)})
    assert isinstance(small[0], nn.Sequential)
    assert small[0] is small[2][0]
    with pytest.raises(PlanError, match="same module"):
        apply_plan(model, {"0": Tucker2(4, 4), "2.0": Tucker2(4, 4)})


def test_a_model_that_is_one_layer():
    layer = nn.Linear(8, 8)
    small = apply_plan(layer, {"": Svd(8)})
    assert isinstance(small, nn.Sequential)
    assert deviation(layer(torch.ones(1, 8)), small(torch.ones(1, 8))) < 1e-5


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({"33": Svd(2)}, "no layer '33'"),
        ({"3": Tucker2(25, 8)}, "at layer '3': tucker2 25/8 cannot be applied, rank_out 25 is outside 1..24"),
        ({"3": Svd(2)}, "a 3×3 convolution 16→24 takes tucker2 or spatial, not svd"),
        ({"9": Spatial(2)}, "a linear layer 16→10 takes svd, not spatial"),
        ({"1": Svd(2)}, "at layer '1': svd 2 cannot be applied, it is a BatchNorm2d"),
        ({"0": Tucker2(4, 3), "6": Svd(17)}, "at layer '6': svd 17"),
    ],
)
def test_plans_that_do_not_fit_are_refused_before_anything_is_changed(plan, text):
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(PlanError, match=text):
        apply_plan(model, plan, inplace=True)
    assert model.state_dict().keys() == before.keys()


def test_layers_to_be_left_alone_are_refused_with_the_reason():
    attention = nn.MultiheadAttention(16, 4)
    with pytest.raises(PlanError, match="'out_proj': svd 4 cannot be applied, used inside MultiheadAttention"):
        apply_plan(attention, {"out_proj": Svd(4)})
    with pytest.raises(PlanError, match="parametrised"):
        apply_plan(nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8))), {"0": Svd(4)})
    with pytest.raises(PlanError, match="transposed"):
        apply_plan(nn.Sequential(nn.ConvTranspose2d(8, 8, 3)), {"0": Tucker2(4, 4)})
    with pytest.raises(PlanError, match="depthwise"):
        apply_plan(nn.Sequential(nn.Conv2d(8, 8, 3, groups=8)), {"0": Tucker2(1, 1)})


def test_what_goes_wrong_in_a_layer_names_it():
    model = make_model()
    model[3].weight.data[0] = torch.nan
    with pytest.raises(ModelError, match="layer '3': its weight holds NaN"):
        apply_plan(model, PLAN, inplace=True)
    assert type(model[0]) is nn.Conv2d
    model = make_model()
    moments = calibrate(model, [IMAGE], ["0"])
    with pytest.raises(ModelError, match="no calibration of layer '3'"):
        apply_plan(model, PLAN, moments=moments)


def test_a_model_that_cannot_be_copied_can_be_changed_in_place():
    model = make_model()
    model.lock = threading.Lock()
    with pytest.raises(ModelError, match="inplace=True"):
        apply_plan(model, PLAN)
    assert apply_plan(model, PLAN, inplace=True)(IMAGE).shape == (2, 10)


def test_what_hooks_compute_before_each_run_is_no_obstacle_to_a_copy():
    model = make_model()
    prune.l1_unstructured(model[6], "weight", amount=0.5)
    assert not model[6].weight.is_leaf
    small = apply_plan(model, {"3": Tucker2(12, 8)})
    assert deviation(small[6](torch.ones(1, 24, 2, 2)), model[6](torch.ones(1, 24, 2, 2))) == 0
    assert small[6].weight is not model[6].weight


def test_save_and_load_give_the_same_logits(tmp_path):
    from safetensors.torch import load_file, save_file

    model = create("resnet20")
    plan = uniform_plan(inspect(model, torch.randn(1, 3, 32, 32)), macs=0.5)
    small = apply_plan(model, plan)
    plan.save(tmp_path / "plan.json")
    save_file(small.state_dict(), tmp_path / "weights.safetensors")
    again = apply_plan(create("resnet20"), Plan.load(tmp_path / "plan.json"))
    again.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    image = torch.randn(2, 3, 32, 32)
    assert torch.equal(again(image), small(image))


def test_a_factorised_network_trains_and_exports():
    model = create("resnet20")
    small = apply_plan(model, uniform_plan(inspect(model, torch.randn(1, 3, 32, 32)), macs=0.5))
    image = torch.randn(2, 3, 32, 32)
    program = torch.export.export(small, (image,)).module()
    assert deviation(small(image), program(image)) < 1e-5
    small.train()(image).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in small.parameters())


def test_the_same_plan_gives_the_same_weights_in_another_process():
    with FORKED.Pool(1) as pool:
        there = pool.apply(_factorised_weights)
    here = _factorised_weights_here()
    assert len(here) == len(there)
    assert all(torch.equal(one, torch.tensor(other)) for one, other in zip(here, there, strict=True))


def _factorised_weights_here() -> list[torch.Tensor]:
    torch.set_num_threads(1)
    model = make_model()
    torch.manual_seed(3)
    moments = calibrate(model, [torch.randn(8, 3, 16, 16)], PLAN.changes())
    return [p.detach() for p in apply_plan(model, PLAN, moments=moments).parameters()]


def _factorised_weights() -> list[list]:
    return [p.tolist() for p in _factorised_weights_here()]
