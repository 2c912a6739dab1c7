"""Measure there, search here: a folder with one plain script and the list of rows, for machines without haloc.

The script is put together from the very files that measure here, so both give the same figures. They keep to Python 3.8
and to torch, onnxruntime or OpenVINO, and import from each other only what the joined script has anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from haloc.cost.measure import RowKey, bench_row
from haloc.cost.runtimes import SESSIONS
from haloc.cost.table import Table
from haloc.cost.target import Target
from haloc.errors import FileFormatError, SpecError
from haloc.files import replacing, write_json
from haloc.space import RankSpace

#: The files the script is made of, in the order in which they need each other.
PARTS = ("chains", "runtimes", "sampling", "machine")
SCRIPT, ROWS, TABLE = "measure.py", "rows.json", "table.json"

_HEADER = '''"""Measures how fast layers run on this machine. Needs Python 3.8 or newer and {package}; nothing else.

    python measure.py

Leave the machine alone while it runs. It writes table.json beside this file and shows how long it will take; stopped
and started again it goes on where it was. Take table.json back to where the rows came from and read it in with

    haloc measure --merge table.json --output FILE
"""

from __future__ import annotations

'''


def write_kit(space: RankSpace | Sequence[RowKey], target: Target, folder: str | Path) -> None:
    """Writes the kit's script and row list into a folder.

    Args:
        space: What `rank_space` returned, or the (shape, form) pairs themselves.
        target: What the other machine is to measure.
        folder: Made if it is not there; an earlier kit in it is replaced, its table is not.
    """
    if target.device == "asic":
        raise SpecError("an accelerator is modelled, which can be done here; it needs no kit")
    rows = space.rows() if isinstance(space, RankSpace) else space
    content = {"target": target.to_dict(), "rows": [bench_row(shape, form) for shape, form in rows]}
    write_json(Path(folder) / ROWS, content)
    with replacing(Path(folder) / SCRIPT) as temporary:
        temporary.write_text(script(target), encoding="utf-8")


def script(target: Target) -> str:
    """The kit's script."""
    package = target.runtime if target.runtime in SESSIONS else "torch"
    return _HEADER.format(package=package) + "\n\n".join(_part(name) for name in PARTS)


def _part(name: str) -> str:
    """A file of ours without what ties it to the package."""
    text = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    _, _, code = text.partition("from __future__ import annotations\n")
    return "\n".join(line for line in code.splitlines() if not line.startswith("from haloc.")).strip() + "\n"


def merge_tables(paths: Sequence[str | Path]) -> Table:
    """Reads table files, or kit folders that hold one, and puts their rows together; later files win."""
    if not paths:
        raise SpecError("there is nothing to merge; name at least one table file or kit folder")
    tables = [Table.load(_table_file(Path(path))) for path in paths]
    merged = tables[0]
    for table in tables[1:]:
        merged = merged.merged(table)
    return merged


def _table_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    if not (path / TABLE).exists():
        raise FileFormatError(f"there is no {TABLE} in {path}; run {SCRIPT} of the kit on its machine first")
    return path / TABLE
