from __future__ import annotations

import pytest
import torch
from torch import nn

from haloc.errors import DataError, ModelError
from haloc.finetune import recalibrate


def make_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, momentum=0.3), nn.Dropout(0.9), nn.Flatten()).train()


def test_statistics_are_those_of_the_batches():
    model = make_model()
    model[1].running_mean.fill_(100.0)
    images = torch.randn(40, 3, 5, 5)
    assert recalibrate(model, [(images[:20], 0), (images[20:], 0)]) == 1
    outputs = model[0](images).detach()
    assert torch.allclose(model[1].running_mean, outputs.mean((0, 2, 3)), atol=1e-5)
    assert torch.allclose(model[1].running_var, outputs.var((0, 2, 3)), rtol=0.02)


def test_modes_and_momentum_are_put_back_and_dropout_stays_off():
    model = make_model()
    model[2].eval()
    seen = []
    model[3].register_forward_hook(lambda m, args, output: seen.append(int((output == 0).sum())))
    recalibrate(model, [torch.randn(4, 3, 2, 2)])
    assert seen == [0]
    assert model[1].momentum == 0.3
    assert [m.training for m in model] == [True, True, False, True]


def test_the_old_statistics_stay_when_it_fails():
    model = make_model()
    model[1].running_mean.fill_(7.0)
    with pytest.raises(ModelError, match="does not run"):
        recalibrate(model, [torch.randn(4, 3, 2, 2), torch.randn(4, 5, 2, 2)])
    with pytest.raises(DataError, match="no batch"):
        recalibrate(model, [])
    assert model[1].running_mean.tolist() == [7.0] * 4
    assert model[1].momentum == 0.3


def test_a_model_without_batchnorm_is_left_alone():
    assert recalibrate(nn.Linear(2, 2), []) == 0
