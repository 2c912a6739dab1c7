"""``haloc compress``: the whole flow that a recipe describes, in a folder where it can be stopped and continued."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from haloc.cli.options import JsonOption
from haloc.cli.output import counting, duration, fail, note, print_json, print_table
from haloc.cli.verdict import show_facts
from haloc.errors import FileFormatError, SpecError
from haloc.files import replacing

if TYPE_CHECKING:
    from haloc.pipeline.outlook import Prospect
    from haloc.pipeline.recipe import Recipe

#: The other processes wait as long as the first takes over what it does alone, such as measuring a table.
PATIENCE = timedelta(days=2)

RecipesArgument = Annotated[
    list[Path], typer.Argument(metavar="recipe", help="The recipe, a TOML file; or several.", show_default=False)
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", show_default=False,
        help="The folder of the run; runs/ and the recipe's name. For several recipes the folder of their folders.",
    ),
]  # fmt: skip
SeedsOption = Annotated[
    int, typer.Option(min=1, help="Run it with so many seeds; ranks are chosen once. Tells mean and spread.")
]
AtOnceOption = Annotated[
    int, typer.Option(min=1, help="Of several recipes or seeds, how many are fine-tuned side by side on a GPU.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change the recipe: section.key=value. Repeat it.", show_default=False),
]
DryOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done and how long it takes; do nothing.")]
QuickOption = Annotated[
    bool, typer.Option("--quick", help="A try of the whole flow with few images and one epoch; no result to go by.")
]
NoTrainOption = Annotated[
    bool,
    typer.Option("--no-train", help="Use no labels and train nothing: blocks are reconstructed from inputs instead."),
]
NoCodeOption = Annotated[
    bool,
    typer.Option("--no-code", help="Refuse a recipe that names Python code of its own; for recipes of strangers."),
]
NewOption = Annotated[bool, typer.Option("--new", help="Write a recipe to start from, with all keys explained.")]


def run(
    recipes: RecipesArgument,
    output: OutputOption = None,
    changes: SetOption = None,
    seeds: SeedsOption = 1,
    at_once: AtOnceOption = 3,
    dry_run: DryOption = False,
    quick: QuickOption = False,
    no_train: NoTrainOption = False,
    no_code: NoCodeOption = False,
    new: NewOption = False,
    json: JsonOption = False,
) -> None:
    """Do all of it: measure the hardware, choose the ranks, factorise, fine-tune, export, report.

    Stopped at any time, the same command goes on; after an edit of the recipe, what it does not concern is kept.

    Examples:
    - `haloc compress --new recipe.toml` and, once it says what you want, `haloc compress recipe.toml`

    - `haloc compress recipe.toml --set budget.latency=40% --set finetune.epochs=30 --output runs/small --dry-run`

    - `haloc compress recipe.toml --no-train` for those who have pictures and no labels

    - `haloc compress haloc.toml alds.toml uniform.toml --seeds 3` compares recipes, each with three seeds

    - `torchrun --nproc_per_node 8 -m haloc compress recipes/imagenet-resnet18.toml` searches and trains on eight GPUs
    """
    if new:
        _write_new(_the_one(recipes, "--new"))
        return
    several = int(os.environ.get("WORLD_SIZE", "1"))
    if several > 1 and (dry_run or len(recipes) > 1 or seeds > 1):
        raise SpecError(
            f"{several} processes work on one recipe with one seed, got more, or --dry-run; run one process"
        )
    from haloc.pipeline.recipe_file import read_recipe

    if dry_run:
        recipe = _the_one(recipes, "--dry-run")
        if seeds > 1:
            raise SpecError("--dry-run is for one seed: what it takes is about the same for each; leave --seeds out")
        told = read_recipe(recipe, changes or (), quick=quick, no_train=no_train, no_code=no_code)
        _foresee(told, output or Path("runs") / recipe.stem, json)
        return
    names = [recipe.stem for recipe in recipes]
    if len(set(names)) < len(names):
        raise SpecError(f"recipes are told apart by their names, got {', '.join(names)}; rename one of them")
    how = {"quick": quick, "no_train": no_train, "no_code": no_code}
    read = {recipe: read_recipe(recipe, changes or (), **how) for recipe in recipes}
    with _interruptible():
        if len(recipes) > 1 or seeds > 1:
            _compare(read, output, seeds, at_once, json)
        else:
            _compress(read[recipes[0]], output or Path("runs") / recipes[0].stem, json)


def _the_one(recipes: list[Path], option: str) -> Path:
    if len(recipes) != 1:
        raise SpecError(f"{option} is for one recipe, got {len(recipes)}")
    return recipes[0]


def _compare(read: dict[Path, Recipe], output: Path | None, seeds: int, at_once: int, json: bool) -> None:
    from haloc.cli.comparison import show_comparison
    from haloc.pipeline.many import compress_many, with_seeds, write_comparison

    names, alone = [recipe.stem for recipe in read], len(read) == 1
    root = output or (Path("runs") / names[0] if alone else Path("runs"))
    if root.is_file():
        raise FileFormatError(f"{root} is a file, expected a folder for the runs; choose another name")
    folders = {name: root if alone else root / name for name in names}
    orders = [o for (path, r) in read.items() for o in with_seeds(path.stem, r, folders[path.stem], seeds)]
    said = write_comparison(root, list(compress_many(orders, shown(), at_once=at_once)))
    show_comparison(said, root, json)
    for failure in said["failed"]:
        fail(f"{failure['folder']}: {failure['error']}")
    if said["failed"]:
        raise typer.Exit(1)
    missed = [row["name"] for row in said["rows"] if not row["met"]]
    if missed:
        fail(f"a budget is not met: {', '.join(missed)}")
        raise typer.Exit(3)


def _compress(recipe: Recipe, folder: Path, json: bool) -> None:
    from haloc.cli.training import joined
    from haloc.pipeline.flow import compress_recipe

    with joined(recipe.run.device, PATIENCE) as (session, _):
        found = compress_recipe(recipe, folder, shown(), session).report
    if not session.is_main:
        return
    show_facts(found.facts, folder, json)
    if not found.met:
        missed = ", ".join(f"{b['name']} {b['after']:.4g} of {b['budget']:.4g} {b['unit']}".strip()
                           for b in found.facts["verdict"]["budgets"] if not b["met"])  # fmt: skip
        other = "another plan" if recipe.search.plan is not None else "other forms (space.forms) or finer ranks"
        fail(f"the budget is not met: {missed}; give a larger one, {other}")
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
