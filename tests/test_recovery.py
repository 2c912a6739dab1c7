from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, TensorDataset

from haloc.errors import DataError, ModelError, SpecError
from haloc.factor.inspect import inspect
from haloc.factor.surgery import apply_plan
from haloc.forms import Tucker2
from haloc.methods.uniform import uniform_plan
from haloc.recovery import RecoverySettings, finetune, recalibrate
from haloc.training.baseline import train
from haloc.training.evaluate import evaluate
from haloc.training.settings import TrainSettings
from haloc.zoo.digits import DIGITS
from tests.training.tiny import batches, digits, held_out, newest, same, same_weights, timeless

SETTINGS = TrainSettings(epochs=2, lr=0.02, warmup_epochs=0.5, save_every_s=0)


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


def dense() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Dropout(0.1), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(64, 10),
    )  # fmt: skip


def lessons(images: int = 160, **options) -> object:
    return batches(32, images, **options)


@cache
def _trained() -> nn.Sequential:
    model = dense()
    train(model, lessons(1200), settings=TrainSettings(epochs=6, lr=0.1, warmup_epochs=1))
    return model.eval()


@pytest.fixture
def teacher():
    return copy.deepcopy(_trained())


@pytest.fixture
def student(teacher):
    return squeezed(teacher)


def squeezed(model: nn.Module) -> nn.Module:
    plan = uniform_plan(inspect(model, torch.randn(1, 1, 8, 8)), macs=0.3, skip=["0", "12"])
    assert len(plan.changes()) == 2
    return apply_plan(model, plan)


def frozen_in_time(model: nn.Module) -> tuple:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return state, [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]


def test_it_brings_the_accuracy_back_and_leaves_the_teacher_alone(teacher, student):
    teacher[4].train()
    teacher[12].bias.requires_grad_(False)
    before, modes, wanted = frozen_in_time(teacher)
    squeezed_top1, teachers_top1 = (evaluate(m, held_out(100, 350)).top1 for m in (student, teacher))
    recovery = RecoverySettings(norm_between=False)
    outcome = finetune(
        student, lessons(1200), teacher=teacher, val=held_out(100, 350), settings=SETTINGS, recovery=recovery
    )
    top1 = evaluate(student, held_out(100, 350)).top1
    # Measured: 0.96 for the teacher, 0.71 when squeezed, 0.96 afterwards.
    assert teachers_top1 > 0.9
    assert top1 > squeezed_top1 + 0.1
    assert top1 > teachers_top1 - 0.05
    assert outcome.history[-1]["val_top1"] == top1
    after = frozen_in_time(teacher)
    assert same(before, after[0])
    assert (modes, wanted) == after[1:]
    assert not any(module._forward_hooks for model in (teacher, student) for module in model.modules())


@pytest.mark.parametrize(
    ("weights", "terms"),
    [
        ({}, {"cross_entropy", "distillation"}),
        ({"features": 0.1}, {"cross_entropy", "distillation", "features"}),
        ({"features": 0.1, "cross_entropy": 0, "distillation": 0}, {"features"}),
        ({"cross_entropy": 0}, {"distillation"}),
        ({"distillation": 0}, {"cross_entropy"}),
    ],
)
def test_what_weighs_something_is_in_the_loss_and_nothing_else(teacher, student, weights, terms):
    outcome = finetune(student, lessons(), teacher=teacher, settings=SETTINGS, recovery=RecoverySettings(**weights))
    (row, _), known = outcome.history, {"cross_entropy", "distillation", "features"}
    assert row.keys() & known == terms
    assert row["loss"] == pytest.approx(sum(row[term] for term in terms), rel=1e-5)


def test_feature_maps_come_closer(teacher, student):
    recovery = RecoverySettings(cross_entropy=0, distillation=0, features=1.0)
    history = finetune(student, lessons(480), teacher=teacher, settings=SETTINGS, recovery=recovery).history
    assert history[-1]["features"] < 0.8 * history[0]["features"]


def test_weights_are_weights_of_their_terms(teacher):
    once, twice = (
        finetune(squeezed(teacher), lessons(32), teacher=teacher, settings=replace(SETTINGS, epochs=1),
                 recovery=RecoverySettings(cross_entropy=w, distillation=w, features=w)).history[0]
        for w in (1.0, 2.0)
    )  # fmt: skip
    for term in ("cross_entropy", "distillation", "features"):  # of the one step that both take from the same weights
        assert twice[term] == pytest.approx(2 * once[term], rel=1e-5)


def test_without_a_teacher_the_labels_have_the_weight_of_both(teacher):
    alone, plain = squeezed(teacher), squeezed(teacher)
    history = finetune(alone, lessons(), settings=SETTINGS, recovery=RecoverySettings(0.25, 0.75)).history
    finetune(plain, lessons(), teacher=teacher, settings=SETTINGS, recovery=RecoverySettings(1.0, 0.0))
    assert same_weights(alone, plain)
    assert "distillation" not in history[0]


def norms(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]


class StopError(Exception):
    pass


def stop_at(step: int):
    def look(progress):
        if round(5 * progress.epoch) >= step:
            raise StopError

    return look


def test_norms_between_the_factors_change_nothing_at_first(student, monkeypatch):
    monkeypatch.setattr("haloc.training.loop.STRETCH", 1)
    data = lessons(32, shuffle=False, augment=False)
    plain, seen, inserted = copy.deepcopy(student), [], []
    recalibrate(plain, data)

    def objective_seen(self, model, inputs, targets):
        inserted.append(len(norms(model)))
        modes = [(module, module.training) for module in model.modules()]
        for training in (False, True):
            model.train(training)
            model[9].eval()  # dropout
            plain.train(training)
            plain[9].eval()
            seen.append((model(inputs).detach() - plain(inputs).detach()).abs().max().item())
        for module, training in modes:
            module.training = training
        raise StopError

    monkeypatch.setattr("haloc.recovery.Recovery.__call__", objective_seen)
    with pytest.raises(StopError):
        finetune(student, data, settings=SETTINGS, recovery=RecoverySettings(norm_between=True))
    assert inserted == [6]
    assert len(norms(student)) == len(norms(plain)) == 2  # folded, though it was stopped
    # On the very batch that they were settled on. Running variances are unbiased, a batch's own are not.
    assert seen[0] < 1e-3
    assert seen[1] < 2e-2


def test_norms_between_the_factors_are_gone_in_the_end_and_nothing_changed_by_it(tmp_path, teacher, student):
    own, layers = norms(student), [name for name, _ in student.named_modules()]
    recovery = RecoverySettings(norm_between=True)
    seen = []

    def figures(model):
        seen.append(len(norms(model)))
        accuracy = evaluate(model, held_out())
        return {"top1": accuracy.top1, "loss": accuracy.loss}

    outcome = finetune(student, lessons(), teacher=teacher, val=figures, settings=SETTINGS, recovery=recovery,
                       folder=tmp_path)  # fmt: skip
    assert seen[-1] == len(own) + 4
    assert norms(student) == own
    assert [name for name, _ in student.named_modules()] == layers
    accuracy = evaluate(student, held_out())
    assert accuracy.top1 == outcome.history[-1]["val_top1"]
    assert accuracy.loss == pytest.approx(outcome.history[-1]["val_loss"], rel=1e-5)
    assert same(load_file(tmp_path / "weights.safetensors"), student.state_dict())


def test_padded_ranks_are_cut_again_whatever_happens(teacher, student):
    shapes = {name: value.shape for name, value in student.state_dict().items()}
    plain, recovery = squeezed(teacher), RecoverySettings(norm_between=True)
    seen = []

    def figures(model):
        seen.append(model[3][0].out_channels)
        return {"score": 0.0}

    finetune(plain, lessons(), teacher=teacher, settings=SETTINGS, recovery=recovery)
    padding = replace(recovery, pad_ranks=8)
    finetune(student, lessons(), teacher=teacher, val=figures, settings=SETTINGS, recovery=padding)
    assert seen[-1] % 8 == 0
    assert set(shapes.items()) <= {(name, value.shape) for name, value in student.state_dict().items()}
    alike = [(value, plain.state_dict()[name]) for name, value in student.state_dict().items()]
    assert all(torch.allclose(own, other, rtol=1e-2, atol=1e-3) for own, other in alike)
    with pytest.raises(StopError):
        finetune(student, lessons(), settings=SETTINGS, recovery=padding, on_progress=stop_at(2))
    assert set(shapes.items()) <= {(name, value.shape) for name, value in student.state_dict().items()}
    with pytest.raises(SpecError, match="pad_ranks must be at least 1, got 0"):
        RecoverySettings(pad_ranks=0)


@pytest.mark.parametrize("norm_between", [False, True])
def test_a_recovery_stopped_at_any_step_goes_on_bit_for_bit(tmp_path, teacher, monkeypatch, norm_between):
    monkeypatch.setattr("haloc.training.loop.STRETCH", 1)
    settings = replace(SETTINGS, ema=0.8)
    told = {"teacher": teacher, "val": held_out(), "settings": settings}
    told["recovery"] = RecoverySettings(norm_between=norm_between, features=0.1, recalibration=96)
    whole = squeezed(teacher)
    reference = finetune(whole, lessons(), folder=tmp_path / "whole", **told)
    for step in (2, 4, 5, 6, 10):
        folder, model = tmp_path / str(step), squeezed(teacher)
        with pytest.raises(StopError):
            finetune(squeezed(teacher), lessons(), folder=folder, on_progress=stop_at(step), **told)
        assert newest(folder).step == step - 1
        with torch.no_grad():
            model[3][0].weight.fill_(0.0)  # all of it is in the checkpoint
        outcome = finetune(model, lessons(), folder=folder, **told)
        assert same_weights(model, whole)
        assert same(newest(folder).tensors, newest(tmp_path / "whole").tensors)
        assert timeless(outcome.history) == timeless(reference.history)


def test_an_interrupted_run_goes_on_with_the_very_same_network(tmp_path, teacher, student):
    whole = copy.deepcopy(student)
    options = {"teacher": teacher, "settings": SETTINGS}
    finetune(whole, lessons(), **options)
    with pytest.raises(StopError):
        finetune(student, lessons(), **options, folder=tmp_path, on_progress=stop_at(10))
    assert student[3][0].bias is not None  # folded, as it had to be handed back
    finetune(student, lessons(), **options, folder=tmp_path)
    assert same_weights(student, whole)


def test_a_refused_run_leaves_a_network_that_can_be_trained(tmp_path, teacher, student):
    finetune(copy.deepcopy(student), lessons(), settings=SETTINGS, folder=tmp_path)
    with pytest.raises(SpecError, match="settings.lr = 0.02, and now it is 0.5"):
        finetune(student, lessons(), settings=replace(SETTINGS, lr=0.5), folder=tmp_path)
    finetune(student, lessons(), settings=SETTINGS, folder=tmp_path)


class Named(nn.Sequential):
    """A user's block that tells its extents, as a factorised layer does."""

    in_channels = 16


def test_a_users_own_sequential_is_not_taken_for_a_chain_of_factors(teacher):
    block = Named(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16))
    model = nn.Sequential(*teacher[:3], block, *teacher[3:])
    small = apply_plan(model, {"4": Tucker2(4, 4)})
    assert finetune(small, lessons(), settings=SETTINGS).finished
    assert small[3][0].bias is not None
    assert len(small[3]) == 2


def test_preparation_takes_no_more_at_a_time_than_training(teacher, student, monkeypatch):
    seen = []
    teacher.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    student.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    finetune(student, lessons(), teacher=teacher, settings=replace(SETTINGS, accumulate=4))
    assert max(seen) == 8


def test_a_users_loader_will_do(teacher, student):
    images, labels = next(iter(digits()[0].subset(range(80)).batches(80, normalisation=DIGITS)))
    loader = DataLoader(TensorDataset(images, labels), 32, shuffle=True)
    recovery = RecoverySettings(norm_between=True, features=0.1)
    outcome = finetune(student, loader, teacher=teacher, settings=SETTINGS, recovery=recovery)
    assert [row["step"] for row in outcome.history] == [2, 4]


def test_without_recalibration_statistics_stay_until_training_moves_them(teacher, student, monkeypatch):
    before = {name: value.clone() for name, value in student.state_dict().items()}

    def stop(self, model, inputs, targets):
        raise StopError

    def started(images: int) -> None:
        recovery = RecoverySettings(recalibration=images, norm_between=False)
        with pytest.raises(StopError):
            finetune(student, lessons(), teacher=teacher, settings=SETTINGS, recovery=recovery)

    monkeypatch.setattr("haloc.recovery.Recovery.__call__", stop)
    started(0)
    assert same(student.state_dict(), before)
    started(64)
    changed = {name for name, value in student.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {f"{n}.{s}" for n in "14" for s in ("running_mean", "running_var", "num_batches_tracked")}
    assert student[1].num_batches_tracked.item() == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cross_entropy": -1, "distillation": 1}, r"must be 0 or more and not all 0, got \(-1, 1, 0.0\)"),
        ({"cross_entropy": 0, "distillation": 0}, r"must be 0 or more and not all 0, got \(0, 0, 0.0\)"),
        ({"temperature": 0}, "temperature must be above 0, got 0"),
        ({"label_smoothing": 1.0}, "label_smoothing must be at least 0 and below 1, got 1.0"),
        ({"recalibration": -1}, "recalibration must be 0 images or more, got -1"),
        ({"features": float("nan")}, "must be 0 or more and not all 0"),
        ({"temperature": float("nan")}, "temperature must be above 0, got nan"),
    ],
)
def test_nonsense_is_refused(options, message):
    with pytest.raises(SpecError, match=message):
        RecoverySettings(**options)


def test_what_there_is_nothing_to_learn_from_is_refused(teacher, student):
    before, modes, wanted = frozen_in_time(student)
    features = RecoverySettings(features=1.0, norm_between=True)
    for other in (None, nn.Sequential(nn.Flatten(), nn.Linear(64, 10))):
        with pytest.raises(ModelError, match="needs a teacher whose layers have the names of the factorised ones"):
            finetune(student, lessons(), teacher=other, settings=SETTINGS, recovery=features)
    with pytest.raises(ModelError, match="needs a teacher whose layers"):
        finetune(teacher, lessons(), teacher=teacher, settings=SETTINGS, recovery=features)
    after = frozen_in_time(student)
    assert same(before, after[0])
    assert (modes, wanted) == after[1:]


def test_networks_that_are_looked_into_are_not_compiled(teacher, caplog):
    told = {"teacher": teacher, "recovery": RecoverySettings(features=1.0)}
    eager, compiled = squeezed(teacher), squeezed(teacher)
    for model, speed in ((eager, "eager"), (compiled, "compile")):
        finetune(model, lessons(), settings=replace(SETTINGS, speed=speed), **told)
    assert [record.message for record in caplog.records if record.name.startswith("haloc")] == [
        "the network is not compiled: the feature-map loss looks at its layers one by one"
    ]
    assert same_weights(eager, compiled)


def test_too_few_images_are_refused(teacher, student):
    with pytest.raises(DataError, match="the training data do not fill one batch of 32"):
        finetune(student, lessons(20), teacher=teacher, settings=SETTINGS)
