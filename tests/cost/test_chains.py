from __future__ import annotations

import numpy as np
import pytest
import torch

from haloc.cost.chains import OnnxGraph, input_shape, onnx_row, torch_row, weight_shape
from haloc.factor.layers import build_layer, layer_shape
from haloc.forms import Dense, Spatial, Svd, Tucker2, stages
from haloc.shapes import ConvShape, LinearShape, shape_to_dict

ONE, TWO, THREE = (1,), (1, 1), (1, 1, 1)
ROWS = [
    (ConvShape(6, 8, (3, 3), (9, 7), (2, 1), (1, 0), TWO), Dense()),
    (ConvShape(6, 8, (3, 3), (9, 7), TWO, (2, 2), (2, 2)), Tucker2(4, 3)),
    (ConvShape(6, 8, (3, 3), (9, 7), (2, 2), (1, 1), TWO, groups=2), Tucker2(2, 2)),
    (ConvShape(6, 8, (4, 3), (9, 7), TWO, "same", TWO, bias=False), Dense()),
    (ConvShape(6, 8, (3, 3), (9, 7), (2, 2), (1, 1), TWO), Spatial(5)),
    (ConvShape(6, 8, (3, 3), (9, 7), TWO, (1, 1), TWO, padding_mode="reflect"), Dense()),
    (ConvShape(6, 8, (3, 3), (9, 7), TWO, (1, 1), TWO, padding_mode="circular"), Tucker2(4, 4)),
    (ConvShape(6, 8, (3, 3), (9, 7), TWO, (2, 1), TWO, padding_mode="replicate"), Dense()),
    (ConvShape(6, 8, TWO, (5, 5), TWO, (0, 0), TWO, images=2), Svd(3)),
    (ConvShape(6, 8, (3,), (9,), ONE, (1,), ONE), Tucker2(4, 4)),
    (ConvShape(6, 8, (3, 2, 3), (5, 4, 6), THREE, (1, 0, 1), THREE), Tucker2(4, 4)),
    (LinearShape(10, 7), Svd(4)),
    (LinearShape(10, 7, bias=False, positions=3), Dense()),
]
ids = [f"{form} of {type(shape).__name__}{number}" for number, (shape, form) in enumerate(ROWS)]


def drawn(chain, batch):
    """Weights and an input for a chain of stages."""
    generator = torch.Generator().manual_seed(0)
    weights = [
        (
            torch.randn(weight_shape(stage), generator=generator),
            torch.randn(weight_shape(stage)[0], generator=generator),
        )
        for stage in chain
    ]
    weights = [(weight, bias if stage["bias"] else None) for stage, (weight, bias) in zip(chain, weights, strict=True)]
    return weights, torch.randn(input_shape(chain[0], batch), generator=generator)


@pytest.mark.parametrize(("shape", "form"), ROWS, ids=ids)
def test_the_torch_row_computes_what_the_built_layers_do(shape, form):
    chain = [shape_to_dict(stage) for stage in stages(shape, form)]
    weights, x = drawn(chain, 2)
    layers = []
    for stage, (weight, bias) in zip(stages(shape, form), weights, strict=True):
        like = torch.nn.Linear(1, 1) if isinstance(shape, LinearShape) else torch.nn.Conv2d(1, 1, 1)
        layers.append(build_layer(stage, weight, like))
        assert (layers[-1].bias is None) == (bias is None)
        if bias is not None:
            layers[-1].bias.data.copy_(bias)
    expected = torch.nn.Sequential(*layers)(x)
    expected = expected if isinstance(shape, LinearShape) else expected.relu()
    torch.testing.assert_close(torch_row(chain)(x, weights), expected, atol=1e-5, rtol=1e-5)
    if isinstance(shape, ConvShape):
        assert tuple(expected.shape[2:]) == shape.output_size
    assert layer_shape(layers[0]).params == stages(shape, form)[0].params


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize(("shape", "form"), ROWS, ids=ids)
def test_the_onnx_row_computes_what_the_torch_row_does(shape, form, pooled):
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    chain = [shape_to_dict(stage) for stage in stages(shape, form)]
    file = onnx_row(chain, 2, 2, "float32", np.random.default_rng(0), pooled)
    model = onnx.load_from_string(file)
    onnx.checker.check_model(model, full_check=True)
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    layers = [node for node in model.graph.node if node.op_type in ("Conv", "Gemm")]
    looked = isinstance(shape, ConvShape) and not pooled  # by a convolution behind each copy
    assert len(layers) == 2 * (len(chain) + looked)
    _, x = drawn(chain, 2)
    total = 0
    for copy in (layers[: len(layers) // 2], layers[len(layers) // 2 :]):
        weights = [[torch.tensor(constants[name]) for name in node.input[1:]] for node in copy]
        pairs = [(weight[0], weight[1] if weight[1:] else None) for weight in weights[: len(chain)]]
        out = torch_row(chain)(x.clone(), pairs)
        out = out if isinstance(shape, LinearShape) else out[(..., *[slice(0, 1)] * len(shape.kernel))]
        total = total + (torch.einsum("oc...,nc...->no...", weights[-1][0], out) if looked else out)
    (found,) = runtime.InferenceSession(file, providers=["CPUExecutionProvider"]).run(None, {"x": x.numpy()})
    np.testing.assert_allclose(found, total.numpy(), atol=1e-4, rtol=1e-4)


def test_every_copy_has_weights_of_its_own():
    onnx = pytest.importorskip("onnx")
    chain = [shape_to_dict(ROWS[0][0])]
    model = onnx.load_from_string(onnx_row(chain, 1, 3, "float16", np.random.default_rng(0)))
    weights = [tensor.raw_data for tensor in model.graph.initializer if len(tensor.dims) == 4]
    assert len(set(weights)) == 3
    assert all(any(weight) for weight in weights)


def test_numbers_of_any_size_are_written():
    onnx = pytest.importorskip("onnx")
    graph = OnnxGraph()
    out = graph.node("MaxPool", "x", kernel_shape=[1, 1], strides=[1 << 16, 300])
    model = onnx.load_from_string(graph.model(out, (1, 1, 5, 5), (1, 1, 1, 1), "float32"))
    assert [list(a.ints) for a in model.graph.node[0].attribute] == [[1, 1], [65536, 300]]
