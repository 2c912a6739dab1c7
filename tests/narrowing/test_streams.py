"""Channels that are only added up: they may be mixed as one likes before some of them go."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import haloc
from haloc.errors import FileFormatError, PlanError
from haloc.files import read_json, write_json
from haloc.narrowing import Narrowed, Stream, hidden_channels, narrow, narrowed_of, resized
from haloc.narrowing.hidden import Sizes, narrowed_from
from haloc.narrowing.interpolate import Raw, moments
from haloc.narrowing.looks import seen_by
from haloc.narrowing.rotate import principal
from haloc.narrowing.surgery import Known, take

from .test_narrow import EXAMPLE, Inverted, apart, inputs


class Linear(nn.Module):
    """Inverted residuals around a stream without activations."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 12, 3, padding=1, bias=bias), nn.BatchNorm2d(12)
        self.one, self.two = Inverted(12, 40), Inverted(12, 24)
        self.last, self.pool = nn.Conv2d(12, 32, 1), nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.last(self.two(self.one(self.norm(self.stem(x))))).relu()).flatten(1))


def network(*, bias: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = Linear(bias=bias)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    haloc.recalibrate(model, inputs())
    return model.eval()


def streams(model: nn.Module, example: torch.Tensor = EXAMPLE) -> list[Stream]:
    return [group for group in hidden_channels(model, example) if isinstance(group, Stream)]


# --- which there are ------------------------------------------------------------------------------------------------


def test_a_stream_is_all_that_is_added_up():
    (stream,) = streams(network())
    assert stream == Stream(
        consumers=("one.widen", "two.widen", "last"),
        producers=("stem", "one.back", "two.back"),
        norms=("one.norm1", "two.norm1", None),
        sources=("norm", "one.norm3", "two.norm3"),
        width=12,
        spare=6,
    )
    assert [group.consumer for group in hidden_channels(network(), EXAMPLE)] == [
        *("one.widen", "one.back", "two.back", "head")
    ]


def test_mobilenetv2_has_seven():
    found = streams(haloc.create("mobilenet_v2"), torch.zeros(1, 3, 64, 64))
    assert [(group.width, len(group.producers), len(group.consumers)) for group in found] == [
        *((16, 1, 1), (24, 2, 2), (32, 3, 3), (64, 4, 4), (96, 3, 3), (160, 3, 3), (320, 1, 1))
    ]


class Path(nn.Module):
    """Two layers that make something, and what is done with it before others read it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.one, self.two = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8, affine=kind != "a norm without weights")
        self.read, self.other = nn.Conv2d(8, 4, 3), nn.Conv2d(8, 4, 1, groups=2 if kind == "a grouped reader" else 1)
        self.linear, self.drop = nn.Linear(8, 4), nn.Dropout()

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        one, two = self.one(x), self.norm(self.two(x))
        match self.kind:
            case "an activation":
                h = one + two.relu()
            case "a scaled sum":
                h = torch.add(one, two, alpha=0.5)
            case "a broadcast sum":
                h = one + two.mean((2, 3), keepdim=True)
            case "a constant":
                h = one + two + torch.ones(8, 1, 1)
            case "the inputs":
                h = one + two + x.repeat(1, 3, 1, 1)[:, :8]
            case "the way around a norm":
                made = self.two(x)
                h = one + self.norm(made)
                return self.read(h).mean((2, 3)) + self.linear(made.mean((2, 3)))
            case "a norm in between":
                h = self.norm(one + self.two(x))
            case "the largest":
                h = nn.functional.max_pool2d(one + two, 2)
            case _:
                h = one + two
        if self.kind == "an output":
            return self.read(h).mean((2, 3)), h
        if self.kind == "averages":
            return self.linear(self.drop(nn.functional.avg_pool2d(h, 2)).mean((2, 3)))
        return self.read(h).mean((2, 3)) + self.other(h).mean((2, 3))


def test_nothing_else_may_happen_to_it():
    kinds = ["an activation", "a scaled sum", "a broadcast sum", "a constant", "the inputs", "a norm in between"]
    kinds += ["the way around a norm", "the largest", "an output", "a grouped reader", "a norm without weights"]
    assert {kind: streams(Path(kind)) for kind in kinds} == {kind: [] for kind in kinds}


def test_dropout_and_averages_may():
    assert [stream.consumers for stream in streams(Path("plain"))] == [("read", "other")]
    (stream,) = streams(Path("averages"))
    assert (stream.consumers, stream.producers) == (("linear",), ("one", "two"))


class Tokens(nn.Module):
    """A transformer's stream without norms, perhaps with an average over what are no positions."""

    def __init__(self, *, averaged: bool) -> None:
        super().__init__()
        self.one, self.two, self.up = nn.Linear(6, 8), nn.Linear(12, 8), nn.Linear(8, 12)
        self.head, self.averaged = nn.Linear(4 if averaged else 8, 3), averaged

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.one(x.flatten(2).transpose(1, 2)[:, :8, :1].expand(-1, 8, 6))
        if self.averaged:
            return self.head(nn.functional.avg_pool1d(h, 2))
        return self.head(h + self.two(self.up(h).relu()))


def test_tokens_have_one_on_their_last_axis():
    assert [stream.consumers for stream in streams(Tokens(averaged=False))] == [("up", "head")]
    assert streams(Tokens(averaged=True)) == []


# --- the arithmetic -------------------------------------------------------------------------------------------------


def mixed(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(500, count, generator=generator, dtype=torch.float64) @ torch.randn(
        count, count, generator=generator, dtype=torch.float64
    )


def seen(rows: torch.Tensor, damping: float = 1e-9):
    return moments(rows.mean(0), rows.T @ rows / len(rows), shifts=True, damping=damping)


def test_for_one_reader_no_other_directions_leave_less():
    rows, weight = mixed(6, 0), torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    basis = principal([(weight, seen(rows))])
    outputs = (rows - rows.mean(0)) @ weight.T
    kept = torch.linalg.svdvals(outputs).square()
    assert basis.errors[0] == 0
    for gone in range(1, 6):
        left = torch.cat([kept, torch.zeros(1)])[6 - gone :].sum() / kept.sum()
        assert basis.errors[gone] == pytest.approx(float(left), abs=1e-6)
    assert torch.allclose(basis.directions @ basis.directions.T, torch.eye(6, dtype=torch.float64), atol=1e-8)


def test_readers_share_the_directions_that_they_need():
    """One reader needs the first three channels, the other the third to fifth; the last is for nobody."""
    one, two = torch.zeros(4, 6, dtype=torch.float64), torch.zeros(4, 6, dtype=torch.float64)
    one[:, :3], two[:, 2:5] = torch.randn(4, 3), torch.randn(4, 3)
    first, second = seen(mixed(6, 1)), seen(mixed(6, 2))
    basis = principal([(one, first), (two, second)])
    assert basis.errors[1] < 1e-6 < basis.errors[2]
    assert float(basis.code(5)[:, 5].abs().max()) < 1e-3
    silent = principal([(torch.zeros(4, 6, dtype=torch.float64), first)])
    assert torch.allclose(silent.directions @ silent.directions.T, torch.eye(6, dtype=torch.float64), atol=1e-8)


# --- the network ----------------------------------------------------------------------------------------------------


def known(model: nn.Module, stream: Stream) -> Known:
    return seen_by(model, [stream], inputs(), inputs(), 64).in_all(stream, stream.width)[1]


@pytest.mark.parametrize("bias", [False, True])
def test_turned_without_loss_the_network_says_the_same(bias):
    model = network(bias=bias)
    (stream,) = streams(model)
    turn = torch.linalg.qr(torch.randn(12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(5))).Q
    turned = resized(model, [])
    take(turned, stream, turn, known(model, stream))
    assert apart(turned, model) < 1e-10
    haloc.recalibrate(turned, inputs())
    assert apart(turned, model) < 1e-3, "its norms have the statistics of what they see now"


def test_directions_that_are_not_there_go_for_nothing():
    model = network()
    with torch.no_grad():
        spanned = torch.linalg.qr(torch.randn(12, 7, generator=torch.Generator().manual_seed(4))).Q
        for name in ("norm", "one.norm3", "two.norm3"):
            norm = model.get_submodule(name)
            norm.weight.copy_((norm.running_var + norm.eps).sqrt())  # plain sums of what the layers make
            norm.bias.copy_(norm.running_mean)
        for name in ("stem", "one.back", "two.back"):
            layer, norm = model.get_submodule(name), {"stem": "norm"}.get(name, name.replace("back", "norm3"))
            layer.weight.copy_((spanned @ spanned.T @ layer.weight.flatten(1)).reshape(layer.weight.shape))
            bias = model.get_submodule(norm).bias
            bias.copy_(spanned @ spanned.T @ (bias - model.get_submodule(norm).running_mean))
            model.get_submodule(norm).running_mean.zero_()
    (stream,) = streams(model)
    code, looks = seen_by(model, [stream], inputs(), inputs(), 64).in_all(stream, 7)
    small = resized(model, [])
    take(small, stream, code, looks)
    assert small.one.widen.in_channels == small.stem.out_channels == small.norm.num_features == 7
    assert apart(small, model) < 1e-6


def test_the_fewer_directions_the_more_is_lost_and_less_than_with_channels():
    model = network()
    (stream,) = streams(model)
    looks = seen_by(model, [stream], inputs(), inputs(), 64)

    def without(code: torch.Tensor) -> float:
        small = resized(model, [])
        take(small, stream, code, looks.in_all(stream, 12)[1])
        return apart(small, model)

    turned = [without(looks.in_all(stream, width)[0]) for width in (12, 10, 8, 6, 4)]
    assert turned == sorted(turned)
    chosen = [without(torch.eye(12, dtype=torch.float64)[list(kept)]) for kept in itertools.combinations(range(12), 10)]
    assert turned[1] < min(chosen)


def test_counts_are_those_of_the_network_that_is_built():
    model = network()
    hidden = hidden_channels(model, EXAMPLE)
    widths = {"one.widen": 8, "one.back": 16, "two.back": 24, "head": 8}
    small = resized(model, [Narrowed(group, widths[group.consumer]) for group in hidden])
    built = haloc.inspect(small, EXAMPLE)
    counts = Sizes(haloc.inspect(model, EXAMPLE), hidden).counts(widths)
    assert counts == {"macs": built.macs, "params": built.params}


def test_it_is_narrowed_saved_loaded_exported_and_factorised_like_any_other(tmp_path):
    model = network()
    told = haloc.NarrowSettings(round_to=2, tried=48)
    small = narrow(model, EXAMPLE, inputs(), budget={"macs": "35%"}, settings=told)
    assert any(isinstance(each.hidden, Stream) for each in narrowed_of(small))
    assert haloc.inspect(small, EXAMPLE).macs <= 0.35 * haloc.inspect(model, EXAMPLE).macs
    both = haloc.apply_plan(small, {"stem": haloc.Tucker2(4, 3)})
    haloc.save(tmp_path / "net", both)
    loaded = haloc.load(tmp_path / "net", Linear())
    x = torch.cat(inputs())
    with torch.no_grad():
        assert torch.equal(loaded(x), both(x))
    assert narrowed_of(loaded) == narrowed_of(small)
    haloc.export(loaded, tmp_path / "net.onnx", EXAMPLE)
    done = haloc.reconstruct_blocks(
        loaded, model, inputs(), settings=haloc.ReconstructionSettings(epochs=1, images=64, batch_size=16)
    )
    assert {each.block: each.kept for each in done}["one"] is False, "it puts out other channels than the dense one"


def test_a_file_for_another_model_is_refused(tmp_path):
    (stream,) = streams(network())
    small = resized(network(), [Narrowed(stream, 8)])
    haloc.save(tmp_path / "net", small)
    other = Linear()
    other.two.back = nn.Conv2d(24, 16, 1)
    with pytest.raises(PlanError, match=r"at layer 'two\.back', which had 12 channels there; this model's has 16"):
        haloc.load(tmp_path / "net", other)
    card = read_json(tmp_path / "net" / "model.json")
    card["narrowed"][0]["norms"] = []
    write_json(tmp_path / "net" / "model.json", card)
    with pytest.raises(FileFormatError, match=r"model\.json.*every layer of a stream"):
        haloc.load(tmp_path / "net", Linear())


def test_values_go_to_json_and_back():
    each = Narrowed(Stream(("b", "c"), ("a",), (None, "n"), ("m",), 8, 2), 4)
    assert narrowed_from([each.to_dict()]) == (each,)
    assert str(each) == "8→4 channels from a to b, c"
    good = each.to_dict()
    for key, value in [("consumers", "b"), ("sources", []), ("consumers", ["b", "b"]), ("producers", [3]), ("kept", 9)]:
        with pytest.raises(FileFormatError):
            narrowed_from([good | {key: value}])


def test_a_model_that_cannot_be_differentiated_is_narrowed_all_the_same(monkeypatch):
    monkeypatch.setattr("haloc.narrowing.looks.output_weights", lambda *args: None)
    model = network()
    small = narrow(model, EXAMPLE, inputs(), budget={"macs": "70%"}, settings=haloc.NarrowSettings(round_to=2))
    assert apart(small, model) < 0.1


def test_raw_moments_are_of_what_norms_see():
    model = network()
    (stream,) = streams(model)
    made = known(model, stream).made
    assert isinstance(made["one.back"], Raw)
    assert torch.allclose(made["one.back"].mean.float(), model.one.norm3.running_mean, atol=1e-2)
