"""What a method has measured so far, in its folder: a file with a JSON object per line, to go on from."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from haloc.factor.forward import tensors_in
from haloc.methods.task import Task
from haloc.training.journal import Journal, read_journal

_LOG = logging.getLogger(__name__)

Row = dict[str, Any]


@contextmanager
def notes(task: Task, method: str, identity: Mapping[str, Any]) -> Iterator[tuple[list[Row], Callable[[Row], None]]]:
    """The rows that were noted before, and what notes another; both are empty-handed where the task has no folder.

    Notes of other work are not used, and that is said in the log: the first line has the ``identity`` of what they were
    taken on.

    Args:
        task: Whose folder it is.
        method: Names the file.
        identity: All that decides what the rows say, as plain values.
    """
    if task.folder is None or not (task.session is None or task.session.is_main):
        yield [], lambda row: None
        return
    with noted(task.folder / f"{method}.jsonl", identity, resume=task.resume) as found:
        yield found


@contextmanager
def noted(
    path: Path, identity: Mapping[str, Any], *, resume: bool = True
) -> Iterator[tuple[list[Row], Callable[[Row], None]]]:
    """The same for a file of one's own."""
    before = read_journal(path) if resume and path.exists() else []
    head = {"step": 0, "of": json.loads(json.dumps(identity))}
    if before and before[0] != head:
        _LOG.warning("%s is not used: it is of another model, other data or other settings", path)
        before = []
    rows = before[1:]
    with Journal(path, keep_until=len(rows) if before else None) as journal:
        if not before:
            journal.append(head)
        count = len(rows)

        def note(row: Row) -> None:
            nonlocal count
            count += 1
            journal.append({"step": count, **row})

        yield rows, note


def fingerprint(task: Task, batches: Sequence[Any]) -> str:
    """A short text that is another one for any other weights, calibration, candidates, examples or loss."""
    digest = hashlib.sha256()
    if task.own_loss is not None:
        digest.update(f"loss {task.own_loss.name}\n".encode())
    for name, offer in task.space.open_layers.items():
        digest.update(f"{name}: {', '.join(map(str, offer))}\n".encode())
    moments = [(each.second, each.mean, each.response) for each in (task.moments or {}).values()]
    digest.update(tensors_digest([task.model.state_dict(), moments, list(batches)]))
    return digest.hexdigest()[:16]


def tensors_digest(nest: Any) -> bytes:
    """What tells the tensors of a nest from all others."""
    digest = hashlib.sha256()
    for tensor in tensors_in(nest):
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.digest()
