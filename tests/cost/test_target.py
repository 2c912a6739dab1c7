from __future__ import annotations

import pytest

from haloc.cost.target import Target
from haloc.errors import FileFormatError, SpecError


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("cpu", Target()),
        ("cuda:fp16:b128:compile", Target("cuda", "compile", "float16", 128)),
        ("cpu:onnxruntime:b1:t2", Target("cpu", "onnxruntime", threads=2)),
        ("cpu:ov:b8", Target("cpu", "openvino", batch_size=8)),
        ("CUDA:nhwc:graph:tf32:b32", Target("cuda", "graph", "tf32", 32, channels_last=True)),
        ("cuda:bf16:eager:nchw", Target("cuda", "eager", "bfloat16")),
        ("eyeriss", Target("asic", "model")),
    ],
)
def test_the_short_spelling(text, target):
    assert Target.parse(text) == target
    assert Target.parse(str(target)) == target
    assert Target.from_dict(target.to_dict()) == target


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tpu", "unknown device 'tpu', expected one of cpu, cuda, asic"),
        ("cpu:onnxruntim", "Did you mean 'onnxruntime'?"),
        ("cpu:graph", "'graph' in a target for cpu"),
        ("cpu:b0", "batch_size must be a whole number above 0, got 0"),
        ("cpu:b1:b8", "says its batch_size twice: 1 and 8"),
        ("cpu:tf32", "TF32 is a precision of CUDA devices"),
        ("cpu:openvino:nhwc", "chooses its memory layout itself"),
        ("cpu:onnxruntime:fp16", "runs in fp32 on the CPU"),
        ("eyeriss:b8", "one image at a time"),
        ("cpu:", "neither a runtime"),
    ],
)
def test_a_wrong_spelling_is_answered(text, said):
    with pytest.raises(SpecError) as raised:
        Target.parse(text)
    assert said in str(raised.value)


def test_a_target_file_with_something_else_in_it():
    with pytest.raises(FileFormatError, match="expected a target with"):
        Target.from_dict({"device": "cpu", "color": "red"})
    with pytest.raises(FileFormatError, match="expected a target with"):
        Target.from_dict("cpu")
