"""Every bar of trust beside its figure, from committed JSON: kills, disks, workers, files, networks, long use.

    python benchmarks/trust/show.py

Nothing is measured here. It fails where a bar does not hold or something has not been measured.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from haloc.files import read_json

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import console

HERE = Path(__file__).resolve().parent
FAULTS = HERE.parent / "faults"
WRONG = "SILENTLY WRONG"


@dataclass(frozen=True)
class Bar:
    """What is to hold, what was measured, and whether that is enough."""

    text: str
    figure: str
    held: bool


def kill_bars(found: Any) -> list[Bar]:
    damaged = sum(len(verb["damaged"]) + len(verb["traces"]) for verb in found["verbs"].values())
    return [
        Bar("kills ≥ 100", str(found["kills"]), found["kills"] >= 100),
        Bar("runs that were killed / that came to the same result", f"{found['runs']} / {found['survived']}",
            found["runs"] == found["survived"]),
        Bar("kills / with something lost", f"{found['kills']} / {found['lost']}", found["lost"] == 0),
        Bar("kills / files damaged or left behind", f"{found['kills']} / {damaged}", damaged == 0),
    ]  # fmt: skip


def disk_bars(found: Any) -> list[Bar]:
    verbs = {name: verb for name, verb in found.items() if name != "machine"}
    full, same = (sum(counts) for counts in zip(*((len(v["full"]), v["same"]) for v in verbs.values()), strict=True))
    wrong = sum(len(verb["wrong"]) for verb in verbs.values())
    return [
        Bar("full disks / gone on from to the same result", f"{full} / {same}", full == same),
        Bar("full and read-only disks / with a complaint", f"{full + len(verbs)} / {wrong}", wrong == 0),
    ]


def worker_bars(found: Any) -> list[Bar]:
    cases = found["cases"]
    slowest, orphans = max(case["seconds"] for case in cases), sum(case["orphans"] for case in cases)
    same = sum(case["same"] for case in cases)
    return [
        Bar("a worker dies: the others stop within 60 s", f"{slowest:.1f} s at most", slowest <= 60),
        Bar("workers that died / runs that went on to the same result", f"{len(cases)} / {same}", len(cases) == same),
        Bar("workers that died / processes left behind", f"{len(cases)} / {orphans}", orphans == 0),
    ]


def fuzz_bars(found: Any) -> list[Bar]:
    return [
        Bar(f"wrong files, {engine} / crashes", f"{run['inputs']:,} / {run['crashes']}", run["crashes"] == 0)
        for engine, run in found.items()
    ]


def network_bars(found: Any) -> list[Bar]:
    tried, wrong = len(found["networks"]), found["counts"].get(WRONG, 0)
    odd = sum(row["verdict"] != row["expected"].split(":")[0] for row in found["networks"])
    return [
        Bar("strange networks / silently wrong", f"{tried} / {wrong}", wrong == 0),
        Bar("strange networks / with another verdict than expected", f"{tried} / {odd}", odd == 0),
    ]


def long_bars(found: Any) -> list[Bar]:
    rows, slowest = found["table"], max(row["solve_s"] for row in found["solve"] if row["layers"] == 1000)
    exact = all(row["gap"] == 0 and row["holds"] for row in found["solve"])
    grown = max(found[part]["bytes_per_100"] for part in ("apply", "measure")) / 2**20
    cycles = min(found[part]["cycles"] for part in ("apply", "measure"))
    return [
        Bar("1,000 cycles of apply and of measure: memory grows by < 1 MB in 100",
            f"{cycles} cycles, {grown:.4f} MB", cycles >= 1000 and grown < 1),
        Bar("hooks left behind", str(found["apply"]["hooks_left"]), found["apply"]["hooks_left"] == 0),
        Bar("a table of 20,000 rows loads in < 1 s", f"{rows['load_s']:.2f} s", rows["load_s"] < 1),
        Bar("… and costs < 100 MB", f"{rows['peak_mb']:.0f} MB", rows["peak_mb"] < 100),
        Bar("1,000 layers × 20 candidates, exactly, in < 10 s", f"{slowest:.1f} s, gap 0", exact and slowest < 10),
    ]  # fmt: skip


PARTS = {
    FAULTS / "kill.json": kill_bars,
    FAULTS / "disk.json": disk_bars,
    FAULTS / "workers.json": worker_bars,
    HERE / "fuzz.json": fuzz_bars,
    HERE / "networks.json": network_bars,
    HERE / "long_use.json": long_bars,
}


def bars() -> list[Bar]:
    """All of them; what was not measured does not hold."""
    missing = [Bar(path.stem, "not measured", held=False) for path in PARTS if not path.is_file()]
    return [bar for path, part in PARTS.items() if path.is_file() for bar in part(read_json(path))] + missing


def main() -> int:
    table = Table("bar", "measured", "verdict", title="trust")
    for bar in bars():
        table.add_row(bar.text, bar.figure, "held" if bar.held else "[red]MISSED[/]")
    console.print(table)
    return int(not all(bar.held for bar in bars()))


if __name__ == "__main__":
    sys.exit(main())
