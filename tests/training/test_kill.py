from __future__ import annotations

import random
import signal
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

import haloc.training.loop
from haloc.training.baseline import train
from haloc.training.journal import read_journal
from tests.processes import FORKED
from tests.training.tiny import SETTINGS, batches, network, newest, same, timeless

EPOCHS, KILLS = 20, 10


def run(folder: Path, seed: int, steps: Connection) -> None:
    """A process that trains, saves after every step and says how far it is."""
    torch.set_num_threads(1)
    haloc.training.loop.STRETCH = 1
    settings = replace(SETTINGS, epochs=EPOCHS, ema=0.9)
    train(network(seed), batches(), settings=settings, folder=folder, on_progress=lambda p: steps.send(6 * p.epoch))


def started(folder: Path, seed: int) -> tuple[BaseProcess, Connection]:
    steps, told = FORKED.Pipe(duplex=False)
    process = FORKED.Process(target=run, args=(folder, seed, told), daemon=True)
    process.start()
    told.close()
    return process, steps


def test_a_run_killed_ten_times_ends_bit_for_bit_as_if_nothing_had_been(tmp_path):
    moments = random.Random(0)
    process, steps = started(tmp_path / "whole", 0)
    process.join(60)
    assert process.exitcode == 0
    for number, step in enumerate(sorted(moments.sample(range(1, 6 * EPOCHS - 15), KILLS))):
        process, steps = started(tmp_path / "killed", number)
        while steps.recv() < step:
            pass
        time.sleep(moments.uniform(0, 0.01))  # a step and its checkpoint take about as long
        process.kill()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
    process, steps = started(tmp_path / "killed", KILLS)
    process.join(60)
    assert process.exitcode == 0
    whole, killed = newest(tmp_path / "whole"), newest(tmp_path / "killed")
    assert killed.step == whole.step == 6 * EPOCHS
    assert same(killed.tensors, whole.tensors)
    weights = [(tmp_path / name / "weights.safetensors").read_bytes() for name in ("whole", "killed")]
    assert weights[0] == weights[1]
    rows = [timeless(read_journal(tmp_path / name / "log.jsonl")) for name in ("whole", "killed")]
    assert rows[0] == rows[1]
    assert [row["epoch"] for row in rows[1]] == list(range(1, EPOCHS + 1))
    assert sorted(path.name for path in (tmp_path / "killed" / "checkpoints").iterdir()) == [
        f"step-{6 * EPOCHS - 1:010d}",
        f"step-{6 * EPOCHS:010d}",
    ]
