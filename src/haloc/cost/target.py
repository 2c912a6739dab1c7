"""Where a network is to run: device, runtime, precision, batch, memory layout, threads."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from haloc.cost.runtimes import SESSIONS
from haloc.errors import FileFormatError, SpecError, nearest, shown

#: Which runtimes there are on each device.
RUNTIMES = {
    "cpu": ("eager", "compile", "onnxruntime", "openvino"),
    "cuda": ("eager", "compile", "graph", "onnxruntime"),
    "asic": ("model",),
}
_DEVICE_WORDS = {"eyeriss": "asic"}
#: What each precision is called; tf32 is float32 with products in TensorFloat-32.
DTYPES = {
    "float32": ("fp32", "float32"),
    "tf32": ("tf32",),
    "float16": ("fp16", "float16", "half"),
    "bfloat16": ("bf16", "bfloat16"),
}
_RUNTIME_WORDS = {"ort": "onnxruntime", "ov": "openvino", "cudagraph": "graph", "torch": "eager"}
_DTYPE_OF = {word: dtype for dtype, words in DTYPES.items() for word in words}
#: No batch is larger, nor are there more threads.
_MOST = 2**31 - 1
_LAYOUTS = {"nchw": False, "channels_first": False, "nhwc": True, "channels_last": True}


@dataclass(frozen=True)
class Target:
    """Device, runtime, precision and batch: everything that decides how fast a layer runs.

    Attributes:
        device: cpu, cuda or asic (an accelerator that is modelled: Eyeriss or the user's own).
        runtime: eager, compile (``torch.compile``), graph (CUDA graph), onnxruntime or openvino.
        dtype: float32 (without TF32), tf32, float16 or bfloat16.
        batch_size: Examples per run.
        channels_last: Whether activations lie in memory with their channels innermost (torch runtimes only).
        threads: CPU threads, None for the runtime's own choice.
    """

    device: str = "cpu"
    runtime: str = "eager"
    dtype: str = "float32"
    batch_size: int = 1
    channels_last: bool = False
    threads: int | None = None

    def __post_init__(self) -> None:
        _check_word(self.device, RUNTIMES, "device")
        if self.device == "asic" and self.runtime == "eager":
            object.__setattr__(self, "runtime", "model")  # the default of the others means nothing here
        _check_word(self.runtime, RUNTIMES[self.device], f"runtime for {self.device}")
        _check_word(self.dtype, DTYPES, "dtype")
        for name in ("batch_size", "threads"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value <= _MOST):
                raise SpecError(f"a target's {name} must be a whole number above 0, got {shown(value)}")
        if not isinstance(self.channels_last, bool):
            raise SpecError(f"a target's channels_last must be true or false, got {shown(self.channels_last)}")
        problem = self._misfit()
        if problem:
            raise SpecError(f"target {self}: {problem}")

    @classmethod
    def parse(cls, text: str) -> Target:
        """Reads the short spelling: ``cuda:fp16:b128:compile``, ``cpu:onnxruntime:b1:t2``. The order is free."""
        word, *words = text.strip().lower().split(":")
        device = _DEVICE_WORDS.get(word, word)
        _check_word(device, RUNTIMES, "device")
        found: dict[str, Any] = {"device": device}
        for word in words:
            name, value = _read_word(word, device)
            if name in found:
                raise SpecError(f"target {text!r} says its {name} twice: {found[name]!r} and {value!r}")
            found[name] = value
        return cls(**found)

    def __str__(self) -> str:
        """The short spelling, which `parse` reads back."""
        if self.device == "asic":
            return self.device
        parts = [self.device, self.runtime, DTYPES[self.dtype][0], f"b{self.batch_size}"]
        parts += ["nhwc"] if self.channels_last else []
        parts += [f"t{self.threads}"] if self.threads else []
        return ":".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Writes the target as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: Any) -> Target:
        """Reads what `to_dict` wrote."""
        names = {field.name for field in fields(cls)}
        if not isinstance(value, dict) or not set(value) <= names:
            raise FileFormatError(f"expected a target with {', '.join(sorted(names))}, got {shown(value)}")
        return cls(**value)

    def _misfit(self) -> str | None:
        """Says what cannot go together, or returns None."""
        rest = (self.dtype, self.batch_size, self.channels_last, self.threads)
        if self.device == "asic" and rest != ("float32", 1, False, None):
            return "an accelerator is modelled for one image at a time in its own precision; leave the rest out"
        if self.dtype == "tf32" and self.device != "cuda":
            return "TF32 is a precision of CUDA devices; use fp32"
        if self.runtime in SESSIONS:
            if self.channels_last:
                return f"{self.runtime} chooses its memory layout itself; leave nhwc out"
            if self.device == "cpu" and self.dtype != "float32":
                return f"{self.runtime} runs in fp32 on the CPU, got {DTYPES[self.dtype][0]}"
        return None


def _read_word(word: str, device: str) -> tuple[str, Any]:
    """One part of a target's spelling: which attribute it sets, and to what."""
    runtime = _RUNTIME_WORDS.get(word, word)
    if runtime in RUNTIMES[device]:
        return "runtime", runtime
    if word in _DTYPE_OF:
        return "dtype", _DTYPE_OF[word]
    if word in _LAYOUTS:
        return "channels_last", _LAYOUTS[word]
    names = {"b": "batch_size", "t": "threads"}
    if word[:1] in names and word[1:].isdecimal():
        return names[word[0]], int(word[1:])
    known = [*RUNTIMES[device], *_DTYPE_OF, *_LAYOUTS, *_RUNTIME_WORDS]
    raise SpecError(
        f"{word!r} in a target for {device} is neither a runtime ({', '.join(RUNTIMES[device])}), a precision "
        f"({', '.join(words[0] for words in DTYPES.values())}), a batch size (b8), threads (t2) nor nhwc or nchw."
        f"{nearest(word, known)}"
    )


def _check_word(word: object, known: Any, what: str) -> None:
    if not isinstance(word, str) or word not in known:
        raise SpecError(f"unknown {what} {shown(word)}, expected one of {', '.join(known)}.{nearest(str(word), known)}")
