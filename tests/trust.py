"""The scripts of benchmarks/trust as modules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

TRUST = Path(__file__).parents[1] / "benchmarks" / "trust"


def load(name: str) -> ModuleType:
    """Imports one, with the others beside it in reach."""
    sys.path.insert(0, str(TRUST))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(TRUST))
