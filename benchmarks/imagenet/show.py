"""ResNet-18 and MobileNetV2 without labels or training: every bar beside its figure, from results.json.

python benchmarks/imagenet/show.py            # prints it
python benchmarks/imagenet/show.py --write    # writes it into docs/imagenet.md
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.table import Table

from haloc.files import read_json, replacing

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import console

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "imagenet.md"
START, END = "<!-- figures -->\n", "<!-- end -->"
TITLES = {"resnet18": "ResNet-18", "mobilenet_v2": "MobileNetV2"}
#: Top-1 that has to be reached with this share of the multiply-adds.
BARS = {"resnet18-70": 69.0, "resnet18-50": 66.0, "mobilenet_v2-85": 70.0}
COLUMNS = ("network", "multiply-adds left", "parameters left", "top-1", "lost", "bar")


def rows_of(found: Any) -> list[tuple[str, ...]]:
    """Dense networks and, from the largest to the smallest, what became of them."""
    rows = []
    for network, dense in found["dense"].items():
        rows.append((TITLES[network], "100%", "100%", f"{dense:.2f}%", "", ""))
        own = [(name, row) for name, row in found["rows"].items() if row["network"] == network]
        for name, row in sorted(own, key=lambda pair: -pair[1]["macs"]):
            cells = (f"{row['macs']:.1%}", f"{row['params']:.1%}", f"{row['top1']:.2f}%", f"{dense - row['top1']:.2f}")
            rows.append((TITLES[network], *cells, _verdict(row["top1"], BARS.get(name))))
    return rows


def _verdict(top1: float, bar: float | None) -> str:
    return "" if bar is None else f"≥ {bar:.1f}%: {'held' if top1 >= bar else 'MISSED'}"


def written(rows: list[tuple[str, ...]]) -> str:
    """As a table of the page."""
    lines = [COLUMNS, ("---", "--:", "--:", "--:", "--:", "---"), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def page_with(text: str, rows: list[tuple[str, ...]]) -> str:
    """The page with these figures."""
    head, _, rest = text.partition(START)
    return f"{head}{START}\n{written(rows)}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into the page")
    rows = rows_of(read_json(HERE / "results.json"))
    if parser.parse_args().write:
        text = page_with(PAGE.read_text(encoding="utf-8"), rows)
        with replacing(PAGE) as temporary:
            temporary.write_text(text, encoding="utf-8")
    table = Table(*COLUMNS, title="without labels or training")
    for row in rows:
        table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    main()
