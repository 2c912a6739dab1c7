"""What a user would pick instead of low rank: channel pruning with torch-pruning, at the same budgets.

Without arguments it prints the table of the committed networks in ``pruned/``. They are made again with

    python benchmarks/pruning.py prune                      # needs torch-pruning, from the `bench` extra

for ResNet-20 at 28% of the multiply-adds and 24% of the parameters. Its shortcuts subsample and pad with zeros (option
A), so the channels of the residual stream belong together in a way that torch-pruning does not see: used plainly it
returns, without a word, a network that does not run. So only the channels inside of the blocks are pruned, and the
result is run and counted. The network that is best after a short fine-tuning is kept as a safetensors file beside its
widths; `load_pruned` makes a network of them where torch-pruning is not installed.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from common import console, machine
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

import haloc
from haloc.files import read_json, replacing, write_json
from haloc.zoo import IMAGENET, ImageSet, load_data
from haloc.zoo.resnet_cifar import CifarBlock, CifarResNet

FOLDER = Path(__file__).resolve().parent / "pruned"
MODEL, MACS_SHARE, PARAMS_SHARE = "resnet20", 0.28, 0.24
EXAMPLE = torch.zeros(1, 3, 32, 32)
#: Importance of a channel, and whether channels of all layers compete (global) or every layer loses the same share.
WAYS = tuple((importance, spread) for importance in ("magnitude", "taylor") for spread in ("uniform", "global"))
#: Images that BatchNorm is recalibrated and gradients are taken on, and that a network is judged by here.
SOME = 2000


# --- pruning ------------------------------------------------------------------------------------------------------


def pruned(
    model: CifarResNet,
    example: torch.Tensor,
    macs_share: float,
    params_share: float,
    *,
    importance: str = "magnitude",
    spread: str = "global",
) -> nn.Module:
    """The widest network within both budgets, channels inside of the blocks pruned by one ratio found by bisection.

    Args:
        model: The dense network; for "taylor" its parameters have gradients. It is not changed.
        example: An input.
        macs_share: How much of the multiply-adds may remain.
        params_share: How much of the parameters may remain.
        importance: "magnitude" or "taylor", both over all weights that go with a channel.
        spread: "uniform" or "global".
    """
    dense = haloc.inspect(model, example)

    def attempt(ratio: float) -> tuple[nn.Module, bool]:
        small = _pruned_by(model, example, ratio, importance, spread)
        counts = haloc.inspect(small, example)
        return small, counts.macs <= macs_share * dense.macs and counts.params <= params_share * dense.params

    low, high = 0.0, 1.0
    best = None
    for _ in range(12):  # finer than one channel of the widest layer
        ratio = (low + high) / 2
        small, fits = attempt(ratio)
        best, low, high = (small, low, ratio) if fits else (best, ratio, high)
    if best is None:
        raise SystemExit(
            f"no ratio keeps to {macs_share:.0%} of the multiply-adds and {params_share:.0%} of the weights"
        )
    check(best, example)
    return best


def check(model: nn.Module, example: torch.Tensor) -> None:
    """Refuses a network that does not run, says nonsense, or is not one of the architecture with other widths."""
    with torch.no_grad():
        logits = model(torch.cat([example, torch.randn_like(example)]))
    if not logits.isfinite().all():
        raise SystemExit("the pruned network has logits that are not finite")
    again = rebuild(inner_widths(model))
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(logits[:1], again(example)) or torch.allclose(logits[:1], again(example), atol=1e-5)


def plain_use_runs(model: CifarResNet, example: torch.Tensor, ratio: float) -> bool:
    """Whether a network runs that torch-pruning has pruned as its front page shows, the last layer excepted."""
    import torch_pruning as tp

    small = copy.deepcopy(model)
    scores = tp.importance.GroupMagnitudeImportance(p=2)
    tp.pruner.BasePruner(small, example, scores, pruning_ratio=ratio, ignored_layers=[small.linear]).step()
    try:
        haloc.inspect(small, example)
    except haloc.HalocError:
        return False
    return True


def take_gradients(model: nn.Module, images: ImageSet) -> None:
    """Leaves the gradients of the cross-entropy on some augmented images in the parameters."""
    model.zero_grad()
    for inputs, labels in images.batches(250, normalisation=IMAGENET, augment=True, shuffle=True, limit=SOME):
        F.cross_entropy(model(inputs), labels, reduction="sum").backward()


def _pruned_by(model: CifarResNet, example: torch.Tensor, ratio: float, importance: str, spread: str) -> nn.Module:
    import torch_pruning as tp

    small = copy.deepcopy(model)
    for parameter, original in zip(small.parameters(), model.parameters(), strict=True):
        parameter.grad = None if original.grad is None else original.grad.clone()
    inner = {id(block.conv1) for block in blocks(small)}
    scores = {"magnitude": tp.importance.GroupMagnitudeImportance, "taylor": tp.importance.GroupTaylorImportance}
    tp.pruner.BasePruner(
        small,
        example,
        scores[importance](),
        global_pruning=spread == "global",
        pruning_ratio=ratio,
        ignored_layers=[x for x in small.modules() if isinstance(x, nn.Conv2d | nn.Linear) and id(x) not in inner],
    ).step()
    small.zero_grad()
    return small


# --- networks of other widths, without torch-pruning --------------------------------------------------------------


def blocks(model: nn.Module) -> list[CifarBlock]:
    return [module for module in model.modules() if isinstance(module, CifarBlock)]


def inner_widths(model: nn.Module) -> list[int]:
    """How many channels every block has inside, from the first to the last."""
    return [block.conv1.out_channels for block in blocks(model)]


def rebuild(widths: Sequence[int]) -> nn.Module:
    """ResNet-20 with these widths inside of its blocks, and random weights."""
    model = haloc.create(MODEL)
    for block, width in zip(blocks(model), widths, strict=True):
        first, second = block.conv1, block.conv2
        block.conv1 = nn.Conv2d(first.in_channels, width, 3, first.stride, padding=1, bias=False)
        block.bn1 = nn.BatchNorm2d(width)
        block.conv2 = nn.Conv2d(width, second.out_channels, 3, padding=1, bias=False)
    return model.eval()


def save_pruned(model: nn.Module, folder: Path = FOLDER) -> None:
    """Writes the weights as safetensors; `load_pruned` reads the widths from the table beside them."""
    state = {name: value.detach().clone().contiguous() for name, value in model.state_dict().items()}
    with replacing(folder / f"{MODEL}.safetensors") as path:
        save_file(state, path)


def load_pruned(folder: Path = FOLDER) -> nn.Module:
    """The committed network, as pruned: BatchNorm not recalibrated, not fine-tuned."""
    model = rebuild(read_json(folder / f"{MODEL}.json")["widths"])
    model.load_state_dict(load_file(folder / f"{MODEL}.safetensors"))
    return model


# --- which way is best --------------------------------------------------------------------------------------------


def accuracy(model: nn.Module, some: ImageSet, judged: ImageSet) -> float:
    """Top-1 of a recalibrated copy."""
    small = copy.deepcopy(model)
    haloc.recalibrate(small, some.batches(250, normalisation=IMAGENET, augment=True, shuffle=True, limit=SOME))
    return haloc.evaluate(small, judged.batches(500, normalisation=IMAGENET)).top1


def finetuned(model: nn.Module, dense: nn.Module, images: ImageSet, epochs: int) -> nn.Module:
    """A copy after a few epochs on a part of the images."""
    small = copy.deepcopy(model)
    feed = images.batches(128, normalisation=IMAGENET, augment=True, shuffle=True)
    settings = haloc.TrainSettings(epochs=epochs, lr=0.05, weight_decay=1e-4, warmup_epochs=0.5)
    haloc.finetune(small, feed, teacher=dense, settings=settings)
    return small


def prune(options: argparse.Namespace) -> dict:
    data, dense = load_data("cifar10", root=options.data_root), haloc.create(MODEL, weights="pretrained")
    images, judged = data.train.subset(range(options.images)), data.val.subset(range(SOME))
    take_gradients(dense, images)
    whole, rows, networks = haloc.inspect(dense, EXAMPLE), [], []
    for importance, spread in WAYS:
        small = pruned(dense, EXAMPLE, MACS_SHARE, PARAMS_SHARE, importance=importance, spread=spread)
        counts = haloc.inspect(small, EXAMPLE)
        row = {"importance": importance, "spread": spread, "widths": inner_widths(small)}
        row |= {"macs": counts.macs / whole.macs, "params": counts.params / whole.params}
        row["raw"] = accuracy(small, images, judged)
        trained = finetuned(small, dense, images, options.epochs)
        row["finetuned"] = haloc.evaluate(trained, judged.batches(500, normalisation=IMAGENET)).top1
        console.print(row)
        rows.append(row)
        networks.append(small)
    best = max(range(len(rows)), key=lambda number: rows[number]["finetuned"])
    save_pruned(networks[best], options.output)
    return {
        "torch-pruning": version("torch-pruning"),
        "plain_use_runs": {str(ratio): plain_use_runs(dense, EXAMPLE, ratio) for ratio in (0.1, 0.3, 0.5)},
        "images": options.images, "epochs": options.epochs, "judged": len(judged),
        "dense": accuracy(dense, images, judged), "rows": rows, "kept": best, "widths": rows[best]["widths"],
    }  # fmt: skip


def show(found: Mapping) -> None:
    title = f"ResNet-20 pruned by torch-pruning {found['torch-pruning']}"
    table = Table(title=f"{title}; the dense network has {found['dense']:.1%}")
    columns = ("importance", "spread", "widths in the blocks", "MACs", "params", "recalibrated", "fine-tuned", "")
    for column in columns:
        table.add_column(column, justify="left" if column in columns[:3] else "right")
    for number, row in enumerate(found["rows"]):
        shares = (f"{row[name]:.1%}" for name in ("macs", "params", "raw", "finetuned"))
        kept = "kept" if number == found["kept"] else ""
        table.add_row(row["importance"], row["spread"], " ".join(map(str, row["widths"])), *shares, kept)
    console.print(table)
    console.print(f"fine-tuned: {found['epochs']} epochs of {found['images']} images, to choose the one to keep")
    console.print(
        f"judged by {found['judged']} training images kept apart here; the dense network was trained on them too"
    )
    plain = ", ".join(
        f"{float(ratio):.0%} {'yes' if runs else 'no'}" for ratio, runs in found["plain_use_runs"].items()
    )
    console.print(f"does it run when pruned plainly, by a share of all channels: {plain}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["prune"], help="make the networks again; without it they are shown")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--output", type=Path, default=FOLDER)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    if options.part:
        write_json(options.output / f"{MODEL}.json", {"machine": machine(), **prune(options)})
    show(read_json(options.output / f"{MODEL}.json"))


if __name__ == "__main__":
    main()
