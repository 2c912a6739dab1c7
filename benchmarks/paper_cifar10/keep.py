"""Keeps of a run what the page needs: its plan, how that was made, and of HALOC's search what its figures show.

    python benchmarks/paper_cifar10/keep.py runs/resnet20-haloc/seed-0 resnet20-haloc

``plans/<name>.json`` is the plan, ``plans/made.json`` has for each the recipe's ``[space]`` and ``[search]``, and
``search/<name>.json`` is what the search found, with rounded numbers and a line per epoch. With
``--flow`` the seconds of all its stages go into ``results/flow.json``.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from haloc.files import read_json, replacing, write_json
from haloc.plan import Plan

HERE = Path(__file__).resolve().parent
#: Digits that count; a probability has four.
DIGITS = 6


def keep(run: Path, name: str, folder: Path = HERE, beside: int | None = None) -> None:
    """Copies what is kept of a run.

    Args:
        run: The folder that `haloc compress` wrote for one seed.
        name: ``<network>-<method>``.
        folder: Where it is kept.
        beside: How many other networks were trained on the same GPU at the time; None where nobody knows.
    """
    Plan.load(run / "plan.json").save(folder / "plans" / f"{name}.json")
    made = folder / "plans" / "made.json"
    known = read_json(made) if made.is_file() else {}
    write_json(made, dict(sorted({**known, name: making(run, beside)}.items())))
    if name.endswith("-haloc"):
        write_search(read_json(run / "search" / "search.json"), folder / "search" / f"{name}.json")


def making(run: Path, beside: int | None) -> dict[str, Any]:
    """How a plan was made; seconds are told only where it is known what else the machine did."""
    recipe = tomllib.loads((run / "recipe.toml").read_text(encoding="utf-8"))
    facts = {"device": recipe["run"]["device"], "space": recipe["space"], "search": recipe["search"]}
    if beside is None:
        return facts
    seconds = read_json(run / "stages.json")["stages"]["search"]["seconds"]
    return facts | {"seconds": round(seconds, 1), "beside": beside}


def keep_flow(run: Path, name: str, folder: Path = HERE) -> None:
    """Seconds of all stages, of a run that came to its end."""
    stages = read_json(run / "stages.json")["stages"]
    open_ones = [stage for stage, row in stages.items() if not row["done"]]
    if open_ones:
        raise SystemExit(f"{run} is not done: {', '.join(open_ones)}; a flow is timed to its end")
    path = folder / "results" / "flow.json"
    known = read_json(path) if path.is_file() else {}
    seconds = {stage: round(row["seconds"], 1) for stage, row in stages.items()}
    write_json(path, {**known, name.split("-")[0]: {"stages": seconds}})


def write_search(found: Mapping[str, Any], path: Path) -> None:
    """A line per key and per epoch, so that it stays small and can be compared."""
    *head, (last, history) = rounded(found).items()
    if last != "history":
        raise SystemExit(f"a search ends with its history, this one with {last!r}; run the search again")
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head]
    epochs = ",\n".join(json.dumps(row) for row in history)
    with replacing(path) as temporary:
        text = ",\n".join([*lines, f'"history": [\n{epochs}\n]'])
        temporary.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


def rounded(value: Any) -> Any:
    """The same values, with as many digits as anybody looks at."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of one seed")
    parser.add_argument("name", help="<network>-<method>")
    parser.add_argument("--folder", type=Path, default=HERE, help="where it is kept")
    parser.add_argument("--beside", type=int, help="networks that were trained on the same GPU at the time")
    parser.add_argument("--flow", action="store_true", help="keep the seconds of all stages too: results/flow.json")
    options = parser.parse_args(arguments)
    keep(options.run, options.name, options.folder, options.beside)
    if options.flow:
        keep_flow(options.run, options.name, options.folder)


if __name__ == "__main__":
    main()
