"""``haloc report``: shows what a run came to, and writes its page and summary anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from haloc.cli.options import JsonOption
from haloc.cli.output import note
from haloc.cli.verdict import say, words_for
from haloc.errors import FileFormatError, HalocError, shown
from haloc.files import naming, read_json, replacing

RunArgument = Annotated[
    Path, typer.Argument(help="The folder of a run of `haloc compress`, or its report.json.", show_default=False)
]
OutputOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Write there: .html for the page, .md for the summary.", show_default=False),
]


def run(run: RunArgument, output: OutputOption = None, json: JsonOption = False) -> None:
    """Show what a run of `haloc compress` came to, and write its report page or summary anew.

    Examples:
    - `haloc report runs/recipe`

    - `haloc report runs/recipe --output summary.md`
    """
    path = run / "report.json" if run.is_dir() or run.suffix != ".json" else run
    facts = read_facts(path)
    files = [path.with_suffix(".html"), path.with_suffix(".md")] if output is None else [output]
    with _drawing(path):
        texts = {file: _text(file, facts) for file in files}
        said = words_for(facts, path.parent)
    for file, text in texts.items():
        with replacing(file) as temporary:
            temporary.write_text(text, encoding="utf-8")
        note(f"wrote {file}")
    say(said, json)


def read_facts(path: Path) -> dict[str, Any]:
    """What a ``report.json`` holds."""
    from haloc.pipeline.facts import FORMAT, KIND

    if not path.exists():
        raise FileFormatError(f"there is no {path}; a run of `haloc compress` writes it at its end")
    with naming(path):
        value = read_json(path)
        if not isinstance(value, dict) or value.get("kind") != KIND:
            raise FileFormatError(f'not a report: expected a JSON object with "kind": "{KIND}"')
        if value.get("format") != FORMAT:
            found = shown(value.get("format"))
            raise FileFormatError(f"report format {found} is not known; this version reads {FORMAT}")
        missing = [name for name in ("title", "verdict", "figures", "variants", "exports") if name not in value]
        if missing:
            raise FileFormatError(f"the report is incomplete: it has no {', '.join(missing)}; run haloc compress again")
        return value


@contextmanager
def _drawing(path: Path) -> Iterator[None]:
    """Says that the file is wrong where no report can be made of it; which of its many values it is may differ."""
    try:
        yield
    except HalocError:
        raise
    except Exception as error:
        raise FileFormatError(
            f"{path} is not a report that haloc wrote: something in it is of another kind than it should be "
            f"({type(error).__name__}: {str(error)[:200]}); run haloc compress again"
        ) from error


def _text(path: Path, facts: dict[str, Any]) -> str:
    from haloc.report.page import render
    from haloc.report.summary import markdown

    writers = {".html": render, ".md": markdown}
    if path.suffix.lower() not in writers:
        raise FileFormatError(f"a report is written as .html or .md, got {path.name!r}")
    return writers[path.suffix.lower()](facts)
