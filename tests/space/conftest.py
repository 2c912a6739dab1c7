from __future__ import annotations

import pytest
import torch

from haloc.factor.inspect import inspect
from haloc.zoo import create


@pytest.fixture(scope="package")
def resnet18():
    return inspect(create("resnet18"), torch.randn(1, 3, 64, 64))


@pytest.fixture(scope="package")
def threes(resnet18):
    return [layer.name for layer in resnet18 if layer.kind == "Conv2d" and layer.shape.kernel == (3, 3)]
