from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from haloc.factor.forward import compiling_many
from haloc.training.surroundings import numerics, own_random_numbers


def test_numbers_hang_on_the_seed_inside_and_are_the_callers_again_outside():
    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), float(np.random.rand()), random.random()

    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    drawn = []
    for seed in (3, 3, 4):
        with own_random_numbers(seed):
            drawn.append(draw())
    assert drawn[0] == drawn[1] != drawn[2]
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == states[1:]


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_the_numerics_of_the_caller_come_back(precision, monkeypatch):
    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)  # the switches are there without a GPU
    torch.set_float32_matmul_precision(precision)
    try:
        with numerics("fp32"):
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.backends.cudnn.allow_tf32
        with numerics("bf16"):
            assert torch.get_float32_matmul_precision() == "high"
            assert torch.backends.cudnn.benchmark
        with numerics("bf16", repeats=False):
            assert not torch.backends.cudnn.benchmark
        assert torch.get_float32_matmul_precision() == precision
        assert not torch.backends.cudnn.benchmark
    finally:
        torch.set_float32_matmul_precision(before)


def test_more_than_eight_networks_can_be_compiled():
    with compiling_many():
        assert torch._dynamo.config.recompile_limit > 1000
    assert torch._dynamo.config.recompile_limit <= 1000
