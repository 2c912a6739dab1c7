"""A few of the kills of `benchmarks/faults/kill.py`: those inside writes, which come at the same place every time."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.processes import FORKED

# Stays there: forks import it, too.
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "faults"))
from work import COMMANDS, Death, damaged, dying, ended, outcome, prepare, progress, started, traces

DEATHS = [Death(1, "torn"), Death(1, "before"), Death(2, "after"), Death(7, "torn"), Death(4, "before")]


def brief(verb: str) -> tuple[str, ...]:
    return tuple({"10": "3", "8": "3"}.get(word, word) for word in COMMANDS[verb])


@pytest.fixture(autouse=True)
def _imported():
    assert FORKED.get_start_method() == "forkserver"  # with what takes seconds to import


@pytest.mark.parametrize("verb", ["train", "finetune"])
def test_killed_inside_writes_it_comes_to_the_same(tmp_path, verb):
    assert ended(started(brief(verb), prepare(tmp_path / "whole"))) == 0
    folder, kept = prepare(tmp_path / "killed"), [0]
    for death in DEATHS:
        assert ended(started(brief(verb), folder, dying, death)) == -signal.SIGKILL
        assert damaged(folder) == []
        kept.append(progress(verb, folder))
    assert kept == sorted(kept)
    assert kept[-1] > 0
    assert ended(started(brief(verb), folder)) == 0, (folder / "said.txt").read_text()
    assert outcome(verb, folder) == outcome(verb, tmp_path / "whole")
    assert traces(folder) == []


@pytest.mark.parametrize("verb", ["compress", "search", "measure"])
def test_killed_in_its_first_write_a_folder_is_still_that_of_a_run(tmp_path, verb):
    folder = prepare(tmp_path / "run")
    for _ in range(2):
        how = "torn" if verb == "measure" else "before"
        assert ended(started(brief(verb), folder, dying, Death(1, how))) == -signal.SIGKILL
        assert len([name for name in traces(folder) if name.endswith(".part")]) <= 1, "they do not add up"
