"""Processes for tests: forks of a server that has imported what takes seconds, and has done nothing else yet."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

# A server of its own, as autograd does not survive a fork of a process that has trained. Like every interpreter that is
# started it has hashes of its own, so that what hangs on the order of a set differs between its forks and the tests.
FORKED = multiprocessing.get_context("forkserver")
PACKAGES = ["sklearn.datasets", "torch._dynamo", "torch.utils.tensorboard", "accelerate", "onnxruntime"]
FORKED.set_forkserver_preload(["haloc.cli", "haloc.pipeline.flow", "haloc.zoo.digits", *PACKAGES])


def two_of(task: Callable[..., None], *arguments: Any, folder: Path) -> list[tuple[str, str]]:
    """Runs a task in two processes that know of each other as torchrun would tell them; what each of them said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = [tuple(folder / f"{name}{rank}.txt" for name in ("out", "err")) for rank in range(2)]
    pair = [FORKED.Process(target=_one_of_two, args=(rank, port, said[rank], task, arguments)) for rank in range(2)]
    for process in pair:
        process.start()
    for process in pair:
        process.join(120)
        process.kill()
    texts = [tuple(path.read_text() for path in paths) for paths in said]
    assert [process.exitcode for process in pair] == [0, 0], texts
    return texts


def _one_of_two(rank: int, port: int, said: tuple[Path, Path], task: Callable[..., None], arguments: tuple) -> None:
    for stream, path in enumerate(said, start=1):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), stream)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    task(*arguments)
