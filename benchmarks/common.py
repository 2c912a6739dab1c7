"""What the benchmarks share: where weights lie, and how results are kept and shown."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import torch
from rich.console import Console

from haloc.files import write_json

console = Console(width=None if sys.stdout.isatty() else 140)


def weights_file(folder: Path, name: str) -> Path:
    """The file of that name, or a sentence saying what to do."""
    path = folder / name
    if not path.is_file():
        sys.exit(f"this benchmark needs {name}; put it into {folder}/ or name its folder: make bench WEIGHTS=folder")
    return path


def machine() -> dict:
    """What results were measured on."""
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    return {"cpu": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), **versions}


def save(script: str, results: dict) -> None:
    """Writes results as JSON beside the script, with what they were measured on."""
    write_json(Path(script).with_suffix(".json"), {"machine": machine(), **results})


def verdict(passed: bool) -> str:
    """How a bar reads in a table."""
    return "[green]held[/]" if passed else "[red]MISSED[/]"
