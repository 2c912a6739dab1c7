"""What can go wrong because of a user's input, each with the exit code the command line gives it.

Every message says what was got, what was expected and what to do about it.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

#: Words longer than this are not looked for among known ones: comparing takes time that grows with the square.
_LONGEST_WORD = 100


class HalocError(Exception):
    """Base of every error that a user can cause and mend."""

    exit_code: ClassVar[int] = 1


class SpecError(HalocError, ValueError):
    """A model, data set, input shape or option that is spelled or combined wrongly."""

    exit_code = 2


class FileFormatError(HalocError, ValueError):
    """A file that is missing, unreadable or not of the kind it should be."""


class PlanError(HalocError, ValueError):
    """A plan that does not fit the model it is applied to, or is not a plan at all."""


class WeightsError(HalocError, ValueError):
    """Weights that do not belong to the model."""


class DataError(HalocError, RuntimeError):
    """A data set that cannot be found, read or trusted."""


class ModelError(HalocError, RuntimeError):
    """A model that does not run on the inputs it was given."""


class TrainError(HalocError, RuntimeError):
    """A training run that cannot go on."""


class ExportError(HalocError, RuntimeError):
    """A model that cannot be written in the format wanted, or whose file does not compute what the model does."""


class CostError(HalocError, LookupError):
    """A price that is not known; it is never taken for zero."""


class BudgetError(HalocError, ValueError):
    """A budget that cannot be reached; the message says what can.

    Attributes:
        reachable: The best that can be reached, by quantity; empty where that is not known.
    """

    exit_code = 3

    def __init__(self, message: str, reachable: Mapping[str, float] | None = None) -> None:
        super().__init__(message)
        self.reachable = dict(reachable or {})


class MissingExtraError(HalocError, ImportError):
    """An optional dependency that is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"this needs the package {package!r}, which is not installed; install it with: pip install 'haloc[{extra}]'"
        )


def nearest(word: str, options: Iterable[str]) -> str:
    """Returns `` Did you mean 'x'?`` for the option closest to ``word``, or nothing when none is close."""
    if len(word) > _LONGEST_WORD:
        return ""
    matches = difflib.get_close_matches(word, list(options), n=1, cutoff=0.5)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def shown(value: Any) -> str:
    """A value as a message can hold it: what is long or deep is cut short, whatever it is."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # a number of more digits than Python writes
        return f"a {type(value).__name__} too long to be shown"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxlong = 60
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict = 3, 6, 8
