from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from haloc.errors import FileFormatError, PlanError, WeightsError
from haloc.factor.between import fold_norms, insert_norms
from haloc.factor.inspect import inspect
from haloc.factor.surgery import apply_plan, skeleton
from haloc.forms import Dense, Spatial, Svd, Tucker2
from haloc.methods.uniform import uniform_plan
from haloc.plan import Plan
from haloc.zoo import create
from haloc.zoo.factorised import restore

IMAGE = torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)
PLAN = Plan({"0": Spatial(6), "3": Tucker2(12, 8), "6": Svd(6), "9": Svd(4), "1": Dense()})


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 24, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU(),
        nn.Conv2d(24, 16, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


def trained(model: nn.Module, plan: Plan, norms: bool) -> nn.Module:
    """A factorised network after a step of training, with or without biases between its factors."""
    small = apply_plan(model, plan).train()
    if norms:
        insert_norms(small, plan)
    optimiser = torch.optim.SGD(small.parameters(), lr=0.01)
    small(torch.randn(8, *IMAGE.shape[1:])).square().mean().backward()
    optimiser.step()
    fold_norms(small)
    return small.eval()


def save(model: nn.Module, path: Path) -> Path:
    save_file(model.state_dict(), path)
    return path


@pytest.mark.parametrize("norms", [False, True])
def test_a_network_comes_back_from_its_plan_and_weights(tmp_path, norms):
    small = trained(make_model(), PLAN, norms)
    assert (small[3][0].bias is not None) == norms
    dense = make_model(seed=1)
    before = copy.deepcopy(dense.state_dict())
    again = restore(dense, PLAN, save(small, tmp_path / "factors.safetensors"))
    assert list(again.state_dict()) == list(small.state_dict())
    assert torch.equal(again(IMAGE), small(IMAGE))
    assert not any(module.training for module in again.modules())
    assert dense.training
    assert all(torch.equal(value, before[name]) for name, value in dense.state_dict().items())


@pytest.mark.parametrize("norms", [False, True])
def test_a_network_of_the_zoo_comes_back(tmp_path, norms):
    plan = uniform_plan(inspect(create("resnet20"), torch.randn(1, 3, 32, 32)), macs=0.5)
    small = trained(create("resnet20"), plan, norms)
    again = restore(create("resnet20"), plan, save(small, tmp_path / "factors.safetensors"))
    assert torch.equal(again(IMAGE), small(IMAGE))


def test_nothing_is_decomposed(tmp_path, monkeypatch):
    path = save(trained(make_model(), PLAN, norms=True), tmp_path / "factors.safetensors")
    monkeypatch.setattr(torch.linalg, "eigh", None)
    monkeypatch.setattr(torch.linalg, "svd", None)
    with pytest.raises(TypeError):
        apply_plan(make_model(), PLAN)
    restore(make_model(), PLAN, path)


def test_prefixes_dtypes_and_layouts(tmp_path):
    small = trained(make_model(), PLAN, norms=True)
    torch.save({"state_dict": {f"module.{k}": v for k, v in small.state_dict().items()}}, tmp_path / "factors.pth")
    dense = make_model().double().to(memory_format=torch.channels_last)
    again = restore(dense, PLAN, str(tmp_path / "factors.pth"))
    assert {p.dtype for p in again.parameters()} == {torch.float64}
    assert all(factor.weight.is_contiguous(memory_format=torch.channels_last) for factor in again[3])
    assert torch.allclose(again(IMAGE.double()), small(IMAGE).double(), rtol=1e-4, atol=1e-5)
    assert again[3].stride == (2, 2)


def test_a_model_that_is_one_layer(tmp_path):
    small = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 6, bias=False))
    again = restore(nn.Linear(8, 6, bias=False), {"": Svd(4)}, save(small, tmp_path / "factors.safetensors"))
    assert torch.equal(again(torch.ones(1, 8)), small(torch.ones(1, 8)))


def test_the_skeleton_has_the_modules_of_the_plan_and_the_biases_of_the_layers():
    plan = Plan({**PLAN, "3": Tucker2(24, 16)})
    model = make_model()
    bare, small = skeleton(model, plan), apply_plan(model, plan)
    assert [(name, type(module)) for name, module in bare.named_modules()] == [
        (name, type(module)) for name, module in small.named_modules()
    ]
    assert {name: value.shape for name, value in bare.state_dict().items()} == {
        name: value.shape for name, value in small.state_dict().items()
    }
    assert torch.equal(bare[0][1].bias, model[0].bias)
    assert not bare[0][0].weight.any()
    assert bare[0].padding == (1, 1)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"3": Tucker2(12, 7)}, r"'3\.0\.(weight|bias)' has shape \(8,.*, expected \(7,.* and [12] more differ"),
        ({"3": Dense()}, r"1 missing \(3\.weight\) and [35] unexpected \(3\.0\.[a-z]+, 3\."),
        ({"6": Dense()}, r"missing \(6\.weight, 6\.bias\) and [34] unexpected \(6\.0\."),
        ({"3": Tucker2(12, 16)}, r"[12] unexpected \((3\.1\.bias, )?3\.2\.weight\)"),
    ],
)
@pytest.mark.parametrize("norms", [False, True])
def test_weights_of_another_plan_are_refused_by_name(tmp_path, change, text, norms):
    path = save(trained(make_model(), PLAN, norms), tmp_path / "factors.safetensors")
    with pytest.raises(WeightsError, match=text) as caught:
        restore(make_model(), Plan({**PLAN, **change}), path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bias_at_the_end_is_the_dense_layers_matter(tmp_path):
    small = trained(make_model(), PLAN, norms=False)
    small[3][2].bias = nn.Parameter(torch.zeros(24))
    with pytest.raises(WeightsError, match=r"1 unexpected \(3\.2\.bias\)"):
        restore(make_model(), PLAN, save(small, tmp_path / "factors.safetensors"))


def test_weights_with_norms_in_them_are_refused(tmp_path):
    small = apply_plan(make_model(), PLAN)
    insert_norms(small, PLAN)
    with pytest.raises(WeightsError, match=r"unexpected \(.*norm0"):
        restore(make_model(), PLAN, save(small, tmp_path / "factors.safetensors"))


def test_other_mistakes(tmp_path):
    with pytest.raises(FileFormatError, match="does not exist"):
        restore(make_model(), PLAN, tmp_path / "none.safetensors")
    with pytest.raises(PlanError, match="no layer '33'"):
        restore(make_model(), {"33": Svd(2)}, tmp_path / "none.safetensors")
