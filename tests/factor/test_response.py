"""What errors in a layer's outputs do to the network's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from haloc.factor.response import DAMPING, output_weights, rooted


def small_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 3, 3), nn.ReLU(inplace=True)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 5)),
    ).eval()


def pictures(count: int = 4) -> torch.Tensor:
    return torch.randn(count, 2, 8, 8, generator=torch.Generator().manual_seed(1))


def by_hand(model: nn.Module, place: int, x: torch.Tensor) -> torch.Tensor:
    """JᵀJ summed over positions, the mean over examples, of outputs as shares of their size."""
    before, behind = model[: place + 1], copy.deepcopy(model[place + 1 :])
    for module in behind.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    total: torch.Tensor | float = 0.0
    size = model(x).detach().norm() / len(x) ** 0.5
    for one in x.split(1):
        with torch.no_grad():
            value = before(one)
        jacobian = torch.autograd.functional.jacobian(behind, value).squeeze(0).squeeze(1) / size
        rows = jacobian.double().reshape(jacobian.shape[0], value.shape[1], -1)
        total = total + torch.einsum("oct,odt->cd", rows, rows)
    return total / len(x)


@pytest.mark.parametrize("place", [0, 1, 3, 7])
def test_they_are_what_the_derivatives_say_on_average(place):
    """Random directions of the outputs, many times, against all derivatives written out."""
    model, x = small_network(), pictures()
    found = output_weights(model, [x] * 4000, [str(place)])[str(place)]
    expected = by_hand(model, place, x)
    assert float((found - expected).norm() / expected.norm()) < 0.1


def test_the_model_is_left_as_it_was_and_the_same_inputs_say_the_same():
    model, x = small_network().train(), pictures()
    before = copy.deepcopy(model.state_dict())
    first, second = (output_weights(model, [x], ["0", "3"]) for _ in range(2))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_frozen_weights_and_whole_numbers_as_inputs_are_no_hindrance():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3)).requires_grad_(False)
    tokens = torch.randint(10, (4, 7))
    found = output_weights(model, [tokens], ["1", "3"])
    assert found["1"].shape == (6, 6)
    assert float(found["3"].diagonal().min()) > 0
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_outputs_of_several_tensors_count_alike_whatever_their_scale():
    class Heads(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.one, self.two, self.scale = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 2), scale

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            h = self.body(x)
            return {"one": self.one(h), "two": self.scale * self.two(h), "shape": torch.tensor(x.shape)}

    x = torch.randn(16, 4)
    small, large = (output_weights(Heads(scale), [x], ["body"])["body"] for scale in (1e-3, 1e3))
    assert torch.allclose(small, large, rtol=1e-4)


def test_a_layer_that_nothing_comes_of_weighs_nothing():
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(4, 3), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.idle(x)
            return self.used(x)

    found = output_weights(Idle(), [torch.randn(8, 4)], ["used", "idle"])
    assert float(found["idle"].abs().max()) == 0
    assert torch.equal(rooted(found["idle"]), torch.eye(2, dtype=torch.float64)), "all its outputs count alike"


class Rounded(nn.Module):
    """Whole numbers come out: there is nothing to derive."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu()).argmax(-1)


def test_a_model_that_cannot_be_differentiated_has_none(caplog):
    assert output_weights(Rounded(), [torch.randn(8, 4)], ["first"]) is None
    assert "cannot be differentiated" in caplog.text
    assert output_weights(small_network(), [], ["0"]) is None


def test_the_root_is_one_of_the_damped_weights():
    rows = torch.randn(20, 6, dtype=torch.float64)
    weights = rows.T @ rows
    root = rooted(weights)
    expected = weights + DAMPING * weights.diagonal().mean() * torch.eye(6, dtype=torch.float64)
    assert torch.allclose(root.T @ root, expected)
