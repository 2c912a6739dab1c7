from __future__ import annotations

from math import exp, log
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from haloc.errors import SpecError
from haloc.training.objective import (
    CrossEntropy,
    Loss,
    accuracy,
    cross_entropy,
    distillation,
    feature_map_loss,
    recording,
)


def test_distillation_of_two_classes_by_hand():
    # At T = 2 the logits ±log 3 are softened to probabilities √3 : 1/√3 = 3/4, 1/4; the student's are even.
    teacher, student = torch.tensor([[log(3), -log(3)]]), torch.zeros(1, 2)
    by_hand = 0.75 * log(0.75 / 0.5) + 0.25 * log(0.25 / 0.5)
    assert float(distillation(student, teacher, 2.0)) == pytest.approx(4 * by_hand, rel=1e-5)
    twice = distillation(student.repeat(2, 1), teacher.repeat(2, 1), 2.0)
    assert float(twice) == pytest.approx(4 * by_hand, rel=1e-5)


def test_it_is_the_student_who_has_to_come_to_the_teacher():
    one, other = torch.tensor([[2.0, 0, 0]]), torch.tensor([[0.0, 0, 1]])
    assert abs(float(distillation(one, other, 1.0) - distillation(other, one, 1.0))) > 0.01


def test_equal_logits_teach_nothing():
    logits = torch.randn(6, 10, requires_grad=True)
    loss = distillation(logits, logits.detach() + 3.0, 4.0)  # softmax does not see the shift
    loss.backward()
    assert abs(float(loss.detach())) < 1e-5
    assert float(logits.grad.abs().max()) < 1e-6


def test_the_temperature_does_not_change_the_size_of_the_gradients():
    # Hinton et al.: for small centred logits the gradient is (student - teacher) / (classes · batch), whatever T.
    student, teacher = 1e-2 * torch.randn(2, 5, 4, dtype=torch.float64)
    student, teacher = (logits - logits.mean(1, keepdim=True) for logits in (student, teacher))
    for temperature in (1.0, 4.0, 16.0):
        logits = student.float().requires_grad_()
        distillation(logits, teacher.float(), temperature).backward()
        # Float32 logarithms leave 1e-7 T of noise.
        assert torch.allclose(logits.grad, ((student - teacher) / 20).float(), rtol=0.03, atol=2e-5), temperature


def test_feature_maps_by_hand():
    maps = [torch.tensor([[1.0, 2.0]]), torch.zeros(1, 1, 2, 2)]
    original = [torch.tensor([[1.0, 4.0]]), torch.full((1, 1, 2, 2), 3.0)]
    assert float(feature_map_loss(maps, original)) == (0 + 4) / 2 + 9
    with pytest.raises(ValueError, match="zip"):
        feature_map_loss(maps, original[:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_feature_maps_go_back_as_mean_squares_do(dtype):
    own = [
        torch.randn(4, 5, dtype=dtype),
        torch.randn(3, 2, 6, 6, dtype=dtype).contiguous(memory_format=torch.channels_last),
    ]
    maps, other = [each.requires_grad_() for each in own], [torch.randn_like(each) for each in own]
    expected = sum(torch.nn.functional.mse_loss(a.float(), b.float()) for a, b in zip(maps, other, strict=True))
    slopes = torch.autograd.grad(3 * expected, maps)
    loss = feature_map_loss(maps, iter(other))
    tolerance = {"rtol": 0.01, "atol": 0.01 * float(slopes[1].abs().max())} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(loss, expected, **tolerance)
    for found, slope in zip(torch.autograd.grad(3 * loss, maps), slopes, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found, slope, **tolerance)


def test_slopes_of_large_half_precision_maps_do_not_vanish():
    own, other = torch.randn(2, 1 << 21).half()
    loss = 65536 * feature_map_loss([own.requires_grad_()], [other])
    (slope,) = torch.autograd.grad(loss, [own])
    torch.testing.assert_close(
        slope.float(), 65536 * 2 / (1 << 21) * (own - other).float().detach(), rtol=2e-3, atol=1e-6
    )


def test_label_smoothing_by_hand():
    # Two classes at 1 : e. With smoothing 0.2 the right one has weight 0.9, the other 0.1.
    logits, targets = torch.tensor([[0.0, 1.0]]), torch.tensor([1])
    right, wrong = log(1 + exp(-1)), log(1 + exp(1))
    assert float(cross_entropy(logits, targets)) == pytest.approx(right)
    assert float(cross_entropy(logits, targets, 0.2)) == pytest.approx(0.9 * right + 0.1 * wrong)
    loss = CrossEntropy(0.2)(nn.Identity(), logits, targets)
    assert float(loss.total) == pytest.approx(0.9 * right + 0.1 * wrong)


def test_accuracy_and_outputs_that_have_logits():
    logits, targets = torch.tensor([[0.0, 1], [1, 0], [0, 1], [0, 1]]), torch.tensor([1, 0, 0, 1])
    assert float(accuracy(logits, targets)) == 0.75

    class Model(nn.Module):
        def forward(self, pixels):
            return SimpleNamespace(logits=pixels)

    loss = CrossEntropy()(Model(), {"pixels": logits}, targets)
    assert float(loss.accuracy) == 0.75
    assert float(loss.total) == pytest.approx(float(cross_entropy(logits, targets)))


def test_the_sum_is_of_all_terms_in_float32():
    loss = Loss({"a": torch.tensor(1.0, dtype=torch.bfloat16), "b": torch.tensor(2.0**-9)})
    assert loss.total.dtype == torch.float32
    assert float(loss.total) == 1 + 2.0**-9


@pytest.mark.parametrize("terms", [{}, {"loss": torch.zeros(())}, {"a": torch.zeros(()), "accuracy": torch.zeros(())}])
def test_terms_that_would_be_lost_in_the_figures_are_refused(terms):
    with pytest.raises(SpecError, match=f"got {', '.join(terms) or 'none'}$"):
        Loss(terms)


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def test_recording_takes_its_hooks_away_also_when_something_fails():
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    with recording(model, ["0", "1"]) as maps:
        output = model(torch.randn(4, 3))
        assert hooks(model) == 2
    assert hooks(model) == 0
    assert torch.equal(maps["1"], output)
    assert torch.equal(maps["0"].relu(), output)
    with pytest.raises(ZeroDivisionError), recording(model, ["0"]):
        assert hooks(model) == 1
        1 / 0  # noqa: B018
    assert hooks(model) == 0
    with pytest.raises(AttributeError), recording(model, ["0", "nonsense"]):
        pass
    assert hooks(model) == 0


def test_recorded_maps_can_be_learnt_from():
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    with recording(model, ["0"]) as maps:
        model(torch.randn(4, 3))
    feature_map_loss(maps.values(), [torch.zeros(4, 2)]).backward()
    assert float(model[0].weight.grad.abs().max()) > 0
