"""Plain values as TOML: what the standard library reads but does not write."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(values: Mapping[str, Any]) -> str:
    """Sections with keys, in order; the keys of a section come before the sections inside it."""
    return "\n".join(_sections(values, ""))


def _sections(values: Mapping[str, Any], name: str) -> list[str]:
    plain = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    inner = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    lines = [f"{_key(key)} = {_value(value)}\n" for key, value in plain.items()]
    own = [f"[{name}]\n", *lines] if name and (lines or not inner) else lines
    found = ["".join(own)] if own else []
    for key, value in inner.items():
        found += _sections(value, f"{name}.{_key(key)}" if name else _key(key))
    return found


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _text(name)


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return _text(value) if isinstance(value, str) else repr(value)


def _text(value: str) -> str:
    """JSON's escapes are TOML's, but for one character that JSON leaves as it is, and all that it writes as pairs."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
