"""Blocks that learn the dense network's feature maps from a few unlabelled inputs."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import haloc
from haloc.errors import DataError, SpecError, TrainError
from haloc.forms import Spatial, Svd, Tucker2
from haloc.reconstruction import ReconstructionSettings, blocks_of, reconstruct_blocks

PLAN = {
    "stem.0": Tucker2(6, 2),
    "one.conv2": Tucker2(3, 3),
    "two.down.0": Svd(3),
    "two.conv1": Spatial(4),
    "head": Svd(3),
}
BRIEF = ReconstructionSettings(epochs=8, images=96, batch_size=16, lr=3e-3)


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.down = nn.Sequential(nn.Conv2d(inputs, outputs, 1))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return (self.down(x) + scale * self.conv2(self.norm1(self.conv1(x)).relu())).relu()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU())
        self.two, self.one = Residual(8, 12), Residual(8, 8)  # not in the order in which they run
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.two(self.one(self.stem(x)), scale=0.5).mean((2, 3)))


def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    dense = Net().eval()
    return dense, haloc.apply_plan(dense, PLAN)


def inputs(count: int = 96, size: int = 24) -> list[torch.Tensor]:
    return list(torch.randn(count, 2, 8, 8, generator=torch.Generator().manual_seed(1)).split(size))


def apart(own: nn.Module, other: nn.Module) -> float:
    x = torch.randn(64, 2, 8, 8, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return float((own(x) - other(x)).square().mean() / other(x).square().mean())


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_blocks_are_the_smallest_modules_that_are_no_mere_containers():
    _, network = networks()
    found = {"stem.0": ["stem.0"], "one": ["one.conv2"], "two": ["two.conv1", "two.down.0"], "head": ["head"]}
    assert {block: sorted(layers) for block, layers in blocks_of(network).items()} == found
    flat = nn.Sequential(nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()), nn.Conv2d(8, 8, 3))
    assert blocks_of(haloc.apply_plan(flat, {"0.0": Tucker2(2, 2), "1": Tucker2(2, 2)})) == {"0.0": ["0.0"], "1": ["1"]}
    assert blocks_of(flat) == {}


def test_every_block_comes_nearer_and_so_does_the_network():
    dense, network = networks()
    before, original = apart(network, dense), state(dense)
    steps = []
    found = reconstruct_blocks(network, dense, inputs(), settings=BRIEF, on_step=lambda *step: steps.append(step))
    assert [row.block for row in found] == ["stem.0", "one", "two", "head"], "in the order in which they run"
    assert all(row.kept for row in found)
    assert all(row.after < row.before for row in found)
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert apart(network, dense) < 0.8 * before
    assert same(state(dense), original)
    assert not network.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in network.parameters())


def test_errors_of_earlier_blocks_are_made_up_for():
    """A block that is dense has nothing to lose by itself; it still can do something about what came before it."""
    dense, network = networks()
    two = state(network.two)
    told = replace(BRIEF, epochs=12)
    found = {row.block: row for row in reconstruct_blocks(network, dense, inputs(), settings=told)}
    alone = networks()[1]
    for name in ("stem", "one"):
        setattr(alone, name, copy.deepcopy(getattr(dense, name)))  # all that comes before it is right
    (block, *_) = (row for row in reconstruct_blocks(alone, dense, inputs(), settings=told) if row.block == "two")
    assert block.before < found["two"].before
    assert not same(state(network.two), two)


def test_modes_flags_and_statistics_stay():
    dense, network = networks()
    network.train()
    network.one.eval()
    network.head.requires_grad_(False)
    modes = [module.training for module in network.modules()]
    statistics = {name: value.clone() for name, value in network.named_buffers()}
    reconstruct_blocks(network, dense, inputs(), settings=BRIEF)
    assert [module.training for module in network.modules()] == modes
    assert not any(parameter.requires_grad for parameter in network.head.parameters())
    assert all(torch.equal(value, statistics[name]) for name, value in network.named_buffers())


def test_a_block_that_is_no_nearer_stays_as_it_was():
    dense, network = networks()
    before = state(network)
    found = reconstruct_blocks(network, dense, inputs(), settings=replace(BRIEF, lr=300))
    assert not any(row.kept for row in found)
    assert all(row.after == row.before for row in found)
    assert same(state(network), before)


def test_a_network_within_another_keeps_its_blocks():
    """One that only wraps it, with a layer of its own, does not become one large block."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.net = nn.Conv2d(2, 2, 3, padding=1), Net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(self.first(x))

    plan = {f"net.{name}": form for name, form in PLAN.items()} | {"first": Tucker2(1, 1)}
    found = blocks_of(haloc.apply_plan(nn.Sequential(nn.Identity(), Wrapped()), {f"1.{n}": f for n, f in plan.items()}))
    assert set(found) == {"1.first", "1.net.stem.0", "1.net.one", "1.net.two", "1.net.head"}


def test_a_module_that_is_only_asked_for_its_layers():
    class Asked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Residual(2, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner.conv2(self.inner.conv1(x)).mean((2, 3))

    torch.manual_seed(0)
    dense = Asked().eval()
    network = haloc.apply_plan(dense, {"inner.conv1": Tucker2(2, 2), "inner.conv2": Tucker2(3, 3)})
    found = reconstruct_blocks(network, dense, inputs(), settings=BRIEF)
    assert [row.block for row in found] == ["inner.conv1", "inner.conv2"]


def test_the_same_again_whatever_was_drawn_before():
    first, second = networks()[1], networks()[1]
    for number, network in enumerate((first, second)):
        torch.manual_seed(number)
        reconstruct_blocks(network, networks()[0], inputs(), settings=BRIEF)
    assert same(state(first), state(second))


class Sequence(nn.Module):
    """The batch is the second axis inside, and there is a mask as long as a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Masked()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x.transpose(0, 1), mask=torch.ones(16, 16).tril())


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.einsum("ts,sbc->tbc", mask, self.layer(x)).relu()


def test_the_batch_may_be_any_axis():
    torch.manual_seed(0)
    dense = Sequence().eval()
    network = haloc.apply_plan(dense, {"block.layer": Svd(4)})
    x = torch.randn(128, 16, 12)
    fresh = torch.randn(64, 16, 12)
    before = float((network(fresh) - dense(fresh)).square().mean().detach())
    (found,) = reconstruct_blocks(network, dense, list(x.split(16)), settings=replace(BRIEF, images=128))
    assert (found.kept, found.images) == (True, 128)
    assert float((network(fresh) - dense(fresh)).square().mean().detach()) < before


def test_batches_of_different_forms():
    """Texts are often as long as the longest of their batch."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(12, 12), nn.ReLU()).eval()
    network = haloc.apply_plan(dense, {"0": Svd(4)})
    x = [torch.randn(16, length, 12) for length in (3, 5, 4, 6, 3)]
    (found,) = reconstruct_blocks(network, dense, x, settings=replace(BRIEF, images=80))
    assert found.kept


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_half_precision_learns_in_full(kind):
    dense, network = (net.to(kind) for net in networks())
    found = reconstruct_blocks(network, dense, [x.to(kind) for x in inputs()], settings=BRIEF)
    assert sum(row.kept for row in found) >= 3
    assert all(parameter.dtype == kind for parameter in network.parameters())


def test_what_a_model_does_to_its_inputs_is_its_own_affair():
    class Shifting(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.sub_(1.0))

    torch.manual_seed(0)
    dense = Shifting().eval()
    network, given = haloc.apply_plan(dense, PLAN), inputs()
    kept = [x.clone() for x in given]
    found = reconstruct_blocks(network, dense, given, settings=BRIEF)
    assert all(torch.equal(a, b) for a, b in zip(given, kept, strict=True))
    assert all(row.kept for row in found)


def test_a_block_that_cannot_be_called_again_is_left_alone(caplog):
    class Past:
        def __init__(self) -> None:
            self.seen: list[torch.Tensor] = []

    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor, past: Past) -> torch.Tensor:
            past.seen.append(self.layer(x))
            return torch.cat(past.seen, 1)

    class Net2(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Remembering()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(x, past=Past())

    torch.manual_seed(0)
    dense = Net2().eval()
    network = haloc.apply_plan(dense, {"block.layer": Svd(2)})
    before = state(network)
    (found,) = reconstruct_blocks(network, dense, list(torch.randn(32, 6).split(8)), settings=BRIEF)
    assert not found.kept
    assert same(state(network), before)
    assert "block block is not reconstructed" in caplog.text


def test_large_feature_maps_are_learnt_from_fewer_inputs():
    dense, network = networks()
    told = replace(BRIEF, memory_gb=200_000 / 2**30)
    found = {row.block: row.images for row in reconstruct_blocks(network, dense, inputs(), settings=told)}
    assert found["one"] < found["head"] == 96


def test_it_learns_where_nobody_wants_gradients():
    dense, network = networks()
    with torch.no_grad():
        assert all(row.kept for row in reconstruct_blocks(network, dense, inputs(), settings=BRIEF))


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_a_reconstruction_that_was_stopped_goes_on(tmp_path, blocks, monkeypatch):
    class StopError(Exception):
        pass

    def stop(done: int, of: int) -> None:
        if done == blocks:
            raise StopError

    dense, whole = networks()
    expected = reconstruct_blocks(whole, dense, inputs(), settings=BRIEF)
    with pytest.raises(StopError):
        reconstruct_blocks(networks()[1], dense, inputs(), settings=BRIEF, folder=tmp_path, on_step=stop)
    network = networks()[1]
    trained = []
    assert (
        reconstruct_blocks(
            network, dense, inputs(), settings=BRIEF, folder=tmp_path, on_step=lambda *s: trained.append(s)
        )
        == expected
    )
    assert same(state(network), state(whole))
    other = networks()[1]
    found = reconstruct_blocks(other, dense, inputs(), settings=replace(BRIEF, epochs=1), folder=tmp_path)
    assert found != expected, "what was kept is of other settings"
    (kept,) = tmp_path.glob("*.safetensors")
    kept.write_bytes(kept.read_bytes()[:100])
    again = networks()[1]
    assert reconstruct_blocks(again, dense, inputs(), settings=replace(BRIEF, epochs=1), folder=tmp_path) == found
    assert same(state(again), state(other)), "a damaged file is as good as none"


def test_what_runs_twice_is_left_alone(caplog):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.conv(self.conv(x)))

    torch.manual_seed(0)
    dense = Twice().eval()
    network = haloc.apply_plan(dense, {"conv": Tucker2(2, 2), "last": Tucker2(2, 2)})
    before = state(network.conv)
    x = list(torch.randn(16, 4, 6, 6).split(8))
    assert [row.block for row in reconstruct_blocks(network, dense, x, settings=replace(BRIEF, images=16))] == ["last"]
    assert same(state(network.conv), before)
    assert "block conv is not reconstructed: it runs 2 times" in caplog.text


def test_nothing_to_do():
    dense, network = networks()
    before = state(network)
    assert reconstruct_blocks(network, dense, inputs(), settings=replace(BRIEF, epochs=0)) == []
    assert same(state(network), before)
    with pytest.raises(DataError, match="two inputs at the least"):
        reconstruct_blocks(network, dense, inputs(1), settings=BRIEF)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"epochs": -1}, "epochs must be at least 0, got -1"),
        ({"images": 1}, "images must be at least 2"),
        ({"lr": 0.0}, "lr must be above 0"),
        ({"held_out": 1.0}, "held_out must be between 0 and 1"),
    ],
)
def test_settings_that_cannot_be(told, said):
    with pytest.raises(SpecError, match=said):
        ReconstructionSettings(**told)


def test_a_block_that_diverges_stops_it_and_names_the_layer():
    dense, network = networks()
    said = r"block \S+ has diverged .*layer '.*' is the first whose weight is not finite;.* which is 1e\+30"
    with pytest.raises(TrainError, match=said):
        reconstruct_blocks(network, dense, inputs(), settings=replace(BRIEF, lr=1e30))
    assert all(tensor.isfinite().all() for tensor in state(network).values())
