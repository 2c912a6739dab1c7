"""`quantise`: an exported network in 8-bit whole numbers, for runtimes that are faster with them."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from haloc.artifact.parity import Parity, compare
from haloc.artifact.quiet import quiet
from haloc.artifact.runtime import OnnxModule, format_of
from haloc.artifact.tensors import first_samples, of_batch
from haloc.errors import DataError, ExportError, MissingExtraError, SpecError, nearest
from haloc.factor.forward import batch_size
from haloc.files import replacing

#: How the range of an activation is found on the samples, as onnxruntime calls it.
METHODS = {"minmax": "MinMax", "entropy": "Entropy", "percentile": "Percentile"}
#: Examples to calibrate on unless told otherwise.
SAMPLES = 512


@dataclass(frozen=True)
class Quantised:
    """A file with 8-bit weights and activations.

    Attributes:
        path: The file.
        bytes: Its size.
        source_bytes: The size of the file it was made from.
        samples: Examples it was calibrated on.
        method: How the ranges were found.
        reduce_range: Whether weights have 7 bits only.
        parity: How far it is from the file it was made from, on these examples.
    """

    path: Path
    bytes: int
    source_bytes: int
    samples: int
    method: str
    reduce_range: bool
    parity: Parity

    def to_dict(self) -> dict[str, Any]:
        """Writes it as plain JSON values."""
        return asdict(self) | {"path": str(self.path)}


def quantise(
    source: str | Path,
    path: str | Path,
    samples: Any,
    *,
    limit: int = SAMPLES,
    method: str = "minmax",
    reduce_range: bool | None = None,
) -> Quantised:
    """Writes an ONNX file with 8-bit weights (per channel) and activations, as onnxruntime runs them fastest.

    Args:
        source: The ONNX file that `export` wrote.
        path: The ONNX file to write.
        samples: Real inputs that the ranges of activations are measured on: inputs of the model, or a loader's batches.
        limit: Examples of them to use.
        method: minmax, entropy or percentile. On ResNet-20 all three give the same accuracy; minmax is the quickest.
        reduce_range: Weights of 7 bits, which CPUs without 8-bit products (VNNI) need lest sums overflow; None decides
            by the CPU of this machine.

    Raises:
        ExportError: the file cannot be quantised; nothing is written.
    """
    source, path = Path(source), Path(path)
    if format_of(source) != "onnx" or format_of(path) != "onnx":
        raise SpecError(f"ONNX files are quantised to ONNX files, got {source} and {path}")
    if method not in METHODS:
        raise SpecError(f"there is no method {method!r}, only {', '.join(METHODS)}.{nearest(method, METHODS)}")
    narrow = _needs_narrow_weights() if reduce_range is None else reduce_range
    module = OnnxModule(source)
    kept = [_fitting(values, module.batch) for values in first_samples(module.input_names, samples, limit)]
    if not kept:
        raise DataError("there is nothing to calibrate on: the samples are empty")
    with replacing(path) as temporary:
        _write(source, temporary, [_fed(module, values) for values in kept], METHODS[method], narrow)
        parity = compare(module, OnnxModule(temporary), kept, strict=False)
    sizes = path.stat().st_size, source.stat().st_size
    return Quantised(path, *sizes, sum(map(batch_size, kept)), method, narrow, parity)


def _fitting(values: Any, batch: int | None) -> Any:
    return values if batch is None else of_batch(values, batch)


def _fed(module: OnnxModule, values: Any) -> dict[str, Any]:
    return module.feeds(**values) if isinstance(values, dict) else module.feeds(values)


def _write(source: Path, path: Path, feeds: list[dict[str, Any]], method: str, reduce_range: bool) -> None:
    quantisation = _package()
    with quiet(), tempfile.TemporaryDirectory() as scratch:
        prepared, written = Path(scratch) / "prepared.onnx", Path(scratch) / "quantised.onnx"
        try:
            quantisation.quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
            quantisation.quantize_static(
                str(prepared),
                str(written),
                _Feeds(feeds),
                quant_format=quantisation.QuantFormat.QDQ,
                per_channel=True,
                reduce_range=reduce_range,
                # Unsigned times signed is what x86 multiplies at once; signed times signed was slower than fp32 there.
                activation_type=quantisation.QuantType.QUInt8,
                weight_type=quantisation.QuantType.QInt8,
                calibrate_method=quantisation.CalibrationMethod[method],
            )
        except OSError:
            raise
        except Exception as error:
            text = (str(error).strip() or "no message").splitlines()[0]
            raise ExportError(f"{source} cannot be quantised: {type(error).__name__}: {text}") from error
        path.write_bytes(written.read_bytes())


def _package() -> Any:
    try:
        import onnx  # noqa: F401
        from onnxruntime import quantization
    except ImportError as error:
        raise MissingExtraError("onnxruntime", "onnx") from error
    return quantization


class _Feeds:
    """What onnxruntime calibrates on, one after the other; it asks for no more than this of its own class."""

    def __init__(self, feeds: list[dict[str, Any]]) -> None:
        self._feeds: Iterator[dict[str, Any]] = iter(feeds)

    def get_next(self) -> dict[str, Any] | None:
        """The next of them, None at the end."""
        return next(self._feeds, None)


def _needs_narrow_weights() -> bool:
    """Whether this CPU adds two products in 16 bits before it widens them, as x86 does without VNNI."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    try:
        return "vnni" not in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return True
