"""The benchmark over strange networks and hard numbers: those that are quick, without exports and timings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import haloc
from haloc.factor.forward import unmoved
from haloc.factor.holders import hidden_layers
from tests.trust import load

checks, strange = load("network_checks"), load("network_cases")
CASES = [case for case in (*load("network_table").STRUCTURES, *load("network_numbers").NUMBERS) if not case.slow]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_network_is_changed_in_silence(case):
    quick = replace(case, steps=tuple(step for step in case.steps if step not in ("export", "measure")))
    finding = checks.examine(quick)
    assert finding.as_expected, f"{finding.verdict}: {finding.detail}"


def test_the_checks_see_a_network_that_was_changed(monkeypatch):
    """A check that cannot fail proves nothing."""
    plain = replace(next(case for case in CASES if case.name == "plain linear layers"), steps=())
    real = haloc.apply_plan

    def clumsy(model, plan, **options):
        small = real(model, plan, **options)
        if len(plan) == 2:
            model[0].bias.data[0] += 1e-6
        return small

    monkeypatch.setattr(haloc, "apply_plan", clumsy)
    assert checks.examine(plain).verdict == checks.WRONG
    monkeypatch.setattr(haloc, "apply_plan", lambda model, plan, **options: real(model, {}))
    assert checks.examine(plain).verdict == checks.WRONG


def test_layers_that_pytorch_does_not_see_have_a_row_and_are_not_lost_when_saved(tmp_path):
    model, inputs = strange.listed_only()
    row = haloc.inspect(model, inputs)["kept[0]"]
    assert row.reason is not None
    assert "nn.ModuleList" in row.reason
    with pytest.raises(haloc.HalocError, match=r"'kept\[0\]' is held outside of its modules"):
        haloc.save(tmp_path / "net", model)
    assert not (tmp_path / "net").exists()
    inner = nn.Module()
    inner.blocks = [nn.Sequential(nn.Linear(4, 4))]
    assert list(hidden_layers(nn.Sequential(inner))) == ["0.blocks[0].0"]


def test_functions_that_only_read_the_model_do_not_close_its_layers():
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    model.slope, model.note = 0.1, lambda x: x * model.slope
    assert haloc.inspect(model, torch.ones(1, 16))["0"].families == ("svd",)
    model.other = lambda x: model.get_submodule("0")(x)
    layer = model[0]
    model.direct = lambda x: layer(x)
    reason = haloc.inspect(model, torch.ones(1, 16))["0"].reason
    assert reason is not None
    assert "a copy of the model shares that" in reason


def test_parameters_that_are_views_of_one_memory_without_overlap_are_not_tied():
    flat = torch.randn(2, 16, 16)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    for layer, part in zip(model, flat, strict=True):
        layer.weight = nn.Parameter(part)
    assert len(haloc.inspect(model, torch.ones(1, 16)).open_layers) == 2


def test_buffers_come_back_however_they_were_changed():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("added", torch.zeros(1))
            self.register_buffer("replaced", torch.zeros(1))

        def forward(self, x):
            self.added += 1
            self.replaced = self.replaced + 1
            return x

    model = Both()
    before = dict(model.named_buffers())
    with unmoved(model):
        model(torch.ones(1))
    assert all(buffer is before[name] and float(buffer) == 0 for name, buffer in model.named_buffers())
