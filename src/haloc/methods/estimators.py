"""How α gets a gradient from a step in which one candidate per layer runs. The paper does not say; here are four ways.

Each takes a choice and its input, and returns an output through which the cross-entropy reaches α.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from haloc.methods.supernet import Choice


def every_answer(choice: Choice, input: Tensor) -> Tensor:
    """The path drawn, taken for Σ_j p_j τ_j(x), of which it is a sample: ∂L/∂p_j = ⟨∂L/∂y, τ_j(x)⟩ for every j.

    The output is the active candidate's to the last bit; the others are asked on the way back, one after the other, or
    all ranks of a form at once where they share weights, so the memory does not grow with their number.
    """
    output = choice.answer(choice.active, input)
    return _gated(output, choice.probabilities, input, choice, range(len(choice.forms)))


def two_answers(choice: Choice, input: Tensor) -> Tensor:
    """Two candidates are drawn and compared as if there were no others (ProxylessNAS's binary gates).

    A step is cheap, whatever the number of candidates, and says something of two of them.
    """
    output = choice.answer(choice.active, input)
    pair = [choice.active, choice.other]
    return _gated(output, (choice.alpha[pair] / choice.temperature).softmax(0), input, choice, pair)


def own_answer(choice: Choice, input: Tensor) -> Tensor:
    """A straight-through gate on the path drawn alone.

    Cheapest of all. It says whether more of the candidate's output would do good, not whether another's would do
    better; and where a BatchNorm comes next, which undoes every scale, it says next to nothing.
    """
    chance = choice.probabilities[choice.active]
    output: Tensor = choice.answer(choice.active, input) * (chance / chance.detach())
    return output


def mixture(choice: Choice, input: Tensor) -> Tensor:
    """Σ_j g_j τ_j(x) with g = softmax(α / T + Gumbel noise): all candidates run, and the memory grows with them."""
    noise = torch.from_numpy(choice.noise).to(choice.alpha)
    gates = (choice.alpha / choice.temperature + noise).softmax(0)
    answers = (gate * choice.answer(number, input) for number, gate in enumerate(gates))
    return torch.stack(list(answers)).sum(0)


#: The ways by name.
ESTIMATORS: dict[str, Callable[[Choice, Tensor], Tensor]] = {
    "all": every_answer,
    "pair": two_answers,
    "single": own_answer,
    "mixture": mixture,
}


def _gated(output: Tensor, gates: Tensor, input: Tensor, choice: Choice, numbers: Sequence[int]) -> Tensor:
    """The output itself; on the way back every gate gets the product of the gradient with its candidate's answer."""
    gated: Tensor = _Gated.apply(output, gates, input.detach(), choice, tuple(numbers))  # type: ignore[no-untyped-call]
    return gated


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, gates: Tensor, input: Tensor, choice: Choice, numbers: Any) -> Tensor:
        ctx.save_for_backward(input)
        ctx.asked = choice, numbers, gates.dtype
        kind = input.device.type
        ctx.mixed = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        return output.clone()  # not a view: what comes next may work in place

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), (input,) = grads, ctx.saved_tensors
        choice, numbers, dtype = ctx.asked
        kind, mixed, enabled = ctx.mixed
        # The way back is outside of autocast, and the answers are to be those of the way there.
        with torch.no_grad(), torch.autocast(kind, mixed, enabled):
            products = choice.products(input, grad, numbers)
        return grad, products.to(dtype), None, None, None
