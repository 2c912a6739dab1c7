"""Verbs that keep state: two at once, a full disk, a clock that jumps, a loss that is no number, a dead worker."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from haloc.cli import main
from haloc.files import read_json
from haloc.training import loop, run
from tests.cli import test_mistakes
from tests.cli.conftest import weights
from tests.cli.test_mistakes import BRIEF, DIGITS, MODEL, RIGHT, changed
from tests.processes import two_of
from tests.test_locks import held

ready = test_mistakes.ready
#: Verbs and where they keep their state.
PLACES = {"train": "run", "finetune": "tuned", "search": "found", "compress": "all", "measure": "new.json"}


@pytest.mark.parametrize("verb", PLACES)
def test_two_at_once(ready, refused, haloc, verb):
    with held(Path(PLACES[verb]), whole=verb != "measure") as other:
        said = refused(*RIGHT[verb], code=1)
        assert f"another haloc is at work in {PLACES[verb]}: process {other.pid} on " in said
    assert haloc(*RIGHT[verb]).code == 0
    assert not list(Path.cwd().rglob("*.lock")), "the other one was killed, and nothing is left of it"


@contextmanager
def room_for(size: int):
    """No file may become larger, which is what a full disk looks like to whoever writes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [10, 400, 3000])
@pytest.mark.parametrize("verb", PLACES)
def test_no_room(ready, refused, haloc, verb, size):
    Path("before.json").write_text("{}")
    if size == 3000 and verb in ("measure", "search"):
        pytest.skip("its files are smaller")
    with room_for(size):
        said = refused(*RIGHT[verb], code=1)
    assert "File too large" in said
    assert PLACES[verb] in said, "the file is named"
    left = [path for path in Path.cwd().rglob("*") if path.is_file()]
    assert not [path for path in left if path.name.endswith((".part", ".lock")) or ".unfinished" in str(path)]
    for path in left:
        assert path.suffix != ".json" or json.loads(path.read_text()) is not None
    assert haloc(*RIGHT[verb]).code == 0, "it goes on when there is"


def diverging(verb: str) -> tuple[object, ...]:
    if verb == "search":
        words = ("search", *MODEL, *DIGITS, "--method", "haloc", "--haloc-warmup-epochs", 0, "--budget", "60%")
        return (*words, "--round-to", 4, "--activations", 50, *BRIEF[2:-1], "--epochs", 2, "--output", "found")
    return changed(verb, 1, 2)


@pytest.mark.parametrize("verb", ["train", "finetune", "search"])
def test_a_loss_that_is_no_number(ready, refused, haloc, monkeypatch, verb):
    words = (*diverging(verb), "--save-every-s", 0)
    monkeypatch.setattr(loop, "STRETCH", 1)
    said = refused(*words, "--lr", 1e38, code=1)
    assert "training has diverged" in said
    assert "is the first whose" in said or "is not finite" in said or "not finite in epoch" in said
    assert "Lower the learning rate" in said
    folder = Path(PLACES[verb])
    assert (folder / "checkpoints/diverged.json").exists()
    assert haloc(*words, "--lr", 0.001).code == 0, "which is what the message says to do"
    assert read_json(folder / "config.json")["settings"]["lr"] == 0.001
    assert not (folder / "checkpoints/diverged.json").exists()
    assert "lr = 0.001, and now it is 0.002" in refused(*words, "--lr", 0.002, code=2), "now it is as any other run"


@pytest.mark.parametrize("year", [365 * 86400.0, -365 * 86400.0])
def test_a_clock_that_jumps(ready, haloc, monkeypatch, year):
    words = (*changed("train", 1, 2), "--save-every-s", 0)
    assert haloc(*words).code == 0
    jumps, now = iter(range(10**6)), time.time
    monkeypatch.setattr(time, "time", lambda: now() + year * (next(jumps) % 3))
    assert haloc(*("other" if word == "run" else word for word in words), "--minutes", 5).code == 0
    first, second = weights(), weights("other")
    assert all(first[name].equal(second[name]) for name in first)
    assert 0 < read_json("other/result.json")["seconds"] < 300
    assert haloc(*RIGHT["measure"]).code == 0


def one_of_two(folder: Path, dies: int) -> None:
    """Trains with another process; one of them is gone all of a sudden."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    loop.STRETCH = 1
    look = run.Run.look

    def looked(self: run.Run) -> None:
        if self.step == 4 and self.session.shard.rank == dies:
            os._exit(0)
        look(self)

    run.Run.look = looked
    sys.argv = ["haloc", *map(str, changed("train", 256, 128))]
    try:
        main()
    except SystemExit as error:
        os._exit(0 if error.code == 1 else 3)  # what `two_of` looks at


@pytest.mark.parametrize("dies", [0, 1])
def test_of_two_processes_the_other_says_so_and_stops(ready, dies):
    begun = time.monotonic()
    said = two_of(one_of_two, Path.cwd(), dies, folder=Path.cwd())[1 - dies][1]
    assert time.monotonic() - begun < 60
    assert "haloc: another process of this run has ended or cannot be reached; what was saved is kept" in said
    assert "Traceback" not in said
