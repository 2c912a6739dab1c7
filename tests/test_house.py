"""The house has one direction: a room imports from its own and from rooms to its left. Nobody waits at the door."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import haloc

ROOMS = ["errors", "files", "locks", "shapes", "forms", "plan", "inventory", "factor", "space", "cost", "training"]
ROOMS += [
    "methods",
    "narrowing",
    "recovery",
    "reconstruction",
    "zoo",
    "artifact",
    "report",
    "pipeline",
    "cli",
    "__main__",
]
SOURCE = Path(haloc.__file__).parent
FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found |= {name.split(".")[1] for name in names if name.startswith("haloc.")}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_rooms_import_from_the_left_only(path):
    own = ROOMS.index(room_of(path))
    assert all(ROOMS.index(room) <= own for room in imported_rooms(path)), imported_rooms(path)


@pytest.mark.parametrize("room", ["errors", "files", "shapes", "forms", "plan", "inventory", "space", "cli"])
def test_rooms_of_plain_values_do_not_wait_for_torch(room):
    check = f"import sys, haloc.{room}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_every_public_name_is_there():
    assert all(getattr(haloc, name) is not None for name in haloc.__all__)
    assert set(haloc.__all__) <= set(dir(haloc))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        haloc.nonsense  # noqa: B018


def test_no_public_name_is_that_of_a_room():
    """Importing a room makes it an attribute of the package, which would hide the function."""
    assert {room.name for room in pkgutil.iter_modules(haloc.__path__)} & set(haloc.__all__) == set()
