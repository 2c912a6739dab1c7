"""Fewer channels between two layers: which there are, which go, and how the others make up for them."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

import haloc
from haloc.errors import BudgetError, DataError, FileFormatError, ModelError, PlanError, SpecError
from haloc.files import read_json, write_json
from haloc.narrowing import NarrowSettings, hidden_channels, narrow, narrowed_of, resized
from haloc.narrowing.choose import choose_widths, filled_in
from haloc.narrowing.hidden import Hidden, Narrowed, Sizes, narrowed_from
from haloc.narrowing.interpolate import (
    DAMPINGS,
    Order,
    Raw,
    moments,
    removal_order,
    stand_ins,
    suitable_damping,
    unseen_error,
)
from haloc.narrowing.narrow import _held_out
from haloc.training.journal import read_journal
from haloc.training.outputs import distance

EXAMPLE = torch.zeros(1, 3, 8, 8)


class Inverted(nn.Module):
    """Wide, depthwise, narrow, as MobileNetV2 has it, with a path around."""

    def __init__(self, channels: int, wide: int, *, bias: bool = False) -> None:
        super().__init__()
        self.widen, self.norm1 = nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.depth, self.norm2 = nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=bias), nn.BatchNorm2d(wide)
        self.back, self.norm3 = nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(self.widen(x)).clamp(0, 6)
        return x + self.norm3(self.back(self.norm2(self.depth(h)).relu()))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.ReLU())
        self.one, self.two = Inverted(12, 40), Inverted(12, 24, bias=True)
        self.last, self.pool = nn.Conv2d(12, 32, 1), nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.last(self.two(self.one(self.stem(x)))).relu()).flatten(1))


def network() -> nn.Module:
    """A network whose statistics are those of its inputs, as a trained one's are."""
    torch.manual_seed(0)
    model = Net()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    haloc.recalibrate(model, inputs())
    return model.eval()


def inputs(count: int = 128, size: int = 32) -> list[torch.Tensor]:
    """Smooth pictures: neighbours say much of each other, as in photographs."""
    noise = torch.randn(count, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    return list(nn.functional.interpolate(noise, size=8, mode="bilinear").split(size))


def apart(own: nn.Module, other: nn.Module) -> float:
    x = torch.cat(inputs())
    with torch.no_grad():
        return float((own(x) - other(x)).square().mean() / other(x).square().mean())


# --- which there are ------------------------------------------------------------------------------------------------


def names(model: nn.Module, example: torch.Tensor = EXAMPLE) -> dict[str, tuple[str, int]]:
    return {group.consumer: (", ".join(group.makers), group.width) for group in hidden_channels(model, example)}


def test_channels_that_nobody_else_sees_are_found():
    model = network()
    assert names(model) == {"one.back": ("one.widen", 40), "two.back": ("two.widen", 24), "head": ("last", 32)}
    one = hidden_channels(model, EXAMPLE)[0]
    assert one.carriers == ("one.norm1", "one.depth", "one.norm2")
    assert one.norm == "one.norm3"
    assert one.spare == 4


@pytest.mark.parametrize(
    ("name", "size", "count"),
    [
        ("resnet20", 32, 9),
        ("resnet18", 64, 8),
        ("mobilenet_v2", 64, 25),
        ("deit_tiny", 224, 12),
        ("convnext_tiny", 64, 18),
    ],
)
def test_networks_of_the_zoo_have_them(name, size, count):
    found = names(haloc.create(name), torch.zeros(1, 3, size, size))
    assert len(found) == count


def test_a_chain_of_layers_has_them_between_all():
    chain = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.GELU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(16, 4)),
    )
    assert names(chain) == {"3": ("0", 8), "8": ("3", 16)}


class Shared(nn.Module):
    """Channels that cannot be narrowed, each for another reason."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Conv2d(3, 8, 1, groups=1)
        groups = 4 if kind == "grouped" else 1
        self.second = nn.Conv2d(8, 8, 1, groups=groups)
        self.norm = nn.GroupNorm(2, 8)
        self.last = nn.Linear(8 * 64 if kind == "flattened" else 8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).relu()
        if self.kind == "read twice":
            return self.last((self.second(h) + h).mean((2, 3)))
        if self.kind == "called twice":
            return self.last((self.second(self.second(h))).softmax(1).mean((2, 3)))
        if self.kind == "mixed":
            return self.last(self.norm(self.second(h.softmax(1))).mean((2, 3)))
        if self.kind == "flattened":
            return self.last(h.flatten(1))
        return self.last(self.norm(self.second(h)).mean((2, 3)))


class Tokens(nn.Module):
    """As many tokens as features: a mean over tokens looks like one over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x.flatten(2).transpose(1, 2)[:, :8]).relu().mean(1))


def test_a_mean_over_tokens_is_none_over_positions():
    assert names(Tokens()) == {}
    unbatched = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1))
    assert names(unbatched, torch.zeros(3, 8, 8)) == {}
    assert names(unbatched) == {"2": ("0", 8)}


@pytest.mark.parametrize("kind", ["read twice", "called twice", "mixed", "flattened", "grouped"])
def test_channels_that_others_see_or_mix_are_left_alone(kind):
    assert names(Shared(kind)) == {}


def test_a_model_that_cannot_be_followed_has_none(caplog):
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) if float(x.sum()) > 0 else self.body(-x)

    assert hidden_channels(Moody(), EXAMPLE) == ()
    assert "cannot be exported" in caplog.text
    with pytest.raises(ModelError, match="no channels that only one layer makes"):
        narrow(Moody(), EXAMPLE, inputs(), budget={"macs": "50%"})


# --- which go -------------------------------------------------------------------------------------------------------


def channels(count: int = 6, seed: int = 0) -> torch.Tensor:
    """Rows of channels that have something to do with each other."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(400, count, generator=generator, dtype=torch.float64)
    return mixed @ torch.randn(count, count, generator=generator, dtype=torch.float64) + 1.0


def seen(rows: torch.Tensor, *, shifts: bool = True):
    return moments(rows.mean(0), rows.T @ rows / len(rows), shifts=shifts, damping=1e-9)


def error_without(rows: torch.Tensor, weight: torch.Tensor, kept: list[int], *, shifts: bool = True) -> float:
    """What least squares on the very rows leaves, as a share of the output's variance."""
    kept_rows = rows[:, kept]
    ones = torch.ones(len(rows), 1, dtype=rows.dtype)
    basis = torch.cat([kept_rows, ones], 1) if shifts else kept_rows
    wanted = rows @ weight.T
    rest = wanted - basis @ torch.linalg.lstsq(basis, wanted).solution
    whole = wanted - wanted.mean(0) if shifts else wanted
    return float(rest.square().sum() / whole.square().sum())


@pytest.mark.parametrize("shifts", [True, False])
def test_errors_are_those_of_least_squares_on_the_rows_themselves(shifts):
    rows, weight = channels(), torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found = removal_order(weight, seen(rows, shifts=shifts))
    assert found.errors[0] == 0
    for gone in range(1, 6):
        expected = error_without(rows, weight, found.kept(6 - gone), shifts=shifts)
        assert found.errors[gone] == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_the_first_to_go_is_the_best_of_all():
    rows, weight = channels(), torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    errors = [error_without(rows, weight, [c for c in range(6) if c != gone]) for gone in range(6)]
    assert removal_order(weight, seen(rows)).removed[0] == errors.index(min(errors))


def test_a_channel_that_others_tell_exactly_goes_for_nothing_and_so_does_a_silent_one():
    rows = channels(5)
    rows = torch.cat([rows, (2 * rows[:, :1] - rows[:, 1:2]), torch.zeros(len(rows), 1, dtype=rows.dtype)], 1)
    found = removal_order(torch.randn(3, 7, dtype=torch.float64), seen(rows))
    assert 6 in found.removed[:2]
    assert {0, 1, 5} & set(found.removed[:2])
    assert found.errors[2] < 1e-6


def test_many_channels_are_taken_in_an_order_that_holds_each_once():
    rows = channels(40)
    found = removal_order(torch.randn(8, 40, dtype=torch.float64), seen(rows))
    assert len(set(found.removed)) == 39
    assert list(found.errors) == sorted(found.errors)
    assert found.errors[-1] <= 1 + 1e-6
    assert found.kept(40) == list(range(40))
    assert len(found.kept(7)) == 7


def test_all_channels_stand_in_for_themselves():
    told, rest = stand_ins(seen(channels()), torch.eye(6))
    assert torch.allclose(told, torch.eye(6, dtype=torch.float64), atol=1e-8)
    assert torch.allclose(rest, torch.zeros(6, dtype=torch.float64), atol=1e-8)


def test_an_order_may_end_early():
    rows, weight = channels(40), torch.randn(8, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    whole, some = removal_order(weight, seen(rows)), removal_order(weight, seen(rows), 7)
    assert list(some.removed) == list(whole.removed[:7])
    assert some.kept(33) == whole.kept(33)


# --- what is true of other inputs -----------------------------------------------------------------------------------


def raw(rows: torch.Tensor, *, shifts: bool = True) -> Raw:
    return Raw(rows.mean(0), rows.T @ rows / len(rows), shifts)


@pytest.mark.parametrize("shifts", [True, False])
def test_the_error_on_other_inputs_is_what_it_is_on_the_rows_themselves(shifts):
    rows, others = channels(8), channels(8, seed=1)[:50]
    weight = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    kept, known = [0, 2, 3, 7], seen(rows, shifts=shifts)
    told, rest = stand_ins(known, torch.eye(8)[kept])
    expected = ((others - others[:, kept] @ told.T - rest) @ weight.T).square().sum(1).mean()
    found = unseen_error(weight, known, torch.eye(8)[kept], raw(others, shifts=shifts))
    assert found == pytest.approx(float(expected), rel=1e-9)


def test_few_inputs_of_many_channels_want_more_damping_than_many_inputs():
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(12, 64, generator=generator, dtype=torch.float64)

    def drawn(count: int) -> torch.Tensor:
        hidden = torch.randn(count, 12, generator=generator, dtype=torch.float64) @ mixing
        return hidden + torch.randn(count, 64, generator=generator, dtype=torch.float64)

    weight = torch.randn(5, 64, generator=generator, dtype=torch.float64)
    code = removal_order(weight, raw(drawn(40)).damped(DAMPINGS[0])).code(48)
    few = suitable_damping(weight, raw(drawn(40)), raw(drawn(40)), code)
    many = suitable_damping(weight, raw(drawn(20000)), raw(drawn(20000)), code)
    assert few > many == DAMPINGS[0]


@pytest.mark.parametrize(
    ("sizes", "count", "judged"), [((10, 10, 10), 6, 6), ((10, 10), 15, 10), ((1, 1, 1, 1), 2, 2), ((7, 3), 1, 1)]
)
def test_some_of_every_batch_are_held_out_half_of_all_at_most(sizes, count, judged):
    numbers = torch.arange(sum(sizes)).float()
    learnt, rest = _held_out(list(numbers.split(sizes)), count)
    assert sum(map(len, rest)) == judged
    assert sorted(torch.cat([*learnt, *rest]).tolist()) == numbers.tolist(), "each is in one of the two"


def test_one_input_is_both_learnt_from_and_judged_by():
    learnt, judged = _held_out([torch.zeros(1, 3)], 4)
    assert len(learnt) == len(judged) == 1


def test_what_is_lost_is_not_flattered_by_the_inputs_that_were_learnt_from(tmp_path):
    """A classifier reads more features than there are pictures: on those pictures any half of them tells all others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 96, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10))
    few, others = torch.randn(40, 3, 6, 6), torch.randn(2000, 3, 6, 6)
    small = narrow(model, EXAMPLE, [few], budget={"macs": "50%"}, folder=tmp_path, settings=NarrowSettings(tried=20))
    rows = [row for row in read_journal(tmp_path / "trials.jsonl") if row.get("gone") == 48]
    with torch.no_grad():
        true = float(distance(small(others), model(others)))
    assert rows[0]["change"] == pytest.approx(true, rel=0.5)


# --- how many -------------------------------------------------------------------------------------------------------


def test_counts_are_those_of_the_network_that_is_built():
    model = network()
    hidden = hidden_channels(model, EXAMPLE)
    sizes = Sizes(haloc.inspect(model, EXAMPLE), hidden)
    widths = {"one.back": 16, "two.back": 24, "head": 8}
    small = resized(model, [Narrowed(group, widths[group.consumer]) for group in hidden])
    built = haloc.inspect(small, EXAMPLE)
    assert sizes.counts(widths) == {"macs": built.macs, "params": built.params}
    assert sizes.counts({}) == {name: getattr(haloc.inspect(model, EXAMPLE), name) for name in ("macs", "params")}


def test_counts_of_a_chain_whose_layers_belong_to_two_groups():
    chain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 3))
    hidden = hidden_channels(chain, EXAMPLE)
    widths = {"2": 4, "4": 8}
    built = haloc.inspect(resized(chain, [Narrowed(group, widths[group.consumer]) for group in hidden]), EXAMPLE)
    counts = Sizes(haloc.inspect(chain, EXAMPLE), hidden).counts(widths)
    assert counts == {"macs": built.macs, "params": built.params}


def test_steps_find_what_trying_everything_finds():
    """Two groups, convex losses: the least loss within the budget, against all pairs of widths."""
    model = nn.Sequential(nn.Conv2d(3, 12, 1), nn.ReLU(), nn.Conv2d(12, 3, 1), nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1))
    hidden = [group for group in hidden_channels(model, EXAMPLE) if group.width > 3]
    layers = haloc.inspect(model, EXAMPLE)
    losses = {"2": [0.01 * gone**2 for gone in range(13)], "4": [0.03 * gone**2 for gone in range(9)]}
    sizes, limit = Sizes(layers, hidden), 0.62 * layers.macs
    found = choose_widths(layers, hidden, losses, {"macs": limit}, 1)
    assert sizes.counts(found)["macs"] <= limit

    def loss(widths: dict[str, int]) -> float:
        return losses["2"][12 - widths["2"]] + losses["4"][8 - widths["4"]]

    every = [dict(zip(("2", "4"), pair, strict=True)) for pair in itertools.product(range(1, 13), range(1, 9))]
    best = min(loss(widths) for widths in every if sizes.counts(widths)["macs"] <= limit)
    assert loss(found) <= 1.1 * best


def test_losses_that_were_tried_are_joined_by_the_groups_own_errors():
    errors = [0.0, 0.1, 0.2, 0.6, 1.0]
    assert filled_in(errors, {2: 0.4, 3: 1.2}) == pytest.approx([0.0, 0.2, 0.4, 1.2, 2.0])
    assert filled_in(errors, {1: 0.4, 3: 0.3}) == pytest.approx([0.0, 0.4, 0.4, 0.4, 0.4]), "it never falls"
    assert filled_in([0.0, 0.0, 0.5], {1: 0.0}) == pytest.approx([0.0, 0.0, 0.0])


def test_both_budgets_hold_and_widths_are_multiples():
    model = network()
    small = narrow(model, EXAMPLE, inputs(), budget={"macs": "70%", "params": 0.6})
    before, after = haloc.inspect(model, EXAMPLE), haloc.inspect(small, EXAMPLE)
    assert after.macs <= 0.7 * before.macs
    assert after.params <= 0.6 * before.params
    assert all(each.kept % 8 == 0 for each in narrowed_of(small))


def test_what_cannot_be_reached_is_said_with_what_can():
    with pytest.raises(BudgetError, match=r"narrowing alone cannot reach 1\.0% of the macs: .* remain") as raised:
        narrow(network(), EXAMPLE, inputs(), budget={"macs": "1%"})
    assert raised.value.reachable["macs"] > 0


# --- the network ----------------------------------------------------------------------------------------------------


def test_outputs_stay_close_and_closer_than_without_stand_ins():
    model = network()
    before = copy.deepcopy(model.state_dict())
    small = narrow(model, EXAMPLE, inputs(), budget={"macs": "75%"})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    plain = network()
    for each in narrowed_of(small):  # the same number of channels, the first ones, with nobody standing in
        plain = resized(plain, [each])
    assert apart(small, model) < 0.02
    assert apart(small, model) < 0.2 * apart(plain, model)
    assert not small.training


def test_the_less_remains_the_more_is_lost():
    model = network()
    shares = ("90%", "70%", "50%", "35%")
    errors = [apart(narrow(model, EXAMPLE, inputs(), budget={"macs": share}), model) for share in shares]
    assert errors == sorted(errors)


def test_dead_channels_go_and_nothing_changes():
    model = network()
    with torch.no_grad():
        model.one.norm2.weight[5:29] = 0.0
        model.one.norm2.bias[5:29] = -1.0
    small = narrow(model, EXAMPLE, inputs(), budget={"macs": "90%"})
    (only,) = narrowed_of(small)
    assert only.hidden.consumer == "one.back"
    assert apart(small, model) < 1e-5


def test_the_same_inputs_give_the_same_network():
    first, second = (narrow(network(), EXAMPLE, inputs(), budget={"macs": "60%"}) for _ in range(2))
    assert narrowed_of(first) == narrowed_of(second)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_trials_go_on_and_serve_other_budgets(tmp_path):
    class StopError(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise StopError

    told = {"settings": NarrowSettings(tried=64), "folder": tmp_path}
    with pytest.raises(StopError):
        narrow(network(), EXAMPLE, inputs(), budget={"macs": "70%"}, on_step=stop, **told)
    half = (tmp_path / "trials.jsonl").read_text().splitlines()
    resumed = narrow(network(), EXAMPLE, inputs(), budget={"macs": "70%"}, **told)
    whole = (tmp_path / "trials.jsonl").read_text().splitlines()
    assert whole[: len(half)] == half
    assert len(whole) == 1 + 3 * 4
    assert narrowed_of(resumed) == narrowed_of(
        narrow(network(), EXAMPLE, inputs(), budget={"macs": "70%"}, settings=told["settings"])
    )
    narrow(network(), EXAMPLE, inputs(), budget={"macs": "50%"}, **told)
    assert (tmp_path / "trials.jsonl").read_text().splitlines() == whole, "another budget asks nothing new"
    narrow(network(), EXAMPLE, inputs(96), budget={"macs": "50%"}, **told)
    assert (tmp_path / "trials.jsonl").read_text().splitlines()[0] != whole[0], "other inputs do"


def test_transformers_and_layouts():
    vit = haloc.create("deit_tiny", num_classes=4, size=32, patch=16).eval()
    small = narrow(vit, torch.zeros(1, 3, 32, 32), [torch.randn(16, 3, 32, 32)], budget={"params": "70%"})
    assert sum(p.numel() for p in small.parameters()) <= 0.7 * sum(p.numel() for p in vit.parameters())
    model = network().to(memory_format=torch.channels_last)
    small = narrow(model, EXAMPLE, inputs(), budget={"macs": "80%"})
    assert small.one.back.weight.shape[1] == small.one.widen.out_channels == small.one.depth.groups
    assert small.stem[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_it_is_saved_loaded_factorised_and_rebuilt_like_any_other(tmp_path):
    model = network()
    small = narrow(model, EXAMPLE, inputs(), budget={"macs": "70%"})
    both = haloc.apply_plan(small, {"stem.0": haloc.Tucker2(6, 3)})
    haloc.save(tmp_path / "net", both)
    loaded = haloc.load(tmp_path / "net", Net())
    x = torch.cat(inputs())
    assert torch.equal(loaded(x), both(x))
    assert narrowed_of(loaded) == narrowed_of(small)
    told = haloc.ReconstructionSettings(epochs=4, images=96, batch_size=16, lr=1e-3)
    before = apart(both, model)
    done = haloc.reconstruct_blocks(both, model, inputs(), settings=told)
    assert {each.block for each in done} >= {"stem.0", "one"}
    assert apart(both, model) < before


def test_a_file_for_another_model_is_refused(tmp_path):
    small = narrow(network(), EXAMPLE, inputs(), budget={"macs": "70%"})
    haloc.save(tmp_path / "net", small)
    other = Net()
    other.one = Inverted(12, 48)
    with pytest.raises(PlanError, match=r"narrowed at layer 'one\.widen', which had 40 channels"):
        haloc.load(tmp_path / "net", other)
    card = read_json(tmp_path / "net" / "model.json")
    card["narrowed"][0]["kept"] = 400
    write_json(tmp_path / "net" / "model.json", card)
    with pytest.raises(FileFormatError, match=r"model\.json.*400 of 40 channels cannot be kept"):
        haloc.load(tmp_path / "net", Net())


@pytest.mark.parametrize("value", [3, [3], [{}], [{"kept": "a", "width": 4}], {"kept": 1}])
def test_malformed_lists_are_refused(value):
    with pytest.raises(FileFormatError):
        narrowed_from(value)


def test_values_go_to_json_and_back():
    each = Narrowed(Hidden("b", "a", ("n",), None, 8, 2), 4)
    assert narrowed_from([each.to_dict()]) == (each,)
    assert str(each) == "8→4 channels from a to b"
    assert Order([1, 0], [0.0, 0.1, 0.2], 3).kept(2) == [0, 2]


def test_mistakes_are_told():
    model, pictures = network(), inputs()
    with pytest.raises(SpecError, match="how narrow"):
        narrow(model, EXAMPLE, pictures, budget={})
    with pytest.raises(SpecError, match="macs, params or latency, got a budget of 'energy'"):
        narrow(model, EXAMPLE, pictures, budget={"energy": "50%"})
    with pytest.raises(DataError, match="no inputs to narrow"):
        narrow(model, EXAMPLE, [], budget={"macs": "50%"})
    with pytest.raises(ModelError, match="NaN or infinite"):
        narrow(model, EXAMPLE, [torch.full((4, 3, 8, 8), torch.nan)], budget={"macs": "50%"})
    with pytest.raises(ModelError, match="narrowed before"):
        narrow(narrow(model, EXAMPLE, pictures, budget={"macs": "80%"}), EXAMPLE, pictures, budget={"macs": "50%"})
    with pytest.raises(SpecError, match="round_to"):
        NarrowSettings(round_to=0)
