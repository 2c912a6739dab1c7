"""The machine a table was measured on, and the kit's own main.

Part of the measuring kit (see `kit`): plain Python 3.8, rows and targets are dicts, packages are imported where used.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from typing import Any

from haloc.cost.runtimes import SESSIONS, TargetDict, torch_settings
from haloc.cost.sampling import Journal, measure_rows, schedule_of

#: What changes from one minute to the next on the same machine.
_MOVING = ("clock_mhz", "memory_clock_mhz")


def environment(target: TargetDict) -> dict[str, Any]:
    """Device name, driver, library versions and clocks, as far as they can be read."""
    found: dict[str, Any] = {"device": _cpu_name(), "cores": os.cpu_count(), "system": platform.platform(terse=True)}
    found["python"] = platform.python_version()
    package = target["runtime"] if target["runtime"] in SESSIONS else "torch"
    found[package] = __import__(package).__version__.split("-")[0]
    if package == "torch":
        import torch

        found["threads"] = target["threads"] or torch.get_num_threads()
    found.update(_gpu() if target["device"] == "cuda" else {"clock_mhz": _cpu_clock()})
    return found


def identity(target: TargetDict, machine: dict[str, Any]) -> str:
    """What must be equal for samples to belong together."""
    fixed = {key: value for key, value in machine.items() if key not in _MOVING}
    return json.dumps([target, fixed], sort_keys=True)


def _gpu() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with contextlib.suppress(ImportError):
        import torch

        found["device"] = torch.cuda.get_device_name()
        found["cuda"], found["cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
    query = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
    command = ["nvidia-smi", "--query-gpu=" + query, "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
        line = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()[0]
        names = ("driver", "clock_mhz", "clock_max_mhz", "memory_clock_mhz", "power_limit_w")
        found.update(zip(names, (part.strip() for part in line.split(","))))
    return found


def _cpu_name() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpu_clock() -> float | None:
    clock = _cpuinfo("cpu MHz")
    return float(clock) if clock else None


def _cpuinfo(key: str) -> str | None:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith(key):
                return line.split(":", 1)[1].strip()
    return None


def table_dict(
    rows: list[dict[str, Any]], target: TargetDict, results: dict[str, dict[str, Any]], machine: dict[str, Any]
) -> dict[str, Any]:
    """The content of a table file."""
    kept = [
        {"shape": row["shape"], "form": row["form"], **results[row["key"]]} for row in rows if row["key"] in results
    ]
    return {"kind": "haloc-table", "format": 1, "target": target, "environment": machine, "rows": kept}


def main(arguments: list[str] | None = None) -> int:
    """Measures the rows of rows.json and writes table.json; started again after a kill it goes on where it was."""
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rows", default=os.path.join(here, "rows.json"), help="the row list (default: %(default)s)")
    parser.add_argument("--output", default=os.path.join(here, "table.json"), help="the table (default: %(default)s)")
    options = parser.parse_args(arguments)
    rows, target = _read_rows(options.rows)
    try:
        machine = environment(target)
    except ImportError as error:
        sys.exit(f"measure: this needs the package {error.name!r}; install it on this machine")
    journal = Journal(options.output + ".rows", identity(target, machine))
    with torch_settings(target):
        results, failures = measure_rows(rows, target, journal, on_visit=_countdown(rows, target, journal))
    _write(options.output, table_dict(rows, target, results, machine))
    journal.forget(set(results))
    sys.stderr.write(f"\nwrote {options.output}: {len(results)} of {len(rows)} rows\n")
    for key, reason in sorted(failures.items()):
        sys.stderr.write(f"not measured: {key}: {reason}\n")
    return 1 if failures else 0


def _read_rows(path: str) -> tuple[list[dict[str, Any]], TargetDict]:
    try:
        with open(path, encoding="utf-8") as file:
            work = json.load(file)
        return work["rows"], work["target"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        sys.exit(f"measure: {path} is not a kit's row list: {error}")


def _countdown(rows: list[dict[str, Any]], target: TargetDict, journal: Journal) -> Any:
    """Writes after every visit how much is left."""
    rounds = schedule_of(target).rounds
    started, fresh, planned, before = time.monotonic(), itertools.count(1), len(rows) * rounds, journal.visits(rounds)

    def show(more: int) -> None:
        done = next(fresh)
        total = max(planned, before + done + more)  # rows that disagree with themselves are visited again
        left = (time.monotonic() - started) / done * (total - before - done)
        sys.stderr.write(f"\r{before + done} of {total} visits, {left:.0f} s left   ")

    return show


def _write(path: str, value: Any) -> None:
    """Whole or not at all."""
    folder = os.path.dirname(os.path.abspath(path))
    handle, temporary = tempfile.mkstemp(dir=folder)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:  # a full disk, say
        os.remove(temporary)
        sys.exit(f"measure: cannot write {path}: {error.strerror or error}; what was measured is kept, start it again")


if __name__ == "__main__":
    sys.exit(main())
