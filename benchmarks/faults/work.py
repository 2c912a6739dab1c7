"""Small work for every verb that keeps state, processes that do it and die, and what is looked at afterwards."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

#: Forks of a server that has imported what takes seconds: what is killed is the work, not the imports.
FORKED = multiprocessing.get_context("forkserver")
PACKAGES = ["haloc.cli", "haloc.pipeline.flow", "haloc.zoo.digits", "sklearn.datasets", "work"]

NETWORK = """
from torch import nn
def make(classes=10):
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2),
                         nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(144, classes))
"""
PLAN = {"kind": "haloc-plan", "format": 1, "layers": {"3": {"form": "tucker2", "rank_out": 8, "rank_in": 4}}}
RECIPE = """
[model]
name = "fault_network:make"
weights = "dense.safetensors"
inputs = ["1x1x8x8"]
[data]
name = "digits"
batch_size = 128
[budget]
macs = "60%"
[target]
name = "cpu"
networks = 2
[space]
round_to = 4
[search]
method = "sensitivity"
activations = 64
[recalibrate]
images = 128
[reconstruct]
epochs = 1
images = 64
[finetune]
epochs = 4
lr = 0.02
warmup_epochs = 0
save_every_s = 0
[export]
formats = []
"""
_MODEL = ("fault_network:make", "--weights", "dense.safetensors")
_BRIEF = ("--data", "digits", "--batch-size", "128", "--save-every-s", "0", "--warmup-epochs", "0")

COMMANDS: dict[str, tuple[str, ...]] = {
    "measure": ("measure", *_MODEL, "--input", "1x1x8x8", "--round-to", "4", "--networks", "2", "-o", "table.json"),
    "search": ("search", *_MODEL, *_BRIEF, "--method", "haloc", "--budget", "60%", "--round-to", "4", "--epochs", "8",
               "--activations", "64", "-o", "run"),
    "finetune": ("finetune", *_MODEL, *_BRIEF, "--plan", "plan.json", "--epochs", "8", "--calibrate", "64",
                 "-o", "run"),
    "train": ("train", _MODEL[0], *_BRIEF, "--epochs", "10", "--ema", "0.9", "-o", "run"),
    "compress": ("compress", "recipe.toml", "-o", "run"),
}  # fmt: skip


def prepare(folder: Path) -> Path:
    """A folder with what the commands need."""
    folder.mkdir(parents=True)
    (folder / "fault_network.py").write_text(NETWORK)
    (folder / "plan.json").write_text(json.dumps(PLAN))
    (folder / "recipe.toml").write_text(RECIPE)
    names: dict[str, Any] = {}
    exec(NETWORK, names)
    torch.manual_seed(0)
    save_file(names["make"]().state_dict(), folder / "dense.safetensors")
    return folder


# --- processes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Death:
    """A process that ends itself inside a write.

    Attributes:
        at: At which write, counted from 1.
        how: Before the file is handed to the disk with half of its content, before it is put in place, or right after.
    """

    at: int
    how: str


#: The ways to die in a write.
WAYS = ("torn", "before", "after")


def started(
    command: tuple[str, ...], folder: Path, prelude: Callable[..., None] | None = None, *args: Any
) -> BaseProcess:
    """A process group of its own that runs a command of haloc in a folder; what it says is in ``said.txt``."""
    process = FORKED.Process(target=_run, args=(command, folder, prelude, args))
    process.start()
    return process


def ended(process: BaseProcess, seconds: float = 300) -> int:
    """The exit code of a process that has come to its end."""
    process.join(seconds)
    if process.exitcode is None:
        killed(process)
        raise TimeoutError("a process did not end")
    return process.exitcode


def killed(process: BaseProcess) -> None:
    """Ends a process and all that it started, at once."""
    assert process.pid is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has not come as far as to have a group
        process.kill()
    process.join()


def _run(command: tuple[str, ...], folder: Path, prelude: Callable[..., None] | None, args: tuple[Any, ...]) -> None:
    os.setsid()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    for stream in (1, 2):
        os.dup2(os.open("said.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
    torch.set_num_threads(1)
    hurry()
    if prelude is not None:
        prelude(*args)
    sys.argv = ["haloc", *command]
    from haloc.cli import main

    main()


def hurry() -> None:
    """Clocks that look briefly: what is measured does not matter. Training looks up after every few steps."""
    import haloc.training.loop
    from haloc.cost import sampling

    brief = sampling.Schedule(4, 4, 0.0, 0.01, 2)
    sampling.SCHEDULES.update(dict.fromkeys(sampling.SCHEDULES, brief))
    haloc.training.loop.STRETCH = 4


def dying(death: Death) -> None:
    """Makes this process end itself in one of its writes."""
    count, flush, put = [0], os.fsync, os.replace

    def fsync(handle: int) -> None:
        if death.how == "torn" and _is_time(count, death.at):
            path = os.readlink(f"/proc/self/fd/{handle}")
            size = os.path.getsize(path)
            # A log that is added to loses what is being added, a file that is being made any part of it.
            os.truncate(path, size - 5 if path.endswith(".rows") else size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        flush(handle)

    def replace(source: Any, target: Any, **more: Any) -> None:
        mine = death.how != "torn" and _is_time(count, death.at)
        if not mine or death.how == "after":
            put(source, target, **more)
        if mine:
            os.kill(os.getpid(), signal.SIGKILL)

    os.fsync, os.replace = fsync, replace


def _is_time(count: list[int], at: int) -> bool:
    count[0] += 1
    return count[0] == at


# --- what is looked at ------------------------------------------------------------------------------------------------


def damaged(folder: Path) -> list[str]:
    """The files under a folder that cannot be read as what their names say; those that were being written are none."""
    return [str(path) for path in sorted(folder.rglob("*")) if path.is_file() and not _readable(path)]


def _readable(path: Path) -> bool:
    if path.name.endswith(".part") or ".unfinished" in str(path):
        return True
    try:
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".safetensors":
            load_file(path)
        elif path.suffix == ".jsonl":
            for line in path.read_text().split("\n")[:-1]:
                json.loads(line)
    except (ValueError, SafetensorError, OSError):
        return False
    return True


def traces(folder: Path) -> list[str]:
    """What only a process that was killed leaves behind."""
    names = (".part", ".lock", ".rows")
    found = (path for path in folder.rglob("*") if path.name.endswith(names) or ".unfinished" in path.name)
    return [str(path.relative_to(folder)) for path in found]


def progress(verb: str, folder: Path) -> int:
    """How much is done and kept, as a number that must not fall."""
    if verb == "measure":
        networks = _rows(folder / "table.network.json", "timings")
        return 10**6 * _rows(folder / "table.json", "rows") + 10**4 * networks + _visits(folder)
    if verb == "compress":
        stamps = folder / "run/stages.json"
        stages = json.loads(stamps.read_text())["stages"] if stamps.exists() else {}
        return 10**6 * sum(stage["done"] for stage in stages.values()) + _steps(folder / "run/finetune")
    return _steps(folder / "run")


def _steps(run: Path) -> int:
    return max((int(path.name.removeprefix("step-")) for path in run.glob("checkpoints/step-*")), default=0)


def _rows(path: Path, name: str) -> int:
    return len(json.loads(path.read_text())[name]) if path.exists() else 0


def _visits(folder: Path) -> int:
    """Of rows that are in no table yet."""
    open_files = [path for path in folder.glob("*.rows") if not path.with_suffix("").exists()]
    return sum(_whole(line) for path in open_files for line in path.read_text().split("\n")[1:])


def _whole(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def outcome(verb: str, folder: Path) -> Any:
    """What must be the same whatever happened on the way; figures of clocks are not."""
    if verb == "measure":
        table = json.loads((folder / "table.json").read_text())
        networks = json.loads((folder / "table.network.json").read_text())
        keys = [json.dumps([row["shape"], row["form"]], sort_keys=True) for row in table["rows"]]
        return sorted(keys), [timing["plan"] for timing in networks["timings"]]
    run = folder / "run"
    if verb == "search":
        evidence = json.loads((run / "search.json").read_text())
        return json.loads((run / "plan.json").read_text()), evidence["losses"], _log(run)
    if verb == "compress":
        plan, figures = (json.loads((run / name).read_text()) for name in ("plan.json", "report.json"))
        return plan, figures["verdict"]["met"], _bits(run / "model/weights.safetensors"), _log(run / "finetune")
    return _bits(run / "weights.safetensors"), _log(run)


def _bits(path: Path) -> dict[str, list[Any]]:
    return {name: tensor.tolist() for name, tensor in load_file(path).items()}


def _log(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in ("seconds", "images_per_s")} for row in rows]


def timed(verb: str, folder: Path) -> tuple[float, Any]:
    """How long a command takes that nobody disturbs, and what comes of it."""
    begun = time.perf_counter()
    code = ended(started(COMMANDS[verb], prepare(folder)))
    if code:
        raise RuntimeError(f"{verb} ended with {code}: {said(folder)}")
    return time.perf_counter() - begun, outcome(verb, folder)


def said(folder: Path) -> str:
    """The end of what processes said in a folder."""
    return (folder / "said.txt").read_text()[-800:]
