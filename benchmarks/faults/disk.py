"""Every verb that keeps state on a disk that is full at some point, and on one that is read-only.

`python benchmarks/faults/disk.py` prints a table and writes `disk.json`. It mounts small file systems in memory, which
takes root; the disk of a run is made larger when the run has failed, and the same command goes on.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from common import console, save, verdict
from work import COMMANDS, FORKED, PACKAGES, damaged, ended, outcome, prepare, started, timed, traces

from haloc.files import read_json

#: Sizes of disks in kB, until one is large enough.
SIZES = (4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 192, 256, 512)


@dataclass
class Tally:
    """What became of one verb.

    Attributes:
        full: Disks, by size in kB, that were too small, each with what was said.
        wrong: Of those, where it was not one sentence that names a file, or something was damaged or left behind.
        same: Runs that went on, when there was room, to the result of the undisturbed run.
        read_only: What is said on a disk that is read-only.
    """

    full: dict[int, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    same: int = 0
    read_only: str = ""

    @property
    def sound(self) -> bool:
        return bool(self.full) and not self.wrong and self.same == len(self.full) and "Read-only" in self.read_only


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verbs", nargs="+", default=list(COMMANDS), choices=list(COMMANDS))
    options = parser.parse_args()
    FORKED.set_forkserver_preload(PACKAGES)
    with tempfile.TemporaryDirectory() as scratch:
        found = {verb: tried(verb, Path(scratch) / verb) for verb in options.verbs}
    path = Path(__file__).with_suffix(".json")
    before = {verb: told for verb, told in read_json(path).items() if verb in COMMANDS} if path.exists() else {}
    save(__file__, before | {verb: asdict(tally) for verb, tally in found.items()})
    show(found)


def tried(verb: str, scratch: Path) -> Tally:
    tally, (_, expected) = Tally(), timed(verb, scratch / "undisturbed")
    command = (*COMMANDS[verb][:-1], f"disk/{COMMANDS[verb][-1]}")
    for size in SIZES:
        folder = prepare(scratch / str(size))
        with mounted(folder / "disk", f"size={size}k") as disk:
            code = ended(started(command, folder))
            if code == 0:
                break
            said = (folder / "said.txt").read_text()
            tally.full[size] = said.strip().splitlines()[-1]
            tally.wrong += [f"{size} kB: {what}" for what in complaints(code, said, disk)]
            subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
            code = ended(started(command, folder))
            if code:
                tally.wrong.append(f"{size} kB: it does not go on: {(folder / 'said.txt').read_text()[-300:]}")
            else:
                tally.same += outcome(verb, disk) == expected
    folder = prepare(scratch / "read-only")
    with mounted(folder / "disk", "ro"):
        code = ended(started(command, folder))
        said = (folder / "said.txt").read_text()
        tally.read_only = said.strip().splitlines()[-1]
        tally.wrong += [f"read-only: {what}" for what in complaints(code, said, folder / "disk")]
    print(verb, "sound" if tally.sound else tally)
    return tally


def complaints(code: int, said: str, disk: Path) -> list[str]:
    """What is wrong with how a run ended."""
    last = said.strip().splitlines()[-1]
    found = [f"exit code {code}"] if code != 1 else []
    found += ["a traceback"] if "Traceback" in said else []
    found += (
        [f"no sentence that names the file: {last}"] if not last.startswith("haloc: ") or "disk" not in last else []
    )
    found += [f"damaged: {name}" for name in damaged(disk)]
    return found + [f"left: {name}" for name in traces(disk) if not name.endswith(".rows")]


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A file system in memory."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=False).returncode:
        sys.exit("this benchmark mounts small file systems, which takes root; run it where you are")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def show(found: dict[str, Tally]) -> None:
    table = Table(title="disks that are full at some point, and read-only ones")
    for column in ("verb", "full disks, kB", "went on to the same", "complaints", "bar"):
        table.add_column(column)
    for verb, tally in found.items():
        table.add_row(
            verb, ", ".join(map(str, tally.full)), str(tally.same), str(len(tally.wrong)), verdict(tally.sound)
        )
    console.print(table)


if __name__ == "__main__":
    main()
