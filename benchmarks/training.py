"""Training: how fast an epoch is, our own base networks, accuracy recovered by fine-tuning, and runs that are killed.

Without arguments it prints the last committed run of every part, from ``training/``. A part is measured again with

    python benchmarks/training.py epoch --device cuda       # seconds per epoch, beside plain eager PyTorch
    python benchmarks/training.py cpu                       # the loop against a bare hand-written one
    python benchmarks/training.py bases --device cuda       # trains ResNet-20 and VGG-16-BN from scratch
    python benchmarks/training.py screen --device cuda      # settings of fine-tuning, on validation images
    python benchmarks/training.py finetune --device cuda    # half and 3/8 ranks, three seeds
    python benchmarks/training.py kills                     # kill -9 at ten random moments

Bars: ResNet-20 with distillation, batch 256, at most 0.6 s per epoch on an H200; on the CPU at most 1.10 times a bare
loop; ResNet-20 at least 91.7%, VGG-16-BN 93.5%; fine-tuned for 60 epochs from a 91.7% teacher at least 91.4% with half
of the ranks and 90.3% with 3/8; weights after ten kills bit-identical.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from common import console, machine, verdict, weights_file
from rich.table import Table
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import haloc
from haloc.files import read_json, write_json
from haloc.zoo import IMAGENET, ImageSet, create, load_data

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "training"
BATCH = 256
EPOCH_BAR, CPU_BAR = 0.6, 1.10
BASE_BARS = {"resnet20": 0.917, "vgg16_bn_cifar": 0.935}
FINETUNE_BARS = {"1/2": 0.914, "3/8": 0.903}
FAST = {"precision": "bf16", "channels_last": True}

#: How the base networks are trained: on all 50,000 training images, the test images looked at once, at the end.
RECIPES = {
    "resnet20": haloc.TrainSettings(epochs=200, lr=0.2, weight_decay=5e-4, speed="compile", **FAST),
    "vgg16_bn_cifar": haloc.TrainSettings(epochs=200, lr=0.1, weight_decay=5e-4, speed="compile", **FAST),
}
FINETUNING = haloc.TrainSettings(epochs=60, lr=0.05, weight_decay=1e-4, warmup_epochs=2, speed="compile", **FAST)
RECOVERY = haloc.RecoverySettings(cross_entropy=0.1, distillation=0.9, norm_between=True)

#: Learning rate, weight decay, weights of cross-entropy and distillation, BatchNorm between the factors.
SCREENED = (
    (0.1, 1e-4, 0.1, 0.9, True),
    (0.1, 5e-4, 0.1, 0.9, True),
    (0.03, 5e-4, 0.1, 0.9, True),
    (0.1, 5e-4, 1.0, 1.0, True),
    (0.1, 5e-4, 0.1, 0.9, False),
)


class Pictures(Dataset):
    """CIFAR-like images as most scripts read them: one by one, augmented by NumPy in worker processes."""

    def __init__(self, images: ImageSet) -> None:
        self.images, self.labels = images.images.cpu().numpy(), images.labels.cpu().numpy()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int):
        padded = np.pad(self.images[index], ((0, 0), (4, 4), (4, 4)))
        top, left = np.random.randint(9), np.random.randint(9)
        image = padded[:, top : top + 32, left : left + 32]
        image = image[:, :, ::-1] if np.random.rand() < 0.5 else image
        mean, std = (np.array(v, np.float32).reshape(3, 1, 1) for v in (IMAGENET.mean, IMAGENET.std))
        return torch.from_numpy((image.astype(np.float32) / 255 - mean) / std), int(self.labels[index])


def random_images(count: int, seed: int = 0) -> ImageSet:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return ImageSet(images, torch.randint(10, (count,), generator=generator), tuple("0123456789"))


def plan_at(fraction: float, device: str) -> haloc.Plan:
    layers = haloc.inspect(create("resnet20").to(device), torch.zeros(1, 3, 32, 32, device=device))
    return haloc.uniform_plan(layers, fraction=fraction, skip=("conv1", "linear"))


def shortened(settings: haloc.TrainSettings, options: argparse.Namespace) -> haloc.TrainSettings:
    """The recipe, with another number of epochs if that was asked for."""
    return replace(settings, epochs=options.epochs) if options.epochs else settings


# --- epoch: seconds per epoch on a GPU ----------------------------------------------------------------------------


def our_epoch(images: ImageSet, student: nn.Module, teacher: nn.Module, settings: haloc.TrainSettings) -> dict:
    """Seconds of the epochs after the first, in which the step is captured or compiled."""
    data = images.batches(BATCH, normalisation=IMAGENET, augment=True, shuffle=True)
    recovery = haloc.RecoverySettings(recalibration=0, norm_between=False)
    outcome = haloc.finetune(student, data, teacher=teacher, settings=settings, recovery=recovery)
    ends = [row["seconds"] for row in outcome.history]
    seconds = [end - before for before, end in pairwise(ends)]
    return {"seconds": statistics.median(seconds), "first": ends[0], "epochs": seconds}


def plain_epoch(images: ImageSet, student: nn.Module, teacher: nn.Module, device: str, workers: int) -> dict:
    """The same training as most scripts write it: a DataLoader, autocast, eager."""
    loader = DataLoader(Pictures(images), BATCH, shuffle=True, num_workers=workers, drop_last=True, pin_memory=True)
    student = student.train().to(memory_format=torch.channels_last)
    teacher = teacher.eval().to(memory_format=torch.channels_last)
    optimiser = torch.optim.SGD(student.parameters(), 0.01, momentum=0.9, nesterov=True, weight_decay=1e-4)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        for inputs, labels in loader:
            inputs = inputs.to(device, non_blocking=True).to(memory_format=torch.channels_last)
            labels = labels.to(device, non_blocking=True)
            with torch.autocast(device, torch.bfloat16):
                with torch.no_grad():
                    taught = teacher(inputs)
                logits = student(inputs)
            student_log, taught_log = (F.log_softmax(x.float() / 4, 1) for x in (logits, taught))
            loss = F.cross_entropy(logits.float(), labels)
            loss = loss + 16 * F.kl_div(student_log, taught_log, log_target=True, reduction="batchmean")
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {"seconds": statistics.median(seconds[1:]), "epochs": seconds}


def epoch(options: argparse.Namespace) -> dict:
    device, images = options.device, random_images(50_000)
    here = images.on(device)
    settings = haloc.TrainSettings(epochs=6, lr=0.01, warmup_epochs=1, **FAST)

    def nets() -> tuple[nn.Module, nn.Module]:
        return create("resnet20").to(device), create("resnet20").to(device)

    def half() -> tuple[nn.Module, nn.Module]:
        dense = create("resnet20").to(device)
        return haloc.apply_plan(dense, plan_at(0.5, device)), dense

    rows = {
        "graph": our_epoch(here, *nets(), settings),
        "compile": our_epoch(here, *nets(), replace(settings, speed="compile")),
        "graph, fp32": our_epoch(here, *nets(), replace(settings, precision="fp32", channels_last=False)),
        "graph, half ranks": our_epoch(here, *half(), settings),
        "compile, half ranks": our_epoch(here, *half(), replace(settings, speed="compile")),
        "eager": our_epoch(here, *nets(), replace(settings, epochs=3, speed="eager")),
        "plain PyTorch, DataLoader": plain_epoch(images, *nets(), device, options.workers),
    }
    return {"gpu": torch.cuda.get_device_name(), "batch": BATCH, "workers": options.workers, "rows": rows}


def show_epoch(found: dict) -> None:
    table = Table(title=f"ResNet-20, distillation, batch {found['batch']}, 50,000 images, augmented ({found['gpu']})")
    for column in ("way", "s per epoch", f"bar ≤ {EPOCH_BAR} s"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for name, row in found["rows"].items():
        held = verdict(row["seconds"] <= EPOCH_BAR) if name in ("graph", "compile") else ""
        table.add_row(name, f"{row['seconds']:.3f}", held)
    console.print(table)
    if "how" in found:
        console.print(found["how"])


# --- cpu: the loop against a bare one -----------------------------------------------------------------------------


def bare_epoch(model: nn.Module, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The same epoch, written by hand."""
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, nesterov=True, weight_decay=1e-4)
    start = time.perf_counter()
    for inputs, labels in batches:
        loss = F.cross_entropy(model(inputs), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return time.perf_counter() - start


def our_cpu_epoch(model: nn.Module, data) -> float:
    settings = haloc.TrainSettings(epochs=1, lr=0.01, warmup_epochs=0, schedule="constant")
    start = time.perf_counter()
    haloc.train(model, data, settings=settings)
    return time.perf_counter() - start


def cpu(options: argparse.Namespace) -> dict:
    """Both take turns in one process: on tensors that are there, and on images that are augmented on the way."""
    images, batch = random_images(options.images), 64
    feed = images.batches(batch, normalisation=IMAGENET, augment=True, shuffle=True)
    ready = list(feed)
    rows: dict[str, dict[str, list[float]]] = {name: {"ours": [], "bare": []} for name in ("ready", "augmented")}
    for _ in range(options.rounds + 1):
        rows["ready"]["bare"].append(bare_epoch(create("resnet20"), ready))
        rows["ready"]["ours"].append(our_cpu_epoch(create("resnet20"), ready))
        feed.epoch = 0
        rows["augmented"]["bare"].append(bare_epoch(create("resnet20"), feed))
        rows["augmented"]["ours"].append(our_cpu_epoch(create("resnet20"), feed))
    for row in rows.values():
        row["ours"], row["bare"] = row["ours"][1:], row["bare"][1:]  # the first round warms up
        row["ratio"] = statistics.median(a / b for a, b in zip(row["ours"], row["bare"], strict=True))
    return {"images": options.images, "batch": batch, "rows": rows}


def show_cpu(found: dict) -> None:
    table = Table(title=f"an epoch of ResNet-20 on the CPU, {found['images']} images, batch {found['batch']}")
    for column in ("tensors", "ours, median s", "bare loop, median s", "median ratio", f"bar ≤ {CPU_BAR:.2f}"):
        table.add_column(column, justify="left" if column == "tensors" else "right")
    for name, row in found["rows"].items():
        ours, bare = (f"{statistics.median(row[side]):.2f}" for side in ("ours", "bare"))
        table.add_row(name, ours, bare, f"{row['ratio']:.3f}", verdict(row["ratio"] <= CPU_BAR))
    console.print(table)


# --- bases: our own networks --------------------------------------------------------------------------------------


def bases(options: argparse.Namespace) -> dict:
    data, rows = load_data("cifar10", root=options.data_root), {}
    for name in options.models.split(","):
        run = options.output / name
        settings = shortened(RECIPES[name], options)
        torch.manual_seed(0)
        model = create(name).to(options.device)
        images = data.whole.on(options.device)
        feed = images.batches(BATCH, normalisation=IMAGENET, augment=True, shuffle=True, seed=0)
        outcome = haloc.train(model, feed, settings=settings, folder=run)
        test = data.test.on(options.device).batches(1000, normalisation=IMAGENET)
        found = haloc.evaluate(model, test)
        shutil.copy(run / "log.jsonl", options.output / f"{name}.log.jsonl")
        rows[name] = {
            "top1": found.top1,
            "loss": found.loss,
            "seconds": outcome.seconds,
            "batch": BATCH,
            "settings": asdict(settings),
            "sha256": hashlib.sha256((run / "weights.safetensors").read_bytes()).hexdigest(),
        }
        console.print(f"{name}: {found.top1:.2%} in {outcome.seconds:.0f} s")
    return {"rows": rows}


def show_bases(found: dict) -> None:
    table = Table(title="base networks, trained on CIFAR-10's 50,000 training images")
    for column in ("network", "test top-1", "epochs", "seconds", "bar"):
        table.add_column(column, justify="left" if column == "network" else "right")
    for name, row in found["rows"].items():
        held = f"≥ {BASE_BARS[name]:.1%} {verdict(row['top1'] >= BASE_BARS[name])}"
        table.add_row(name, f"{row['top1']:.2%}", str(row["settings"]["epochs"]), f"{row['seconds']:.0f}", held)
    console.print(table)


# --- finetune: accuracy recovered ---------------------------------------------------------------------------------


def recovered(dense: nn.Module, fraction: float, seed: int, data, options: argparse.Namespace) -> dict:
    """Factorises, fine-tunes on all training images and evaluates on the test images once."""
    device = options.device
    layers = haloc.inspect(dense, torch.zeros(1, 3, 32, 32, device=device))
    plan = haloc.uniform_plan(layers, fraction=fraction, skip=("conv1", "linear"))
    whole = data.whole.on(device)
    test = data.test.on(device).batches(1000, normalisation=IMAGENET)
    some = whole.batches(250, normalisation=IMAGENET, augment=True, shuffle=True, seed=seed, limit=1000)
    small = haloc.apply_plan(dense, plan, moments=haloc.calibrate(dense, some, plan.changes()))
    raw = haloc.evaluate(small, test).top1
    feed = whole.batches(BATCH, normalisation=IMAGENET, augment=True, shuffle=True, seed=seed)
    settings = replace(shortened(FINETUNING, options), seed=seed)
    outcome = haloc.finetune(small, feed, teacher=dense, settings=settings, recovery=RECOVERY)
    counted = haloc.inspect(small, torch.zeros(1, 3, 32, 32, device=device))
    return {
        "seed": seed,
        "raw": raw,
        "top1": haloc.evaluate(small, test).top1,
        "seconds": outcome.seconds,
        "macs": counted.macs / layers.macs,
        "params": counted.params / layers.params,
    }


def finetune(options: argparse.Namespace) -> dict:
    data, before = load_data("cifar10", root=options.data_root), options.output / "finetune.json"
    rows = read_json(before)["rows"] if options.ranks and before.is_file() else {}
    test = data.test.on(options.device).batches(1000, normalisation=IMAGENET)
    for label, fraction in {"1/2": 0.5, "3/8": 0.375}.items():
        if options.ranks and label != options.ranks:
            continue
        dense = create("resnet20", weights=weights_file(options.weights, options.file)).to(options.device)
        found = [recovered(dense, fraction, seed, data, options) for seed in range(options.seeds)]
        teacher = haloc.evaluate(dense, test).top1
        rows[label] = {"teacher": teacher, "weights": options.file, "runs": found}
        scores = ", ".join(f"{run['top1']:.2%}" for run in found)
        console.print(f"{label}: {scores}; {found[0]['seconds']:.0f} s each")
    return {"settings": asdict(FINETUNING), "recovery": asdict(RECOVERY), "rows": rows}


def screen(options: argparse.Namespace) -> dict:
    """Settings of fine-tuning against each other, at half of the ranks, on the validation images."""
    device, data = options.device, load_data("cifar10", root=options.data_root)
    dense = create("resnet20", weights=weights_file(options.weights, options.file)).to(device)
    plan, images = plan_at(0.5, device), data.train.on(device)
    some = images.batches(250, normalisation=IMAGENET, augment=True, shuffle=True, limit=1000)
    moments = haloc.calibrate(dense, some, plan.changes())
    val = data.val.on(device).batches(1000, normalisation=IMAGENET)
    rows = []
    for lr, decay, cross_entropy, distillation, norms in SCREENED:
        settings = replace(
            FINETUNING, lr=lr, weight_decay=decay, **({"epochs": options.epochs} if options.epochs else {})
        )
        recovery = replace(RECOVERY, cross_entropy=cross_entropy, distillation=distillation, norm_between=norms)
        small = haloc.apply_plan(dense, plan, moments=moments)
        feed = images.batches(BATCH, normalisation=IMAGENET, augment=True, shuffle=True)
        outcome = haloc.finetune(small, feed, teacher=dense, settings=settings, recovery=recovery)
        row = {"lr": lr, "weight_decay": decay, "cross_entropy": cross_entropy, "distillation": distillation}
        row |= {"norm_between": norms, "val": haloc.evaluate(small, val).top1, "seconds": outcome.seconds}
        rows.append(row)
    return {"teacher_val": haloc.evaluate(dense, val).top1, "rows": rows}


def show_screen(found: dict) -> None:
    table = Table(title=f"settings of fine-tuning, half of the ranks, validation (teacher {found['teacher_val']:.2%})")
    for column in found["rows"][0]:
        table.add_column(column, justify="right")
    for row in sorted(found["rows"], key=lambda row: -row["val"]):
        table.add_row(*(f"{value:.2%}" if name == "val" else f"{value:g}" for name, value in row.items()))
    console.print(table)


def show_finetune(found: dict) -> None:
    table = Table(title=f"ResNet-20, uniform ranks, {found['settings']['epochs']} epochs of fine-tuning")
    columns = ("ranks", "MACs", "params", "teacher", "factorised", "fine-tuned (mean)", "seeds", "bar")
    for column in columns:
        table.add_column(column, justify="left" if column == "ranks" else "right")
    for label, row in found["rows"].items():
        runs = row["runs"]
        mean = statistics.mean(run["top1"] for run in runs)
        bar = FINETUNE_BARS[label]
        table.add_row(
            label,
            f"{runs[0]['macs']:.1%}",
            f"{runs[0]['params']:.1%}",
            f"{row['teacher']:.2%}",
            f"{runs[0]['raw']:.2%}",
            f"{mean:.2%}",
            ", ".join(f"{run['top1']:.2%}" for run in runs),
            f"≥ {bar:.1%} {verdict(mean >= bar)}",
        )
    console.print(table)


# --- kills: a run that is killed again and again ------------------------------------------------------------------


def kills(options: argparse.Namespace) -> dict:
    """Trains a small CNN twice, once in peace and once killed at random moments."""
    with tempfile.TemporaryDirectory() as folder:
        peaceful, killed = Path(folder) / "peaceful", Path(folder) / "killed"
        start = time.perf_counter()
        subprocess.run(_command(peaceful), check=True, capture_output=True, cwd=HERE)
        seconds = time.perf_counter() - start
        training = read_json(peaceful / "result.json")["seconds"]
        rng, moments = random.Random(options.seed), []
        while len(moments) < options.kills:
            # Some while it starts or goes on, most while it trains, and not too late to be killed ten times.
            moment = seconds - training + rng.uniform(-1.0, 1.5 * training / options.kills)
            process = subprocess.Popen(_command(killed), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=HERE)
            try:
                process.wait(moment)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
                moments.append({"after_s": moment, "steps": _steps(killed)})
                continue
            shutil.rmtree(killed)  # it came to its end before it could be killed often enough
            moments = []
        subprocess.run(_command(killed), check=True, capture_output=True, cwd=HERE)
        first, second = (load_file(run / "weights.safetensors") for run in (peaceful, killed))
    same = first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    return {"kills": moments, "identical": same, "seconds": seconds}


def _command(run: Path) -> list[str]:
    """Training on the digits, slow enough to be killed in the middle, a checkpoint after every epoch."""
    options = ["--data", "digits", "--epochs", "60", "--batch-size", "64", "--ema", "0.99", "--save-every-s", "0"]
    model = f"{Path(__file__).stem}:digits_network"
    return [sys.executable, "-m", "haloc", "train", model, *options, "--output", str(run), "--json"]


def digits_network() -> nn.Module:
    """A small CNN for 8×8 grey images, with dropout so that random numbers matter."""

    def block(channels_in: int, channels_out: int) -> list[nn.Module]:
        conv = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
        return [conv, nn.BatchNorm2d(channels_out), nn.ReLU()]

    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 10)]
    return nn.Sequential(*block(1, 32), *block(32, 64), *block(64, 64), *head)


def _steps(run: Path) -> int:
    found = sorted((run / "checkpoints").glob("step-*"))
    return int(found[-1].name.removeprefix("step-")) if found else 0


def show_kills(found: dict) -> None:
    table = Table(title="kill -9 at random moments, then the same command again")
    for column in ("kills", "steps done at each", "final weights", "bar"):
        table.add_column(column)
    steps = ", ".join(str(kill["steps"]) for kill in found["kills"])
    said = "bit-identical" if found["identical"] else "DIFFERENT"
    table.add_row(str(len(found["kills"])), steps, said, verdict(found["identical"] and len(found["kills"]) >= 10))
    console.print(table)


PARTS = {
    "epoch": (epoch, show_epoch),
    "cpu": (cpu, show_cpu),
    "bases": (bases, show_bases),
    "screen": (screen, show_screen),
    "finetune": (finetune, show_finetune),
    "kills": (kills, show_kills),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=PARTS, help="what to measure again; without it results are printed")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--weights", type=Path, default=Path("weights"))
    parser.add_argument("--file", default="resnet20-cifar10.safetensors", help="the teacher's weights")
    parser.add_argument("--models", default=",".join(RECIPES))
    parser.add_argument("--ranks", choices=FINETUNE_BARS, help="only these ranks")
    parser.add_argument("--epochs", type=int, help="other than the recipe's, to try things out")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--images", type=int, default=2560)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=FOLDER)
    parser.add_argument("--name", help="of the result file, if not the part's")
    options = parser.parse_args()
    if options.part:
        measured, show = PARTS[options.part]
        found = {"machine": machine(), **measured(options)}
        write_json(options.output / f"{options.name or options.part}.json", found)
        show(found)
        return
    for path in sorted(options.output.glob("*.json")):
        PARTS[path.stem.split("-")[0]][1](read_json(path))


if __name__ == "__main__":
    main()
