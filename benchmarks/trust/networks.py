"""What becomes of strange networks and of hard numbers: works, left alone with a reason, refused, or SILENTLY WRONG.

python benchmarks/trust/networks.py                 # all of them, and networks.json beside this file
python benchmarks/trust/networks.py --only LoRA     # those whose name has the word; nothing is written
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from network_checks import WRONG, Case, Finding, examine
from network_numbers import NUMBERS
from network_table import STRUCTURES
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import console, save

CASES: tuple[Case, ...] = (*STRUCTURES, *NUMBERS)


def main() -> int:
    """Runs the cases and prints the table; fails where something is silently wrong or not as expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a word of the names")
    chosen = parser.parse_args().only
    logging.disable(logging.WARNING)
    found = [examine(case) for case in CASES if chosen in case.name]
    show(found)
    if not chosen:
        counts = dict(Counter(finding.verdict for finding in found))
        save(__file__, {"counts": counts, "networks": [asdict(finding) for finding in found]})
    return int(any(not finding.as_expected for finding in found))


def show(found: list[Finding]) -> None:
    """Prints the table."""
    table = Table("network", "verdict", "open layers", "reason, message or what else was done", "s")
    for finding in found:
        colour = "red" if finding.verdict == WRONG or not finding.as_expected else "green"
        row = (finding.name, f"[{colour}]{finding.verdict}[/]", str(finding.open_layers), finding.detail[:160])
        table.add_row(*row, f"{finding.seconds:.1f}")
    console.print(table)
    console.print(", ".join(f"{count} {verdict}" for verdict, count in Counter(f.verdict for f in found).items()))


if __name__ == "__main__":
    sys.exit(main())
