from __future__ import annotations

import pytest
import torch

from haloc.cost.measure import bench_row
from haloc.cost.runtimes import (
    LEAST_COPIES,
    MOST_COPIES,
    ROTATED_BYTES,
    TorchRun,
    copies_of,
    in_layout,
    open_row,
    torch_settings,
)
from haloc.cost.sampling import Schedule, visit
from haloc.cost.target import Target
from haloc.forms import Dense, Tucker2
from haloc.shapes import ConvShape, LinearShape, shape_to_dict

BRIEF = Schedule(1, 1, 0.0, 0.001, 2)


def row_of(shape, form=None):
    return bench_row(shape, form or Dense())


@pytest.mark.parametrize("spec", ["cpu", "cpu:nhwc", "cpu:bf16", "cpu:onnxruntime:t1", "cpu:openvino:t1", "cpu:b2"])
def test_every_runtime_runs_a_row(spec, conv, hurried):
    target = Target.parse(spec)
    if target.runtime != "eager":
        pytest.importorskip(target.runtime)
    runner = open_row(row_of(conv, Tucker2(4, 4)), target.to_dict())
    samples = visit(runner, BRIEF)
    assert len(samples) >= 2
    assert all(sample > 0 for sample in samples)
    assert runner.executions >= LEAST_COPIES
    runner.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("runtime", ["eager", "graph", "compile"])
@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16"])
def test_every_cuda_runtime_runs_a_row(runtime, dtype, conv, hurried):
    target = Target.parse(f"cuda:{runtime}:{dtype}:b4:nhwc")
    with torch_settings(target.to_dict()):
        runner = open_row(row_of(conv, Tucker2(4, 4)), target.to_dict())
        assert all(sample > 0 for sample in visit(runner, BRIEF))
        runner.close()


def test_compile_runs_more_shapes_than_it_likes_to_compile(hurried):
    target, frames = Target.parse("cpu:compile").to_dict(), torch._dynamo.utils.counters["frames"]
    before = frames["ok"]
    for features in range(4, 14):
        runner = open_row(row_of(LinearShape(features, 4)), target)
        runner.run()
        runner.close()
    assert frames["ok"] - before == 10


def test_weights_and_inputs_exceed_the_caches():
    small = [shape_to_dict(ConvShape(8, 8, (3, 3), (8, 8), (1, 1), (1, 1), (1, 1)))]
    large = [shape_to_dict(ConvShape(512, 512, (3, 3), (7, 7), (1, 1), (1, 1), (1, 1)))]
    assert copies_of(small, 1, 4) == MOST_COPIES
    copies = copies_of(large, 1, 4)
    size = 4 * (512 * 512 * 9 + 512 * 49)
    assert copies * size >= ROTATED_BYTES > (copies - 1) * size
    assert copies_of(large, 10_000, 4) == LEAST_COPIES


def test_a_short_function_is_repeated_until_the_clock_can_see_it():
    calls = []
    runner = TorchRun([lambda: calls.append(1)], {"device": "cpu", "runtime": "eager"})
    calls.clear()
    runner.run()
    assert len(calls) == runner.executions > 100


def test_settings_are_put_back():
    convs, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (torch.get_num_threads(), convs.allow_tf32, products.allow_tf32, convs.benchmark)
    with pytest.raises(ZeroDivisionError), torch_settings(Target("cuda", dtype="tf32", threads=3).to_dict()):
        assert torch.get_num_threads() == 3
        assert convs.allow_tf32
        assert products.allow_tf32
        raise ZeroDivisionError
    with torch_settings(Target("cuda").to_dict()):
        assert not convs.allow_tf32
    assert (torch.get_num_threads(), convs.allow_tf32, products.allow_tf32, convs.benchmark) == before


def test_tensors_take_the_targets_precision_and_layout():
    target = Target("cpu", dtype="bfloat16", channels_last=True).to_dict()
    image = in_layout(torch.randn(2, 3, 4, 4), target)
    assert image.dtype == torch.bfloat16
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert in_layout(torch.arange(3), target).dtype == torch.int64
    assert in_layout(torch.randn(3), target).dtype == torch.bfloat16


def test_a_provider_that_is_not_there(conv):
    pytest.importorskip("onnxruntime")
    if torch.cuda.is_available():
        pytest.skip("there may be one")
    with pytest.raises(RuntimeError, match="onnxruntime has no CUDAExecutionProvider"):
        open_row(row_of(conv), Target("cuda", "onnxruntime").to_dict())
