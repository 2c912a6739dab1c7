"""Files made wrong in the ways that strangers' files are: by hand, by accident, on purpose.

Everything is drawn from the random numbers that are handed in, so the same seed makes the same file.
"""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

# ruff: noqa: E501
#: Values that a reader has to think of.
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 10**9, 2**31, 2**63, -(2**63), 10**400, 0.5, -0.0, 1e308, 1e-320,
    float("nan"), float("inf"), float("-inf"), "", "0", "x", "conv", "linear", "dense", "\ud800", "\x00", "\x1b[31m",
    "<script>alert(1)</script>", "[/red]", "{0}", "%s", "../../etc/passwd", "/dev/zero", "os:abort", "a" * 3000,
    [], {}, [[]], [0], [None], [1, 2, 3], ["a", "b"], {"a": 1}, {"": {}}, {"form": "svd", "rank": 10**9},
)  # fmt: skip

_RAW = (
    b"", b"\n", b"{", b"[]", b"{}", b"null", b"0", b'"x"', b"NaN", b"-", b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}", b"\x80\x02}q\x00.",
    b"[" * 3000, b'{"a":' * 3000, b"[" * 100_000, b"1" * 5000, b'{"a": ' + b"9" * 5000 + b"}", b"\x00" * 512, b"PK\x03\x04", b"\x1f\x8b\x08",
)  # fmt: skip


def bytes_mutated(content: bytes, random: Random) -> bytes:
    """Some bytes changed, left out, doubled or moved; or the file cut off; or another file altogether."""
    way = random.randrange(12)
    if way == 0:
        return random.choice(_RAW)
    if way <= 2:
        return content[: random.randrange(len(content) + 1)]
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 1, 2, 4, 16))):
        at = random.randrange(len(changed) + 1)
        more = random.choice((1, 1, 2, 4, 8, 64))
        what = random.randrange(6)
        if what == 0:
            changed[at : at + more] = bytes(random.randrange(256) for _ in range(more))
        elif what == 1:
            del changed[at : at + more]
        elif what == 2:
            changed[at:at] = changed[at : at + more]
        elif what == 3:
            other = random.randrange(len(changed) + 1)
            changed[at : at + more] = changed[other : other + more]
        elif what == 4:
            number = random.choice((0, 1, 127, 128, 255, 2**16 - 1, 2**31 - 1, 2**32 - 1, 2**60, 2**64 - 1))
            width = random.choice((1, 2, 4, 8))
            changed[at : at + width] = (number % 256**width).to_bytes(width, random.choice(("little", "big")))
        elif changed:
            at = min(at, len(changed) - 1)
            changed[at] ^= 1 << random.randrange(8)
    return bytes(changed)


def json_mutated(content: bytes, random: Random) -> bytes:
    """The same document with something in it that does not belong, is missing, or is there twice."""
    value = json.loads(content)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        value = _changed(value, random)
    text = _written(value, random)
    encoding = random.choice(("utf-8",) * 30 + ("utf-16", "utf-8-sig", "latin-1"))
    found = text.encode(encoding, "replace" if encoding == "latin-1" else "surrogatepass")
    return bytes_mutated(found, random) if random.randrange(10) == 0 else found


def lines_mutated(content: bytes, random: Random) -> bytes:
    """A file of JSON lines with one of them changed, missing, doubled or torn."""
    lines = content.split(b"\n")
    at = random.randrange(len(lines))
    way = random.randrange(5)
    if way == 0:
        del lines[at]
    elif way == 1:
        lines.insert(at, random.choice(lines))
    elif way == 2:
        lines[at] = bytes_mutated(lines[at], random)
    elif lines[at].strip():
        lines[at] = json_mutated(lines[at], random)
    return b"\n".join(lines)


#: What may stand to the right of a key in TOML, right or wrong.
_TOML = (
    "1", "-1", "0", "10000000000000000000000", "1" * 5000, "1.5", "nan", "inf", "-inf", "1e400", "true", '"text"', "'x'", '"60%"', '"os:abort"',
    "1979-05-27", "07:32:00", "1979-05-27T07:32:00Z", "[]", "[1]", '["a"]', "{}", "{a = 1}", "[[[[1]]]]", '"""\nlines\n"""', "0x10", "0b1", "1_000",
    '"\\u0000"', '"\\ud800"', "[" * 3000, "{a = " * 500 + "1" + "}" * 500, "", '"' + "a" * 3000 + '"', "[1, 'a', {b = 2}]", "+1", '"4 ms"', '"-3%"', '"nan ms"',
)  # fmt: skip


def toml_mutated(content: bytes, random: Random) -> bytes:
    """A recipe with a value, a key, a section or a line that does not belong."""
    lines = content.decode().split("\n")
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        at = random.randrange(len(lines))
        key, equals, _ = lines[at].partition("=")
        way = random.randrange(8)
        if way <= 3 and equals:
            lines[at] = f"{key}= {random.choice(_TOML)}"
        elif way == 4:
            del lines[at]
            lines = lines or [""]
        elif way == 5:
            lines.insert(at, random.choice(lines))
        elif way == 6:
            lines.insert(
                at,
                random.choice(
                    (
                        "[x]",
                        "[model]",
                        "[[model]]",
                        "model = 1",
                        "a.b.c = 1",
                        "'' = 1",
                        "[" * 300 + "]" * 300,
                        "search = 3",
                        "finetune = []",
                        "reconstruct = 1",
                        "target = 1",
                        "data = []",
                    )
                ),
            )
        else:
            lines[at] = f"{random.choice(('name', 'epochs', 'settings', 'rows', 'x'))} = {random.choice(_TOML)}"
    found = "\n".join(lines).encode("utf-8", "replace")
    return bytes_mutated(found, random) if random.randrange(8) == 0 else found


def _changed(value: Any, random: Random) -> Any:
    """One place of it changed."""
    holders = _holders(value)
    if not holders or random.randrange(60) == 0:
        return copy.deepcopy(random.choice(ODD))
    holder = random.choice(holders)
    keys = list(holder) if isinstance(holder, dict) else range(len(holder))
    key, way = random.choice(list(keys)), random.randrange(10)
    if way == 0:
        del holder[key]
    elif way == 1 and isinstance(holder, dict):
        holder[random.choice(("", "x", "kind", "form", "rank", "__class__", "name", "\ud800"))] = copy.deepcopy(
            random.choice(ODD)
        )
    elif way == 1:
        holder.insert(key, random.choice(holder))
    elif way == 2:
        holder[key] = random.choice(_values(value))  # a circle, now and then, which is written as something else
    elif way == 3:
        holder[key] = _nested(random.choice((2, 70, 500, 900)), random)
    elif way == 4 and isinstance(holder[key], int | float):
        holder[key] = holder[key] * random.choice((-1, 0, 2, 10**6, 10**30)) + random.choice((0, 1, -1, 0.5))
    else:
        holder[key] = copy.deepcopy(random.choice(ODD))
    return value


def _holders(value: Any) -> list[Any]:
    """All lists and dicts in a document that are not empty."""
    found, waiting, seen = [], [value], set()
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict | list) and one and id(one) not in seen:
            seen.add(id(one))
            found.append(one)
            waiting.extend(one.values() if isinstance(one, dict) else one)
    return found


def _values(value: Any) -> list[Any]:
    return [item for holder in _holders(value) for item in (holder.values() if isinstance(holder, dict) else holder)]


def _nested(depth: int, random: Random) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if random.randrange(2) else {"a": value}
    return value


def _written(value: Any, random: Random) -> str:
    """As JSON; now and then with a key twice."""
    try:
        text = json.dumps(value, ensure_ascii=bool(random.randrange(4)))
    except (RecursionError, ValueError):
        text = "[" * 2000
    if random.randrange(25) == 0:
        text = text.replace("{", '{"kind": "other", ' if random.randrange(2) else '{"x": 1, "x": 2, ', 1)
    return text
