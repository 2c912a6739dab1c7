"""What two processes do together; `test_session` starts them and looks at what they leave."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn

import haloc.training.loop
from haloc.errors import TrainError
from haloc.training.baseline import train
from haloc.training.evaluate import evaluate
from haloc.training.session import join_session
from tests.training import tiny
from tests.training.tiny import batches, held_out, network, timeless

SETTINGS = {
    "plain": replace(tiny.SETTINGS, weight_decay=0.01, lr=0.1),
    "rich": replace(tiny.SETTINGS, ema=0.9, channels_last=True, schedule="steps", step_epochs=1),
}
#: Sizes of batches and numbers of images: even, uneven, a rest, fewer batches than processes.
EVALUATED = ((30, 120), (50, 120), (50, 150), (200, 120))


class StopError(Exception):
    pass


def stop(progress: object) -> None:
    if round(6 * progress.epoch) == 8:
        raise StopError


def digest(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in model.state_dict().values())).hexdigest()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    session, _ = join_session("cpu")
    rank, facts = session.shard.rank, {}
    assert session.shard.world == 2
    common = {"val": held_out(), "session": session}
    for name, settings in SETTINGS.items():
        # A folder for each, to see who writes.
        model, own = network(dropout=0), folder / f"{name}{rank}"
        facts[name] = timeless(train(model, batches(), settings=settings, folder=own, **common).history)
    try:
        train(network(dropout=0), batches(), settings=SETTINGS["rich"], folder=folder / f"rich{rank}", **common)
    except TrainError as error:
        facts["apart"] = str(error)
    haloc.training.loop.STRETCH = 1
    told = {"settings": SETTINGS["rich"], "folder": folder / "stopped", **common}
    try:
        train(network(dropout=0), batches(), on_progress=stop, **told)
    except StopError:
        session.wait()
        facts["stopped"] = timeless(train(network(7, dropout=0), batches(), **told).history)
    other = network(rank)
    train(other, batches(), settings=replace(tiny.SETTINGS, epochs=1), session=session)
    facts["digest"] = digest(other)
    facts["evaluated"] = {
        f"{size} {images}": asdict(evaluate(network(), held_out(size, images), session=session))
        for size, images in EVALUATED
    }
    session.leave()
    tasks = Path("/proc/self/task").glob("*/comm")  # of Linux
    facts["threads"] = [name for name in (task.read_text() for task in tasks) if "gloo" in name]
    (folder / f"facts{rank}.json").write_text(json.dumps(facts))
