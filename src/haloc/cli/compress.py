"""``haloc compress``: the whole flow that a recipe describes, in a folder where it can be stopped and continued."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from haloc.cli.options import JsonOption
from haloc.cli.output import counting, duration, fail, note, print_json, print_table
from haloc.cli.verdict import show_facts
from haloc.errors import SpecError
from haloc.files import replacing

if TYPE_CHECKING:
    from haloc.pipeline.outlook import Prospect
    from haloc.pipeline.recipe import Recipe

RecipeArgument = Annotated[Path, typer.Argument(help="The recipe, a TOML file.", show_default=False)]
OutputOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="The folder of the run; runs/ and the recipe's name.", show_default=False),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change the recipe: section.key=value. Repeat it.", show_default=False),
]
DryOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done and how long it takes; do nothing.")]
QuickOption = Annotated[
    bool, typer.Option("--quick", help="A try of the whole flow with few images and one epoch; no result to go by.")
]
NewOption = Annotated[bool, typer.Option("--new", help="Write a recipe to start from, with all keys explained.")]


def run(
    recipe: RecipeArgument,
    output: OutputOption = None,
    changes: SetOption = None,
    dry_run: DryOption = False,
    quick: QuickOption = False,
    new: NewOption = False,
    json: JsonOption = False,
) -> None:
    """Do all of it: measure the hardware, choose the ranks, factorise, fine-tune, export, report.

    Stopped at any time, the same command goes on; after an edit of the recipe, what it does not concern is kept.

    Examples:
    - `haloc compress --new recipe.toml` and, once it says what you want, `haloc compress recipe.toml`

    - `haloc compress recipe.toml --set budget.latency=40% --set finetune.epochs=30 --output runs/small --dry-run`
    """
    if new:
        _write_new(recipe)
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SpecError("haloc compress runs as one process; haloc search and haloc finetune run under torchrun")
    from haloc.pipeline.recipe import read_recipe

    wanted, folder = read_recipe(recipe, changes or (), quick=quick), output or Path("runs") / recipe.stem
    if dry_run:
        _foresee(wanted, folder, json)
        return
    with _interruptible():
        _compress(wanted, folder, json)


def _compress(recipe: Recipe, folder: Path, json: bool) -> None:
    from haloc.pipeline.flow import compress_recipe

    found = compress_recipe(recipe, folder, shown()).report
    show_facts(found.facts, folder, json)
    if not found.met:
        missed = ", ".join(f"{b['name']} {b['after']:.4g} of {b['budget']:.4g} {b['unit']}".strip()
                           for b in found.facts["verdict"]["budgets"] if not b["met"])  # fmt: skip
        fail(f"the budget is not met: {missed}; give a larger one, other forms (space.forms) or finer ranks")
        raise typer.Exit(3)


def _foresee(recipe: Recipe, folder: Path, json: bool) -> None:
    from haloc.pipeline.outlook import outlook

    found = outlook(recipe, folder)
    if json:
        print_json({"folder": str(folder), "stages": [vars(stage) for stage in found]})
        return
    table = Table(title=f"what would be done in {folder}")
    for column in ("stage", "", "state", "takes"):
        table.add_column(column, justify="right" if column == "takes" else "left")
    for stage in found:
        table.add_row(stage.name, stage.what, stage.why or stage.state, _said(stage))
    table.add_section()
    table.add_row("", "", "in all about", duration(sum(stage.seconds for stage in found)))
    print_table(table)


def _said(stage: Prospect) -> str:
    if stage.state in ("kept", "not needed"):
        return ""
    return f"{'' if stage.known else 'about '}{duration(stage.seconds)}"


def _write_new(path: Path) -> None:
    from haloc.pipeline.template import TEMPLATE

    if path.exists():
        raise SpecError(f"{path} is there already; choose another name, or remove it first")
    with replacing(path) as temporary:
        temporary.write_text(TEMPLATE, encoding="utf-8")
    note(f"wrote {path}; edit it, then: haloc compress {path} --dry-run")


def shown() -> Any:
    """A listener that shows bars and lines on stderr."""
    from haloc.cli.searching import following
    from haloc.pipeline.listener import Listener, Steps, Training

    class Shown(Listener):
        def stage(self, name: str, what: str, place: str) -> None:
            note(f"[{place}] {name}: {what}")

        def kept(self, name: str, why: str, place: str) -> None:
            note(f"[{place}] {name}: {why}")

        def note(self, text: str) -> None:
            note(f"       {text}")

        @contextmanager
        def steps(self, what: str) -> Iterator[Steps]:
            with counting(f"       {what}") as step:
                yield step

        @contextmanager
        def working(self, what: str) -> Iterator[tuple[Steps, Training]]:
            with following(f"       {what}") as bars:
                yield bars

    return Shown()


@contextmanager
def _interruptible() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as error:
        fail("interrupted; what was done is kept, run the same command again to go on")
        raise typer.Exit(130) from error
