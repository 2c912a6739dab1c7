"""Every reader of a file that a user can hand in: a whole file to begin with, and how it is read.

A reader takes bytes and a folder to put them in. It ends, or raises one of HALOC's errors; anything else is a crash.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn

from haloc.forms import Dense, Svd, Tucker2
from haloc.plan import Plan
from tests.strangers.mutate import bytes_mutated, json_mutated, lines_mutated, toml_mutated

Mutate = Callable[[bytes, Random], bytes]
Read = Callable[[bytes, Path], None]


@dataclass(frozen=True)
class Reader:
    """One reader.

    Attributes:
        name: What is read.
        seeds: Returns whole files of the kind.
        read: Puts a file into a folder and reads it.
        mutate: Makes a file wrong.
        weight: How many wrong files the benchmark tries it on: fewer where one takes long.
    """

    name: str
    seeds: Callable[[], list[bytes]]
    read: Read
    mutate: Mutate
    weight: int = 5000


PLAN = Plan({"0": Tucker2(4, 2), "4": Svd(5), "2": Dense()})


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Linear(8 * 16, 6)
    ).eval()


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _placed(content: bytes, folder: Path, name: str) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


# Plans, layers, tables, timings, searches


def _layers() -> Any:
    from haloc.factor.inspect import inspect

    return inspect(network(), torch.zeros(1, 3, 4, 4))


def _read_plan(content: bytes, folder: Path) -> None:
    plan = Plan.load(_placed(content, folder, "plan.json"))
    _LAYERS().check(plan)
    str(_LAYERS().macs_of(plan))


_cache: dict[str, Any] = {}


def _LAYERS() -> Any:  # noqa: N802  a constant that takes long to make
    if "layers" not in _cache:
        _cache["layers"] = _layers()
    return _cache["layers"]


def _read_layers(content: bytes, folder: Path) -> None:
    from haloc.inventory import Inventory

    found = Inventory.load(_placed(content, folder, "layers.json"))
    f"{found.open_share:.1%} {found.macs:,}"
    for layer in found.open_layers:
        found.check({layer.name: Svd(3)}) if layer.families == ("svd",) else None
    json.dumps(found.to_dict())


def _table() -> Any:
    from haloc.cost.table import Row, Table
    from haloc.cost.target import Target

    rows = [
        Row(layer.shape, form, 0.5 + number, 0.01, 20)
        for number, layer in enumerate(_LAYERS())
        for form in (Dense(), Tucker2(2, 2) if layer.name == "0" else Svd(3))
    ]
    return Table(Target("cpu", "onnxruntime", batch_size=8), tuple(rows), {"device": "a machine", "cores": 2})


def _read_table(content: bytes, folder: Path) -> None:
    from haloc.cost.table import Table

    table = Table.load(_placed(content, folder, "table.json"))
    for row in table.rows:
        table.price(row.shape, row.form)
        f"{row.shape.macs:,}"
    json.dumps(table.to_dict())


def _timings() -> bytes:
    from haloc.cost.network import NetworkTimings, Timing
    from haloc.cost.target import Target

    target = Target("cpu", "onnxruntime")
    return _json(NetworkTimings(target, (Timing(PLAN, 1.5, 0.1, 20), Timing(Plan({}), 2.0)), {"device": "x"}).to_dict())


def _read_timings(content: bytes, folder: Path) -> None:
    from haloc.cost.network import NetworkTimings

    found = NetworkTimings.load(_placed(content, folder, "networks.json"))
    for timing in found.timings:
        f"{timing.latency_ms:.3g} {timing.iqr_ms:.3g} {timing.count:d}"


def _evidence() -> list[bytes]:
    from haloc.methods.evidence import Evidence
    from haloc.space import rank_space

    space = rank_space(_LAYERS(), forms=["tucker2", "svd"], round_to=2)
    losses = {name: tuple(0.1 * n for n in range(len(offer))) for name, offer in space.open_layers.items()}
    summed = Evidence("energy", space, losses, settings={"a": 1}, history=({"step": 1, "loss": 0.5},))
    plan = Plan({name: next(iter(offer)) for name, offer in space.open_layers.items()})
    seen = Evidence("genetic", space, rule="seen", seen=((plan, 0.5),))
    return [_json(summed.to_dict()), _json(seen.to_dict())]


def _read_evidence(content: bytes, folder: Path) -> None:
    from haloc.methods.evidence import Evidence
    from haloc.methods.search import solve

    found = Evidence.load(_placed(content, folder, "search.json"))
    solve(found, {"macs": "100%"})


def _read_space(content: bytes, folder: Path) -> None:
    from haloc.files import read_json
    from haloc.space import RankSpace

    found = RankSpace.from_dict(read_json(_placed(content, folder, "space.json")))
    json.dumps(found.to_dict())


# Recipes, runs and reports


def _recipes() -> list[bytes]:
    from haloc.pipeline.recipe import Recipe

    values: dict[str, Any] = {
        "model": {"name": "resnet20", "weights": "pretrained", "inputs": ["1x3x32x32"]},
        "data": {"name": "digits", "batch_size": 64, "mean": [0.5], "std": [0.5]},
        "target": {"name": "cpu:onnxruntime:b64", "margin": 0.02},
        "budget": {"latency": "60%", "macs": "50%"},
        "space": {"forms": ["tucker2", "svd"], "ratio": 0.5},
        "search": {"method": "haloc", "settings": {"warmup_epochs": 1}, "training": {"epochs": 2}},
        "reconstruct": {"epochs": 2},
        "finetune": {"epochs": 3, "lr": 0.01},
        "export": {"formats": ["onnx"], "int8": True},
        "run": {"device": "cpu", "seed": 1},
    }
    return [Recipe.from_dict(values).to_toml().encode()]


def _read_recipe(content: bytes, folder: Path) -> None:
    from haloc.pipeline.recipe_file import read_recipe
    from haloc.pipeline.settings import check_search, finetuning, reconstruction

    path = _placed(content, folder, "recipe.toml")
    way = len(content) % 4
    recipe = read_recipe(path, ["budget.macs=40%"] if way == 0 else [], quick=way == 1, no_train=way == 2)
    recipe.to_toml()
    for check in (check_search, finetuning, reconstruction):
        check(recipe)


def _stages() -> bytes:
    stamp = {"fingerprint": "a", "done": True, "seconds": 1.5, "files": {"stages.json": "b"}}
    return _json({"kind": "haloc-stages", "format": 1, "stages": {"inspect": stamp, "table": {"fingerprint": "c"}}})


def _read_stages(content: bytes, folder: Path) -> None:
    from haloc.pipeline.stamps import Stamps

    _placed(content, folder, "stages.json")
    stamps = Stamps(folder)
    for name in ("inspect", "table"):
        if stamps.get(name) is not None:
            stamps.changed(name)


def _report() -> bytes:
    from tests.report.sample import sample

    return _json(sample())


def _read_report(content: bytes, folder: Path) -> None:
    from haloc.cli.report import run

    sink = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        run(_placed(content, folder, "report.json"), output=None, json=False)


# Saved networks, checkpoints, logs


def _saved(folder: Path) -> None:
    from haloc.artifact.store import save
    from haloc.factor.surgery import apply_plan

    save(folder, apply_plan(network(), PLAN), provenance={"classes": 6, "command": "apply"})


def _artefact(name: str) -> Callable[[], list[bytes]]:
    def seeds() -> list[bytes]:
        import tempfile

        with tempfile.TemporaryDirectory() as scratch:
            _saved(Path(scratch))
            return [(Path(scratch) / name).read_bytes()]

    return seeds


def _read_artefact(name: str) -> Read:
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


def _checkpoint(name: str) -> Callable[[], list[bytes]]:
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


def _read_checkpoint(name: str) -> Read:
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


def _resume() -> list[bytes]:
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


def _read_resume(content: bytes, folder: Path) -> None:
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


def _journal() -> bytes:
    rows = [{"step": step, "epoch": step, "loss": 0.5, "lr": 0.1} for step in range(1, 6)]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _read_journal(content: bytes, folder: Path) -> None:
    from haloc.training.journal import Journal, read_journal

    path = _placed(content, folder, "log.jsonl")
    read_journal(path)
    Journal(path, keep_until=3).close()


def _blocks() -> bytes:
    block = {"block": "0", "before": 0.5, "after": None, "kept": True, "images": 8}
    rows: list[Any] = [{"step": 0, "of": {"a": 1}}, {"step": 1, "blocks": [block]}]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _read_blocks(content: bytes, folder: Path) -> None:
    from safetensors.torch import save_file

    from haloc.reconstruction.kept import Kept

    model = nn.Linear(2, 2)
    _placed(content, folder, "blocks.jsonl")
    save_file(model.state_dict(), folder / "blocks-1.safetensors")
    with Kept.opened(folder, {"a": 1}, model) as kept:
        for each in kept.done:
            f"{each.block} {each.before:.3f} {each.after:.3f} {each.kept} {each.images:d}"


def _samples() -> bytes:
    rows = [{"of": "here", "key": key, "ms": [0.5, 0.6, 0.7]} for key in ("a", "b", "a")]
    return b"".join(b"\n" + json.dumps(row).encode() for row in rows)


def _read_samples(content: bytes, folder: Path) -> None:
    from haloc.cost.sampling import Journal, summary

    for visits in Journal(str(_placed(content, folder, "table.json.rows")), "here").read().values():
        f"{summary(visits)['latency_ms']:.5g}"


def _prices() -> bytes:
    import tempfile

    from haloc.cost.asic import asic_costs
    from haloc.cost.eyeriss import EYERISS

    with tempfile.TemporaryDirectory() as scratch:
        cache = Path(scratch) / "prices"
        rows = [(layer.shape, Dense()) for layer in _LAYERS()]
        asic_costs(rows, EYERISS, engine="bound", jobs=1, cache=cache)
        return cache.read_bytes()


def _read_prices(content: bytes, folder: Path) -> None:
    from haloc.cost.asic import asic_costs
    from haloc.cost.eyeriss import EYERISS

    cache = _placed(content, folder, "prices")
    asic_costs([(layer.shape, Dense()) for layer in _LAYERS()], EYERISS, engine="bound", jobs=1, cache=cache)


def _description() -> bytes:
    import yaml

    from haloc.cost.eyeriss import EYERISS
    from haloc.cost.zigzag_description import zigzag_description

    return yaml.safe_dump(zigzag_description(EYERISS)).encode()


def _read_description(content: bytes, folder: Path) -> None:
    from haloc.cost.accelerators import as_hardware
    from haloc.cost.zigzag import _accelerator

    hardware = as_hardware(_placed(content, folder, "own.yaml"))
    str(hardware.digest)  # type: ignore[union-attr]
    _accelerator(hardware)


# Weights, pictures, data sets, exported files


def _safetensors() -> bytes:
    from safetensors.torch import save

    return save(nn.Conv2d(3, 4, 1).state_dict())


def _torch_files() -> list[bytes]:
    state = nn.Conv2d(3, 4, 1).state_dict()
    made = []
    for content, zipped in ((state, True), (state, False), ({"state_dict": state, "epoch": 3}, True)):
        file = io.BytesIO()
        torch.save(content, file, _use_new_zipfile_serialization=zipped)
        made.append(file.getvalue())
    return made


def _read_weights(name: str) -> Read:
    def read(content: bytes, folder: Path) -> None:
        from haloc.zoo.weights import load_weights

        load_weights(nn.Conv2d(3, 4, 1), _placed(content, folder, name))

    return read


def _pictures() -> list[bytes]:
    from PIL import Image

    picture, made = Image.linear_gradient("L").resize((40, 30)).convert("RGB"), []
    for kind in ("PNG", "JPEG", "BMP", "TIFF", "WEBP", "PPM"):
        file = io.BytesIO()
        picture.save(file, kind)
        made.append(file.getvalue())
    return made


def _read_picture(content: bytes, folder: Path) -> None:
    from haloc.zoo.folder import FolderImages

    _placed(content, folder, "picture.png")
    images = FolderImages.unlabelled(folder, size=16)
    assert images.image(0).shape == (3, 16, 16)
    assert images.image(0, (1, 2)).shape == (3, 16, 16)


def _cifar_files() -> dict[str, bytes]:
    import numpy as np

    from tests.zoo.fabricate import NAMES, python2_pickle

    return {name: python2_pickle(np.zeros((1, 3, 32, 32), np.uint8), [3]) for name in NAMES}


def _archives() -> list[bytes]:
    import tarfile

    made = []
    for mode in ("w", "w:gz"):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode=mode) as archive:  # type: ignore[call-overload]
            for name, content in _cifar_files().items():
                member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        made.append(file.getvalue())
    return made


def _read_archive(content: bytes, folder: Path) -> None:
    from haloc.zoo.cifar10_formats import read_cifar10

    read_cifar10(_placed(content, folder, "cifar-10-python.tar.gz"), rows=1)


def _read_batch(content: bytes, folder: Path) -> None:
    from haloc.zoo.cifar10_formats import read_cifar10

    if not (folder / "test_batch").exists():
        for name, whole in _cifar_files().items():
            _placed(whole, folder, name)
    _placed(content, folder, "data_batch_1")
    read_cifar10(folder, rows=1)


def _kept_data() -> bytes:
    from safetensors.torch import save

    tensors = {}
    for part in ("train", "test"):
        tensors[f"{part}_images"] = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
        tensors[f"{part}_labels"] = torch.zeros(1, dtype=torch.uint8)
    return save(tensors)


#: The sum of one black picture of the first class.
_EMPTY = hashlib.sha256(bytes(3 * 32 * 32 + 1)).hexdigest()


def _read_kept_data(content: bytes, folder: Path) -> None:
    from haloc.zoo.cifar10 import Expected, _from_cache

    _from_cache(_placed(content, folder, "cifar10.safetensors"), Expected(1, _EMPTY, _EMPTY))


def _onnx() -> bytes:
    import onnx
    from onnx import TensorProto, helper

    from haloc.artifact.formats import INPUTS_KEY, OUTPUTS_KEY

    one = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 2])
    two = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])
    weight = helper.make_tensor("w", TensorProto.FLOAT, [2, 3], [0.5] * 6)
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [one], [two], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    helper.set_model_props(model, {INPUTS_KEY: '["x"]', OUTPUTS_KEY: '{"out": "y"}'})
    onnx.checker.check_model(model)
    made: bytes = model.SerializeToString()
    return made


def _read_onnx(content: bytes, folder: Path) -> None:
    from haloc.artifact.runtime import open_exported

    model: Any = open_exported(_placed(content, folder, "model.onnx"), threads=1)
    str(model.input_names), str(model.batch)
    model(torch.ones(2, 2))


def _one(seed: Callable[[], bytes]) -> Callable[[], list[bytes]]:
    return lambda: [seed()]


READERS = {
    reader.name: reader
    for reader in (
        Reader("plan", lambda: [_json(PLAN.to_dict())], _read_plan, json_mutated, 20_000),
        Reader("layers", lambda: [_json(_LAYERS().to_dict())], _read_layers, json_mutated, 15_000),
        Reader("table", lambda: [_json(_table().to_dict())], _read_table, json_mutated, 12_000),
        Reader("timings", _one(_timings), _read_timings, json_mutated, 12_000),
        Reader("search", _evidence, _read_evidence, json_mutated, 3_000),
        Reader("space", lambda: [_json(json.loads(_evidence()[0])["space"])], _read_space, json_mutated, 4_000),
        Reader("recipe", _recipes, _read_recipe, toml_mutated, 4_000),
        Reader("stages", _one(_stages), _read_stages, json_mutated, 10_000),
        Reader("report", _one(_report), _read_report, json_mutated, 400),
        Reader("card", _artefact("model.json"), _read_artefact("model.json"), json_mutated, 500),
        Reader("artefact-plan", _artefact("plan.json"), _read_artefact("plan.json"), json_mutated, 500),
        Reader(
            "artefact-weights",
            _artefact("weights.safetensors"),
            _read_artefact("weights.safetensors"),
            bytes_mutated,
            500,
        ),
        Reader("checkpoint-facts", _checkpoint("state.json"), _read_checkpoint("state.json"), json_mutated, 3_000),
        Reader(
            "checkpoint-tensors",
            _checkpoint("state.safetensors"),
            _read_checkpoint("state.safetensors"),
            bytes_mutated,
            3_000,
        ),
        Reader("resume", _resume, _read_resume, json_mutated, 300),
        Reader("journal", _one(_journal), _read_journal, lines_mutated, 8_000),
        Reader("blocks", _one(_blocks), _read_blocks, lines_mutated, 1_500),
        Reader("samples", _one(_samples), _read_samples, lines_mutated, 8_000),
        Reader("prices", _one(_prices), _read_prices, lines_mutated, 2_000),
        Reader("description", _one(_description), _read_description, bytes_mutated, 200),
        Reader("safetensors", _one(_safetensors), _read_weights("weights.safetensors"), bytes_mutated, 12_000),
        Reader("torch-file", _torch_files, _read_weights("weights.pth"), bytes_mutated, 3_000),
        Reader("picture", _pictures, _read_picture, bytes_mutated, 3_000),
        Reader("cifar10-archive", _archives, _read_archive, bytes_mutated, 1_500),
        Reader("cifar10-batch", lambda: [_cifar_files()["test_batch"]], _read_batch, bytes_mutated, 3_000),
        Reader("cifar10-cache", _one(_kept_data), _read_kept_data, bytes_mutated, 1_500),
        Reader("onnx", _one(_onnx), _read_onnx, bytes_mutated, 1_000),
    )
}
