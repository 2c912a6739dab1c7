"""Exported files as models that can be called, evaluated and timed."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from haloc.artifact.formats import INPUTS_KEY, OUTPUTS_KEY
from haloc.artifact.quiet import quiet
from haloc.artifact.tensors import named_inputs, noise_like, of_batch
from haloc.cost.machine import environment, identity
from haloc.cost.measure import Progress, check_available, visit_counter
from haloc.cost.model import Estimate
from haloc.cost.runtimes import SESSIONS, TorchRun, open_onnx, torch_settings
from haloc.cost.sampling import Journal, measure_rows, schedule_of
from haloc.cost.target import Target
from haloc.errors import CostError, FileFormatError, MissingExtraError, ModelError, SpecError, shown
from haloc.factor.forward import call, describe, tensors_in
from haloc.files import naming, parse_json

#: The formats by the endings of their files.
FORMATS = {".onnx": "onnx", ".pt2": "pt2"}


class OnnxModule(nn.Module):
    """An ONNX file as a model, run by onnxruntime on the CPU.

    It takes tensors in the order, or by the names, that the exported model took them, and returns what that returned:
    a tensor, a tuple or a dict. So `haloc.evaluate` and a score of your own take it as they take the model itself.

    Args:
        path: The file.
        threads: CPU threads, None for the runtime's own choice.
    """

    def __init__(self, path: str | Path, threads: int | None = None) -> None:
        super().__init__()
        _add_place(self)
        self._session = _session(Path(path), threads)
        try:
            self._taken = {item.name: str(item.type) for item in self._session.get_inputs()}
            self._returned = [item.name for item in self._session.get_outputs()]
            self._extents = [list(item.shape) for item in self._session.get_inputs()]
            known = self._session.get_modelmeta().custom_metadata_map
        except UnicodeDecodeError as error:
            raise FileFormatError(f"{path} is damaged: a name in it is no text") from error
        if not self._returned:
            raise FileFormatError(f"{path} is a network without outputs")
        several: Any = self._returned if len(self._returned) > 1 else self._returned[0]
        with naming(path):
            self._order: list[str] = _order(known.get(INPUTS_KEY), list(self._taken))
            self._nest = _outputs(known.get(OUTPUTS_KEY), several, self._returned)

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of its inputs, in order."""
        return tuple(self._order)

    @property
    def batch(self) -> int | None:
        """How many examples it takes at a time, None for any number."""
        extents = self._extents[0][:1] if self._extents else []
        return extents[0] if extents and isinstance(extents[0], int) else None

    def feeds(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The arrays that the file is fed when the module is called so."""
        given = tensors_in(args)
        values = dict(zip(self._order, given, strict=False)) | named_inputs(self, kwargs)
        wrong = len(given) > len(self._order) or any(name not in values for name in self._taken)
        if wrong or any(name not in self._order for name in values):
            told = ", ".join([*(describe(value) for value in given), *kwargs]) or "nothing"
            raise ModelError(f"the file takes {', '.join(self._order)}, but was given {told}")
        return {name: values[name].detach().cpu().numpy() for name in self._taken}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the file on tensors, positional or named."""
        feeds = self.feeds(*args, **kwargs)
        try:
            found = self._run(feeds)
        except Exception as error:  # onnxruntime has many errors of its own
            raise ModelError(f"the exported network does not run on these inputs: {_first(error)}") from error
        tensors = {name: torch.from_numpy(array) for name, array in zip(self._returned, found, strict=True)}
        return _nested(self._nest, tensors)

    def _run(self, feeds: dict[str, Any]) -> list[Any]:
        """Runs a file for a fixed batch as often as it takes, the last time with its last example over and over."""
        size, whole = self.batch, len(next(iter(feeds.values()), ()))
        if size in (None, whole):
            found: list[Any] = self._session.run(self._returned, feeds)
            return found
        starts = range(0, whole, size or 1)
        parts = [self._session.run(self._returned, _part(feeds, whole, range(at, at + (size or 1)))) for at in starts]
        return [numpy.concatenate(outputs)[:whole] for outputs in zip(*parts, strict=True)]

    def close(self) -> None:
        """Ends the session and its threads."""
        self._session = None
        gc.collect()


class ProgramModule(nn.Module):
    """A torch.export program as a model that eval mode and the like do not disturb."""

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        _add_place(self)
        # In a tuple: a program is fixed in eval mode and refuses to be told so.
        self._program = (_loaded(Path(path)),)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program."""
        return self._program[0](*args, **kwargs)


def _add_place(module: nn.Module) -> None:
    """Nothing, on the CPU: many scores ask a model's first parameter where to put their inputs."""
    module.register_parameter("place", nn.Parameter(torch.empty(0), requires_grad=False))


def open_exported(path: str | Path, threads: int | None = None, *, trust: bool = False) -> nn.Module:
    """An exported file, .onnx or .pt2, as a model that can be called and evaluated.

    Args:
        path: The file.
        threads: CPU threads of an .onnx, None for the runtime's own choice.
        trust: Whether a .pt2 may be opened: torch runs what such a file says, so it has to be yours, or from somebody
            whose programs you would run. An .onnx needs no trust.

    Raises:
        SpecError: the file is a .pt2 and nobody said that it is to be trusted.
    """
    check_trust(path, trust)
    return OnnxModule(path, threads) if format_of(path) == "onnx" else ProgramModule(path)


def check_trust(path: str | Path, trust: bool) -> None:
    """Refuses a .pt2 unless somebody said that it is to be trusted: its graph and its pickles can name any function."""
    if format_of(path) == "pt2" and not trust:
        raise SpecError(
            f"{path} is a torch.export program, which can run any code when it is opened; if you wrote it, or trust "
            "who did, say so (trust=True, on the command line --trust), or take the network as .onnx"
        )


def format_of(path: str | Path) -> str:
    """The format that the ending of a file's name stands for."""
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise SpecError(f"a network is exported as .onnx or .pt2, got {str(path)!r}; name the file so")
    return FORMATS[suffix]


def time_files(
    files: Mapping[str, str | Path], inputs: Any, target: Target, *, on_progress: Progress | None = None
) -> dict[str, Estimate]:
    """Times exported files against each other in the runtime of a target, taking turns, one alive at a time.

    Args:
        files: ONNX files for onnxruntime and OpenVINO, .pt2 programs for torch on the CPU, by name. Programs run what
            they say, so they have to be yours.
        inputs: What the model takes; repeated or cut to the target's batch size.
        target: Where they run.
        on_progress: Called with the visits done and to be done.

    Returns:
        Milliseconds per run, and half the spread.
    """
    check_available(target)
    for path in map(Path, files.values()):
        check_format(path, target)
        if not path.is_file():
            raise FileFormatError(f"there is no file {path}")
    settings, batch = target.to_dict(), of_batch(inputs, target.batch_size)
    open_file = partial(_opened, bound=[batch, noise_like(batch)], target=target, fed={})
    rows = [{"key": name, "group": "network"} for name in files]

    def opened(row: dict[str, Any], _: Any) -> Any:
        return open_file(Path(files[row["key"]]))

    with tempfile.TemporaryDirectory() as scratch, torch_settings(settings):
        journal = Journal(f"{scratch}/rows", identity(settings, environment(settings)))
        schedule = schedule_of(settings, networks=True)
        counter = visit_counter(len(rows), schedule.rounds, journal, on_progress)
        results, failures = measure_rows(rows, settings, journal, opened, on_visit=counter, schedule=schedule)
    if failures:
        name, reason = next(iter(failures.items()))
        raise CostError(f"{name} does not run on {target}: {reason}")
    return {name: Estimate(results[name]["latency_ms"], results[name]["iqr_ms"] / 2) for name in files}


def check_format(path: Path, target: Target) -> None:
    """Refuses a file that the target's runtime does not run."""
    wanted = "onnx" if target.runtime in SESSIONS else "pt2"
    if format_of(path) != wanted:
        raise SpecError(f"{target.runtime} runs .{wanted} files, got {path}; export one, or choose another target")
    if wanted == "pt2" and (target.device, target.dtype) != ("cpu", "float32"):
        raise SpecError(f"a .pt2 is timed on the CPU in fp32, got target {target}; choose such a one")


def _opened(path: Path, bound: list[Any], target: Target, fed: dict[Path, list[Any]]) -> Any:
    """Sets a file up; what an ONNX file is fed is kept in ``fed``."""
    if target.runtime in SESSIONS:
        if path not in fed:
            fed[path] = _feeds(path, bound)
        return open_onnx(str(path), fed[path], target.to_dict())
    program: Any = _loaded(path)
    runnable: Any = torch.compile(program, dynamic=False) if target.runtime == "compile" else program
    return TorchRun([partial(call, runnable, values) for values in bound], target.to_dict())


def _feeds(path: Path, bound: list[Any]) -> list[dict[str, Any]]:
    """What an ONNX file is fed; the session that tells is gone before another is timed."""
    module = OnnxModule(path, threads=1)
    feeds = [module.feeds(**values) if isinstance(values, dict) else module.feeds(values) for values in bound]
    module.close()
    return feeds


def _part(feeds: dict[str, Any], whole: int, examples: range) -> dict[str, Any]:
    """Some of the examples, the last of them where there are no more."""
    return {
        name: array.take(examples, axis=0, mode="clip") if array.shape[:1] == (whole,) else array
        for name, array in feeds.items()
    }


def _session(path: Path, threads: int | None) -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtraError("onnxruntime", "onnx") from error
    if not path.is_file():
        raise FileFormatError(f"there is no file {path}")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what goes wrong is raised as well
    options.intra_op_num_threads = threads or 0
    # Threads that wait by spinning would slow down whatever else runs beside it, torch for one.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise FileFormatError(f"{path} cannot be opened by onnxruntime: {reason}") from error


def _loaded(path: Path) -> nn.Module:
    if not path.is_file():
        raise FileFormatError(f"there is no file {path}")
    try:
        with quiet(), path.open("rb") as file:
            return torch.export.load(file).module()
    except Exception as error:
        raise FileFormatError(f"{path} is no torch.export program that this torch can read: {_first(error)}") from error


def _order(text: str | None, taken: list[str]) -> list[str]:
    """The inputs in the order that the file says, which are those that it takes."""
    found = _metadata(text) or taken
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found) or set(taken) - set(found):
        raise FileFormatError(f"its metadata name other inputs than it takes: {shown(found)}, expected {shown(taken)}")
    return found


def _outputs(text: str | None, several: Any, returned: list[str]) -> Any:
    """The nest of outputs that the file says, made of those that it has."""
    found = _metadata(text) or several
    if not _is_nest(found, frozenset(returned)):
        raise FileFormatError(
            f"its metadata name other outputs than it has: {shown(found)}, expected {shown(returned)}"
        )
    return found


def _metadata(text: str | None) -> Any:
    try:
        return None if text is None else parse_json(text)
    except FileFormatError as error:
        raise FileFormatError(f"its metadata cannot be read: the text {error}") from error


def _is_nest(value: Any, names: frozenset[str]) -> bool:
    if isinstance(value, str):
        return value in names
    members = value.values() if isinstance(value, dict) else value if isinstance(value, list) else (None,)
    return all(_is_nest(member, names) for member in members)


def _first(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _nested(nest: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The outputs in the nest of names that the file carries."""
    if isinstance(nest, str):
        return tensors[nest]
    if isinstance(nest, dict):
        return {key: _nested(member, tensors) for key, member in nest.items()}
    members: Iterable[Any] = nest
    return tuple(_nested(member, tensors) for member in members)
