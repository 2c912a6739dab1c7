"""The whole flow on the ResNet-20 that comes with HALOC, for this machine's CPU: what ``make demo`` runs.

It is ``haloc compress recipes/demo.toml`` and nothing else. CIFAR-10 is found in the cache or downloaded once; where it
cannot be had, the digits serve (see digits.py).
"""

from __future__ import annotations

import sys
from pathlib import Path

import digits
from rich.console import Console

from haloc import cli
from haloc.errors import DataError
from haloc.zoo import load_data

RECIPE = Path(__file__).parent.parent / "recipes" / "demo.toml"


def main() -> None:
    """Makes sure of the data, then compresses."""
    console = Console(stderr=True)
    try:
        with console.status("reading CIFAR-10 (downloaded the first time, some 140 MB)"):
            load_data("cifar10")
    except DataError as error:
        console.print(f"CIFAR-10 cannot be had here, so the digits serve: {error}", markup=False)
        digits.main()
        return
    sys.argv = ["haloc", "compress", str(RECIPE), "--output", "runs/demo", *sys.argv[1:]]
    cli.main()


if __name__ == "__main__":
    main()
