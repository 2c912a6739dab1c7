"""The runtimes: what sets a layer or a network up on a device, runs it once and waits for it.

Part of the measuring kit (see `kit`): plain Python 3.8, rows and targets are dicts, packages are imported where used.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from math import prod
from typing import Any, Callable, Dict, Iterator

from haloc.cost.chains import Stage, input_shape, onnx_row, torch_row, weight_shape

#: A target as `Target.to_dict` writes it.
TargetDict = Dict[str, Any]

#: The copies of a layer's weights and inputs together exceed this many bytes, if MOST_COPIES are enough for it.
ROTATED_BYTES, LEAST_COPIES, MOST_COPIES = 96 << 20, 2, 12
#: One timed run takes at least this long, so that the clock and the launch of a graph do not count.
RUN_SECONDS = 0.002
#: Runtimes with thread pools of their own, which fight when several sessions are alive.
SESSIONS = ("onnxruntime", "openvino")


class TorchRun:
    """Functions of no argument, run one after the other in torch: as they are, or captured as one CUDA graph."""

    def __init__(self, calls: list[Callable[[], Any]], target: TargetDict) -> None:
        import torch

        self._torch, self._cuda, self._graph = torch, target["device"] == "cuda", None
        self._calls, self.executions = calls, len(calls)
        repeats = max(1, int(RUN_SECONDS / self._warm()))
        self._calls, self.executions = calls * repeats, len(calls) * repeats
        if self._cuda and target["runtime"] != "eager":
            graph: Any = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._run_calls()
            self._graph = graph

    def _warm(self) -> float:
        """Runs everything a few times, on a side stream as capturing asks for; returns the seconds of one pass."""
        if not self._cuda:
            first = _seconds(self.run)
            return first if first > 100 * RUN_SECONDS else min(_seconds(self.run) for _ in range(3))
        side = self._torch.cuda.Stream()
        side.wait_stream(self._torch.cuda.current_stream())
        with self._torch.cuda.stream(side):
            seconds = min(_seconds(self.run) for _ in range(4))
        self._torch.cuda.current_stream().wait_stream(side)
        return seconds

    def _run_calls(self) -> None:
        with self._torch.inference_mode():
            for call in self._calls:
                call()

    def run(self) -> None:
        """Runs everything once and waits for it."""
        if self._graph is None:
            self._run_calls()
        else:
            self._graph.replay()
        if self._cuda:
            self._torch.cuda.synchronize()

    def close(self) -> None:
        """Lets go of graph and tensors."""
        self._graph, self._calls = None, []


class OnnxRun:
    """An ONNX model (bytes or a path) in onnxruntime, with inputs that take turns."""

    def __init__(self, model: Any, feeds: list[Any], target: TargetDict, executions: int = 1) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = target["threads"] or 0
        provider = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}[target["device"]]
        if provider not in onnxruntime.get_available_providers():
            raise RuntimeError(f"onnxruntime has no {provider} on this machine")
        self._session: Any = onnxruntime.InferenceSession(model, options, providers=[provider])
        self._feeds, self.executions = itertools.cycle(feeds), executions

    def run(self) -> None:
        """Runs the model once on the next input."""
        self._session.run(None, next(self._feeds))

    def close(self) -> None:
        """Ends the session and its threads."""
        self._session = None
        gc.collect()


class OpenVinoRun:
    """An ONNX model (bytes or a path) in OpenVINO, with inputs that take turns."""

    def __init__(self, model: Any, feeds: list[Any], target: TargetDict, executions: int = 1) -> None:
        import openvino

        threads = {"INFERENCE_NUM_THREADS": target["threads"]} if target["threads"] else {}
        core = openvino.Core()
        config = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32", **threads}
        self._request: Any = core.compile_model(core.read_model(model), "CPU", config).create_infer_request()
        self._feeds, self.executions = itertools.cycle(feeds), executions

    def run(self) -> None:
        """Runs the model once on the next input."""
        self._request.infer(next(self._feeds), share_inputs=True, share_outputs=True)

    def close(self) -> None:
        """Ends the session and its threads."""
        self._request = None
        gc.collect()


def open_row(row: dict[str, Any], target: TargetDict) -> Any:
    """Sets a row up in the target's runtime: copies of the layer with random weights, each run once per run."""
    stages, batch = row["stages"], target["batch_size"]
    copies = copies_of(stages, batch, 2 if target["dtype"] in ("float16", "bfloat16") else 4)
    if target["runtime"] not in SESSIONS:
        return TorchRun(_torch_calls(stages, batch, copies, target), target)
    import numpy

    random = numpy.random.default_rng(0)
    dtype = "float16" if target["dtype"] == "float16" else "float32"
    shape = input_shape(stages[0], batch)
    feeds = [{"x": random.standard_normal(shape, "float32").astype(dtype)} for _ in range(LEAST_COPIES)]
    model = onnx_row(stages, batch, copies, dtype, random, pooled=target["runtime"] != "onnxruntime")
    return open_onnx(model, feeds, target, copies)


def open_onnx(model: Any, feeds: list[Any], target: TargetDict, executions: int = 1) -> Any:
    """Sets an ONNX model up in the target's runtime."""
    runtime = OnnxRun if target["runtime"] == "onnxruntime" else OpenVinoRun
    return runtime(model, feeds, target, executions)


def copies_of(stages: list[Stage], batch: int, element_bytes: int) -> int:
    """How many copies of weights and input take turns."""
    elements = prod(input_shape(stages[0], batch)) + sum(prod(weight_shape(stage)) for stage in stages)
    return min(MOST_COPIES, max(LEAST_COPIES, -(-ROTATED_BYTES // (elements * element_bytes))))


def _torch_calls(stages: list[Stage], batch: int, copies: int, target: TargetDict) -> list[Callable[[], Any]]:
    """One function per copy of the layer, each with weights and an input of its own."""
    import torch

    generator = torch.Generator(target["device"]).manual_seed(0)
    function = torch_row(stages)
    if target["runtime"] == "compile":
        function = torch.compile(function, dynamic=False)

    def tensor(shape: tuple[int, ...], scale: float = 1.0) -> Any:
        values = torch.randn(shape, device=target["device"], generator=generator).mul_(scale)
        return in_layout(values, target)

    def bind() -> Callable[[], Any]:
        shapes = [(weight_shape(stage), stage["bias"]) for stage in stages]
        weights = [(tensor(s, prod(s[1:]) ** -0.5), tensor(s[:1]) if bias else None) for s, bias in shapes]
        x = tensor(input_shape(stages[0], batch))
        return lambda: function(x, weights)

    return [bind() for _ in range(copies)]


def in_layout(values: Any, target: TargetDict) -> Any:
    """A tensor or module in the target's precision and memory layout."""
    import torch

    dtype = torch.float32 if target["dtype"] == "tf32" else getattr(torch, target["dtype"])
    if isinstance(values, torch.Tensor) and (values.dim() != 4 or not values.is_floating_point()):
        return values.to(dtype) if values.is_floating_point() else values
    layout = torch.channels_last if target["channels_last"] else torch.preserve_format
    return values.to(dtype).to(memory_format=layout)


@contextlib.contextmanager
def torch_settings(target: TargetDict) -> Iterator[None]:
    """Threads, TF32 and cuDNN's choice of algorithms as the target says; put back afterwards."""
    if target["runtime"] in SESSIONS:
        yield
        return
    import torch

    convs, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (torch.get_num_threads(), convs.allow_tf32, products.allow_tf32, convs.benchmark)
    if target["threads"]:
        torch.set_num_threads(target["threads"])
    convs.allow_tf32 = products.allow_tf32 = target["dtype"] == "tf32"
    convs.benchmark = True
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        convs.allow_tf32, products.allow_tf32, convs.benchmark = before[1:]


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return max(1e-7, time.perf_counter() - start)
