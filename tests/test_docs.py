"""Every Python block of the README and the docs runs, and every JSON block is a file that can be read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from haloc.cost import sampling
from haloc.cost.table import Table
from haloc.plan import Plan

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list:
    pattern = re.compile(rf"^```{language}\n(.*?)^```", re.MULTILINE | re.DOTALL)
    found = [(page, number, code) for page in PAGES for number, code in enumerate(pattern.findall(page.read_text()))]
    return [pytest.param(code, id=f"{page.name}-{number}") for page, number, code in found]


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # What the pages measure does not matter here, so it need not take as long as it should.
    brief = sampling.Schedule(3, 3, 0.0, 0.001, 2)
    monkeypatch.setattr(sampling, "SCHEDULES", dict.fromkeys(sampling.SCHEDULES, brief))
    names: dict = {}
    exec(code, names)
    assert names


@pytest.mark.parametrize("code", blocks("json"))
def test_json_blocks_are_files(code):
    value = json.loads(code)
    readers = {"haloc-plan": Plan, "haloc-table": Table}
    assert len(readers[value["kind"]].from_dict(value)) > 0


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_verbs_of_the_readme_are_there(capsys):
    from haloc.cli import app

    verbs = set(re.findall(r"^haloc (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert verbs == {command.name for command in app.registered_commands}
