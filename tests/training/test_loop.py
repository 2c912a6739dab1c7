from __future__ import annotations

import math
import random
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from haloc.errors import SpecError, TrainError
from haloc.training.baseline import train, weights_update
from haloc.training.checkpoint import Store
from haloc.training.evaluate import evaluate
from haloc.training.journal import read_journal
from haloc.training.loop import Outcome, fit
from haloc.training.objective import CrossEntropy, Loss
from haloc.training.schedule import learning_rate
from haloc.training.settings import TrainSettings
from tests.training.tiny import (
    SETTINGS,
    batches,
    difference,
    held_out,
    network,
    newest,
    same,
    same_weights,
    timeless,
)

RICH = replace(SETTINGS, ema=0.9, accumulate=2, schedule="cosine", weight_decay=1e-3)


class StopError(Exception):
    pass


def stop_at(step: int, steps: int):
    """Fails when the run looks up after so many steps, before that state is saved."""

    def look(progress):
        if round(progress.epoch * steps) >= step:
            raise StopError

    return look


@pytest.fixture
def _every_step(monkeypatch):
    """The run looks up, and so saves, after every step."""
    monkeypatch.setattr("haloc.training.loop.STRETCH", 1)


@pytest.mark.usefixtures("_every_step")
@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        (RICH, range(1, 19)),
        (replace(SETTINGS, channels_last=True, precision="bf16", schedule="steps"), (6, 9, 18)),
        (replace(SETTINGS, optimiser="adamw", lr=0.01), (1, 6, 9, 18)),
    ],
    ids=["rich", "channels last", "adamw"],
)
def test_a_run_stopped_at_any_step_goes_on_bit_for_bit(tmp_path, settings, steps):
    whole = network()
    reference = train(whole, batches(), val=held_out(), settings=settings, folder=tmp_path / "whole")
    for step in steps:
        folder, model = tmp_path / str(step), network(seed=step)
        with pytest.raises(StopError):
            train(network(), batches(), val=held_out(), settings=settings, folder=folder, on_progress=stop_at(step, 6))
        if step > 1:
            assert newest(folder).step == step - 1
        else:
            model = network()  # nothing was saved, so it starts afresh
        outcome = train(model, batches(), val=held_out(), settings=settings, folder=folder)
        assert outcome.finished
        assert same_weights(model, whole), step
        assert same(newest(folder).tensors, newest(tmp_path / "whole").tensors), step
        assert timeless(outcome.history) == timeless(reference.history)
    names = newest(tmp_path / "whole").tensors
    assert any(name.startswith("update0/optimiser/") for name in names)
    assert any(name.startswith("ema/") for name in names) == bool(settings.ema)


@pytest.mark.usefixtures("_every_step")
def test_a_run_stopped_again_and_again_goes_on_bit_for_bit(tmp_path):
    whole = network()
    train(whole, batches(), settings=RICH, folder=tmp_path / "whole")
    for number, step in enumerate((2, 3, 7, 8, 12, 13, 18)):
        with pytest.raises(StopError):
            train(network(number), batches(), settings=RICH, folder=tmp_path / "often", on_progress=stop_at(step, 6))
    model = network(9)
    train(model, batches(), settings=RICH, folder=tmp_path / "often")
    assert same_weights(model, whole)
    assert same(newest(tmp_path / "often").tensors, newest(tmp_path / "whole").tensors)


def own_loader() -> DataLoader:
    (inputs, labels), *_ = batches(72, augment=False)
    return DataLoader(TensorDataset(inputs, labels), 16, shuffle=True)


@pytest.mark.usefixtures("_every_step")
def test_a_run_over_a_users_loader_goes_on_from_the_end_of_an_epoch(tmp_path):
    whole = network()
    reference = train(whole, own_loader(), val=own_loader(), settings=RICH, folder=tmp_path / "whole")
    assert [row["step"] for row in reference.history] == [4, 8, 12]
    for step, saved in [(5, 4), (8, 4), (9, 8), (12, 8)]:
        folder = tmp_path / str(step)
        with pytest.raises(StopError):
            train(network(), own_loader(), val=own_loader(), settings=RICH, folder=folder, on_progress=stop_at(step, 4))
        assert newest(folder).step == saved
        model = network(step)
        train(model, own_loader(), val=own_loader(), settings=RICH, folder=folder)
        assert same_weights(model, whole)
        assert same(newest(folder).tensors, newest(tmp_path / "whole").tensors)


def test_how_often_it_is_evaluated_changes_nothing():
    often, rarely = network(), network()
    # A loader draws random numbers whenever it is iterated.
    first = train(often, own_loader(), val=own_loader(), settings=SETTINGS)
    second = train(rarely, own_loader(), val=own_loader(), settings=replace(SETTINGS, evaluate_every=2))
    assert same_weights(often, rarely)
    assert [["val_top1" in row for row in outcome.history] for outcome in (first, second)] == [
        [True, True, True],
        [False, True, True],
    ]


def test_the_loop_is_the_bare_loop_bit_for_bit():
    settings = TrainSettings(epochs=2, lr=0.1, warmup_epochs=0.5, weight_decay=0.01, seed=7)
    model, bare = network(), network()
    outcome = train(model, batches(), settings=settings)
    optimiser = torch.optim.SGD(
        [
            {"params": [p for p in bare.parameters() if p.dim() > 1], "weight_decay": 0.01},
            {"params": [p for p in bare.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=0.1, momentum=0.9, nesterov=True, fused=True,
    )  # fmt: skip
    torch.manual_seed(7)
    data, losses = batches(), []
    for epoch in range(2):
        for step, (inputs, labels) in enumerate(data):
            for group in optimiser.param_groups:
                group["lr"] = learning_rate(settings)(epoch + step / 6)
            optimiser.zero_grad()
            loss = F.cross_entropy(bare(inputs), labels)
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
    assert same_weights(model, bare)
    means = [sum(losses[:6]) / 6, sum(losses[6:]) / 6]
    assert [row["loss"] for row in outcome.history] == pytest.approx(means, rel=1e-6)


def test_parts_of_a_batch_together_are_the_batch():
    whole, parts, other = (network(norm=False, dropout=0) for _ in range(3))
    history = train(whole, batches(), settings=SETTINGS).history
    again = train(parts, batches(), settings=replace(SETTINGS, accumulate=4)).history
    assert difference(whole, parts) < 1e-5
    assert [row["loss"] for row in again] == pytest.approx([row["loss"] for row in history], rel=1e-4)
    assert [row["accuracy"] for row in again] == pytest.approx([row["accuracy"] for row in history])
    assert difference(whole, other) > 1e-2  # it did learn something


def test_what_comes_out_is_the_average_and_it_is_what_was_evaluated():
    model, plain = network(), network()
    history = train(model, batches(), val=held_out(), settings=replace(SETTINGS, ema=0.9)).history
    train(plain, batches(), settings=SETTINGS)
    assert evaluate(model, held_out()).loss == pytest.approx(history[-1]["val_loss"], rel=1e-6)
    assert difference(model, plain) > 1e-3


def test_the_average_begins_with_what_the_start_made_of_the_network():
    model = network(dropout=0)
    settings = replace(SETTINGS, epochs=1, ema=0.9, lr=1e-12, weight_decay=0)
    update = weights_update(model, batches(), CrossEntropy(), settings)
    fit(model, [update], settings, on_start=lambda: nn.init.constant_(model[8].weight, 0.5))
    assert torch.allclose(model[8].weight, torch.full((10, 32), 0.5))


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},
        {"precision": "tf32"},
        {"channels_last": True},
        {"channels_last": True, "precision": "bf16", "accumulate": 2, "ema": 0.8},
        {"schedule": "steps", "step_epochs": 4},
        {"schedule": "constant"},
        {"momentum": 0.0, "lr": 0.5},
        {"optimiser": "adamw", "lr": 0.02, "weight_decay": 0.05},
    ],
)
def test_it_learns_in_every_way(options):
    model = network()
    settings = replace(SETTINGS, **{"epochs": 6, "lr": 0.1, **options})
    outcome = train(model, batches(16, 320), val=held_out(), settings=settings)
    losses = [row["loss"] for row in outcome.history]
    assert losses[-1] < 0.75 * losses[0]
    assert outcome.history[-1]["val_top1"] > 0.4
    assert {p.dtype for p in model.parameters()} == {torch.float32}


class NanFrom:
    """Cross-entropy that is no number from the given call on."""

    def __init__(self, call: int) -> None:
        self.calls, self.call = 0, call

    def __call__(self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Loss:
        self.calls += 1
        loss = CrossEntropy()(model, inputs, targets)
        factor = math.nan if self.calls >= self.call else 1.0
        return Loss({"cross_entropy": loss.terms["cross_entropy"] * factor}, loss.accuracy)


class SteepFrom(NanFrom):
    """Cross-entropy whose value stays what it is, but not its gradient."""

    def __call__(self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Loss:
        self.calls += 1
        loss = CrossEntropy()(model, inputs, targets)
        steep = [(model[0].weight.sum() * 0).sqrt()] if self.calls >= self.call else []
        return Loss({**loss.terms, **dict(zip(["steep"], steep, strict=False))}, loss.accuracy)


@pytest.mark.usefixtures("_every_step")
@pytest.mark.parametrize(
    ("objective", "what"),
    [
        (NanFrom, r"loss is nan in epoch 1.33 \(every layer puts out finite values, so it is .* the loss\)"),
        (SteepFrom, "0.weight has values that are not finite in epoch 1.33"),
    ],
)
def test_a_run_that_diverges_stops_and_keeps_what_was_good(tmp_path, objective, what):
    with pytest.raises(TrainError, match=f"{what}: training has diverged; the last good state is in .*{tmp_path.name}"):
        train(network(), batches(), settings=SETTINGS, folder=tmp_path, objective=objective(8))
    kept = newest(tmp_path)
    # A state whose very next loss is no number is no good one; that of a step with a steep gradient is.
    assert kept.step == (6 if objective is NanFrom else 7)
    assert all(tensor.isfinite().all() for name, tensor in kept.tensors.items() if name.startswith("model/"))
    assert [row["step"] for row in read_journal(tmp_path / "log.jsonl")] == [6]


@pytest.mark.usefixtures("_every_step")
def test_a_run_that_diverged_goes_on_with_a_smaller_learning_rate(tmp_path):
    with pytest.raises(TrainError, match="the last good state is in .* to go on from there"):
        nan_from(8, tmp_path, 0.05)
    objective = NanFrom(10**6)
    settings = replace(SETTINGS, lr=0.01)
    assert train(network(), batches(), settings=settings, folder=tmp_path, objective=objective).finished
    assert objective.calls == 12
    assert newest(tmp_path).facts["config"]["settings"]["lr"] == 0.01
    with pytest.raises(SpecError, match="settings.lr = 0.01, and now it is 0.05"):
        nan_from(10**6, tmp_path, 0.05)


def nan_from(call: int, folder: Path, lr: float) -> Outcome:
    return train(network(), batches(), settings=replace(SETTINGS, lr=lr), folder=folder, objective=NanFrom(call))


def test_a_state_of_which_nothing_comes_twice_is_given_up(tmp_path):
    for call in (9, 3):
        with pytest.raises(TrainError, match="training has diverged"):
            nan_from(call, tmp_path, 0.05)
    assert Store(tmp_path / "checkpoints").last_step is None
    assert nan_from(10**6, tmp_path, 0.05).finished


def test_statistics_that_are_not_finite_are_not_saved(tmp_path):
    model = network()
    model[1].running_var.fill_(math.inf)
    with pytest.raises(TrainError, match="1.running_var has values that are not finite"):
        train(model, batches(), settings=SETTINGS, folder=tmp_path)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_layer_is_named_that_the_loss_comes_from(precision):
    model = network(norm=False)
    model[3].weight.data.fill_(1e37)
    settings = replace(SETTINGS, precision=precision)
    with pytest.raises(TrainError, match=r"\(layer '[3-8]' is the first whose output is not finite\): training has"):
        train(model, batches(), settings=settings)
    model[3].weight.data[0] = math.nan
    with pytest.raises(TrainError, match="layer '3' is the first whose weight is not finite"):
        train(model, batches(), settings=settings)


class Large(NanFrom):
    """Cross-entropy whose gradient does not fit half precision as long as the scaler's scale is what it begins with."""

    def __call__(self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Loss:
        loss = CrossEntropy()(model, inputs, targets)
        return Loss({"cross_entropy": 1000 * loss.terms["cross_entropy"]}, loss.accuracy)


def test_steps_that_the_scaler_skips_are_no_divergence():
    model = network(norm=False)
    before = model[0].weight.detach().clone()
    assert train(model, batches(), settings=replace(SETTINGS, precision="fp16", lr=1e-5), objective=Large(0)).finished
    assert not torch.equal(model[0].weight, before)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_weights_that_the_very_last_step_spoils_are_not_handed_over():
    with pytest.raises(TrainError, match="not finite in epoch 3.00: training has diverged. Lower the learning rate"):
        train(network(), batches(), settings=SETTINGS, objective=SteepFrom(18))


@pytest.mark.usefixtures("_every_step")
def test_when_the_time_is_up_it_stops_where_it_can_go_on(tmp_path, monkeypatch):
    whole, model = network(), network()
    train(whole, batches(), settings=RICH, folder=tmp_path / "whole")
    seconds = iter(range(10**6))
    with monkeypatch.context() as patched:
        patched.setattr("haloc.training.clock.time", SimpleNamespace(monotonic=lambda: next(seconds)))
        first = train(model, batches(), settings=replace(RICH, minutes=1), folder=tmp_path / "short")
    assert not first.finished
    assert first.seconds >= 60
    stopped = newest(tmp_path / "short")
    assert 1 < stopped.step < 18
    assert len(first.history) == stopped.step // 6
    assert same({f"ema/{name}": value for name, value in model.state_dict().items()},
                {name: value for name, value in stopped.tensors.items() if name.startswith("ema/")})  # fmt: skip
    second = train(model, batches(), settings=RICH, folder=tmp_path / "short")
    assert second.finished
    assert second.seconds > 60
    assert same_weights(model, whole)


def test_without_a_folder_time_runs_out_too(monkeypatch):
    seconds = iter(range(10**6))
    monkeypatch.setattr("haloc.training.clock.time", SimpleNamespace(monotonic=lambda: next(seconds)))
    assert not train(network(), batches(), settings=replace(SETTINGS, epochs=90, minutes=1)).finished


def global_draws() -> list[float]:
    return [float(torch.rand(())), float(np.random.rand()), random.random()]


@pytest.mark.parametrize("fails", [False, True])
def test_modes_and_random_numbers_are_put_back(tmp_path, fails):
    model = network()
    model.eval()
    model[5].train()
    modes = [module.training for module in model.modules()]
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    expected = global_draws()
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    flags = (torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32)
    try:
        watch = stop_at(6, 6) if fails else None
        train(model, own_loader(), settings=replace(RICH, precision="bf16"), folder=tmp_path, on_progress=watch)
    except StopError:
        assert fails
    assert global_draws() == expected
    assert [module.training for module in model.modules()] == modes
    assert (torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32) == flags
    assert not any(module._forward_hooks for module in model.modules())


def test_the_seed_decides_the_dropout_and_nothing_else_does():
    models = [network() for _ in range(3)]
    for number, (model, seed) in enumerate(zip(models, (1, 1, 2), strict=True)):
        torch.manual_seed(number)
        train(model, batches(), settings=replace(SETTINGS, seed=seed))
    assert same_weights(models[0], models[1])
    assert not same_weights(models[0], models[2])


def test_a_finished_run_is_not_run_again(tmp_path):
    model, again = network(), network(5)
    first = train(model, batches(), val=held_out(), settings=RICH, folder=tmp_path)
    log = (tmp_path / "log.jsonl").read_text()
    told = []
    second = train(again, batches(), val=held_out(), settings=RICH, folder=tmp_path, on_progress=told.append)
    assert (told, second.finished, second.history) == ([], True, first.history)
    assert same_weights(model, again)
    assert (tmp_path / "log.jsonl").read_text() == log
    train(again, batches(), settings=RICH, folder=tmp_path, resume=False, on_progress=told.append)
    assert len(told) == 3


@pytest.mark.usefixtures("_every_step")
def test_logs_have_a_row_per_epoch_whatever_happened(tmp_path):
    for step in (1, 7, 12, 14):
        with pytest.raises(StopError):
            train(
                network(), batches(), val=held_out(), settings=SETTINGS, folder=tmp_path, on_progress=stop_at(step, 6)
            )
    outcome = train(network(), batches(), val=held_out(), settings=SETTINGS, folder=tmp_path)
    rows = read_journal(tmp_path / "log.jsonl")
    assert [(row["epoch"], row["step"]) for row in rows] == [(1, 6), (2, 12), (3, 18)]
    assert timeless(rows) == timeless(outcome.history)
    assert {"lr", "loss", "cross_entropy", "accuracy", "val_top1", "val_top5", "val_loss", "seconds"} < rows[0].keys()
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    shown = accumulator.EventAccumulator(str(tmp_path), size_guidance={"scalars": 0}).Reload()
    for tag in ("loss", "val_top1", "lr"):
        assert [event.step for event in shown.Scalars(tag)] == [6, 12, 18]
        assert [event.value for event in shown.Scalars(tag)] == pytest.approx([row[tag] for row in rows])


def test_progress_tells_where_it_stands(monkeypatch):
    monkeypatch.setattr("haloc.training.loop.STRETCH", 4)
    told = []
    train(network(), batches(), val=held_out(), settings=SETTINGS, on_progress=told.append)
    assert [(round(6 * p.epoch), p.ended) for p in told] == [(s + e, e == 6) for s in (0, 6, 12) for e in (4, 6)]
    assert all(p.epochs == 3 and p.images_per_s > 0 and p.seconds_left >= 0 for p in told)
    assert all(("val_top1" in p.figures) == p.ended for p in told)
    assert told[-1].seconds_left == 0


def test_a_users_function_can_validate():
    seen = []

    def figures(model):
        seen.append(model.training)
        return {"tensor": torch.tensor(0.5), "numpy": np.float32(2)}

    history = train(network(), batches(), val=figures, settings=SETTINGS).history
    assert [(row["val_tensor"], row["val_numpy"]) for row in history] == [(0.5, 2.0)] * 3
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": replace(SETTINGS, lr=0.06)}, "settings.lr = 0.05, and now it is 0.06"),
        ({"data": batches(24)}, "data.weights.batch_size = 16, and now it is 24"),
        ({"objective": CrossEntropy(0.1)}, "objective.label_smoothing = 0.0, and now it is 0.1"),
        ({"config": {"plan": "b"}}, "plan = a, and now it is b"),
    ],
)
def test_another_run_is_not_gone_on_with(tmp_path, change, message):
    told = {"data": batches(), "settings": SETTINGS, "folder": tmp_path, "config": {"plan": "a"}}
    train(network(), **told)
    with pytest.raises(SpecError, match=message):
        train(network(), **{**told, **change})
    train(network(), **{**told, "settings": replace(SETTINGS, minutes=60, evaluate_every=3, save_every_s=1)})


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (nn.Sequential(*network()[:-1], nn.Linear(32, 11)), r"8.bias is \(10,\), and now it is \(11,\)"),
        (network(norm=False), r"1.bias is \(8,\), and now it is not there"),
        (nn.Sequential(*network(), nn.Linear(10, 10)), r"9.bias is not there, and now it is \(10,\)"),
    ],
)
def test_another_network_is_not_gone_on_with(tmp_path, other, message):
    train(network(), batches(), settings=SETTINGS, folder=tmp_path)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(SpecError, match=f"holds a run of another network: its {message}"):
        train(other, batches(), settings=SETTINGS, folder=tmp_path)
    assert same(other.state_dict(), before)


def test_an_objective_of_any_kind_can_be_written_down(tmp_path):
    def plain(model, inputs, targets):
        return CrossEntropy()(model, inputs, targets)

    class Holding(CrossEntropy):
        """A dataclass in which something is that JSON has no words for."""

        def __post_init__(self):
            object.__setattr__(self, "label_smoothing", torch.tensor(0.0))

        def __call__(self, model, inputs, targets):
            return plain(model, inputs, targets)

    for number, objective in enumerate((plain, Holding())):
        train(network(), batches(), settings=SETTINGS, objective=objective, folder=tmp_path / str(number))
    names = [newest(tmp_path / str(number)).facts["config"]["objective"].split(".")[-1] for number in range(2)]
    assert names == ["plain", "Holding"]


def warnings(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.name.startswith("haloc")]


def test_a_graph_without_a_gpu_is_done_eagerly_and_said(caplog):
    eager, graph = network(), network()
    train(eager, batches(), settings=replace(SETTINGS, speed="auto"))
    assert warnings(caplog) == []
    train(graph, batches(), settings=replace(SETTINGS, speed="graph"))
    assert same_weights(eager, graph)
    reason = "there are graphs on CUDA alone, and the model is on cpu"
    assert warnings(caplog) == [f"the step of weights is not captured: {reason}"]


def test_a_network_that_cannot_be_compiled_is_trained_eagerly_and_it_is_said(caplog, monkeypatch):
    eager, broken = network(), network()
    settings = replace(RICH, speed="eager")
    train(eager, batches(), settings=settings)

    def compiled(model):
        def call(inputs):
            model(inputs)  # it may fail late, when BatchNorm and dropout have left their traces
            raise RuntimeError("no working C++ compiler\nand a long story")

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    train(broken, batches(), settings=replace(settings, speed="compile"))
    assert same_weights(eager, broken)
    (message,) = warnings(caplog)
    assert message.startswith("the network of weights is not compiled: ")
    assert message.endswith("no working C++ compiler")


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_compiled_network_learns_the_same(caplog):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10))

    eager, compiled = make(), make()
    first = train(eager, batches(), settings=SETTINGS)
    second = train(compiled, batches(), settings=replace(SETTINGS, speed="compile"))
    assert warnings(caplog) == []
    assert list(compiled.state_dict()) == list(eager.state_dict())
    assert difference(eager, compiled) < 1e-4
    assert compiled[2].num_batches_tracked.item() == 18  # the trial has left no trace
    assert [row["loss"] for row in second.history] == pytest.approx([row["loss"] for row in first.history], rel=1e-4)


def test_no_gradients_are_left_behind():
    model = network()
    train(model, batches(), settings=replace(SETTINGS, epochs=1))
    assert all(parameter.grad is None for parameter in model.parameters())
