from __future__ import annotations

import pytest
import torch
from torch import nn

from haloc.training.ema import Ema
from tests.training.tiny import network, same


def set_to(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def test_by_hand():
    model = nn.Linear(1, 1)
    set_to(model, 0.0)
    ema, average = Ema(model, 0.8), 0.0
    for step, value in [(0, 1.0), (1, 2.0), (90, 5.0)]:
        set_to(model, value)
        ema.set_step(step)
        ema.update()
        decay = {0: 1 / 10, 1: 2 / 11, 90: 0.8}[step]  # young averages forget faster; 91 / 100 is above 0.8
        average = decay * average + (1 - decay) * value
        assert float(ema.state["weight"]) == pytest.approx(average)
    assert model.weight.item() == 5.0


def test_running_statistics_are_averaged_and_counts_copied():
    model = network()
    ema = Ema(model, 0.8)
    model[1].running_mean.fill_(1.0)
    model[1].num_batches_tracked.fill_(7)
    ema.set_step(0)
    ema.update()
    assert torch.allclose(ema.state["1.running_mean"], torch.full((8,), 0.9))
    assert ema.state["1.num_batches_tracked"].item() == 7
    assert ema.state["1.num_batches_tracked"].dtype == torch.int64


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_has_the_averages_inside_and_its_own_values_afterwards(fails):
    model = network()
    ema = Ema(model, 0.9)
    averages = {name: value.clone() for name, value in model.state_dict().items()}
    set_to(model, 3.0)
    model[1].num_batches_tracked.fill_(7)
    own = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        with ema.in_place(model):
            assert same(model.state_dict(), averages)
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert fails
    assert same(model.state_dict(), own)
    assert same(ema.state, averages)
    ema.put_into(model)
    assert same(model.state_dict(), averages)


def test_it_follows_the_tensors_that_training_changes_not_copies_of_them():
    model = network()
    ema = Ema(model, 0.9)
    kept = {name: tensor.data_ptr() for name, tensor in ema.state.items()}
    set_to(model, 2.0)
    ema.restart(model)
    assert same(ema.state, model.state_dict())
    assert {name: tensor.data_ptr() for name, tensor in ema.state.items()} == kept
    ema.load({name: torch.zeros_like(tensor) for name, tensor in ema.state.items()})
    assert {name: tensor.data_ptr() for name, tensor in ema.state.items()} == kept
    ema.set_step(0)
    ema.update()
    assert torch.allclose(ema.state["8.weight"], torch.full((10, 32), 1.8))


def test_without_a_decay_nothing_is_kept_or_done():
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ema = Ema(model, 0.0)
    ema.set_step(5)
    ema.update()
    ema.restart(model)
    with ema.in_place(model):
        assert same(model.state_dict(), before)
    ema.put_into(model)
    assert ema.state == {}
    assert same(model.state_dict(), before)


def test_tied_weights_are_averaged_once():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    set_to(model, 0.0)
    ema = Ema(model, 0.8)
    set_to(model, 1.0)
    ema.set_step(0)
    ema.update()
    assert list(ema.state) == ["0.weight", "0.bias", "1.bias"]
    assert torch.allclose(ema.state["0.weight"], torch.full((2, 2), 0.9))
