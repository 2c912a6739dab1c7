"""Readers of what a run keeps: saved networks, checkpoints, logs, prices."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from haloc.forms import Dense
from tests.strangers.common import PLAN, Read, layers, network, placed


def _saved(folder: Path) -> None:
    from haloc.artifact.store import save
    from haloc.factor.surgery import apply_plan

    save(folder, apply_plan(network(), PLAN), provenance={"classes": 6, "command": "apply"})


def artefact(name: str) -> Callable[[], list[bytes]]:
    def seeds() -> list[bytes]:
        import tempfile

        with tempfile.TemporaryDirectory() as scratch:
            _saved(Path(scratch))
            return [(Path(scratch) / name).read_bytes()]

    return seeds


def read_artefact(name: str) -> Read:
    """Reads a saved network of which one file was exchanged, by somebody who knows how to write its sum."""

    def read(content: bytes, folder: Path) -> None:
        from haloc.artifact.store import load

        place = folder / "saved"
        if not place.exists():
            _saved(place)
        kept = {path.name: path.read_bytes() for path in place.iterdir()}
        try:
            (place / name).write_bytes(content)
            if name != "model.json":
                card = json.loads(kept["model.json"])
                card["sha256"][name] = hashlib.sha256(content).hexdigest()
                (place / "model.json").write_text(json.dumps(card))
            load(place, network())
        finally:
            for other, before in kept.items():
                (place / other).write_bytes(before)

    return read


def checkpoint(name: str) -> Callable[[], list[bytes]]:
    def seeds() -> list[bytes]:
        import tempfile

        with tempfile.TemporaryDirectory() as scratch:
            _write_checkpoint(Path(scratch))
            return [(Path(scratch) / "step-0000000003" / name).read_bytes()]

    return seeds


_CONFIG = {"settings": {"epochs": 1, "lr": 0.1}, "data": "digits"}


def _write_checkpoint(folder: Path) -> None:
    from haloc.training.checkpoint import Checkpoint, Store, random_states

    tensors = {f"random/{key}": value for key, value in random_states().items()} | {"model/weight": torch.ones(3)}
    facts = {"config": _CONFIG, "history": [], "seconds": 1.0, "updates": [{"scaler": None}]}
    Store(folder).save(Checkpoint(3, tensors, facts))


def read_checkpoint(name: str) -> Read:
    def read(content: bytes, folder: Path) -> None:
        from haloc.training.checkpoint import Store

        place = folder / "checkpoints" / "step-0000000003"
        if not place.exists():
            _write_checkpoint(place.parent)
        kept = {path.name: path.read_bytes() for path in place.iterdir()}
        try:
            (place / name).write_bytes(content)
            if name != "state.json":
                facts = json.loads(kept["state.json"]) | {"sha256": hashlib.sha256(content).hexdigest()}
                (place / "state.json").write_text(json.dumps(facts))
            Store(place.parent).newest(_CONFIG)
        finally:
            for other, before in kept.items():
                (place / other).write_bytes(before)

    return read


def resume() -> list[bytes]:
    """The facts of a checkpoint that a run really wrote."""
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        _trained(Path(scratch), 1)
        newest = sorted((Path(scratch) / "checkpoints").glob("step-*"))[-1]
        return [(newest / "state.json").read_bytes()]


def _trained(folder: Path, epochs: int) -> None:
    from haloc.training.baseline import train
    from haloc.training.settings import TrainSettings

    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    data = [(torch.ones(2, 3), torch.zeros(2, dtype=torch.long))]
    train(model, data, settings=TrainSettings(epochs=epochs, warmup_epochs=0, lr=0.01), folder=folder)


def read_resume(content: bytes, folder: Path) -> None:
    """Goes on with a run whose checkpoint is somebody else's."""
    import shutil

    kept, place = folder / "kept", folder / "run"
    if not kept.exists():
        _trained(kept, 1)
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(kept, place)
    newest = sorted((place / "checkpoints").glob("step-*"))[-1]
    (newest / "state.json").write_bytes(content)
    _trained(place, 1)


def journal() -> bytes:
    rows = [{"step": step, "epoch": step, "loss": 0.5, "lr": 0.1} for step in range(1, 6)]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def read_journal(content: bytes, folder: Path) -> None:
    from haloc.training.journal import Journal, read_journal

    path = placed(content, folder, "log.jsonl")
    read_journal(path)
    Journal(path, keep_until=3).close()


def blocks() -> bytes:
    block = {"block": "0", "before": 0.5, "after": None, "kept": True, "images": 8}
    rows: list[Any] = [{"step": 0, "of": {"a": 1}}, {"step": 1, "blocks": [block]}]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def read_blocks(content: bytes, folder: Path) -> None:
    from safetensors.torch import save_file

    from haloc.reconstruction.kept import Kept

    model = nn.Linear(2, 2)
    placed(content, folder, "blocks.jsonl")
    save_file(model.state_dict(), folder / "blocks-1.safetensors")
    with Kept.opened(folder, {"a": 1}, model) as kept:
        for each in kept.done:
            f"{each.block} {each.before:.3f} {each.after:.3f} {each.kept} {each.images:d}"


def samples() -> bytes:
    rows = [{"of": "here", "key": key, "ms": [0.5, 0.6, 0.7]} for key in ("a", "b", "a")]
    return b"".join(b"\n" + json.dumps(row).encode() for row in rows)


def read_samples(content: bytes, folder: Path) -> None:
    from haloc.cost.sampling import Journal, summary

    for visits in Journal(str(placed(content, folder, "table.json.rows")), "here").read().values():
        f"{summary(visits)['latency_ms']:.5g}"


def prices() -> bytes:
    import tempfile

    from haloc.cost.asic import asic_costs
    from haloc.cost.eyeriss import EYERISS

    with tempfile.TemporaryDirectory() as scratch:
        cache = Path(scratch) / "prices"
        rows = [(layer.shape, Dense()) for layer in layers()]
        asic_costs(rows, EYERISS, engine="bound", jobs=1, cache=cache)
        return cache.read_bytes()


def read_prices(content: bytes, folder: Path) -> None:
    from haloc.cost.asic import asic_costs
    from haloc.cost.eyeriss import EYERISS

    cache = placed(content, folder, "prices")
    asic_costs([(layer.shape, Dense()) for layer in layers()], EYERISS, engine="bound", jobs=1, cache=cache)


def description() -> bytes:
    import yaml

    from haloc.cost.eyeriss import EYERISS
    from haloc.cost.zigzag_description import zigzag_description

    return yaml.safe_dump(zigzag_description(EYERISS)).encode()


def read_description(content: bytes, folder: Path) -> None:
    from haloc.cost.accelerators import as_hardware
    from haloc.cost.zigzag import _accelerator

    hardware = as_hardware(placed(content, folder, "own.yaml"))
    str(hardware.digest)  # type: ignore[union-attr]
    _accelerator(hardware)
