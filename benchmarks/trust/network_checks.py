"""One network through the public path, and what became of it: works, left alone, refused, or SILENTLY WRONG.

Nothing here trusts what HALOC says of itself. Outputs at full rank are compared with the dense network's, errors at low
rank with singular values computed apart, everything the plan does not name bit by bit, and the network that was given
with what it was before.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from network_state import (
    TOLERANCES,
    WrongError,
    apart,
    distance,
    equal,
    finite,
    outputs_of,
    require,
    same_bits,
    same_numbers,
    tensors,
    tolerance,
    unchanged,
)
from torch import Tensor, nn

import haloc
from haloc.errors import HalocError
from haloc.factor.forward import call, tensors_in
from haloc.forms import Form, Svd, full_form, scaled_form
from haloc.training.settings import TrainSettings

#: "broke" is an error that is not HALOC's own: loud, but no sentence a user could act on.
WORKS, ALONE, REFUSED, BROKE, WRONG = "works", "left alone", "refused", "broke", "SILENTLY WRONG"

ONE_STEP = TrainSettings(epochs=1, lr=1e-3, warmup_epochs=0, speed="eager")


@dataclass(frozen=True)
class Case:
    """A network, and what is to become of it.

    Attributes:
        name: What is strange about it.
        make: Builds it with its inputs; the same each time but for the seed.
        expect: "works", or "left alone" or "refused" with words of the reason, as in "left alone: tied".
        alone: Words of the reason of single layers that are left alone in a network that works otherwise.
        steps: What else is done with it: "train", "search", "sensitivity", "aware", "export", "measure".
        same: Whether even the lowest rank computes the same, as of a weight of rank one.
        tolerance: How far full rank may be off, where the precision alone does not decide.
        slow: Whether it takes too long for the tests.
    """

    name: str
    make: Callable[[], tuple[nn.Module, Any]]
    expect: str = WORKS
    alone: dict[str, str] = field(default_factory=dict)
    steps: tuple[str, ...] = ("train", "search", "aware")
    same: bool = False
    tolerance: float | None = None
    slow: bool = False

    @property
    def verdict(self) -> str:
        """The verdict that is expected."""
        return self.expect.partition(":")[0]

    @property
    def words(self) -> str:
        """What the reason has to say."""
        return self.expect.partition(":")[2].strip()


@dataclass(frozen=True)
class Finding:
    """What became of a network: the verdict, and the reason or the message or what is wrong."""

    name: str
    expected: str
    verdict: str
    detail: str
    open_layers: int
    seconds: float

    @property
    def as_expected(self) -> bool:
        """Whether it is the verdict that was expected, for the reason that was expected."""
        wanted, _, words = self.expected.partition(":")
        return self.verdict == wanted and words.strip() in self.detail


def examine(case: Case) -> Finding:
    """Puts a network through everything and says what became of it."""
    start = time.perf_counter()
    torch.manual_seed(0)
    model, inputs = case.make()
    count = 0
    try:
        with warnings.catch_warnings(), unchanged(model):
            warnings.simplefilter("ignore")
            inventory = listed(model, inputs)
            count = len(inventory.open_layers)
            reasons(inventory, case)
            verdict, detail = passed_through(case, model, inputs, inventory) if count else left(model, inventory)
    except WrongError as error:
        verdict, detail = WRONG, str(error)
    except HalocError as error:
        verdict, detail = REFUSED, str(error)
    except Exception as error:
        verdict, detail = BROKE, f"{type(error).__name__}: {error}".splitlines()[0]
    return Finding(case.name, case.expect, verdict, detail, count, round(time.perf_counter() - start, 2))


def listed(model: nn.Module, inputs: Any) -> haloc.Inventory:
    """The inventory; it draws no random numbers, and has a reason for whatever is not offered."""
    with same_numbers("inspect"):
        inventory = haloc.inspect(model, inputs, min_rank=2)
    for row in inventory:
        require(bool(row.families) != bool(row.reason), f"{row.name!r} is neither offered nor left alone with a reason")
    return inventory


def reasons(inventory: haloc.Inventory, case: Case) -> None:
    """Single layers that must be left alone are, for the right reason."""
    for name, words in case.alone.items():
        reason = inventory[name].reason
        require(reason is not None and words in reason, f"{name!r} should be left alone ({words}), got {reason!r}")


def left(model: nn.Module, inventory: haloc.Inventory) -> tuple[str, str]:
    """Nothing is offered: the reasons, or that there are no layers."""
    return ALONE, "; ".join(dict.fromkeys(row.reason or "" for row in inventory)) or "no layers"


def passed_through(case: Case, model: nn.Module, inputs: Any, inventory: haloc.Inventory) -> tuple[str, str]:
    """Everything there is to do with a network that has open layers."""
    dense = outputs_of(model, inputs)
    for family in (0, -1):
        full = {row.name: full_form(row.shape, row.families[family]) for row in inventory.open_layers}
        whole = applied(model, full)
        off = distance(outputs_of(whole, inputs), dense)
        require(off <= allowed(case, dense), f"full rank is {off:.2g} of the largest output away")
        plan = low_plan(inventory, family)
        small = applied(model, plan)
        got = outputs_of(small, inputs)
        require(finite(got) or not finite(dense), "low rank gives values that are not finite")
        moved = distance(got, dense)
        require(case.same == (moved <= allowed(case, dense)), f"low rank moves the outputs by {moved:.2g}")
        near_optimum(model, small, plan)
    done = [*(STEPS[step](case, model, small, plan, inputs, inventory) for step in ("store", *case.steps)), ""]
    return WORKS, "; ".join(filter(None, done))


def low_plan(inventory: haloc.Inventory, family: int = 0) -> dict[str, Form]:
    """A quarter of the full ranks for every layer that is offered."""
    rows = inventory.open_layers
    return {row.name: scaled_form(row.shape, row.families[family], 0.25) for row in rows}


def applied(model: nn.Module, plan: dict[str, Form]) -> nn.Module:
    """The plan in effect; all that it does not name is the same, bit by bit, and what it names is not."""
    with same_numbers("apply_plan"):
        small = haloc.apply_plan(model, plan)
    require(small is not model, "apply_plan returned the model itself")
    before, after = tensors(model), tensors(small)
    ours = {id(model.get_submodule(name)) for name in plan}
    names = [name for name, module in model.named_modules(remove_duplicate=False) if id(module) in ours]

    def named(key: str) -> bool:
        return any(not name or key.startswith(f"{name}.") for name in names)

    for key in {key for key in before.keys() | after.keys() if not named(key)}:
        alike = key in before and key in after and same_bits(before[key], after[key])
        require(alike, f"{key!r} is not in the plan and has changed")
    for name in plan:
        old, new = model.get_submodule(name), small.get_submodule(name) if name else small
        require(new is not old and getattr(new, "haloc_form", None) is not None, f"{name!r} was not written")
        require(len(new._forward_hooks) == len(old._forward_hooks), f"{name!r} lost its hooks")
        grads = {p.requires_grad for p in new.parameters()}
        wanted = {p.requires_grad for p in old.parameters()}
        require(grads <= wanted, f"{name!r} has another requires_grad")
        require({p.dtype for p in new.parameters()} == {p.dtype for p in old.parameters()}, f"{name!r}: another dtype")
    return small


def near_optimum(model: nn.Module, small: nn.Module, plan: dict[str, Form]) -> None:
    """No error of an SVD is further from the least there is than rounding, as singular values tell (Eckart–Young)."""
    for name, form in plan.items():
        layer = model.get_submodule(name)
        chain = small.get_submodule(name) if name else small
        if not isinstance(form, Svd) or not isinstance(layer, nn.Linear) or layer.weight.is_meta:
            continue
        weight = layer.weight.detach().double()
        first, second = (factor.weight.detach().double() for factor in chain)
        scale = float(weight.abs().max()) or 1.0
        values = torch.linalg.svdvals(weight / scale)
        least = float(values[form.rank :].norm())
        found = float(((second / scale) @ first - weight / scale).norm())
        slack = TOLERANCES[layer.weight.dtype] * float(values.norm())
        require(found <= least * 1.001 + slack, f"{name!r}: the error is {found:.3g}, the least is {least:.3g}")


def store(case: Case, model: nn.Module, small: nn.Module, plan: Any, inputs: Any, inventory: Any) -> str:
    """Saved, and read again into a network that had other weights."""
    with tempfile.TemporaryDirectory() as folder, same_numbers("save"):
        haloc.save(folder, small)
        state = torch.get_rng_state()
        torch.manual_seed(1)
        base, _ = case.make()
        torch.set_rng_state(state)
        loaded = haloc.load(folder, base)
    require(equal(outputs_of(loaded, inputs), outputs_of(small, inputs)), "what was loaded computes something else")
    return ""


def train(case: Case, model: nn.Module, small: nn.Module, plan: Any, inputs: Any, inventory: Any) -> str:
    """One step of fine-tuning towards the dense network; frozen parameters stay what they are."""
    student = haloc.apply_plan(model, plan)
    frozen = {key: value.clone() for key, value in student.named_parameters() if not value.requires_grad}
    structure = [name for name, _ in student.named_modules()]
    haloc.finetune(student, [inputs_as_batch(inputs)], teacher=model, loss=squares, inputs=whole, settings=ONE_STEP)
    require([name for name, _ in student.named_modules()] == structure, "fine-tuning left modules behind")
    now = dict(student.named_parameters())
    require(all(same_bits(now[key], value) for key, value in frozen.items()), "fine-tuning changed what is frozen")
    require(finite(outputs_of(student, inputs)), "fine-tuning gave values that are not finite")
    return ""


def search(case: Case, model: nn.Module, small: nn.Module, plan: Any, inputs: Any, inventory: Any) -> str:
    """Ranks chosen by energy, and the plan in effect."""
    return _searched(model, inputs, inventory, "energy")


def sensitivity(case: Case, model: nn.Module, small: nn.Module, plan: Any, inputs: Any, inventory: Any) -> str:
    """Ranks chosen by what the output loses."""
    return _searched(model, inputs, inventory, "sensitivity")


def _searched(model: nn.Module, inputs: Any, inventory: haloc.Inventory, method: str) -> str:
    space = haloc.rank_space(inventory, round_to=2)
    if not space.open_layers:
        return f"too small for {method}"
    given = {"val": [inputs_as_batch(inputs)], "loss": squares, "inputs": whole} if method == "sensitivity" else {}
    result = haloc.search(model, space, budget={"params": "96%"}, method=method, **given)
    outputs_of(applied(model, result.plan.changes()), inputs)
    return ""


def aware(case: Case, model: nn.Module, small: nn.Module, plan: Any, inputs: Any, inventory: Any) -> str:
    """The same plan with what the inputs look like: finite, and no further off than a few times the plain one."""
    moments = haloc.calibrate(model, [inputs_as_batch(inputs)], plan, inputs=whole)
    fitted = haloc.apply_plan(model, plan, moments=moments)
    dense = outputs_of(model, inputs)
    got = outputs_of(fitted, inputs)
    require(finite(got), "activation-aware factors give values that are not finite")
    off, plain = distance(got, dense), distance(outputs_of(small, inputs), dense)
    require(off <= 4 * plain + allowed(case, dense), f"activation-aware is {off:.2g} off, plain {plain:.2g}")
    return ""


def export(case: Case, model: nn.Module, small: nn.Module, plan: Any, inputs: Any, inventory: Any) -> str:
    """Exported both ways; `haloc.export` itself compares the outputs, and here they are compared again."""
    wanted = tensors_in(outputs_of(small, inputs))
    with tempfile.TemporaryDirectory() as folder:
        for ending in ("pt2", "onnx"):
            path = Path(folder) / f"network.{ending}"
            haloc.export(small, path, inputs)
            got = tensors_in(call(haloc.open_exported(path, trust=True), inputs))
            off = max(apart(one.double(), other.double()) for one, other in zip(got, wanted, strict=True))
            require(off <= 1e-3, f"the .{ending} is {off:.2g} away")
    return "exported"


def measure(case: Case, model: nn.Module, small: nn.Module, plan: Any, inputs: Any, inventory: Any) -> str:
    """Two rows of a table."""
    row = inventory.open_layers[0]
    keys = [(row.shape, haloc.Dense()), (row.shape, plan[row.name])]
    table = haloc.measure(keys, haloc.Target("cpu", runtime="eager"))
    require(len(table) == 2, "rows are missing from the table")
    return "measured"


STEPS: dict[str, Callable[..., str]] = {
    step.__name__: step for step in (store, train, search, sensitivity, aware, export, measure)
}


def allowed(case: Case, outputs: Any) -> float:
    """How far outputs may be off where nothing is cut."""
    return tolerance(outputs) if case.tolerance is None else case.tolerance


def inputs_as_batch(inputs: Any) -> Any:
    """A batch that holds nothing but the inputs."""
    return {"given": inputs}


def whole(batch: Mapping[str, Any]) -> Any:
    """The inputs in such a batch."""
    return batch["given"]


def squares(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """A loss for outputs of any kind: their mean square."""
    answers = [tensor for tensor in tensors_in(call(model, whole(batch))) if tensor.is_floating_point()]
    return torch.stack([tensor.float().square().mean() for tensor in answers]).sum()
