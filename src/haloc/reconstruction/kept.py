"""What became of the blocks so far, in a folder, to go on from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import nn

from haloc.errors import FileFormatError
from haloc.training.baseline import save_weights
from haloc.training.journal import Journal, read_journal

_JOURNAL = "blocks.jsonl"


@dataclass(frozen=True)
class Rebuilt:
    """What became of a block.

    Attributes:
        block: Its name.
        before: How far its output was from the dense network's on held-out inputs, as a share of that.
        after: How far it is now.
        kept: Whether it was changed.
        images: How many inputs it learnt from and was judged on.
    """

    block: str
    before: float
    after: float
    kept: bool
    images: int


@dataclass(eq=False)
class Kept:
    """The state after every block, in a folder; without one nothing is kept.

    Attributes:
        folder: The folder.
        journal: What became of the blocks that are done.
        done: The same.
    """

    folder: Path | None
    journal: Journal | None
    done: list[Rebuilt]

    @classmethod
    @contextmanager
    def opened(cls, folder: str | Path | None, identity: Mapping[str, Any], model: nn.Module) -> Iterator[Kept]:
        """Puts the model into the state that was kept, where that is of the same work."""
        if folder is None:
            yield cls(None, None, [])
            return
        place = Path(folder)
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileFormatError(f"cannot write to {place}: {error.strerror or error}") from error
        path, head = place / _JOURNAL, {"step": 0, "of": dict(identity)}
        rows = read_journal(path) if path.exists() else []
        rows = rows[1:] if rows and rows[0] == head else []
        rows = [row for row in rows if _is_of_blocks(row) and (place / _weights(row["step"])).is_file()][-1:]
        rows = [row for row in rows if _loaded(model, place / _weights(row["step"]))]
        for path_of_others in place.glob(_weights("*")):
            if not rows or path_of_others.name != _weights(rows[0]["step"]):
                path_of_others.unlink()
        with Journal(path, keep_until=rows[0]["step"] if rows else None) as journal:
            if not rows:
                journal.append(head)
            yield cls(place, journal, [_read(row) for row in (rows[0]["blocks"] if rows else [])])

    def note(self, done: Sequence[Rebuilt], model: nn.Module) -> None:
        """Keeps the weights first: a row in the journal says that they are there."""
        if self.folder is None or self.journal is None:
            return
        save_weights(model, self.folder / _weights(len(done)))
        self.journal.append({"step": len(done), "blocks": [asdict(each) for each in done]})
        (self.folder / _weights(len(done) - 1)).unlink(missing_ok=True)


def _loaded(model: nn.Module, path: Path) -> bool:
    """Whether the weights could be read; a file that is damaged is as good as none."""
    try:
        own = model.state_dict()  # what is no tensor is not in the file
        model.load_state_dict({**own, **load_file(path)})
    except Exception:  # what is wrong with a header that a stranger wrote decides what is raised
        return False
    return True


#: No network has more.
_MOST_BLOCKS = 10**6


def _is_of_blocks(row: Mapping[str, Any]) -> bool:
    """Whether a row says what became of blocks, as `Kept.note` writes it."""
    blocks = row.get("blocks")
    return 0 <= row["step"] <= _MOST_BLOCKS and isinstance(blocks, list) and all(map(_is_of_block, blocks))


def _is_of_block(row: Any) -> bool:
    if not isinstance(row, Mapping) or set(row) != {known.name for known in fields(Rebuilt)}:
        return False
    numbers = (row["before"], row["after"])
    fits = all(x is None or (type(x) in (int, float) and abs(x) <= 1e300) for x in numbers)
    images = type(row["images"]) is int and 0 <= row["images"] < 2**63
    return fits and images and isinstance(row["block"], str) and isinstance(row["kept"], bool)


def _read(row: Mapping[str, Any]) -> Rebuilt:
    """A log has no NaN: it says null."""
    numbers = {name: float("nan") if row[name] is None else row[name] for name in ("before", "after")}
    return Rebuilt(**{**row, **numbers})


def _weights(number: int | str) -> str:
    return f"blocks-{number}.safetensors"
