"""Writing a network as bytes: a torch.export program, or an ONNX file by either of torch's exporters."""

from __future__ import annotations

import functools
import inspect
import io
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from haloc import __version__
from haloc.artifact.tensors import has_batch, is_plain, named_inputs, named_outputs, of_batch, plain
from haloc.errors import MissingExtraError
from haloc.factor.forward import batch_size, mapped, tensors_in
from haloc.factor.layers import Conv, conv_shape

#: What an ONNX file knows of the model's inputs and outputs, for `OnnxModule`.
INPUTS_KEY, OUTPUTS_KEY, VERSION_KEY = "haloc.inputs", "haloc.outputs", "haloc.version"
#: The first extent of every input and output, where it may be any.
BATCH = "batch"
#: The older exporter writes nothing newer well.
OLD_OPSET = 17


def write_program(model: nn.Module, inputs: Any, outputs: Any, *, path: Path, dynamic: bool) -> None:
    """Writes a torch.export program, which `torch.export.load` reads without any class of the model."""
    whole = model if is_plain(outputs) else _Reshaped(model, plain)
    program = _program(whole, inputs, dynamic)
    _forget(program)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    path.write_bytes(buffer.getbuffer())


def write_onnx(
    model: nn.Module,
    inputs: Any,
    outputs: Any,
    *,
    path: Path,
    dynamic: bool,
    opset: int | None = None,
    old: bool = False,
) -> None:
    """Writes an ONNX file of nothing but itself: no weights beside it, no traces of where it was made.

    Args:
        model: The network in eval mode.
        inputs: What it takes.
        outputs: What it returns for them.
        path: The file.
        dynamic: Leave the batch open.
        opset: The version of the operators; the exporter's own choice without it.
        old: Use torch's older exporter, which follows one run of the model instead of reading its code.
    """
    flat = model if _is_flat(outputs) else _Reshaped(model, lambda value: tuple(tensors_in(value)))
    # Names of inputs and outputs are one set of names.
    taken = named_inputs(model, inputs)
    given = {f"{name}_out" if name in taken else name: tensor for name, tensor in named_outputs(outputs).items()}
    exporter: Callable[..., Any] = _traced if old else _translated
    proto = exporter(flat, inputs, list(taken), list(given), dynamic, opset)
    _clean(proto)
    named = iter(given)
    for key, value in (
        (VERSION_KEY, __version__),
        (INPUTS_KEY, json.dumps(list(taken))),
        (OUTPUTS_KEY, json.dumps(mapped(plain(outputs), lambda _: next(named)))),
    ):
        proto.metadata_props.add(key=key, value=value)
    path.write_bytes(proto.SerializeToString())


class _Reshaped(nn.Module):
    """The model with another nest around its outputs, and the signature it has."""

    def __init__(self, model: nn.Module, reshape: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model = model

        @functools.wraps(model.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return reshape(model(*args, **kwargs))

        self.forward = forward


def _is_flat(outputs: Any) -> bool:
    """Whether both exporters take the outputs as they are."""
    return isinstance(outputs, torch.Tensor) or (type(outputs) is tuple and all(map(_is_tensor, outputs)))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs as positional and as named arguments."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def _program(model: nn.Module, inputs: Any, dynamic: bool) -> ExportedProgram:
    """The model as torch.export reads it."""
    if dynamic:
        inputs = of_batch(inputs, 2)  # torch.export takes an extent of 1 for one that stays so; more cost time
    args, kwargs = _arguments(inputs)
    shapes = _dynamic_shapes(model, args, kwargs, batch_size(inputs)) if dynamic else None
    with torch.no_grad():
        return torch.export.export(model, args, kwargs or None, dynamic_shapes=shapes, strict=False)


def _dynamic_shapes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int) -> dict[str, Any]:
    any_batch = Dim(BATCH, min=1)
    bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    return {
        name: mapped(value, lambda tensor: {0: any_batch} if has_batch(tensor, batch) else None, lambda _: None)
        for name, value in bound.items()
    }


def _forget(program: ExportedProgram) -> None:
    """Takes out what it was exported with: the example, and where in whose files every operator comes from."""
    program.example_inputs = None
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("stack_trace", None)


def _translated(
    model: nn.Module, inputs: Any, input_names: list[str], output_names: list[str], dynamic: bool, opset: int | None
) -> Any:
    """The ONNX model that torch's present exporter makes of a torch.export program."""
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("onnxscript", "onnx") from error
    program = _program(model, inputs, dynamic)
    made: Any = torch.onnx.export(
        program,
        (),
        None,
        dynamo=True,
        input_names=input_names,
        output_names=output_names,
        opset_version=opset,
        optimize=True,
        verbose=False,
    )
    return made.model_proto


def _traced(
    model: nn.Module, inputs: Any, input_names: list[str], output_names: list[str], dynamic: bool, opset: int | None
) -> Any:
    """The ONNX model that torch's older exporter makes of one run."""
    import onnx

    _spell_padding(model)
    buffer: Any = io.BytesIO()
    (args, kwargs), batch = _arguments(inputs), batch_size(inputs)
    open_inputs = [name for name, tensor in named_inputs(model, inputs).items() if has_batch(tensor, batch)]
    axes = {name: {0: BATCH} for name in (*open_inputs, *output_names)} if dynamic else None
    if args and isinstance(args[-1], dict):
        args += ({},)  # torch would take a dict that comes last for the named arguments
    torch.onnx.export(
        model,
        args,
        buffer,
        kwargs=kwargs or None,
        dynamo=False,
        input_names=input_names,
        output_names=output_names,
        dynamic_axes=axes,
        opset_version=opset or OLD_OPSET,
    )
    return onnx.load_model_from_string(buffer.getvalue())


def _spell_padding(model: nn.Module) -> None:
    """Writes padding "same" as numbers where numbers can say it; onnxruntime refuses the word with a dilation."""
    for module in model.modules():
        if isinstance(module, Conv) and module.padding == "same":
            module.padding = conv_shape(module).padding


def _clean(proto: Any) -> None:
    """Takes out where the model comes from, and calls its batch so."""
    graph = proto.graph
    for part in (proto, graph, *graph.node, *graph.initializer, *graph.input, *graph.output, *graph.value_info):
        part.doc_string = ""
        if hasattr(part, "metadata_props"):
            del part.metadata_props[:]
    for function in proto.functions:
        for node in function.node:
            node.doc_string = ""
            del node.metadata_props[:]
    _name_batch(graph)


def _name_batch(graph: Any) -> None:
    """The exporter makes up a symbol for the batch, which is the only extent left open."""
    dims = [dim for info in graph.input for dim in info.type.tensor_type.shape.dim[:1] if dim.dim_param]
    symbols = {dim.dim_param for dim in dims}
    pattern = re.compile("|".join(rf"\b{re.escape(symbol)}\b" for symbol in symbols))
    for info in (*graph.input, *graph.output, *graph.value_info):
        for dim in info.type.tensor_type.shape.dim:
            if symbols and dim.dim_param:
                dim.dim_param = pattern.sub(BATCH, dim.dim_param)
