"""Which stages of a run are done, on what, and what they left: a stage is done again only when its inputs change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from haloc.errors import FileFormatError, shown
from haloc.files import read_json, write_json

KIND, FORMAT = "haloc-stages", 1
FILE = "stages.json"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Stamp:
    """What is known of a stage.

    Attributes:
        fingerprint: Of all that it was done with.
        done: Whether it came to its end.
        seconds: How long that took.
        files: What it left, by path in the folder of the run: the file's digest.
    """

    fingerprint: str
    done: bool = False
    seconds: float = 0.0
    files: Mapping[str, str] = field(default_factory=dict)


class Stamps:
    """The stamps of a run, in one small file of its folder that is written after every change."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stamps = _read(folder / FILE)

    def get(self, stage: str) -> Stamp | None:
        """What is known of a stage."""
        return self._stamps.get(stage)

    def begin(self, stage: str, fingerprint: str) -> None:
        """Notes that a stage is under way."""
        self._set(stage, Stamp(fingerprint))

    def end(self, stage: str, seconds: float, files: Iterable[str]) -> None:
        """Notes that it is done, and what it left."""
        found = {name: file_digest(self._folder / name) for name in files}
        self._set(stage, replace(self._stamps[stage], done=True, seconds=seconds, files=found))

    def changed(self, stage: str) -> list[str]:
        """The files of a finished stage that are not as it left them."""
        files = self._stamps[stage].files
        return [name for name, digest in files.items() if _digest_or_none(self._folder / name) != digest]

    def _set(self, stage: str, stamp: Stamp) -> None:
        self._stamps[stage] = stamp
        self.save()

    def save(self) -> None:
        """Writes what is known."""
        stages = {name: asdict(found) for name, found in self._stamps.items()}
        write_json(self._folder / FILE, {"kind": KIND, "format": FORMAT, "stages": stages})


def _read(path: Path) -> dict[str, Stamp]:
    if not path.exists():
        return {}
    value = read_json(path)
    if not isinstance(value, dict) or value.get("kind") != KIND or value.get("format") != FORMAT:
        raise FileFormatError(f"{path} is not of a run of this version; choose another folder")
    try:
        return {name: _stamp(stamp) for name, stamp in value["stages"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise FileFormatError(f"{path} is damaged: {error}; remove it to start the run afresh") from error


def _stamp(value: Any) -> Stamp:
    """A stamp of the right kinds; files are those of the run's own folder."""
    found = Stamp(**value)
    files = found.files.items() if isinstance(found.files, Mapping) else [(None, None)]
    seconds = type(found.seconds) in (int, float) and 0 <= found.seconds <= _MOST_SECONDS
    if not isinstance(found.fingerprint, str) or not isinstance(found.done, bool) or not seconds:
        raise TypeError(f"a stamp cannot be {shown(value)}")
    if not all(isinstance(name, str) and isinstance(digest, str) and _inside(name) for name, digest in files):
        raise TypeError(f"the files of a stage lie in the folder of the run, got {shown(found.files)}")
    return found


def _inside(name: str) -> bool:
    path = Path(name)
    return "\0" not in name and not path.is_absolute() and ".." not in path.parts


#: A stage that takes longer is none.
_MOST_SECONDS = 1e12


def fingerprint(value: Any) -> str:
    """A short text that is another one for any other plain value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:24]


def file_digest(path: Path) -> str:
    """A short text that is another one for any other content."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()[:24]


def _digest_or_none(path: Path) -> str | None:
    return file_digest(path) if path.is_file() else None


@cache
def code_version() -> str:
    """The version of the package and of its very files: what another version made is made again."""
    from haloc import __version__

    root = Path(__file__).parent.parent
    files = sorted(root.rglob("*.py"))
    return f"{__version__}-{fingerprint([[str(file.relative_to(root)), file_digest(file)] for file in files])[:12]}"
