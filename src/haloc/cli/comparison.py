"""Several runs beside each other: one line per recipe, in the mean over its seeds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from haloc.cli.output import note, print_json, print_table
from haloc.cli.verdict import amount


def show_comparison(said: Mapping[str, Any], folder: Path, json: bool) -> None:
    """Prints what ``comparison.json`` says, the best score first."""
    if json:
        print_json({"folder": str(folder), **said})
        return
    rows = said["rows"]
    if not rows:
        return
    keys = list(dict.fromkeys(key for row in rows for key in row["figures"]))
    names = {key: next(row["figures"][key]["name"] for row in rows if key in row["figures"]) for key in keys}
    table = Table(title=f"{len(rows)} recipes" if len(rows) > 1 else rows[0]["name"])
    table.add_column("recipe", no_wrap=True)
    for column in ("method", "seeds", *(names[key] for key in keys), "budget"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in sorted(rows, key=_score, reverse=True):
        own = row["figures"]
        cells = [_said(own[key], key) if key in own else "" for key in keys]
        met = "met" if row["met"] else "NOT MET"
        table.add_row(row["name"], row["method"], str(len(row["seeds"])), *cells, met)
    print_table(table)
    note(f"all figures are in {folder / 'comparison.json'}")


def _score(row: Mapping[str, Any]) -> float:
    return float(row["figures"].get("score", {}).get("after", 0.0))


def _said(figure: Mapping[str, Any], key: str) -> str:
    """A score with its spread, all else as the share that remains."""
    if key == "score":
        spread = figure["spread"]
        return amount(figure["after"], figure["unit"]) + (f" ± {spread:.2g}" if spread is not None else "")
    return f"{amount(figure['after'], figure['unit'])} ({figure['after'] / figure['before']:.2%})"
