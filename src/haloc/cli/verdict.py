"""What is said of a run at its end: before and after, the networks on the way, and where the report is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from haloc.cli.output import count, note, print_json, print_table


@dataclass(frozen=True)
class Words:
    """What is said of a run.

    Attributes:
        plain: For programs.
        tables: For people, on stdout.
        notes: For people, on stderr.
    """

    plain: Mapping[str, Any]
    tables: Sequence[Table]
    notes: Sequence[str]


def show_facts(facts: Mapping[str, Any], folder: Path, json: bool) -> None:
    """Prints it, for people or for programs; both from the facts that the report has."""
    say(words_for(facts, folder), json)


def words_for(facts: Mapping[str, Any], folder: Path) -> Words:
    """All of it, before any of it is said: facts from a file may be of any kind."""
    files = {"report": str(folder / "report.html"), "model": str(folder / "model")}
    sign = "budget met" if facts["verdict"]["met"] else "BUDGET NOT MET"
    notes = [
        f"{sign}: {facts['verdict']['text']}",
        f"the report is {files['report']}, the network {files['model']}",
        *(f"exported: {folder / row['path']}" for row in facts["exports"]),
    ]
    plain = {**facts, "folder": str(folder), "files": files}
    return Words(plain, (_before_and_after(facts), _networks(facts)), notes)


def say(words: Words, json: bool) -> None:
    """Prints it, for people or for programs."""
    if json:
        print_json(words.plain)
        return
    for table in words.tables:
        print_table(table)
    for text in words.notes:
        note(text)


def _before_and_after(facts: Mapping[str, Any]) -> Table:
    table = Table(title=str(facts["title"]))
    for column in ("", "before", "after", "budget", "remains", "saved"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in facts["figures"]:
        remains = row.get("remains")
        shares = ("", "") if remains is None else (f"{remains:.1%}", f"{1 - remains:.1%}")
        budget = amount(row["budget"], row["unit"]) if row.get("budget") is not None else ""
        cells = (_with_error(row, "before"), _with_error(row, "after"), budget)
        table.add_row(str(row["name"]), *cells, *shares)
    return table


def _networks(facts: Mapping[str, Any]) -> Table:
    score = next((row for row in facts["figures"] if row["key"] == "score"), None)
    table = Table(title="the networks on the way")
    table.add_column("network")
    for column in (str(score["name"]) if score else "score", "latency ms", "MACs", "params", "outputs differ by"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in facts["variants"]:
        said = "" if row.get("score") is None else amount(row["score"], score["unit"] if score else "")
        times = row.get("latency_ms")
        latency = "" if times is None else f"{times[0]:.3f} ± {times[1]:.3f}"
        parity = row.get("parity") or {}
        differs = max((value for key, value in parity.items() if key != "same_answer"), default=None)
        cells = (count(row[key]) if row.get(key) else "" for key in ("macs", "params"))
        table.add_row(str(row["name"]), said, latency, *cells, "" if differs is None else f"{differs:.1e}")
    return table


def _with_error(row: Mapping[str, Any], key: str) -> str:
    error = row.get(f"{key}_error")
    return amount(row[key], row["unit"]) + (f" ± {error:.2g}" if error else "")


def amount(value: float, unit: str) -> str:
    """A figure as people read it."""
    if unit == "%":
        return f"{value:.2f}%"
    if unit == "B" or (unit == "" and value >= 1000):
        return f"{count(round(value))}{'B' if unit else ''}"
    return f"{value:.4g} {unit}".rstrip()
