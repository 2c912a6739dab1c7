from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from haloc.errors import ModelError
from haloc.training.optimiser import optimiser_of, start_at_rest
from haloc.training.settings import TrainSettings
from tests.training.tiny import network, same_weights


def test_only_weights_decay():
    model, settings = network(), TrainSettings(lr=0.5, momentum=0, weight_decay=0.1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimiser = optimiser_of(model, settings)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    for name, parameter in model.named_parameters():
        expected = before[name] * (1 - 0.5 * 0.1) if parameter.dim() > 1 else before[name]
        assert torch.allclose(parameter, expected, rtol=1e-6, atol=0), name
    assert sum(parameter.dim() > 1 for parameter in model.parameters()) == 3


RATE = torch.tensor(0.1)


@pytest.mark.parametrize(
    ("settings", "theirs"),
    [
        ({}, lambda groups: torch.optim.SGD(groups, lr=RATE, momentum=0.9, nesterov=True, fused=True)),
        ({"momentum": 0.0}, lambda groups: torch.optim.SGD(groups, lr=RATE, fused=True)),
        ({"optimiser": "adamw"}, lambda groups: torch.optim.AdamW(groups, lr=RATE, fused=True)),
    ],
)
def test_starting_at_rest_is_what_torch_does_bit_for_bit(settings, theirs):
    own, other = network(norm=False), network(norm=False)
    at_rest = optimiser_of(own, TrainSettings(lr=0.1, weight_decay=0.01, **settings))
    start_at_rest(at_rest)
    assert len(at_rest.state) == (0 if settings.get("momentum") == 0 else len(list(own.parameters())))
    decays = [{"params": [p for p in other.parameters() if p.dim() > 1], "weight_decay": 0.01},
              {"params": [p for p in other.parameters() if p.dim() <= 1], "weight_decay": 0.0}]  # fmt: skip
    plain = theirs(decays)
    for step in range(4):
        gradients = [torch.randn_like(parameter) for parameter in own.parameters()]
        for model, optimiser in ((own, at_rest), (other, plain)):
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient.clone()
            optimiser.step()
        assert same_weights(own, other), step


def test_nesterov_by_hand():
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    optimiser = optimiser_of(model, TrainSettings(lr=0.1, momentum=0.9, weight_decay=0))
    start_at_rest(optimiser)
    for expected in (1 - 0.1 * (1 + 0.9 * 1), 0.81 - 0.1 * (1 + 0.9 * 1.9)):  # the velocity is 1, then 1.9
        model.weight.grad = torch.ones(1, 1)
        optimiser.step()
        assert model.weight.item() == pytest.approx(expected)


def test_frozen_and_skipped_parameters_are_left_out():
    model = network()
    model[0].weight.requires_grad_(False)
    optimiser = optimiser_of(model, TrainSettings(), skip=[model[3].weight])
    trained = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    left_out = [name for name, p in model.named_parameters() if all(p is not other for other in trained)]
    assert left_out == ["0.weight", "3.weight"]
    with pytest.raises(ModelError, match="no parameter of the model wants a gradient"):
        optimiser_of(model.requires_grad_(False), TrainSettings())


def test_a_weight_that_is_part_of_a_larger_tensor_is_updated_in_its_place():
    whole = torch.ones(4, 6)
    model = nn.Linear(3, 4, bias=False)
    model.weight = nn.Parameter(whole[:, :3])
    optimiser = optimiser_of(model, TrainSettings(lr=0.5, momentum=0.9, weight_decay=0))
    start_at_rest(optimiser)
    model.weight.grad = torch.ones(4, 3)
    optimiser.step()
    assert torch.equal(whole[:, 3:], torch.ones(4, 3))
    assert torch.allclose(whole[:, :3], torch.full((4, 3), 1 - 0.5 * 1.9))


def test_momentum_lies_in_memory_as_the_weight_does():
    model = copy.deepcopy(network()).to(memory_format=torch.channels_last)
    optimiser = optimiser_of(model, TrainSettings())
    start_at_rest(optimiser)
    buffers = [(parameter, state["momentum_buffer"]) for parameter, state in optimiser.state.items()]
    assert all(parameter.stride() == buffer.stride() for parameter, buffer in buffers)
    assert not model[3].weight.is_contiguous()
