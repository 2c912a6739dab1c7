"""Putting a plan into effect on a model, and taking it back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from haloc.errors import HalocError, ModelError, PlanError
from haloc.factor.calibrate import InputMoments
from haloc.factor.forward import copied, module_at
from haloc.factor.inspect import static_reasons
from haloc.factor.layers import Layer, layer_shape
from haloc.factor.modules import Factoriser, blank, merge, written_form
from haloc.forms import Dense, Form, misfit
from haloc.plan import Plan

#: The dicts in which PyTorch keeps a module's forward hooks and what it knows of them.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def apply_plan(
    model: nn.Module,
    plan: Mapping[str, Form],
    *,
    moments: Mapping[str, InputMoments] | None = None,
    inplace: bool = False,
    on_layer: Callable[[str], None] | None = None,
) -> nn.Module:
    """Writes every layer the plan names in its form.

    Nothing is changed unless the whole plan fits and every layer can be factorised. New layers keep the dtype, device,
    memory layout, mode, ``requires_grad`` and forward hooks of the one they replace; everything else is untouched.

    Args:
        model: The dense model.
        plan: Layer names and forms; layers not named stay as they are.
        moments: What the layers' inputs look like, from `calibrate`. With them the error of each layer's output is
            minimised instead of that of its weight, which keeps far more accuracy.
        inplace: Change ``model`` itself instead of a copy.
        on_layer: Called with the name of each layer once it is written, for a progress bar.

    Returns:
        The factorised model: a copy, or ``model`` itself where ``inplace`` is set.
    """
    built: dict[str, nn.Module] = {}
    for name, layer in check_plan(model, plan).items():
        with _naming(name):
            built[name] = Factoriser(layer, _moments(moments, name)).build(plan[name])
        if on_layer is not None:
            on_layer(name)
    return replaced(model if inplace else _copy(model), built)


def skeleton(model: nn.Module, plan: Mapping[str, Form]) -> nn.Module:
    """A copy with the modules and names that `apply_plan` makes, but weights of zero: nothing is decomposed."""
    built = {name: blank(layer, plan[name]) for name, layer in check_plan(model, plan).items()}
    return replaced(_copy(model, hint=""), built)


def check_plan(model: nn.Module, plan: Mapping[str, Form]) -> dict[str, Layer]:
    """Returns the layers that the plan changes, or raises a `PlanError` naming the first misfit and the difference."""
    reasons = static_reasons(model)
    first_names = {id(module): name for name, module in model.named_modules()}
    layers: dict[str, Layer] = {}
    for name, form in plan.items():
        module = module_at(model, name)
        if isinstance(form, Dense):
            continue
        problem = reasons.get(first_names[id(module)]) or _misfit(module, form)
        if any(module is layer for layer in layers.values()):
            problem = "it is the same module as another layer of the plan"
        if problem or not isinstance(module, Layer):
            raise PlanError(f"the plan does not fit at layer {name!r}: {form} cannot be applied, {problem}")
        layers[name] = module
    return layers


def plan_of(model: nn.Module) -> Plan:
    """The plan that a network was written by, as `apply_plan` left it on the layers; empty for a dense network.

    Raises:
        PlanError: a layer that was written already was factorised once more, which no one plan can say.
    """
    found = {name: written_form(module) for name, module in model.named_modules()}
    written = {name: form for name, form in found.items() if form is not None and not isinstance(form, Dense)}
    for name in written:
        outer = next((other for other in written if name != other and _inside(name, other)), None)
        if outer is not None:
            raise PlanError(
                f"layer {name!r} was factorised inside {outer!r}, which was factorised before; no one plan can say "
                "that: apply a single plan to the dense model"
            )
    return Plan(written)


def _inside(name: str, other: str) -> bool:
    return not other or name.startswith(f"{other}.")


def reconstruct(model: nn.Module, plan: Mapping[str, Form], *, inplace: bool = False) -> nn.Module:
    """Turns a factorised model back to dense: every layer the plan changed is multiplied out to one layer again.

    Args:
        model: What `apply_plan` made, trained further or not.
        plan: The plan it was made with.
        inplace: Change ``model`` itself instead of a copy.
    """
    merged: dict[str, nn.Module] = {}
    for name, form in plan.items():
        chain = module_at(model, name)
        if isinstance(form, Dense) or not isinstance(chain, nn.Sequential):
            continue
        with _naming(name):
            merged[name] = merge(chain)
    return replaced(model if inplace else _copy(model), merged)


def _moments(moments: Mapping[str, InputMoments] | None, name: str) -> InputMoments | None:
    if moments is not None and name not in moments:
        raise ModelError(f"there is no calibration of layer {name!r}; calibrate all layers that the plan changes")
    return None if moments is None else moments[name]


def _misfit(module: nn.Module, form: Form) -> str | None:
    if not isinstance(module, Layer):
        return f"it is a {type(module).__name__}, not a convolution or linear layer"
    return misfit(layer_shape(module), form)


def _copy(model: nn.Module, hint: str = "; pass inplace=True to change it in place") -> nn.Module:
    try:
        return copied(model)
    except Exception as error:
        raise ModelError(f"the model cannot be copied ({error}){hint}") from error


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Adds the layer's name to what goes wrong inside the block."""
    try:
        yield
    except HalocError as error:
        raise ModelError(f"layer {name!r}: {error}") from error


def replaced(model: nn.Module, modules: Mapping[str, nn.Module]) -> nn.Module:
    """Puts all new modules in, once all of them have been made: a failure leaves no half-changed model behind."""
    for name, module in modules.items():
        model = _replace(model, name, module)
    return model


def _replace(model: nn.Module, name: str, new: nn.Module) -> nn.Module:
    """Puts ``new`` wherever the module of that name is used, with its mode and hooks."""
    old = model.get_submodule(name)
    new.training = old.training
    for hooks in _HOOKS:
        getattr(new, hooks).update(getattr(old, hooks))
    if old is model:
        return new
    for parent in list(model.modules()):
        for child_name, child in list(parent._modules.items()):
            if child is old:
                parent._modules[child_name] = new
    return model
