"""Silence around exporters, which talk a lot about what no user of ours can change."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

_TALKERS = ("torch", "onnxscript", "onnx_ir", "onnxruntime", "onnx", "root")


@contextmanager
def quiet() -> Iterator[None]:
    """Inside the block no warnings, log lines or prints of torch and the packages around ONNX come through."""
    filters = [(handler, _not_theirs) for handler in _handlers()]
    for handler, filtering in filters:
        handler.addFilter(filtering)
    try:
        said = io.StringIO()
        with warnings.catch_warnings(), redirect_stdout(said), redirect_stderr(said):
            warnings.simplefilter("ignore")
            yield
    finally:
        for handler, filtering in filters:
            handler.removeFilter(filtering)


def _handlers() -> list[logging.Handler]:
    """Where log lines come out: at the root, and at loggers that have an outlet of their own."""
    loggers = [logging.getLogger(), *(logging.getLogger(name) for name in logging.root.manager.loggerDict)]
    found = [handler for logger in loggers for handler in logger.handlers]
    return [*dict.fromkeys(found), *([logging.lastResort] if logging.lastResort else [])]


def _not_theirs(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.CRITICAL or record.name.split(".")[0] not in _TALKERS
