"""Numbers as engineers write them: 12.3 ± 0.2 ms, 40.8 M, 58.1%. What is not there is a dash."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log10
from typing import Any

NOTHING = "–"
_MINUS = "\N{MINUS SIGN}"
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
#: What is larger is no figure of a report, and could not be worked with.
_LARGEST = 1e100
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def number(value: Any) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
        return None
    return float(value)


def quantity(value: Any, unit: str = "", error: Any = None) -> str:
    """A value with its unit, and its error where there is one."""
    found, off = number(value), number(error)
    if found is None:
        return NOTHING
    if unit == "%":
        return _percent_points(found, off)
    if unit in ("", "B") and abs(found) >= 999.5:
        factor, prefix = prefix_for(found)
        return _with_unit(_digits(found / factor, off and off / factor), f"{prefix}{unit}")
    whole = unit in ("", "B") and found == int(found) and not off
    return _with_unit(f"{int(found)}" if whole else _digits(found, off), unit)


def prefix_for(value: float) -> tuple[float, str]:
    """What a large number is divided by, and the letter for it."""
    return next(((factor, letter) for factor, letter in _PREFIXES if abs(value) >= 0.9995 * factor), (1.0, ""))


def with_error(pair: Any, unit: str) -> str:
    """A value and its error given as a pair; either may be missing."""
    if not isinstance(pair, Sequence) or isinstance(pair, str) or not pair:
        return NOTHING
    return quantity(pair[0], unit, pair[1] if len(pair) > 1 else None)


def percent(share: Any, digits: int = 1) -> str:
    """A share of one as a percentage."""
    found = number(share)
    return NOTHING if found is None else f"{found * 100:.{digits}f}%".replace("-", _MINUS)


def times(ratio: Any) -> str:
    """How many times as fast, large, …."""
    found = number(ratio)
    return NOTHING if found is None else f"{_digits(found, None)}×"


def tiny(value: Any) -> str:
    """A small difference by its power of ten."""
    found = number(value)
    if found is None:
        return NOTHING
    if found == 0 or abs(found) >= 0.01:
        return f"{found:.3g}"
    lead, power = f"{found:.1e}".split("e")
    return f"{lead}×10{str(int(power)).translate(_RAISED)}".replace("-", _MINUS)


def signed(value: float, digits: int) -> str:
    """A difference, with its sign."""
    return f"{value:+.{digits}f}".replace("-", _MINUS)


def grouped(value: Any) -> str:
    """A whole number with its thousands apart."""
    found = number(value)
    return NOTHING if found is None else f"{found:,.0f}"


def duration(seconds: Any) -> str:
    """A time as people say it."""
    found = number(seconds)
    if found is None:
        return NOTHING
    if found < 60:
        return f"{found:.0f} s" if found >= 10 else f"{found:.1f} s"
    minutes, rest = divmod(round(found), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def like(value: Any, unit: str, largest: float) -> str:
    """A value beside others of one unit, with as many places as the largest of them has."""
    found = number(value)
    if found is None or unit in ("", "B", "%") or largest <= 0:
        return quantity(value, unit)
    return _with_unit(f"{found:.{max(0, 2 - floor(log10(largest)))}f}", unit)


def _with_unit(digits: str, unit: str) -> str:
    return f"{digits} {unit}".rstrip()


def _percent_points(value: float, error: float | None) -> str:
    return (f"{value:.2f}%" if not error else f"{value:.2f} ± {error:.2f}%").replace("-", _MINUS)


def _digits(value: float, error: float | None) -> str:
    """As many digits as the error leaves, or three that count."""
    if error:
        places = max(0, -floor(log10(abs(error))))
        return f"{value:.{places}f} ± {error:.{places}f}".replace("-", _MINUS)
    if value == 0 or not 1e-4 <= abs(value) < 1e6:
        return tiny(value) if abs(value) < 1e6 else f"{value:.3g}"
    places = max(0, 2 - int(f"{value:.2e}".split("e")[1]))
    return f"{value:.{places}f}".replace("-", _MINUS)
