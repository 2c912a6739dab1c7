"""Every verb that keeps state, killed at random moments and inside its writes, and run again until it ends by itself.

`python benchmarks/faults/kill.py` prints a table and writes `kill.json`; `--verbs train --kills 5` tries a part of it.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from common import console, save, verdict
from work import (
    COMMANDS,
    FORKED,
    PACKAGES,
    WAYS,
    Death,
    damaged,
    dying,
    ended,
    killed,
    outcome,
    prepare,
    progress,
    said,
    started,
    timed,
    traces,
)

from haloc.files import read_json

#: A run that is about to be killed more often than this is left to end.
MOST_IN_A_ROW = 8


@dataclass
class Tally:
    """What became of one verb.

    Attributes:
        seconds: How long the command takes at the most, undisturbed.
        kills: How often it was killed: at a random moment, or inside a write.
        runs: Runs that came to their end after kills.
        same: Those of them whose result is that of the undisturbed run.
        damaged: Files that could not be read after a kill.
        lost: Kills after which less was kept than before.
        traces: What was left behind when a run had ended.
        kept: How much was done and kept after each kill, as `progress` counts it.
    """

    seconds: float = 0.0
    kills: dict[str, int] = field(default_factory=lambda: {"moment": 0, **dict.fromkeys(WAYS, 0)})
    runs: int = 0
    same: int = 0
    damaged: list[str] = field(default_factory=list)
    lost: int = 0
    traces: list[str] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return self.runs > 0 and self.same == self.runs and not (self.damaged or self.lost or self.traces)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verbs", nargs="+", default=list(COMMANDS), choices=list(COMMANDS))
    parser.add_argument("--kills", type=int, default=21, help="of every verb")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    FORKED.set_forkserver_preload(PACKAGES)
    found: dict[str, Tally] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for verb in options.verbs:
            rng = random.Random(f"{verb} {options.seed}")
            found[verb] = tried(verb, Path(scratch) / verb, options.kills, rng)
            print(f"{verb}: {sum(found[verb].kills.values())} kills, {'sound' if found[verb].sound else found[verb]}")
    path = Path(__file__).with_suffix(".json")
    before = {verb: Tally(**told) for verb, told in read_json(path)["verbs"].items()} if path.exists() else {}
    found = before | found  # of verbs that were not tried this time what is known stays
    kills = sum(sum(tally.kills.values()) for tally in found.values())
    facts: dict[str, Any] = {"kills": kills, "runs": sum(tally.runs for tally in found.values())}
    facts |= {"survived": sum(tally.same for tally in found.values()), "lost": sum(t.lost for t in found.values())}
    save(__file__, facts | {"verbs": {verb: asdict(tally) for verb, tally in found.items()}})
    show(found, kills)


def tried(verb: str, scratch: Path, kills: int, rng: random.Random) -> Tally:
    """Kills one verb so often, in as many runs as that takes."""
    tally = Tally()
    tally.seconds, expected = timed(verb, scratch / "undisturbed")
    while sum(tally.kills.values()) < kills:
        folder = prepare(scratch / f"run{tally.runs}")
        _until_it_ends(verb, folder, tally, kills, rng)
        tally.runs += 1
        tally.same += outcome(verb, folder) == expected
        tally.traces += traces(folder)
    return tally


def _until_it_ends(verb: str, folder: Path, tally: Tally, kills: int, rng: random.Random) -> None:
    before = 0
    for _ in range(MOST_IN_A_ROW):
        if sum(tally.kills.values()) >= kills or not _killed_once(verb, folder, tally, rng):
            break
        tally.damaged += damaged(folder)
        now = progress(verb, folder)
        tally.lost += now < before
        tally.kept.append(now)
        before = now
    code = ended(started(COMMANDS[verb], folder))
    if code:
        raise RuntimeError(f"{verb} ended with {code} after kills: {said(folder)}")


def _killed_once(verb: str, folder: Path, tally: Tally, rng: random.Random) -> bool:
    """Runs the command and kills it; False if it came to its end before."""
    if rng.random() < 0.5:
        process, moment = started(COMMANDS[verb], folder), rng.uniform(0, tally.seconds)
        begun = time.perf_counter()
        process.join(moment)
        if process.exitcode is None:
            killed(process)
        elif process.exitcode == 0:
            # A machine that was busy is calm now: moments beyond the end kill nobody.
            tally.seconds = min(tally.seconds, time.perf_counter() - begun)
        how = "moment"
    else:
        how = rng.choice(WAYS)
        last = 3 if verb == "measure" and how != "torn" else 9  # it puts few files in place
        process = started(COMMANDS[verb], folder, dying, Death(rng.randint(1, last), how))
        ended(process)
    if process.exitcode == -9:
        tally.kills[how] += 1
        return True
    if process.exitcode:
        raise RuntimeError(f"{verb} ended with {process.exitcode}: {said(folder)}")
    return False


def show(found: dict[str, Tally], kills: int) -> None:
    table = Table(title=f"kill -9, {kills} times: the same command again until it ends by itself")
    columns = ("verb", "s", "at a moment", *(f"in a write: {way}" for way in WAYS), "runs", "same result", "damaged")
    for column in (*columns, "lost", "left behind", "bar"):
        table.add_column(column, justify="left" if column == "verb" else "right")
    for verb, tally in found.items():
        cells: list[Any] = [verb, f"{tally.seconds:.1f}", *tally.kills.values(), tally.runs, tally.same]
        cells += [len(tally.damaged), tally.lost, len(tally.traces), verdict(tally.sound)]
        table.add_row(*map(str, cells))
    console.print(table)


if __name__ == "__main__":
    main()
