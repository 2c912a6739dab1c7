"""The command line: one file per verb, each of which parses, calls a public function and prints.

Nothing here imports torch before a verb runs, so that ``haloc --help`` answers at once.
"""

from __future__ import annotations

import os
import sys

import typer

from haloc.cli import apply, compress, evaluate, export, finetune, inspect, measure, predict, report, search, train
from haloc.cli.output import fail, warnings_noted
from haloc.errors import HalocError

app = typer.Typer(
    name="haloc",
    help="Make trained PyTorch networks smaller and faster by low-rank factorisation.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 failed, 2 wrong usage, 3 budget not reachable.",
)
app.command("compress")(compress.run)
app.command("inspect")(inspect.run)
app.command("measure")(measure.run)
app.command("predict")(predict.run)
app.command("search")(search.run)
app.command("apply")(apply.run)
app.command("evaluate")(evaluate.run)
app.command("train")(train.run)
app.command("finetune")(finetune.run)
app.command("export")(export.run)
app.command("report")(report.run)


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", help="Print the version and leave.")) -> None:
    if version:
        from haloc import __version__

        typer.echo(f"haloc {__version__}")
        raise typer.Exit


def main() -> None:
    """Runs the command line; what a user can mend ends in one sentence and the exit code of its kind."""
    try:
        with warnings_noted():
            app(prog_name="haloc")
    except HalocError as error:
        fail(str(error))
        sys.exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # who read it has left; nothing more is said
        sys.exit(1)
    except OSError as error:  # a full disk, say, in the middle of a log
        named = "" if error.filename is None else f" ({error.filename})"
        fail(f"{error.strerror or error}{named}; what was finished is kept, run it again when that is mended")
        sys.exit(1)
    except KeyboardInterrupt:
        fail("interrupted")
        sys.exit(130)
