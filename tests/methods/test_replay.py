"""Running a network behind a layer gives what the whole network gives, and leaves it as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from haloc.factor.forward import call
from haloc.methods.replay import behind


class Counting(nn.Linear):
    """Counts how often it is really computed."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.computed = 0

    def forward(self, input: Tensor) -> Tensor:
        self.computed += 1
        return super().forward(input)


class Block(nn.Module):
    """Two layers and a residual added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Counting(), Counting()

    def forward(self, input: Tensor) -> Tensor:
        out = self.two(self.one(input).relu_())
        out += input
        return out


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Counting()

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(input), input


class Network(nn.Module):
    """Additions in place, a module that returns two tensors, and one that is called before and after the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.pair, self.blocks = Block(), Pair(), nn.ModuleList([Block(), Block()])
        self.shared, self.layer, self.last = Counting(), Counting(), Counting()

    def forward(self, input: Tensor) -> Tensor:
        one, two = self.pair(self.first(input))
        one += self.shared(two)
        for block in self.blocks:
            one = block(one)
        return self.last(self.shared(self.layer(one).tanh()))


class Restless(Network):
    """Never the same twice."""

    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return self.calls * super().forward(input)


class Remembering(nn.Module):
    """Its first layer leaves something behind for the last one, beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.noting, self.layer, self.last = Noting(), Counting(), Counting()

    def forward(self, input: Tensor) -> Tensor:
        out = self.layer(self.noting(input))
        return self.last(out + self.noting.left.pop())


class Noting(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.left: list[Tensor] = []

    def forward(self, input: Tensor) -> Tensor:
        self.left.append(input)
        return super().forward(input)


def made(kind: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return kind().eval().requires_grad_(False)


def inputs() -> Tensor:
    return torch.linspace(-1, 1, 12).reshape(3, 4)


def work(network: nn.Module) -> int:
    return sum(module.computed for module in network.modules() if isinstance(module, Counting))


@pytest.mark.parametrize(
    "name", [name for name, module in made(Network).named_modules() if isinstance(module, Counting)]
)
def test_the_output_is_that_of_the_whole_network_again_and_again(name):
    network = made(Network)
    layer = network.get_submodule(name)
    with behind(network, layer, lambda: network(inputs())):
        for scale in (1.0, 0.5, 0.0):
            layer.weight.mul_(scale)
            found = network(inputs())
            whole = made(Network)
            whole.load_state_dict(network.state_dict())
            assert torch.equal(found, whole(inputs()))


def test_only_what_comes_after_the_layer_is_computed():
    network = made(Network)
    with behind(network, network.layer, lambda: network(inputs())):
        before = work(network)
        network(inputs())
        assert work(network) - before == 3  # the layer, the second call of the shared one, the last
    before = work(network)
    network(inputs())
    assert work(network) - before == 11


def test_the_network_is_left_as_it_was():
    network = made(Network)
    network.first.forward = network.first.forward  # somebody's own
    before = {name: dict(vars(module)) for name, module in network.named_modules()}
    with behind(network, network.layer, lambda: network(inputs())):
        assert "forward" in vars(network.pair)
    after = {name: dict(vars(module)) for name, module in network.named_modules()}
    for rows in (before, after):
        for row in rows.values():
            row.pop("computed", None)
    assert after == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


@pytest.mark.parametrize("kind", [Restless, Remembering])
def test_a_network_that_does_not_repeat_is_run_as_a_whole(kind):
    network = made(kind)
    before = work(network)
    call(network, inputs())
    all_of_it = work(network) - before
    with behind(network, network.layer, lambda: call(network, inputs())):
        before = work(network)
        call(network, inputs())
        assert work(network) - before == all_of_it


def test_a_layer_that_is_not_called_changes_nothing():
    network = made(Network)
    idle = Counting()
    network.idle = idle
    with behind(network, idle, lambda: network(inputs())):
        before = work(network)
        assert torch.equal(network(inputs()), made(Network)(inputs()))
        assert work(network) == before
