"""The paper's CIFAR-10 table beside what was measured here, and every bar beside its figure, from committed files.

    python benchmarks/paper_cifar10/show.py           # prints it
    python benchmarks/paper_cifar10/show.py --write   # writes it into docs/paper-cifar10.md

Nothing is measured by it, and what has not been measured says so. The page has places for it between comments, from
``<!-- table: bars -->`` or ``<!-- words: status -->`` to ``<!-- end -->``; what is written there by hand is lost.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from bars import HERE
from sheets import sheets_of
from words import words_of

from haloc.files import replacing

sys.path.insert(0, str(HERE.parent))  # where the other benchmarks keep what all share

from common import console

PAGE = HERE.parents[1] / "docs" / "paper-cifar10.md"
_PLACE = re.compile(r"^<!-- (table|words): ([\w-]+) -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)


def filled(page: str, folder: Path) -> str:
    """A page with all its places filled from the files of a folder."""
    sheets = {f"table: {name}": sheet.markdown for name, sheet in sheets_of(folder).items()}
    texts = sheets | {f"words: {name}": text for name, text in words_of(folder).items()}

    def text_of(place: re.Match[str]) -> str:
        name = f"{place[1]}: {place[2]}"
        if name not in texts:
            sys.exit(f"the page has a place {name!r} that nothing is known of; there are {', '.join(texts)}")
        return f"<!-- {name} -->\n\n{texts[name]}\n\n<!-- end -->"

    return _PLACE.sub(text_of, page)


def show(folder: Path) -> None:
    """Prints all there is."""
    for sheet in sheets_of(folder).values():
        console.print(sheet.table)
    for name, text in words_of(folder).items():
        console.print(f"[bold]{name}[/]: {text}", highlight=False, soft_wrap=True)


def write(folder: Path, page: Path) -> None:
    """Fills the page anew."""
    text = filled(page.read_text(encoding="utf-8"), folder)
    with replacing(page) as temporary:
        temporary.write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=HERE, help="where results, plans and searches lie")
    parser.add_argument("--write", action="store_true", help="fill the page in docs/ instead of printing")
    parser.add_argument("--page", type=Path, default=PAGE, help="another page to fill")
    options = parser.parse_args(arguments)
    if options.write:
        write(options.folder, options.page)
    else:
        show(options.folder)


if __name__ == "__main__":
    main()
