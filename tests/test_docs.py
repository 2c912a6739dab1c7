"""Every Python block of the README and the docs runs, JSON and TOML blocks can be read, and commands can be typed."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from functools import partial
from pathlib import Path

import pytest
import typer

from haloc.cli import app
from haloc.cost import sampling
from haloc.cost.table import Table
from haloc.factor import aware
from haloc.pipeline.flow import check_recipe
from haloc.pipeline.recipe import Recipe
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
    # How long things take and how well factors fit does not matter here, so neither is gone into for long.
    brief = sampling.Schedule(3, 3, 0.0, 0.001, 2)
    monkeypatch.setattr(sampling, "SCHEDULES", dict.fromkeys(sampling.SCHEDULES, brief))
    monkeypatch.setattr(aware, "fit", partial(aware.fit, max_sweeps=1))
    names: dict = {}
    exec(code, names)
    assert names


@pytest.mark.parametrize("code", blocks("json"))
def test_json_blocks_are_files(code):
    value = json.loads(code)
    readers = {"haloc-plan": Plan, "haloc-table": Table}
    assert len(readers[value["kind"]].from_dict(value)) > 0


@pytest.mark.parametrize("code", blocks("toml"))
def test_toml_blocks_are_recipes(code):
    check_recipe(Recipe.from_dict(tomllib.loads(code)))


def commands() -> list:
    """Every line of a page that a reader could type: those that begin with haloc, in blocks that are no code."""
    pattern = re.compile(r"^```\n(.*?)^```", re.MULTILINE | re.DOTALL)
    lines = [(page, line) for page in PAGES for code in pattern.findall(page.read_text()) for line in code.splitlines()]
    return [pytest.param(line, id=f"{page.name}: {line[:50]}") for page, line in lines if line.startswith("haloc ")]


@pytest.mark.parametrize("line", commands())
def test_commands_have_the_options_that_are_shown(line):
    """They are parsed to the end, and not run."""
    verb, *arguments = shlex.split(line, comments=True)[1:]
    command = typer.main.get_command(app).commands[verb]
    command.make_context(verb, arguments)


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_verbs_of_the_readme_are_there(capsys):
    verbs = set(re.findall(r"^haloc (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert verbs == {command.name for command in app.registered_commands}, "the README names every verb"
