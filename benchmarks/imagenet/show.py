"""ResNet-18 and MobileNetV2: every bar beside its figure, from the files of this folder and of ../tiny_imagenet.

python benchmarks/imagenet/show.py            # prints it
python benchmarks/imagenet/show.py --write    # writes it into docs/imagenet.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from haloc.files import read_json, replacing

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import console

HERE = Path(__file__).resolve().parent
TINY, SPEED = HERE.parent / "tiny_imagenet" / "results", HERE / "speed"
PAGE = HERE.parents[1] / "docs" / "imagenet.md"
END = "<!-- end -->"
TITLES = {"resnet18": "ResNet-18", "mobilenet_v2": "MobileNetV2", "mobilenetv2": "MobileNetV2"}
#: Top-1 that has to be reached without training, with this share of the multiply-adds.
BARS = {"resnet18-70": 69.0, "resnet18-50": 66.0, "mobilenet_v2-narrow-85": 70.0}
#: On Tiny-ImageNet: points that may be lost, and shares of multiply-adds and parameters that may be left.
TINY_BARS = {"resnet18": (0.0, 0.3384, 0.3636), "mobilenetv2": (0.9, 0.7516, 0.5997)}
#: Networks that lose nothing on Tiny-ImageNet; the faster of them is the one for a target.
LOSSLESS = ("resnet18-haloc", "resnet18-half")
#: How much faster than the dense network that one has to be; on all other targets not slower.
SPEED_BARS = {"cpu:onnxruntime:b1": 2.0, "cuda:graph:fp32:b1": 1.46, "cuda:graph:fp32:b128": 1.46}
SPEED_BARS |= {"cuda:compile:fp16:b128:nhwc": 1.1}
#: How far a predicted latency may be from a measured one.
APART = 0.05

Row = tuple[str, ...]


@dataclass(frozen=True)
class Sheet:
    """A table of the page, between two marks."""

    mark: str
    title: str
    columns: Row
    rows: Callable[[], list[Row]]

    @property
    def start(self) -> str:
        return f"<!-- {self.mark} -->\n"

    def written(self) -> str:
        words = [column in WORDS for column in self.columns]
        lines = [self.columns, tuple("---" if word else "--:" for word in words), *self.rows()]
        return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


#: Columns that hold no numbers.
WORDS = ("network", "how", "bar", "target", "plan", "method")


def held(holds: bool) -> str:
    return "held" if holds else "MISSED"


# --- without labels or training -----------------------------------------------------------------------------------


def untrained() -> list[Row]:
    """Dense networks and, from the largest to the smallest, what became of them."""
    found, rows = read_json(HERE / "results.json"), []
    for network, dense in found["dense"].items():
        rows.append((TITLES[network], "", "100%", "100%", f"{dense:.2f}%", "", ""))
        own = [(name, row) for name, row in found["rows"].items() if row["network"] == network]
        for name, row in sorted(own, key=lambda pair: -pair[1]["macs"]):
            cells = (f"{row['macs']:.1%}", f"{row['params']:.1%}", f"{row['top1']:.2f}%", f"{dense - row['top1']:.2f}")
            bar = BARS.get(name)
            said = "" if bar is None else f"≥ {bar:.1f}%: {held(row['top1'] >= bar)}"
            rows.append((TITLES[network], row["how"], *cells, said))
    return rows


# --- Tiny-ImageNet ------------------------------------------------------------------------------------------------


def tiny() -> list[Row]:
    """The bases and what HALOC made of them at the paper's budgets."""
    bases, rows = read_json(TINY / "bases.json"), []
    for network, base in bases.items():
        rows.append((TITLES[network], "100%", "100%", f"{base['epochs']}", f"{base['top1']:.2f}%", "", ""))
        for name in (network, f"{network}-half"):
            path = TINY / f"{name}.json"
            if path.exists():
                rows.append(_trained(network, base, read_json(path)))
    return rows


def _trained(network: str, base: dict[str, Any], found: dict[str, Any]) -> Row:
    lost, macs, params = TINY_BARS[network]
    top1 = sum(found["top1"]) / len(found["top1"])
    shares = found["macs"] / base["macs"], found["params"] / base["params"]
    # A network beyond the paper's budgets has no bar.
    fits = shares[0] <= macs and shares[1] <= params
    bar = f"at most {lost:.1f} lost: {held(base['top1'] - top1 <= lost)}" if fits else ""
    cells = (*(f"{share:.1%}" for share in shares), f"{found['epochs']}", f"{top1:.2f}%")
    return (TITLES[network], *cells, f"{base['top1'] - top1:+.2f}", bar)


#: What is of HALOC itself; all else is compared with it.
OURS = ("haloc", "narrowing")


def methods() -> list[Row]:
    """All methods at the same budget and with the same fine-tuning, the best first, and the network they began with."""
    rows = []
    for network in TINY_BARS:
        path = TINY / f"{network}-methods.json"
        if not path.exists():
            continue
        found = read_json(path)
        ranked = sorted(found["rows"], key=lambda row: -row["figures"]["score"]["after"])
        rows.append((TITLES[network], "", "100%", "100%", f"{found['base']:.2f}%", "", ""))
        for row in ranked:
            score, macs, params = (row["figures"][name] for name in ("score", "macs", "params"))
            shares = (f"{each['after'] / each['before']:.1%}" for each in (macs, params))
            cells = (row["method"], *shares, f"{score['after']:.2f}%", f"{len(row['seeds'])}")
            rows.append((TITLES[network], *cells, _ahead(row, ranked)))
    return rows


def _ahead(row: dict[str, Any], ranked: list[dict[str, Any]]) -> str:
    """The bar, for the better of what is ours. Who has the plan of another is not ahead of it, whatever a seed says."""
    if row is not next((each for each in ranked if each["method"] in OURS), None):
        return ""
    others = [each for each in ranked if each["method"] not in OURS]
    alike = next((each["method"] for each in others if _plan_of(each) == _plan_of(row)), None)
    if alike is not None:
        return f"ahead of the {len(others)} others: MISSED, it has the plan of {alike}"
    best = max(each["figures"]["score"]["after"] for each in others)
    return f"ahead of the {len(others)} others: {held(row['figures']['score']['after'] > best)}"


def _plan_of(row: dict[str, Any]) -> Any:
    """The plan of a row, if it is kept; one that is not is like no other."""
    path = TINY.parent / "plans" / f"{row['name']}.json"
    return read_json(path) if path.exists() else row["name"]


def beyond() -> list[Row]:
    """Transformers and what looks like them, without training."""
    rows = []
    for found in read_json(TINY / "beyond.json").values():
        rows.append((found["title"], "", "100%", f"{found['top1']:.2f}%", ""))
        for row in found["rows"]:
            lost = f"{found['top1'] - row['top1']:+.2f}"
            rows.append((found["title"], row["how"], f"{row['macs']:.0%}", f"{row['top1']:.2f}%", lost))
    return rows


# --- speed --------------------------------------------------------------------------------------------------------


def speed() -> list[Row]:
    """What the clock says of plans, target by target; of a chip that nobody has, what its model says."""
    rows = []
    for row in _timed():
        told = row.get("latency_ms") if "measured_ms" in row else None
        figures = row.get("measured_ms", row.get("latency_ms"))
        dense, plan = figures["dense"][0], figures["plan"][0]
        ahead = "" if told is None else f"{told['plan'][0] / plan - 1:+.1%}"
        cells = (TITLES[row["network"]], str(row["size"]), row["plan"], row["target"], f"{dense:.3f}", f"{plan:.3f}")
        rows.append((*cells, f"{dense / plan:.2f}×", ahead, _verdict(row, dense / plan, told)))
    return rows


def _timed() -> Iterator[dict[str, Any]]:
    for path in sorted(SPEED.glob("*.json")):
        yield from read_json(path)["rows"]


def _fastest(row: dict[str, Any]) -> float:
    """How much faster the fastest of the networks is that lose nothing, on the target and for the images of a row."""
    alike = (each for each in _timed() if (each["target"], each["size"]) == (row["target"], row["size"]))
    pairs = (each.get("measured_ms", each.get("latency_ms")) for each in alike if each["plan"] in LOSSLESS)
    return max(pair["dense"][0] / pair["plan"][0] for pair in pairs)


def _verdict(row: dict[str, Any], ratio: float, told: Any) -> str:
    said = []
    if row["plan"] in LOSSLESS and ratio == _fastest(row):
        bar = SPEED_BARS.get(row["target"], 1.0)
        said.append(f"≥ {bar:.2f}×: {held(ratio >= bar)}")
    if told is not None:
        apart = abs(told["plan"][0] / row["measured_ms"]["plan"][0] - 1)
        said.append(f"predicted within {APART:.0%}: {held(apart <= APART)}")
    return "; ".join(said)


SHEETS = (
    Sheet(
        "figures",
        "without labels or training",
        ("network", "how", "multiply-adds left", "parameters left", "top-1", "lost", "bar"),
        untrained,
    ),
    Sheet(
        "tiny",
        "Tiny-ImageNet, trained",
        ("network", "multiply-adds left", "parameters left", "epochs", "top-1", "lost", "bar"),
        tiny,
    ),
    Sheet(
        "methods",
        "Tiny-ImageNet, all methods",
        ("network", "method", "multiply-adds left", "parameters left", "top-1", "seeds", "bar"),
        methods,
    ),
    Sheet(
        "beyond",
        "beyond CNNs, without training, on Tiny-ImageNet",
        ("network", "how", "multiply-adds left", "top-1", "lost"),
        beyond,
    ),
    Sheet(
        "speed",
        "speed",
        ("network", "image", "plan", "target", "dense ms", "ms", "faster", "predicted", "bar"),
        speed,
    ),
)


def page_with(text: str) -> str:
    """The page with these figures."""
    for sheet in SHEETS:
        head, found, rest = text.partition(sheet.start)
        if not found:
            raise SystemExit(f"{PAGE} has no line {sheet.start!r}")
        text = f"{head}{sheet.start}\n{sheet.written()}\n{END}{rest.partition(END)[2]}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into the page")
    if parser.parse_args().write:
        text = page_with(PAGE.read_text(encoding="utf-8"))
        with replacing(PAGE) as temporary:
            temporary.write_text(text, encoding="utf-8")
    for sheet in SHEETS:
        table = Table(*sheet.columns, title=sheet.title)
        for row in sheet.rows():
            table.add_row(*row)
        console.print(table)


if __name__ == "__main__":
    main()
