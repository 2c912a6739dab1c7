"""Two processes that train together, one of which dies: how soon the other stops, what it says, how the run goes on.

`python benchmarks/faults/workers.py` prints a table and writes `workers.json`. With `torchrun` its agent looks after
the processes; by themselves, as a cluster may start them, they have nobody.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from common import console, save, verdict
from work import NETWORK, outcome, prepare

#: All have to be gone after so many seconds.
BAR_S = 60.0
#: A network that breaks in one of the processes, after so many calls as the environment says.
BREAKING = """
import os
from torch import nn
class Net(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net, self.calls = net, 0
    def forward(self, x):
        self.calls += 1
        if os.environ.get("BREAK") == os.environ.get("RANK") and self.calls == 60:
            raise RuntimeError("a worker breaks")
        return self.net(x)
def breaking(classes=10):
    return Net(make(classes))
"""
COMMAND = [
    "-m",
    "haloc",
    "train",
    "fault_network:breaking",
    "--data",
    "digits",
    "--batch-size",
    "128",
    "--epochs",
    "40",
]
COMMAND += ["--warmup-epochs", "0", "--save-every-s", "0", "--output", "run"]


@dataclass(frozen=True)
class Case:
    """How a worker dies.

    Attributes:
        launcher: Who started the processes.
        rank: Which of the two dies.
        how: Whether it is killed or raises an error.
    """

    launcher: str
    rank: int
    how: str


@dataclass(frozen=True)
class Found:
    """What became of it.

    Attributes:
        seconds: From the death until all processes were gone.
        told: What the one that was left said.
        orphans: Processes that stayed.
        same: Whether the run, started again, came to the same weights as an undisturbed one.
    """

    seconds: float
    told: str
    orphans: int
    same: bool

    @property
    def sound(self) -> bool:
        return self.seconds < BAR_S and not self.orphans and self.same and "another process of this run" in self.told


CASES = [Case("torchrun", rank, how) for rank in (1, 0) for how in ("killed", "raises")]
CASES += [Case("by themselves", rank, "killed") for rank in (1, 0)]


def main() -> None:
    found: list[tuple[Case, Found]] = []
    with tempfile.TemporaryDirectory() as scratch:
        whole = _prepared(Path(scratch) / "undisturbed")
        assert _finish(whole) == 0, (whole / "said.txt").read_text()
        expected = outcome("train", whole)
        for number, case in enumerate(CASES):
            found.append((case, tried(case, _prepared(Path(scratch) / str(number)), expected)))
            print(*found[-1])
    save(__file__, {"cases": [asdict(case) | asdict(result) for case, result in found], "bar_s": BAR_S})
    show(found)


def tried(case: Case, folder: Path, expected: Any) -> Found:
    broken = {"BREAK": str(case.rank)} if case.how == "raises" else {}
    launched = _launch(case.launcher, folder, broken)
    workers = _workers(launched, folder, case)
    begun = time.monotonic()
    if case.how == "killed":
        os.kill(workers[case.rank], signal.SIGKILL)
    for process in launched:
        process.wait(600)
    seconds = time.monotonic() - begun
    told = (folder / "said.txt").read_text()
    orphans = sum(_is_alive(worker) for worker in workers)
    for worker in filter(_is_alive, workers):
        os.kill(worker, signal.SIGKILL)
    again = _finish(folder)
    line = next((line for line in told.splitlines() if "another process of this run" in line), told[-300:])
    return Found(seconds, line, orphans, again == 0 and outcome("train", folder) == expected)


def _prepared(folder: Path) -> Path:
    prepare(folder)
    (folder / "fault_network.py").write_text(NETWORK + BREAKING)
    return folder


def _launch(launcher: str, folder: Path, more: dict[str, str]) -> list[subprocess.Popen]:
    said = (folder / "said.txt").open("a")
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | more
    told: dict[str, Any] = {"cwd": folder, "stdout": said, "stderr": said, "start_new_session": True}
    if launcher == "torchrun":
        run = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", _free_port()]
        return [subprocess.Popen([*run, *COMMAND], env=environment, **told)]
    port = _free_port()
    both = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} for rank in range(2)]  # fmt: skip
    return [subprocess.Popen([sys.executable, *COMMAND], env=environment | own, **told) for own in both]


def _free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def _workers(launched: list[subprocess.Popen], folder: Path, case: Case) -> list[int]:
    """The processes by rank, as soon as they have trained for a while, or as one of them has gone."""
    workers: dict[int, int] = {}
    while True:
        for pid in [process.pid for process in launched] + [c for p in launched for c in _children(p.pid)]:
            rank = _rank(pid)
            if rank is not None:
                workers[rank] = pid
        steps = [int(path.name.removeprefix("step-")) for path in folder.glob("run/checkpoints/step-*")]
        gone = len(workers) == 2 and not all(map(_is_alive, workers.values()))
        if (case.how == "raises" and gone) or (
            case.how == "killed" and len(workers) == 2 and max(steps, default=0) > 60
        ):
            return [workers[0], workers[1]]
        if any(process.poll() is not None for process in launched):
            return [workers.get(0, 0), workers.get(1, 0)]
        time.sleep(0.05)


def _children(pid: int) -> list[int]:
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []


def _rank(pid: int) -> int | None:
    try:
        names = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((int(name[5:]) for name in names if name.startswith(b"RANK=")), None)


def _is_alive(pid: int) -> bool:
    try:
        return pid > 0 and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _finish(folder: Path) -> int:
    (process,) = _launch("torchrun", folder, {})
    return process.wait(600)


def show(found: list[tuple[Case, Found]]) -> None:
    table = Table(title="one of two processes dies while they train together")
    for column in (
        "started by",
        "rank that dies",
        "how",
        "s until all are gone",
        "orphans",
        "goes on to the same",
        "bar",
    ):
        table.add_column(column, justify="right")
    for case, result in found:
        same = "yes" if result.same else "NO"
        cells = (case.launcher, case.rank, case.how, f"{result.seconds:.1f}", result.orphans, same)
        table.add_row(*map(str, cells), verdict(result.sound))
    console.print(table)


if __name__ == "__main__":
    main()
