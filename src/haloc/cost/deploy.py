"""A network as it is deployed: BatchNorm folded, layers in their forms, in the layout and format of a runtime."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from haloc.cost.runtimes import SESSIONS, TorchRun, in_layout, open_onnx
from haloc.cost.target import Target
from haloc.errors import MissingExtraError, ModelError
from haloc.factor.between import absorb
from haloc.factor.forward import call, compiling_many, copied, evaluating, tensors_in
from haloc.factor.layers import Layer
from haloc.factor.surgery import skeleton
from haloc.forms import Dense, Form

#: Outputs of a folded network differ from the original's by rounding only.
FOLD_TOLERANCE = 1e-3


def fold_batchnorm(model: nn.Module, example_inputs: Any) -> nn.Module:
    """A copy in eval mode in which every BatchNorm right after a convolution or linear layer is part of that layer.

    Which BatchNorm follows which layer is seen by running the model, so any forward will do. A model whose output
    would change (a layer's output is also used elsewhere) is returned with its BatchNorms as they were.
    """
    plain = copied(model).eval()
    folded = copy.deepcopy(plain)
    for layer, norm in _followers(folded, example_inputs):
        _fold(folded, layer, norm)
    return folded if _same_outputs(plain, folded, example_inputs) else plain


def _followers(model: nn.Module, example_inputs: Any) -> list[tuple[str, str]]:
    """Pairs (layer, BatchNorm) where the one's output is the other's input, and both are called once."""
    made: dict[int, str] = {}
    alive: list[Any] = []  # tensors stay alive, so that no two of them can have the same id
    pairs, calls = [], Counter[str]()
    with ExitStack() as hooks:

        def watch(name: str, module: nn.Module) -> None:
            def seen(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
                calls[name] += 1
                alive.extend((output, *inputs))
                if isinstance(module, _BatchNorm) and inputs and id(inputs[0]) in made:
                    pairs.append((made[id(inputs[0])], name))
                elif isinstance(module, Layer):
                    made[id(output)] = name

            hooks.callback(module.register_forward_hook(seen).remove)

        for name, module in model.named_modules():
            if isinstance(module, Layer) or (isinstance(module, _BatchNorm) and module.running_mean is not None):
                watch(name, module)
        with evaluating(model):
            call(model, example_inputs)
    return [(layer, norm) for layer, norm in pairs if calls[layer] == calls[norm] == 1]


def _fold(model: nn.Module, layer_name: str, norm_name: str) -> None:
    layer, norm = model.get_submodule(layer_name), model.get_submodule(norm_name)
    assert isinstance(layer, Layer)
    assert isinstance(norm, _BatchNorm)
    absorb(layer, norm)
    parent, _, child = norm_name.rpartition(".")
    setattr(model.get_submodule(parent), child, nn.Identity())


def _same_outputs(first: nn.Module, second: nn.Module, example_inputs: Any) -> bool:
    with torch.no_grad():
        pairs = list(zip(_floats(call(first, example_inputs)), _floats(call(second, example_inputs)), strict=True))
    return all(torch.allclose(a, b, rtol=FOLD_TOLERANCE, atol=FOLD_TOLERANCE * float(a.abs().max())) for a, b in pairs)


def _floats(value: Any) -> list[Tensor]:
    """Every floating-point tensor in nested outputs."""
    return [tensor for tensor in tensors_in(value) if tensor.is_floating_point()]


def sketch(model: nn.Module, plan: Mapping[str, Form]) -> nn.Module:
    """A copy with every layer of the plan in its form, with random weights: enough to be timed, made at once."""
    generator = torch.Generator().manual_seed(0)
    drawn = skeleton(model, plan)
    for name, form in plan.items():
        if not isinstance(form, Dense):
            _draw(drawn.get_submodule(name), generator)
    return drawn


def _draw(written: nn.Module, generator: torch.Generator) -> None:
    """Random weights for the factors of one layer."""
    for factor in written.modules():
        if isinstance(factor, Layer):
            values = torch.randn(factor.weight.shape, generator=generator)
            # Scaled so that activations neither vanish nor explode on their way through the network.
            factor.weight.data.copy_(values * (len(values) / values.numel()) ** 0.5)


class Networks:
    """Whole networks, ready to be set up in the target's runtime again and again.

    Args:
        build: Makes the network of a name.
        example_inputs: What it takes.
        target: Where it runs.
        folder: For ONNX files, which are written once for each name.
    """

    def __init__(self, build: Callable[[str], nn.Module], example_inputs: Any, target: Target, folder: Path) -> None:
        inputs = at_batch(example_inputs, target.batch_size)
        self._build, self._target, self._folder = build, target, folder
        self._inputs = [inputs, _noise_like(inputs)]
        self._files: dict[str, tuple[str, list[Any]]] = {}

    def open(self, name: str) -> Any:
        """Sets one of them up."""
        if self._target.runtime not in SESSIONS:
            return _open_torch(self._build(name), self._inputs, self._target)
        if name not in self._files:
            path = self._folder / f"{len(self._files)}.onnx"
            names = export_onnx(self._build(name), self._inputs[0], path)
            self._files[name] = str(path), [dict(zip(names, _arrays(x), strict=True)) for x in self._inputs]
        return open_onnx(*self._files[name], self._target.to_dict())


def _open_torch(model: nn.Module, inputs: list[Any], target: Target) -> Any:
    settings = target.to_dict()
    network = in_layout(copied(model).eval().to(target.device), settings)
    runnable: Any = torch.compile(network, dynamic=False) if target.runtime == "compile" else network
    bound = [_placed(values, target) for values in inputs]
    with compiling_many():
        return TorchRun([partial(call, runnable, values) for values in bound], settings)


def export_onnx(model: nn.Module, inputs: Any, path: Path) -> list[str]:
    """Writes a network as an ONNX file for exactly these inputs; returns the names of its inputs."""
    try:
        import onnx  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("onnx", "onnx") from error
    named = inputs if isinstance(inputs, dict) else {}
    positional = () if named else tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    if positional and isinstance(positional[-1], dict):
        positional += ({},)  # torch would take a dict that comes last for the named arguments
    names = _input_names(inputs)
    with evaluating(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            # The older exporter takes a tenth of the time, and the file is only there to be timed.
            torch.onnx.export(
                model, positional, str(path), kwargs=named or None, input_names=names, dynamo=False, opset_version=17
            )
        except Exception as error:
            raise ModelError(f"the model cannot be written as ONNX: {type(error).__name__}: {error}") from error
    return names


def at_batch(inputs: Any, size: int) -> Any:
    """Inputs of the wanted batch size: the examples given, over and over."""
    if isinstance(inputs, Tensor):
        repeats = -(-size // max(1, inputs.shape[0]))
        return inputs.repeat(repeats, *[1] * (inputs.dim() - 1))[:size] if inputs.dim() else inputs
    if isinstance(inputs, dict):
        return {key: at_batch(value, size) for key, value in inputs.items()}
    return type(inputs)(at_batch(value, size) for value in inputs) if isinstance(inputs, (tuple, list)) else inputs


def _noise_like(inputs: Any) -> Any:
    """Other inputs of the same kind: numbers are drawn anew, whole numbers (tokens) kept."""
    if isinstance(inputs, Tensor):
        return torch.randn(inputs.shape).to(inputs) if inputs.is_floating_point() else inputs
    if isinstance(inputs, dict):
        return {key: _noise_like(value) for key, value in inputs.items()}
    return type(inputs)(map(_noise_like, inputs)) if isinstance(inputs, (tuple, list)) else inputs


def _placed(inputs: Any, target: Target) -> Any:
    """Inputs on the target's device in its precision and layout."""
    if isinstance(inputs, Tensor):
        return in_layout(inputs.to(target.device), target.to_dict())
    if isinstance(inputs, dict):
        return {key: _placed(value, target) for key, value in inputs.items()}
    return type(inputs)(_placed(value, target) for value in inputs) if isinstance(inputs, (tuple, list)) else inputs


def _input_names(inputs: Any) -> list[str]:
    """A name for every tensor: that of its argument where it has one, numbers where an argument is a nest."""
    named = inputs if isinstance(inputs, dict) else {"input": tensors_in(inputs)}
    return [
        key if isinstance(value, Tensor) else f"{key}_{number}"
        for key, value in named.items()
        for number, _ in enumerate(tensors_in(value))
    ]


def _arrays(inputs: Any) -> list[Any]:
    return [tensor.numpy() for tensor in tensors_in(inputs)]
