"""Every reader of files on many thousands of wrong files: none may crash, hang, or take memory without end.

    python benchmarks/trust/fuzz.py                              # all readers, about a hundred and fifty thousand files
    python benchmarks/trust/fuzz.py --readers plan,table --share 0.1
    python benchmarks/trust/fuzz.py --engine atheris --readers plan --share 1

Each reader works in a process of its own, with a limit on its memory and somebody who looks at the clock. A file that
is read, or refused with one of HALOC's errors, is fine; anything else is a crash, and the file is kept, once per place
in the code, under ``--keep``. The engine "mutation" changes whole files by what it knows of their format; "atheris" is
guided by what the code does with them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

RESULT = Path(__file__).with_name("fuzz.json")
#: A file may take so many seconds, and the process so much more memory than it began with.
HANG_S, MEMORY_GIB = 10, 2
#: Crashes that are kept of one reader.
MOST_KEPT = 40


class Hang(BaseException):
    """No reader catches it."""


def main() -> int:
    options = _options()
    if options.child:
        return _child(options)
    names = options.readers.split(",") if options.readers else list(_readers())
    unknown = [name for name in names if name not in _readers()]
    if unknown:
        sys.exit(f"fuzz: there is no reader {unknown[0]!r}, only {', '.join(_readers())}")
    if options.engine == "atheris":
        _require_atheris()
    rows = {name: _watched(name, options) for name in names}
    found = {
        "engine": options.engine,
        "seed": options.seed,
        "inputs": sum(row["inputs"] for row in rows.values()),
        "crashes": sum(row["crashes"] for row in rows.values()),
        "seconds": round(sum(row["seconds"] for row in rows.values()), 1),
        "limits": {"seconds": HANG_S, "memory_gib": MEMORY_GIB},
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "readers": rows,
    }
    print(f"{found['inputs']:,} files, {found['crashes']} crashes, {found['seconds']:.0f} s")
    if options.write:
        kept = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        RESULT.write_text(json.dumps(kept | {options.engine: found}, indent=2) + "\n")
    return 1 if found["crashes"] else 0


_PACKAGES = ("haloc", "torch", "safetensors", "pillow", "onnxruntime", "numpy", "atheris")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except Exception:
        return None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readers", default="", help="only these, with commas between them")
    parser.add_argument("--share", type=float, default=1.0, help="of the usual number of files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=("mutation", "atheris"), default="mutation")
    parser.add_argument("--keep", type=Path, default=None, help="a folder for files that crash a reader")
    parser.add_argument("--write", action="store_true", help=f"write the figures to {RESULT.name}")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def _readers() -> Any:
    from tests.strangers.readers import READERS

    return READERS


def _require_atheris() -> None:
    try:
        import atheris  # noqa: F401
    except ImportError:
        sys.exit("fuzz: --engine atheris needs the package 'atheris'; install it, or leave --engine out")


def _watched(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs one reader in a process of its own, and starts it again behind a file that ended it."""
    count = max(1, round(_readers()[name].weight * options.share))
    row: dict[str, Any] = {"inputs": 0, "read": 0, "refused": 0, "crashes": 0, "seconds": 0.0, "peak_mib": 0}
    places: set[str] = set()
    first, started = 0, time.monotonic()
    with tempfile.TemporaryDirectory(dir=_memory_disk()) as scratch:
        state = Path(scratch) / "state.json"
        while first < count:
            command = [sys.executable, __file__, "--child", name, "--first", str(first), "--scratch", scratch]
            command += ["--share", str(options.share), "--seed", str(options.seed), "--engine", options.engine]
            command += [] if options.keep is None else ["--keep", str(options.keep)]
            ended = _run(command, state)
            told = json.loads(state.read_text()) if state.exists() else {"next": count, "inputs": 0}
            for key in ("inputs", "read", "refused", "crashes"):
                row[key] += told.get(key, 0)
            row["peak_mib"] = max(row["peak_mib"], told.get("peak_mib", 0))
            places |= set(told.get("places", []))
            if ended == 0:
                break
            if not told["inputs"]:
                sys.exit(f"fuzz: {name} did not begin")
            row["crashes"] += 1
            places.add(f"the process ended with {ended}")
            first = told["next"] + 1
            _keep_file(options.keep, name, f"ended{ended}", Path(scratch, "input").read_bytes())
            state.unlink(missing_ok=True)
    row["seconds"] = round(time.monotonic() - started, 1)
    said = f"{row['inputs']:7,} files {row['read']:7,} read {row['refused']:7,} refused {row['crashes']:5} crashes"
    print(f"{name:20} {said} {row['peak_mib']:5} MiB more {row['seconds']:6.1f} s", flush=True)
    for place in sorted(places):
        print(f"    {place}")
    return row


def _memory_disk() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _run(command: list[str], state: Path) -> int:
    """Waits for the process as long as it goes on; one that stands still is ended."""
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    before, since = None, time.monotonic()
    while process.poll() is None:
        time.sleep(0.2)
        now = state.with_name("input").stat().st_mtime_ns if state.with_name("input").exists() else None
        if now != before:
            before, since = now, time.monotonic()
        if time.monotonic() - since > (3 * HANG_S if before else 120):
            process.kill()
            process.wait()
            return -signal.SIGALRM
    return process.returncode


def _child(options: argparse.Namespace) -> int:
    """Reads wrong files, one after the other, and keeps account in a file that outlives it."""
    logging.disable(logging.CRITICAL)  # a damaged checkpoint is warned of, thousands of times here
    warnings.simplefilter("ignore")
    with _instrumented(options.engine):
        reader = _readers()[options.child]
        tally = _Tally(reader, options)
        seeds = reader.seeds()
        for seed in seeds:
            tally.read(seed)  # what is whole is read; and what is loaded on first use is there before the limit
    count = max(1, round(reader.weight * options.share))
    if tally.told["read"] != len(seeds):
        print(f"{reader.name}: a whole file is not read: {tally.last}")
        return 3
    tally.told |= {"inputs": 0, "read": 0}
    _limit_memory()
    tally.start()
    if options.engine == "atheris":
        return _guided(reader, seeds, count, tally, options)
    for number in range(options.first, count):
        random = Random(f"{options.seed} {reader.name} {number}")
        tally.told["next"] = number
        tally.read(reader.mutate(random.choice(seeds), random))
    tally.save()
    return 0


def _instrumented(engine: str) -> Any:
    """What is imported inside tells atheris where it goes."""
    if engine != "atheris":
        return nullcontext()
    import atheris

    return atheris.instrument_imports(include=["haloc"])


def _guided(reader: Any, seeds: list[bytes], count: int, tally: _Tally, options: argparse.Namespace) -> int:
    """The same by way of atheris, which keeps files that reach new places and goes on from them."""
    import atheris

    corpus = options.scratch / "corpus"
    corpus.mkdir(exist_ok=True)
    for number, seed in enumerate(seeds):
        (corpus / f"seed{number}").write_bytes(seed)

    def mutated(data: bytes, most: int, seed: int) -> bytes:
        random = Random(seed)
        try:
            made = reader.mutate(data if random.randrange(3) else random.choice(seeds), random)
        except (ValueError, RecursionError):  # no longer a document
            made = atheris.Mutate(data, most)
        return made[:most]

    def one(data: bytes) -> None:
        tally.told["next"] = tally.told["inputs"]
        tally.read(data)
        if tally.told["inputs"] >= count:
            tally.save()
            os._exit(0)

    flags = [f"-runs={count + 1}", "-max_len=16384", "-verbosity=0", f"-seed={options.seed + 1}", str(corpus)]
    atheris.Setup([sys.argv[0], *flags], one, custom_mutator=mutated)
    atheris.Fuzz()
    tally.save()
    return 0


class _Tally:
    """Reads files and counts what became of them."""

    def __init__(self, reader: Any, options: argparse.Namespace) -> None:
        self.reader, self.options = reader, options
        self.told: dict[str, Any] = {"next": 0, "inputs": 0, "read": 0, "refused": 0, "crashes": 0, "places": []}
        self._folder, self._input = options.scratch / "files", options.scratch / "input"
        self._folder.mkdir(exist_ok=True)
        self._began, self.last = 0, ""
        signal.signal(signal.SIGALRM, _hang)

    def start(self) -> None:
        """From here on memory counts."""
        self._began = _peak_mib()

    def read(self, content: bytes) -> None:
        from haloc.errors import HalocError

        self._input.write_bytes(content)
        self.told["inputs"] += 1
        signal.alarm(HANG_S if self._began else 12 * HANG_S)  # what is imported on first use may take long
        try:
            self.reader.read(content, self._folder)
            self.told["read"] += 1
        except HalocError as error:
            self.told["refused"] += 1
            self.last = str(error)
            if len(str(error)) > 5000:
                self._crashed(f"a message of {len(str(error))} signs", error, content)
        except (Exception, Hang, SystemExit) as error:
            self._crashed(type(error).__name__, error, content)
        finally:
            signal.alarm(0)
        if self.told["inputs"] % 50 == 0:
            self.save()

    def save(self) -> None:
        self.told["peak_mib"] = _peak_mib() - self._began if self._began else 0
        Path(self.options.scratch, "state.json").write_text(json.dumps(self.told))

    def _crashed(self, kind: str, error: BaseException, content: bytes) -> None:
        place = f"{kind} at {_place(error)}: {str(error)[:120]!r}"
        known = {found.rpartition(":")[0].split(": ")[0] for found in self.told["places"]}
        self.told["crashes"] += 1
        if place.split(": ")[0] not in known and len(self.told["places"]) < MOST_KEPT:
            self.told["places"].append(place)
            _keep_file(self.options.keep, self.reader.name, kind, content)
        self.save()


def _place(error: BaseException) -> str:
    """The last line of ours that it came through."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "haloc" in frame.filename and "src" in frame.filename
    ]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "outside"


def _keep_file(folder: Path | None, reader: str, kind: str, content: bytes) -> None:
    if folder is None:
        return
    place = folder / reader
    place.mkdir(parents=True, exist_ok=True)
    word = "".join(sign if sign.isalnum() else "-" for sign in kind)
    (place / f"{word}-{hashlib.sha256(content).hexdigest()[:8]}").write_bytes(content)


def _hang(*_: object) -> None:
    raise Hang(f"longer than {HANG_S} s")


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def _limit_memory() -> None:
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = held + MEMORY_GIB * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    sys.exit(main())
