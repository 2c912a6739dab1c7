"""`export`: a network as one file that runs without its Python class, known to compute the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from haloc.artifact.formats import BATCH, OLD_OPSET, write_onnx, write_program
from haloc.artifact.parity import Parity, compare
from haloc.artifact.quiet import quiet
from haloc.artifact.runtime import OnnxModule, ProgramModule, format_of
from haloc.artifact.store import bare
from haloc.artifact.tensors import first_samples, has_batch, named_inputs, named_outputs, noise_like, of_batch
from haloc.cost.deploy import fold_batchnorm
from haloc.errors import ExportError, FileFormatError, HalocError, MissingExtraError, ModelError
from haloc.factor.forward import batch_size, call, copied, to_device
from haloc.files import replacing

#: So many examples of the samples are compared.
COMPARED = 512
#: A protobuf, which an ONNX file is, holds less than this.
MOST_BYTES = 2**31 - 1

_log = logging.getLogger("haloc")


@dataclass(frozen=True)
class Exported:
    """A file that was exported.

    Attributes:
        path: The file.
        format: onnx or pt2.
        bytes: Its size.
        dynamic_batch: Whether it takes any number of examples at a time.
        inputs: The shape of every input by name, with "batch" for an extent that may be any.
        outputs: The same of the outputs.
        parity: How far it is from the model, on "random" and, where samples were given, on "real" inputs.
    """

    path: Path
    format: str
    bytes: int
    dynamic_batch: bool
    inputs: dict[str, tuple[int | str, ...]]
    outputs: dict[str, tuple[int | str, ...]]
    parity: dict[str, Parity]

    def to_dict(self) -> dict[str, Any]:
        """Writes it as plain JSON values."""
        return asdict(self) | {"path": str(self.path)}


def export(
    model: nn.Module,
    path: str | Path,
    example_inputs: Any,
    *,
    samples: Any = None,
    dynamic_batch: bool = True,
    opset: int | None = None,
) -> Exported:
    """Writes a network as one file, after its outputs have been compared with the model's.

    BatchNorms are folded into the layers before them. The file is for the CPU, wherever the model is, in the model's
    precision. What cannot be exported for any batch is exported for the batch of ``example_inputs``, with a warning.

    Args:
        model: The network; it is not changed.
        path: An ``.onnx`` file, or a ``.pt2`` that ``torch.export.load`` reads.
        example_inputs: A tensor, a tuple of positional or a dict of named arguments.
        samples: Real inputs to compare on as well: inputs of that kind, or a loader's batches.
        dynamic_batch: Leave the batch open.
        opset: The version of ONNX's operators; without it the exporter's own choice.

    Raises:
        ExportError: the model cannot be exported, or the file computes something else; nothing is written.
    """
    path, kind = Path(path), format_of(path)
    if kind == "onnx":
        _check_extras()
        _check_size(model)
    plain, inputs = _on_cpu(model), to_device(example_inputs, torch.device("cpu"))
    with torch.no_grad():
        outputs = call(plain, inputs)
    batch = batch_size(inputs)
    free = dynamic_batch and _takes_any_batch(plain, inputs)
    ways = _ways(fold_batchnorm(plain, inputs), inputs, outputs, kind, free, opset)
    way, parity = _first_faithful(ways, plain, inputs, samples, path, kind)
    if dynamic_batch and not way.dynamic:
        _log.warning("%s takes batches of %d only: the model fixes its batch", path, batch)
    taken = {name: _shape(tensor, batch, way.dynamic) for name, tensor in named_inputs(plain, inputs).items()}
    given = {name: _shape(tensor, batch, way.dynamic) for name, tensor in named_outputs(outputs).items()}
    return Exported(path, kind, path.stat().st_size, way.dynamic, taken, given, parity)


def _check_extras() -> None:
    """Says what is missing before anything long begins."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        try:
            __import__(package)
        except ImportError as error:
            raise MissingExtraError(package, "onnx") from error


def _check_size(model: nn.Module) -> None:
    size = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    if size > MOST_BYTES:
        raise ExportError(
            f"the network takes {size / 2**30:.1f} GiB, and an ONNX file holds less than 2; export a .pt2 instead"
        )


def _on_cpu(model: nn.Module) -> nn.Module:
    try:
        return copied(bare(model)).cpu().eval()
    except Exception as error:
        raise ModelError(f"the model cannot be copied to be exported ({error})") from error


@torch.no_grad()
def _takes_any_batch(model: nn.Module, inputs: Any) -> bool:
    """Whether the model itself runs on other batches than the one given."""
    try:
        for size in _other_sizes(inputs):
            call(model, of_batch(inputs, size))
    except ModelError:
        return False
    return batch_size(inputs) > 0


def _other_sizes(inputs: Any) -> tuple[int, int]:
    return 1, batch_size(inputs) + 1


@dataclass(frozen=True)
class _Way:
    """A way to write the file: for any batch or not, by the older exporter or not, and what does it."""

    dynamic: bool
    write: Callable[..., None]
    old: bool = False


def _ways(
    model: nn.Module, inputs: Any, outputs: Any, kind: str, dynamic_batch: bool, opset: int | None
) -> Iterator[_Way]:
    """The ways there are, the best first."""
    for dynamic in (True, False) if dynamic_batch else (False,):
        if kind == "pt2":
            yield _Way(dynamic, partial(write_program, model, inputs, outputs, dynamic=dynamic))
            continue
        # Operators that are older than those of the present exporter are the older one's business.
        for old in (False, True) if opset is None or opset > OLD_OPSET else (True,):
            yield _Way(dynamic, partial(write_onnx, model, inputs, outputs, dynamic=dynamic, opset=opset, old=old), old)


def _first_faithful(
    ways: Iterable[_Way], model: nn.Module, inputs: Any, samples: Any, path: Path, kind: str
) -> tuple[_Way, dict[str, Parity]]:
    """Writes the file in the first way that works and computes the same; where none does, tells what went wrong."""
    kept = None if samples is None else list(first_samples(named_inputs(model, inputs), samples, COMPARED))
    failures: list[ExportError] = []
    for way in ways:
        try:
            with replacing(path) as temporary:
                _written(way, temporary)
                parity = _parity(model, temporary, kind, inputs, kept, way.dynamic)
        except ExportError as error:
            failures.append(error)
            continue
        if way.old and failures:
            _log.warning("%s follows one run of the model, the rest of its code was not read: %s", path, failures[0])
        return way, parity
    raise ExportError(f"{path} was not written: {failures[0]}") from failures[0]


def _written(way: _Way, path: Path) -> None:
    try:
        with quiet():
            way.write(path=path)
    except (HalocError, OSError):
        raise
    except Exception as error:
        raise ExportError(f"the model cannot be exported: {type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: object) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")


def _parity(
    model: nn.Module, path: Path, kind: str, inputs: Any, samples: list[Any] | None, dynamic: bool
) -> dict[str, Parity]:
    try:
        exported = OnnxModule(path) if kind == "onnx" else ProgramModule(path)
    except FileFormatError as error:
        raise ExportError(f"its runtime does not take the file written: {_first_line(error.__cause__)}") from error
    sizes = (batch_size(inputs), *(_other_sizes(inputs) if dynamic else ()))
    batches = [of_batch(inputs, size) for size in sizes]
    found = {"random": compare(model, exported, [*batches, *map(noise_like, batches)])}
    if samples is not None:
        real = samples if dynamic else [of_batch(sample, batch_size(inputs)) for sample in samples]
        found["real"] = compare(model, exported, real)
    return found


def _shape(tensor: Tensor, batch: int, dynamic: bool) -> tuple[int | str, ...]:
    return (BATCH, *tensor.shape[1:]) if dynamic and has_batch(tensor, batch) else tuple(tensor.shape)
