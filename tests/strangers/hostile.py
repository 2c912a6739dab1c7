"""Files that somebody made on purpose."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

import torch


def written(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def evil_torch_file(marker: Path, zipped: bool) -> bytes:
    file = io.BytesIO()
    torch.save({"weight": Evil(marker)}, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def evil_pickle(marker: Path) -> bytes:
    return pickle.dumps(Evil(marker))


def safetensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A file with any header, of any length that it says it has."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _entry(shape: list[Any], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


#: Headers that lie about what follows.
LIES: dict[str, bytes] = {
    "a header of 2^60 bytes": safetensors({}, length=2**60),
    "a header of 2^64 - 1 bytes": safetensors({}, length=2**64 - 1),
    "a header longer than the file": safetensors({"weight": _entry([1], 0, 4)}, bytes(4), length=500),
    "offsets beyond the end": safetensors({"weight": _entry([1000], 0, 4000)}, bytes(8)),
    "offsets the wrong way round": safetensors({"weight": _entry([1], 4, 0)}, bytes(8)),
    "negative offsets": safetensors({"weight": _entry([1], -4, 0)}, bytes(8)),
    "a shape that its bytes do not hold": safetensors({"weight": _entry([10**9, 10**9], 0, 4)}, bytes(4)),
    "a shape that overflows": safetensors({"weight": _entry([2**62, 4], 0, 0)}, b""),
    "overlapping tensors": safetensors({"a": _entry([2], 0, 8), "b": _entry([2], 4, 12)}, bytes(12)),
    "a hole between tensors": safetensors({"a": _entry([1], 0, 4), "b": _entry([1], 8, 12)}, bytes(12)),
    "bytes that belong to nobody": safetensors({"a": _entry([1], 0, 4)}, bytes(4000)),
    "a kind of number that nobody knows": safetensors({"a": _entry([1], 0, 4, "Q99")}, bytes(4)),
    "no header": safetensors(b"[1, 2]"),
    "a header of brackets": safetensors(b"[" * 100_000),
    "a name twice": safetensors(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
                                b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
    "nothing at all": b"",
    "seven bytes": b"\0" * 7,
}  # fmt: skip


def png(width: int, height: int, lines: int | None = None) -> bytes:
    """A black picture of one bit per pixel: a few bytes for any number of them."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    row = b"\0" * (1 + (width + 7) // 8)
    packed = zlib.compressobj(9)
    body = b"".join(packed.compress(row) for _ in range(height if lines is None else lines)) + packed.flush()
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def jpeg_of(width: int, height: int) -> bytes:
    """A JPEG whose header says that it is of that size."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("L", (8, 8)).save(file, "JPEG")
    content = bytearray(file.getvalue())
    at = content.index(b"\xff\xc0") + 5
    content[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(content)


def archive(*members: tuple[str, bytes | str | int], mode: str = "w:gz") -> bytes:
    """A tar file: content by name; a text instead is where a link leads, a number how long a file claims to be."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as made:  # type: ignore[call-overload]
        for name, content in members:
            member = tarfile.TarInfo(name)
            if isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
                made.addfile(member)
            elif isinstance(content, int):
                member.type, member.size = tarfile.REGTYPE, content
                made.fileobj.write(member.tobuf(tarfile.GNU_FORMAT))  # type: ignore[union-attr]
                break
            else:
                member.size = len(content)
                made.addfile(member, io.BytesIO(content))
    return file.getvalue()


#: A pickle of eight bytes that asks for a memo of two billion places.
MEMO_BOMB = b"\x80\x02Nr\xff\xff\xff\x7f."

#: Lines that unfold to ten to the ninth.
YAML_BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
).encode()
