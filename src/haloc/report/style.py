"""What all figures share: colours, type, a sheet to draw on, and how they are written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from haloc.errors import MissingExtraError, SpecError
from haloc.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: What a figure can be written as, and what to leave out of the file so that the same table gives the same bytes.
SUFFIXES: dict[str, dict[str, Any]] = {
    ".svg": {"Date": None},
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None, "Producer": None, "Creator": None},
}
#: One colour per kind of form, told apart with any colour vision; dense is grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
DENSE_COLOUR = "#555555"
_STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "svg.hashsalt": "haloc",
}


@contextmanager
def drawing() -> Iterator[Figure]:
    """A figure of its own, drawn without a screen and without touching anybody's settings."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plot") from error
    with rc_context(_STYLE):
        yield Figure(figsize=(7, 4.5), layout="constrained")


def require_matplotlib() -> None:
    """Says what to install where figures cannot be drawn, before anything long begins."""
    with drawing():
        pass


def check_suffix(path: Path) -> None:
    """Refuses names of files that figures are not written as."""
    if path.suffix.lower() not in SUFFIXES:
        raise SpecError(f"a figure is written as {', '.join(SUFFIXES)}, got {path.name!r}")


def write_figure(figure: Figure, path: str | Path) -> None:
    """Writes a figure as .svg, .png or .pdf, whole or not at all; the same figure gives the same bytes."""
    from matplotlib import rc_context

    path = Path(path)
    check_suffix(path)
    suffix = path.suffix.lower()
    with rc_context(_STYLE), replacing(path) as temporary:
        figure.savefig(temporary, format=suffix[1:], dpi=160, metadata=SUFFIXES[suffix])
