"""What only a GPU can show; skipped where there is none."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

from haloc.recovery import RecoverySettings, finetune
from haloc.training.baseline import train
from haloc.training.settings import TrainSettings
from haloc.zoo import IMAGENET, ImageSet

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def network() -> nn.Module:
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(8, 4)).cuda()


def images(count: int = 64) -> ImageSet:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (count, 3, 8, 8), generator=generator, dtype=torch.uint8)
    return ImageSet(pixels, torch.arange(count) % 4, tuple("abcd")).on("cuda")


def feed(count: int = 64):
    return images(count).batches(16, normalisation=IMAGENET, augment=True, shuffle=True)


def trained(speed: str, **options) -> tuple[nn.Module, list[dict]]:
    model = network()
    settings = TrainSettings(epochs=3, lr=0.05, warmup_epochs=1, ema=0.5, speed=speed, **options)
    return model, train(model, feed(), settings=settings).history


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"channels_last": True}, {"optimiser": "adamw"}])
def test_a_captured_step_does_what_an_eager_one_does(options, caplog):
    with caplog.at_level(logging.WARNING):
        (eager, rows), (captured, others) = trained("eager", **options), trained("graph", **options)
    assert not caplog.records
    for one, other in zip(rows, others, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert one["accuracy"] == pytest.approx(other["accuracy"], abs=0.02)
    for one, other in zip(eager.state_dict().values(), captured.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_mixed_precision_and_fp16_train(caplog):
    assert trained("graph", precision="bf16")[1][-1]["loss"] < 2
    with caplog.at_level(logging.WARNING):
        assert trained("graph", precision="fp16")[1][-1]["loss"] < 2
    assert "fp16 looks at the gradients" in caplog.text


class Curious(nn.Module):
    """Reads a value back in every call, which no graph can hold."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 if float(x.mean()) < 1e9 else 2)


def test_what_cannot_be_captured_is_trained_eagerly_with_the_reason_logged(caplog):
    model = nn.Sequential(network(), Curious())
    settings = TrainSettings(epochs=2, lr=0.05, warmup_epochs=0, speed="graph")
    with caplog.at_level(logging.WARNING):
        outcome = train(model, feed(), settings=settings)
    assert "not captured as a CUDA graph" in caplog.text
    plain = nn.Sequential(network(), Curious())
    expected = train(plain, feed(), settings=TrainSettings(epochs=2, lr=0.05, warmup_epochs=0, speed="eager"))
    assert outcome.history[-1]["loss"] == pytest.approx(expected.history[-1]["loss"], rel=1e-4)


def test_a_stopped_run_goes_on(tmp_path):
    whole, _ = trained("graph")
    settings = TrainSettings(epochs=3, lr=0.05, warmup_epochs=1, ema=0.5, speed="graph", save_every_s=0)

    def stop(progress):
        if progress.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(network(), feed(), settings=settings, folder=tmp_path, on_progress=stop)
    model = network()
    train(model, feed(), settings=settings, folder=tmp_path)
    for one, other in zip(whole.state_dict().values(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_batches_are_the_same_on_both_devices():
    here, there = images(), images()
    here = ImageSet(here.images.cpu(), here.labels.cpu(), here.classes)
    options = {"normalisation": IMAGENET, "augment": True, "shuffle": True, "seed": 3}
    for (a, la), (b, lb) in zip(here.batches(16, **options), there.batches(16, **options), strict=True):
        assert torch.equal(a, b.cpu())
        assert torch.equal(la, lb.cpu())


def test_finetuning_with_a_teacher_is_captured(caplog):
    with caplog.at_level(logging.WARNING):
        outcome = finetune(
            network(),
            feed(),
            teacher=network(),
            settings=TrainSettings(epochs=2, lr=0.01, warmup_epochs=0, precision="bf16", channels_last=True),
            recovery=RecoverySettings(distillation=0.9, cross_entropy=0.1),
        )
    assert not caplog.records
    assert set(outcome.history[0]) >= {"cross_entropy", "distillation"}


def test_dropout_is_drawn_anew_in_every_replay_and_the_same_for_the_same_seed():
    def losses(seed: int) -> list[float]:
        model = nn.Sequential(nn.Dropout(0.5), network()).cuda()
        settings = TrainSettings(epochs=4, lr=1e-9, warmup_epochs=0, schedule="constant", speed="graph", seed=seed)
        still = images(16).batches(16, normalisation=IMAGENET)
        return [row["loss"] for row in train(model, still, settings=settings).history]

    assert losses(0) == losses(0) != losses(1)
    assert len(set(losses(0))) == 4


def test_images_that_lie_elsewhere_are_trained_on_eagerly_with_a_hint(caplog):
    far = images()
    far = ImageSet(far.images.cpu(), far.labels.cpu(), far.classes)
    near, model = network(), network()
    settings = TrainSettings(epochs=1, lr=0.05, warmup_epochs=0)
    options = {"normalisation": IMAGENET, "augment": True, "shuffle": True}
    with caplog.at_level(logging.WARNING):
        first = train(model, far.batches(16, **options), settings=settings).history
    assert "the images lie on cpu; images.on('cuda:0')" in caplog.text
    second = train(near, far.on("cuda").batches(16, **options), settings=settings).history
    assert first[0]["loss"] == pytest.approx(second[0]["loss"], rel=1e-4)
