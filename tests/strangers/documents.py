"""Readers of plans, layers, tables, searches, recipes and reports."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

from haloc.forms import Dense, Svd, Tucker2
from haloc.plan import Plan
from tests.strangers.common import PLAN, as_json, layers, placed


def read_plan(content: bytes, folder: Path) -> None:
    plan = Plan.load(placed(content, folder, "plan.json"))
    layers().check(plan)
    str(layers().macs_of(plan))


def read_layers(content: bytes, folder: Path) -> None:
    from haloc.inventory import Inventory

    found = Inventory.load(placed(content, folder, "layers.json"))
    f"{found.open_share:.1%} {found.macs:,}"
    for layer in found.open_layers:
        found.check({layer.name: Svd(3)}) if layer.families == ("svd",) else None
    json.dumps(found.to_dict())


def table() -> Any:
    from haloc.cost.table import Row, Table
    from haloc.cost.target import Target

    rows = [
        Row(layer.shape, form, 0.5 + number, 0.01, 20)
        for number, layer in enumerate(layers())
        for form in (Dense(), Tucker2(2, 2) if layer.name == "0" else Svd(3))
    ]
    return Table(Target("cpu", "onnxruntime", batch_size=8), tuple(rows), {"device": "a machine", "cores": 2})


def read_table(content: bytes, folder: Path) -> None:
    from haloc.cost.table import Table

    table = Table.load(placed(content, folder, "table.json"))
    for row in table.rows:
        table.price(row.shape, row.form)
        f"{row.shape.macs:,}"
    json.dumps(table.to_dict())


def timings() -> bytes:
    from haloc.cost.network import NetworkTimings, Timing
    from haloc.cost.target import Target

    target = Target("cpu", "onnxruntime")
    return as_json(
        NetworkTimings(target, (Timing(PLAN, 1.5, 0.1, 20), Timing(Plan({}), 2.0)), {"device": "x"}).to_dict()
    )


def read_timings(content: bytes, folder: Path) -> None:
    from haloc.cost.network import NetworkTimings

    found = NetworkTimings.load(placed(content, folder, "networks.json"))
    for timing in found.timings:
        f"{timing.latency_ms:.3g} {timing.iqr_ms:.3g} {timing.count:d}"


def evidence() -> list[bytes]:
    from haloc.methods.evidence import Evidence
    from haloc.space import rank_space

    space = rank_space(layers(), forms=["tucker2", "svd"], round_to=2)
    losses = {name: tuple(0.1 * n for n in range(len(offer))) for name, offer in space.open_layers.items()}
    summed = Evidence("energy", space, losses, settings={"a": 1}, history=({"step": 1, "loss": 0.5},))
    plan = Plan({name: next(iter(offer)) for name, offer in space.open_layers.items()})
    seen = Evidence("genetic", space, rule="seen", seen=((plan, 0.5),))
    return [as_json(summed.to_dict()), as_json(seen.to_dict())]


def read_evidence(content: bytes, folder: Path) -> None:
    from haloc.methods.evidence import Evidence
    from haloc.methods.search import solve

    found = Evidence.load(placed(content, folder, "search.json"))
    solve(found, {"macs": "100%"})


def read_space(content: bytes, folder: Path) -> None:
    from haloc.files import read_json
    from haloc.space import RankSpace

    found = RankSpace.from_dict(read_json(placed(content, folder, "space.json")))
    json.dumps(found.to_dict())


# Recipes, runs and reports


def recipes() -> list[bytes]:
    from haloc.pipeline.recipe import Recipe

    values: dict[str, Any] = {
        "model": {"name": "resnet20", "weights": "pretrained", "inputs": ["1x3x32x32"]},
        "data": {"name": "digits", "batch_size": 64, "mean": [0.5], "std": [0.5]},
        "target": {"name": "cpu:onnxruntime:b64", "margin": 0.02},
        "budget": {"latency": "60%", "macs": "50%"},
        "narrow": {"macs": "80%", "round_to": 4},
        "space": {"forms": ["tucker2", "svd"], "ratio": 0.5},
        "search": {"method": "haloc", "settings": {"warmup_epochs": 1}, "training": {"epochs": 2}},
        "reconstruct": {"epochs": 2},
        "finetune": {"epochs": 3, "lr": 0.01},
        "export": {"formats": ["onnx"], "int8": True},
        "run": {"device": "cpu", "seed": 1},
    }
    content = Recipe.from_dict(values).to_toml().encode()
    return [content + b"\n" * (-len(content) % 4)]  # its length decides how it is read


def read_recipe(content: bytes, folder: Path) -> None:
    from haloc.pipeline.recipe_file import read_recipe
    from haloc.pipeline.settings import check_search, finetuning, reconstruction

    path = placed(content, folder, "recipe.toml")
    way = len(content) % 4
    recipe = read_recipe(path, ["budget.macs=40%"] if way == 0 else [], quick=way == 1, no_train=way == 2)
    recipe.to_toml()
    for check in (check_search, finetuning, reconstruction):
        check(recipe)


def stages() -> bytes:
    stamp = {"fingerprint": "a", "done": True, "seconds": 1.5, "files": {"stages.json": "b"}}
    return as_json({"kind": "haloc-stages", "format": 1, "stages": {"inspect": stamp, "table": {"fingerprint": "c"}}})


def read_stages(content: bytes, folder: Path) -> None:
    from haloc.pipeline.stamps import Stamps

    placed(content, folder, "stages.json")
    stamps = Stamps(folder)
    for name in ("inspect", "table"):
        if stamps.get(name) is not None:
            stamps.changed(name)


def report() -> bytes:
    from tests.report.sample import sample

    return as_json(sample())


def read_report(content: bytes, folder: Path) -> None:
    from haloc.cli.report import run

    sink = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        run(placed(content, folder, "report.json"), output=None, json=False)
