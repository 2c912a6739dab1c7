"""Tucker-2 against tensorly's ``partial_tucker``: error at equal ranks, and time for all candidates of a network.

Bars: error at most 1.001 times tensorly's on the 18 block convolutions of ResNet-20 and on 20 random tensors; all
Tucker-2 candidates of ResNet-18's 3×3 layers at least 5 times faster than tensorly building them one by one.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from common import console, save, verdict, weights_file
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from haloc.factor.modules import Factoriser
from haloc.forms import Tucker2
from haloc.zoo import create

ERROR_BAR, SPEED_BAR = 1.001, 5.0
FRACTIONS = (0.25, 0.5, 0.75)


def tensorly_error(weight: Tensor, form: Tucker2) -> float:
    """Builds the factors as a user of tensorly would, with its defaults, and returns the relative error."""
    from tensorly.decomposition import partial_tucker
    from tensorly.tenalg import multi_mode_dot

    dense = weight.double().numpy()
    (core, factors), _ = partial_tucker(dense, rank=[form.rank_out, form.rank_in], modes=[0, 1])
    return float(np.linalg.norm(multi_mode_dot(core, factors, modes=[0, 1]) - dense) / np.linalg.norm(dense))


def as_conv(weight: Tensor) -> nn.Conv2d:
    layer = nn.Conv2d(weight.shape[1], weight.shape[0], weight.shape[2:], bias=False)
    layer.weight.data.copy_(weight)
    return layer


def error_ratios(weights: dict[str, Tensor]) -> list[dict]:
    """Our error over tensorly's for every weight at every fraction of its ranks."""
    rows = []
    for name, weight in track(weights.items(), description="errors", console=console, transient=True):
        factoriser = Factoriser(as_conv(weight))
        for fraction in FRACTIONS:
            form = Tucker2(*(max(1, round(fraction * full)) for full in weight.shape[:2]))
            ours, theirs = factoriser.error(form), tensorly_error(factoriser.layer.weight.detach(), form)
            rows.append({"weight": name, "form": str(form), "ours": ours, "tensorly": theirs, "ratio": ours / theirs})
    return rows


def random_weights(count: int = 20) -> dict[str, Tensor]:
    """Random tensors of many sizes: nothing to find in them, so the sweeps have the most to do."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(8, 97, (count, 2), generator=generator).tolist()
    return {f"random {f}×{c}": torch.randn(f, c, 3, 3, generator=generator) for f, c in sizes}


def candidates(weight: Tensor) -> list[Tucker2]:
    """Equal ranks in multiples of 32, 16 or 8 for layers of 256, 128 or 64 channels, but for the dense layer itself."""
    out_channels, in_channels = weight.shape[:2]
    narrow = min(out_channels, in_channels)
    step = 32 if narrow >= 256 else 16 if narrow >= 128 else 8
    ranks = [rank for rank in range(step, narrow + 1, step) if (rank, rank) != (out_channels, in_channels)]
    return [Tucker2(rank, rank) for rank in ranks]


def candidate_times(weights: dict[str, Tensor]) -> list[dict]:
    """Seconds for all candidates of every layer, ours and tensorly's by turns."""
    rows = []
    for name, weight in track(weights.items(), description="candidates", console=console, transient=True):
        forms = candidates(weight)
        start = time.perf_counter()
        factoriser = Factoriser(as_conv(weight))
        factors = [factoriser.factors(form) for form in forms]
        ours = time.perf_counter() - start
        start = time.perf_counter()
        theirs_error = [tensorly_error(weight, form) for form in forms]
        theirs = time.perf_counter() - start
        stack = weight.double().reshape(1, *weight.shape[:2], -1)
        errors = [float((stack - f.rebuild()).norm() / stack.norm()) for f in factors]
        worst = max(ours_error / other for ours_error, other in zip(errors, theirs_error, strict=True))
        rows.append(
            {"layer": name, "candidates": len(forms), "ours_s": ours, "tensorly_s": theirs, "worst_ratio": worst}
        )
    return rows


def summary(results: dict) -> Table:
    table = Table(title="Tucker-2 against tensorly's partial_tucker")
    for column in ("what", "measured", "bar", ""):
        table.add_column(column)
    for name in ("resnet20", "random"):
        worst = max(row["ratio"] for row in results[name])
        what = f"largest error ratio, {name}, {len(results[name])} cases"
        table.add_row(what, f"{worst:.5f}", f"≤ {ERROR_BAR}", verdict(worst <= ERROR_BAR))
    rows = results["resnet18"]
    ours, theirs = (sum(row[key] for row in rows) for key in ("ours_s", "tensorly_s"))
    count = sum(row["candidates"] for row in rows)
    what = f"time, {count} candidates of ResNet-18: {ours:.1f} s against {theirs:.1f} s"
    table.add_row(what, f"{theirs / ours:.1f}×", f"≥ {SPEED_BAR:.0f}×", verdict(theirs >= SPEED_BAR * ours))
    worst = max(row["worst_ratio"] for row in rows)
    table.add_row(f"largest error ratio, these {count} candidates", f"{worst:.5f}", "", "")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, default=Path("weights"), help="folder with the two weights files")
    folder = parser.parse_args().weights
    small = create("resnet20", weights=weights_file(folder, "resnet20-cifar10.safetensors"))
    large = create("resnet18", weights=weights_file(folder, "resnet18-imagenet-reconstructed.safetensors"))

    def threes(model: nn.Module) -> dict[str, Tensor]:
        convs = {n: m for n, m in model.named_modules() if isinstance(m, nn.Conv2d) and n.startswith("layer")}
        return {n: m.weight.detach() for n, m in convs.items() if m.kernel_size == (3, 3)}

    results = {
        "resnet20": error_ratios(threes(small)),
        "random": error_ratios(random_weights()),
        "resnet18": candidate_times(threes(large)),
    }
    save(__file__, results)
    console.print(summary(results))


if __name__ == "__main__":
    main()
