"""One layer and a form make an ``nn.Sequential`` of plain layers; and such a Sequential makes one layer again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from math import frexp, prod
from typing import TypeVar

import torch
from torch import Tensor, nn

from haloc.errors import ModelError, PlanError
from haloc.factor import aware
from haloc.factor.calibrate import InputMoments
from haloc.factor.factors import Factors, balance, ordered
from haloc.factor.layers import Layer, build_layer, layer_shape, plain_layer
from haloc.factor.response import rooted
from haloc.factor.svd import InputSvd, input_svd
from haloc.factor.tensors import as_stack, squared_norm, widened
from haloc.factor.tucker2 import Hosvd, hosvd, tucker2
from haloc.forms import Form, Spatial, Svd, Tucker2, form_from_dict, form_to_dict, full_ranks, misfit, ranks, stages
from haloc.shapes import ConvShape, LinearShape, Shape

M = TypeVar("M", bound=nn.Module)

#: Where a written layer keeps its form: plain values, so that copies and pickles of the network need nothing of ours.
FORM = "haloc_form"

#: What a layer is apart from its weights.
DESCRIPTION = (
    *("in_features", "out_features", "in_channels", "out_channels"),
    *("kernel_size", "stride", "padding", "padding_mode", "dilation", "groups"),
)


class Factoriser:
    """One layer, decomposed at most once per kind of form, from which every form and rank can be built.

    Args:
        layer: The dense layer; it is read, never changed.
        moments: What the layer's inputs look like (see `haloc.calibrate`). Without them the error of the weight is
            minimised, with them the error of the layer's output, weighted by what comes of it where that is known.
    """

    def __init__(self, layer: Layer, moments: InputMoments | None = None) -> None:
        self.layer = layer
        self.shape = layer_shape(layer)
        stack = as_stack(layer.weight, self.shape.groups if isinstance(self.shape, ConvShape) else 1)
        self._moments = moments
        _check(stack, moments)
        self._scale = _usual_scale(stack)
        self._stack = stack / self._scale

    def build(self, form: Form, *, nested: bool = False) -> nn.Module:
        """Writes the layer in ``form``: a Sequential of plain layers, or one new layer where one is enough.

        ``nested`` orders the hidden channels so that the first r of them are good factors of rank r too.
        """
        factors = balance(self._ordered(form)) if nested else self.factors(form)
        chain = stages(self.shape, form)
        weights = [factors.into.mT] if factors.into is not None else []
        weights += [factors.core] if factors.out is None else [factors.core, factors.out]
        share = self._scale ** (1 / len(weights))  # what was taken out goes back in, the same part to every factor
        layers = [build_layer(stage, share * weight, self.layer) for stage, weight in zip(chain, weights, strict=True)]
        self._set_bias(layers[-1], factors)
        return _one_module(self.layer, layers, form)

    def factors(self, form: Form) -> Factors:
        """The balanced factors of ``form``, of the weight at its usual scale."""
        problem = misfit(self.shape, form)
        if problem:
            raise PlanError(f"{form} does not fit: {problem}")
        return balance(self._plain(form) if self._exact(form) else self._aware(form))

    def _ordered(self, form: Form) -> Factors:
        """The factors with the most important hidden channels first, as far as taps can be told apart."""
        factors = self.factors(form)
        if self._moments is None:
            return ordered(factors)
        groups, _, channels, taps = (self._spatial(self._stack) if isinstance(form, Spatial) else self._stack).shape
        split = self._problem.moment.reshape(groups, channels, taps, channels, taps)
        return self._as_it_is(ordered(self._as_it_matters(factors), torch.einsum("gckdk->gcd", split)))

    def error(self, form: Form) -> float:
        """The relative error of ``form``: of the output where moments were given, of the weight otherwise."""
        factors = self.factors(form)
        if self._moments is not None:
            return aware.relative_error(self._problem, self._as_it_matters(factors))
        difference, whole = self._stack - factors.rebuild().reshape(self._stack.shape), squared_norm(self._stack)
        return float((squared_norm(difference) / whole).sqrt()) if bool(whole > 0) else 0.0

    def _exact(self, form: Form) -> bool:
        """Whether the weight alone decides: no moments, or nothing is truncated."""
        return self._moments is None or ranks(form) == full_ranks(self.shape, form.name)

    def _plain(self, form: Form) -> Factors:
        match form:
            case Tucker2(rank_out, rank_in):
                return tucker2(self._hosvd, rank_out, rank_in)
            case Spatial(rank):
                return self._spatial_svd.truncated(rank)
            case Svd(rank):
                return self._svd.truncated(rank)
        return Factors(None, self._stack, None)

    def _aware(self, form: Form) -> Factors:
        _, out_channels, in_channels, _ = self._stack.shape
        match form:
            case Tucker2(rank_out, rank_in):
                return self._as_it_is(aware.fit(self._problem, rank_out, rank_in))
            case Spatial(rank):
                spatial = aware.regrouped(self._problem, self._spatial(self._problem.stack))
                return self._as_it_is(aware.fit(spatial, out_channels, rank))
            case Svd(rank):
                return self._as_it_is(aware.fit(self._problem, rank, in_channels))
        return Factors(None, self._stack, None)

    def _as_it_matters(self, factors: Factors) -> Factors:
        """The factors of the layer whose outputs are mixed so that errors of all of them count alike."""
        return factors if self._root is None else factors.behind(self._root)

    def _as_it_is(self, factors: Factors) -> Factors:
        """The way back from there."""
        return factors if self._root is None else factors.behind(torch.linalg.inv(self._root))

    def _set_bias(self, last: Layer, factors: Factors) -> None:
        """Hands the bias to the last layer, shifted by the mean error of the output where the mean input is known."""
        if self.layer.bias is None or last.bias is None:
            return
        bias = widened(self.layer.bias)
        if self._moments is not None:
            difference = (self._stack - factors.rebuild().reshape(self._stack.shape)).flatten(2)
            bias = bias + self._scale * (difference @ self._moments.mean.unsqueeze(-1)).reshape(-1)
        with torch.no_grad():
            last.bias.copy_(bias)
        last.bias.requires_grad_(self.layer.bias.requires_grad)

    def _spatial(self, stack: Tensor) -> Tensor:
        """A stack with the kernel's first axis moved from the taps to the input channels."""
        first, *_ = self.layer.weight.shape[2:]
        return stack.reshape(*stack.shape[:2], stack.shape[2] * first, -1)

    @cached_property
    def _hosvd(self) -> Hosvd:
        return hosvd(self._stack)

    @cached_property
    def _svd(self) -> InputSvd:
        return input_svd(self._stack)

    @cached_property
    def _spatial_svd(self) -> InputSvd:
        return input_svd(self._spatial(self._stack))

    @cached_property
    def _problem(self) -> aware.Problem:
        assert self._moments is not None
        # A bias can absorb the mean error of the output, so only the deviations from the mean input count then.
        centred = self.layer.bias is not None
        stack = self._as_it_matters(Factors(None, self._stack, None)).core
        return aware.problem(stack, self._moments.covariance() if centred else self._moments.second)

    @cached_property
    def _root(self) -> Tensor | None:
        """Mixes the outputs of every group so that errors of all of them count alike; None where they do."""
        if self._moments is None or self._moments.response is None:
            return None
        groups, outputs = self._stack.shape[:2]
        blocks = self._moments.response.unflatten(1, (groups, outputs)).unflatten(0, (groups, outputs))
        return torch.stack([rooted(blocks[group, :, group]) for group in range(groups)]).to(self._stack)


def blank(layer: Layer, form: Form) -> nn.Module:
    """The modules that ``layer`` becomes in ``form``, yet to be filled: weights of zero, the layer's own bias."""
    chain = stages(layer_shape(layer), form)
    layers = [build_layer(stage, torch.zeros(replace(stage, bias=False).params), layer) for stage in chain]
    last = layers[-1]
    if layer.bias is not None and last.bias is not None:
        last.bias.data.copy_(layer.bias.detach())
        last.bias.requires_grad_(layer.bias.requires_grad)
    return _one_module(layer, layers, form)


def merge(chain: nn.Sequential, *, borders: bool = True) -> Layer:
    """Multiplies the layers of a factorised layer out to one dense layer, in float64.

    Args:
        chain: The factors.
        borders: Whether outputs have to stay the same at the borders too, where a bias between the factors meets a
            border of zeros: there is no such dense layer then. Otherwise they stay the same everywhere else.
    """
    layers = [plain_layer(layer, name) for name, layer in chain.named_children()]
    shape = _merged_shape([layer_shape(layer) for layer in layers])
    bias = _merged_bias(layers, borders)
    groups = shape.groups if isinstance(shape, ConvShape) else 1
    # Taps first, (*kernel, groups, out, in): axes of extent 1 then broadcast against the other factor's kernel.
    weight = _taps_first(layers[0], groups)
    for layer in layers[1:]:
        weight = _taps_first(layer, groups) @ weight
    dense = build_layer(
        replace(shape, bias=bias is not None), torch.movedim(weight, (-3, -2, -1), (0, 1, 2)), layers[0]
    )
    if dense.bias is not None and bias is not None:
        dense.bias.data.copy_(bias)
        dense.bias.requires_grad_(any(layer.bias is not None and layer.bias.requires_grad for layer in layers))
    return dense


def carries(layer: Layer) -> bool:
    """Whether a constant added to the input adds a constant to the output: a border of zeros would be left without."""
    shape = layer_shape(layer)
    if isinstance(shape, LinearShape) or shape.padding_mode != "zeros":
        return True  # the other borders are copies of the input, constant and all
    return not isinstance(shape.padding, str) and not any(shape.padding)


def carried(constant: Tensor, layer: Layer) -> Tensor:
    """What a constant for each input channel adds to the output channels of a layer that `carries` it, in float64."""
    groups = 1 if isinstance(layer, nn.Linear) else layer.groups
    return (as_stack(layer.weight, groups).sum(-1) @ widened(constant).reshape(groups, -1, 1)).flatten()


def _merged_bias(layers: list[Layer], borders: bool) -> Tensor | None:
    """All biases of a chain as one at its end."""
    total: Tensor | None = None
    for layer in layers:
        if borders and total is not None and not carries(layer):
            raise ModelError("a bias between the factors cannot be written as one dense layer")
        parts = [] if total is None else [carried(total, layer)]
        parts += [] if layer.bias is None else [widened(layer.bias)]
        total = torch.stack(parts).sum(0) if parts else None
    return total


def _merged_shape(shapes: list[Shape]) -> Shape:
    """The one layer that a chain stands for: every axis takes its kernel and steps from where they are not trivial."""
    first, last = shapes[0], shapes[-1]
    if isinstance(first, LinearShape) and isinstance(last, LinearShape):
        return LinearShape(first.in_features, last.out_features, last.bias)
    if isinstance(first, LinearShape) or isinstance(last, LinearShape):
        raise ModelError("a chain of convolutions and linear layers mixed is not one layer")
    convs = [shape for shape in shapes if isinstance(shape, ConvShape)]
    widest = max(convs, key=lambda shape: prod(shape.kernel))

    def largest(values: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
        return tuple(map(max, zip(*values, strict=True)))

    pads = [shape.padding for shape in convs if not isinstance(shape.padding, str)]
    return replace(
        widest,
        in_channels=first.in_channels,
        out_channels=last.out_channels,
        bias=last.bias,
        kernel=largest(shape.kernel for shape in convs),
        stride=largest(shape.stride for shape in convs),
        dilation=largest(shape.dilation for shape in convs),
        input_size=largest(shape.input_size for shape in convs),
        padding=largest(pads) if len(pads) == len(convs) else "same",
    )


def _taps_first(layer: Layer, groups: int) -> Tensor:
    """A layer's weight in float64 as (*kernel, groups, out of the group, in of the group)."""
    weight = widened(layer.weight).unflatten(0, (groups, -1))
    return torch.movedim(weight, (0, 1, 2), (-3, -2, -1))


def _one_module(layer: Layer, layers: list[Layer], form: Form) -> nn.Module:
    """What stands in the layer's place: the layers in a row, or the one there is; it knows the form it is in."""
    module = described_as(layer, nn.Sequential(*layers)) if len(layers) > 1 else layers[0]
    setattr(module, FORM, form_to_dict(form))
    return module


def written_form(module: nn.Module) -> Form | None:
    """The form that a module was written in here; None for one that is as it was."""
    written = vars(module).get(FORM)
    return None if written is None else form_from_dict(written)


def described_as(layer: nn.Module, chain: M) -> M:
    """Lets the chain answer what code around it may ask the layer for, such as its stride; plain values, no weight."""
    for name in DESCRIPTION:
        if hasattr(layer, name):
            setattr(chain, name, getattr(layer, name))
    return chain


def _usual_scale(stack: Tensor) -> float:
    """What to divide a weight by whose squares would not fit into float32; 1 for all that are of a usual size.

    A power of two, so that nothing is rounded.
    """
    largest = float(stack.abs().max()) if stack.numel() else 0.0
    return 1.0 if largest == 0 or 1e-8 < largest < 1e8 else 2.0 ** frexp(largest)[1]


def _check(stack: Tensor, moments: InputMoments | None) -> None:
    """Refuses weights that cannot be decomposed and moments of some other layer."""
    if stack.is_meta:
        raise ModelError("its weight is on the meta device and has no values; load weights first")
    if not bool(stack.isfinite().all()):
        raise ModelError("its weight holds NaN or infinite values; load sound weights first")
    expected = (stack.shape[0], prod(stack.shape[2:]), prod(stack.shape[2:]))
    if moments is not None and tuple(moments.second.shape) != expected:
        raise ModelError(
            f"the calibration is of another layer: its second moment has shape {tuple(moments.second.shape)}, "
            f"expected {expected}; calibrate this model anew"
        )
    outputs = (stack.shape[0] * stack.shape[1],) * 2
    if moments is not None and moments.response is not None and tuple(moments.response.shape) != outputs:
        raise ModelError(
            f"the calibration is of another layer: its responses have shape {tuple(moments.response.shape)}, "
            f"expected {outputs}; calibrate this model anew"
        )
