"""The bars that need neither weights nor data: full rank reproduces a layer, spaces of the paper's size, wrong input.

The layers are those of the tests: every stride × padding × dilation × groups × bias × kernel shape.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import torch
from common import console, save, verdict
from rich.progress import track
from rich.table import Table

import haloc
from haloc.factor.layers import layer_shape
from haloc.forms import families, full_form

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.factor.layers import GRID, deviation, lower_rank, make_conv, make_input  # noqa: E402

DEVIATION_BAR = 1e-5
PAPER_ALL, PAPER_REDUCED = 2.2e71, 7.8e13


def full_rank_deviations() -> dict[str, float]:
    """The worst relative deviation of the output per form, from the weights alone and activation-aware."""
    worst: dict[str, float] = defaultdict(float)
    for case in track(GRID, description="layers", console=console, transient=True):
        layer = make_conv(**case)
        inputs = make_input(layer)
        for aware in (False, True):
            for family in families(layer_shape(layer)):
                name = f"{family}, {'activations' if aware else 'weights'}"
                form = full_form(layer_shape(layer), family)
                worst[name] = max(worst[name], built_deviation(layer, form, inputs, aware))
            if max(layer.kernel_size) > 1:
                name = f"tucker2 of a weight with these ranks, {'activations' if aware else 'weights'}"
                narrow = lower_rank(make_conv(**case), 2, 2)
                worst[name] = max(worst[name], built_deviation(narrow, haloc.Tucker2(2, 2), inputs, aware))
    return dict(worst)


def built_deviation(layer: torch.nn.Module, form: haloc.Form, inputs: torch.Tensor, aware: bool) -> float:
    moments = haloc.calibrate(torch.nn.Sequential(layer), [inputs], ["0"], positions=10**6)["0"] if aware else None
    return deviation(layer(inputs), haloc.Factoriser(layer, moments).build(form)(inputs))


def space_sizes() -> dict[str, int]:
    """How many rank settings ResNet-18's sixteen 3×3 layers have: all of them, and under the two design principles."""
    layers = haloc.inspect(haloc.create("resnet18"), torch.zeros(1, 3, 64, 64))
    threes = [row.name for row in layers if row.kind == "Conv2d" and row.shape.kernel == (3, 3)]
    everything = haloc.rank_space(layers, forms=("tucker2",), round_to=1, equal=False, names=threes, dense=False)
    reduced = haloc.rank_space(layers, forms=("tucker2",), names=threes, dense=False)
    return {"all": everything.size, "reduced": reduced.size}


def wrong_inputs() -> dict[str, int]:
    """Runs the tests of the command line and of the zoo's readers, which are mostly wrong input."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/cli",
        "tests/zoo",
        "tests/test_plan.py",
        "tests/test_inventory.py",
    ]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed)", output)}


def summary(results: dict) -> Table:
    table = Table(title="Foundation")
    for column in ("what", "measured", "bar", ""):
        table.add_column(column)
    for name, worst in results["full_rank"].items():
        table.add_row(f"full rank, {name}", f"{worst:.1e}", f"≤ {DEVIATION_BAR:.0e}", verdict(worst <= DEVIATION_BAR))
    sizes = results["space"]
    text = f"{PAPER_ALL:.1e}"
    table.add_row("rank settings of ResNet-18", f"{sizes['all']:.1e}", text, verdict(f"{sizes['all']:.1e}" == text))
    near = 0.8 < sizes["reduced"] / PAPER_REDUCED < 1.25
    table.add_row("… equal ranks, default steps", f"{sizes['reduced']:.1e}", f"near {PAPER_REDUCED:.1e}", verdict(near))
    ran = results["wrong_input"]
    sound = ran.get("passed", 0) > 0 and not ran.get("failed")
    table.add_row("tests of wrong input and readers", f"{ran.get('passed', 0)} passed", "none failed", verdict(sound))
    return table


def main() -> None:
    results = {"layers": len(GRID), "full_rank": full_rank_deviations(), "space": space_sizes()}
    results["wrong_input"] = wrong_inputs()
    save(__file__, results)
    console.print(summary(results))


if __name__ == "__main__":
    main()
