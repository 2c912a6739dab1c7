from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from haloc.errors import DataError, ModelError
from haloc.training.evaluate import evaluate

LOGITS = torch.tensor([[5.0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 4, 5], [9, 8, 7, 6, 5, 4]])


def test_scores_worked_out_by_hand():
    done = []
    accuracy = evaluate(nn.Identity(), [(LOGITS[:2], torch.tensor([0, 1])), (LOGITS[2:], torch.tensor([5]))],
                        on_batch=done.append)  # fmt: skip
    assert (accuracy.top1, accuracy.top5, accuracy.count) == (1 / 3, 2 / 3, 3)
    expected = nn.functional.cross_entropy(LOGITS, torch.tensor([0, 1, 5]))
    assert accuracy.loss == pytest.approx(float(expected))
    assert done == [2, 1]


def test_outputs_with_logits_and_named_inputs():
    class Model(nn.Module):
        def forward(self, pixels):
            return SimpleNamespace(logits=pixels)

    assert evaluate(Model(), [({"pixels": LOGITS}, torch.tensor([0, 5, 0]))]).top1 == 1.0


def test_fewer_than_five_classes():
    assert evaluate(nn.Identity(), [(torch.eye(3), torch.arange(3))]).top5 == 1.0


def test_modes_are_put_back():
    model = nn.Sequential(nn.BatchNorm1d(6)).train()
    before = model[0].running_mean.clone()
    evaluate(model, [(LOGITS, torch.zeros(3, dtype=torch.long))])
    assert model.training
    assert torch.equal(model[0].running_mean, before)


def test_bad_calls_are_refused():
    with pytest.raises(DataError, match="gave no batch"):
        evaluate(nn.Identity(), [])
    with pytest.raises(ModelError, match=r"logits \(batch, classes\), got shape \(3, 6, 1\)"):
        evaluate(nn.Identity(), [(LOGITS.unsqueeze(2), torch.zeros(3))])
    with pytest.raises(ModelError, match="a class 7, but the model tells only 6"):
        evaluate(nn.Identity(), [(LOGITS, torch.tensor([1, 2, 7]))])
    with pytest.raises(ModelError, match="does not run"):
        evaluate(nn.Linear(2, 2), [(LOGITS, torch.zeros(3))])
