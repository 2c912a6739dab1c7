from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode

from haloc.errors import ModelError, PlanError, SpecError
from haloc.factor.inspect import inspect
from haloc.factor.surgery import apply_plan
from haloc.forms import Svd
from haloc.zoo import create


class Owner(nn.Module):
    """Runs its layer and looks at it from outside, as dtype look-ups and fused kernels do."""

    def __init__(self, attribute=None):
        super().__init__()
        self.fc, self.attribute = nn.Linear(16, 16), attribute

    def forward(self, x):
        if self.attribute:
            getattr(self.fc, self.attribute)
        return self.fc(x)


def only_row(model, inputs):
    (row,) = inspect(model, inputs)
    return row


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.Conv2d(16, 16, 3, groups=16), "depthwise"),
        (nn.Conv2d(16, 32, 3, groups=16), "depthwise"),
        (nn.ConvTranspose2d(16, 8, 2, stride=2), "transposed convolution"),
        (parametrizations.weight_norm(nn.Conv2d(16, 16, 3)), "parametrised weight"),
        (parametrizations.spectral_norm(nn.Conv2d(16, 16, 3)), "parametrised weight"),
        (nn.Conv2d(16, 2, 1), "too small to gain"),
    ],
)
def test_reasons_to_leave_a_convolution_alone(layer, reason):
    row = only_row(nn.Sequential(layer), torch.randn(1, 16, 8, 8))
    assert (row.reason, row.families) == (reason, ())


def test_old_style_weight_norm_is_seen():
    with pytest.warns(FutureWarning):
        layer = nn.utils.weight_norm(nn.Linear(16, 16))
    assert only_row(nn.Sequential(layer), torch.randn(1, 16)).reason == "parametrised weight"


def test_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            return self.head(self.embed(tokens))

    assert "tied weight" in only_row(Tied(), torch.tensor([[1, 2]])).reason


def test_attention_that_reads_weights():
    attention = nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(1, 5, 16)
    assert only_row(attention, (x, x, x)).reason == "used inside MultiheadAttention, which reads its weight"
    encoder = nn.TransformerEncoderLayer(16, 4, 64, batch_first=True)
    assert all("reads its weight" in row.reason for row in inspect(encoder, x))


@pytest.mark.parametrize("attribute", ["weight", "bias"])
def test_layers_whose_parameters_are_read_from_outside(attribute):
    assert only_row(Owner(attribute), torch.randn(1, 16)).reason == f"Owner reads its {attribute}"


@pytest.mark.parametrize("attribute", [None, "in_features", "out_features"])
def test_layers_asked_for_nothing_or_for_what_the_chain_can_answer(attribute):
    model = Owner(attribute)
    assert only_row(model, torch.randn(1, 16)).reason is None
    assert apply_plan(model, {"fc": Svd(4)})(torch.randn(1, 16)).shape == (1, 16)


def test_layers_not_called_and_layers_of_another_kind():
    class Other(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    class Named(nn.Linear):
        pass

    class Model(nn.ModuleDict):
        def forward(self, x):
            return self["named"](self["other"](x))

    model = Model({"idle": nn.Linear(16, 16), "other": Other(16, 16), "named": Named(16, 16)})
    idle, other, named = inspect(model, torch.randn(1, 16))
    assert idle.reason == "not called in this forward pass"
    assert other.reason == "Other has a forward of its own"
    assert named.families == ("svd",)


def test_shared_modules_are_one_row_with_all_their_calls():
    conv = nn.Conv2d(8, 8, 3, padding=1)
    row = only_row(nn.Sequential(conv, nn.MaxPool2d(2), conv), torch.randn(1, 8, 8, 8))
    assert [call.input_size for call in row.calls] == [(8, 8), (4, 4)]
    assert row.macs == 8 * 8 * 9 * (64 + 16)
    assert row.params == 8 * 8 * 9 + 8


@pytest.mark.parametrize(
    "inputs",
    [
        torch.randn(1, 16),
        (torch.randn(1, 16),),
        [torch.randn(1, 16)],
        {"x": torch.randn(1, 16)},
        torch.randn(16),
    ],
)
def test_inputs_of_every_kind(inputs):
    assert only_row(Owner(), inputs).macs == 256


def test_counts_are_per_example():
    class Frames(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(8, 8)

        def forward(self, video):
            maps = self.conv(video.flatten(0, 1))
            return self.fc(maps.mean((2, 3)).unflatten(0, video.shape[:2]))

    for batch in (1, 4):
        inventory = inspect(Frames(), torch.randn(batch, 5, 3, 10, 10))
        assert inventory["conv"].shape.images == 5
        assert inventory["fc"].shape.positions == 5
        assert inventory.macs == 5 * (8 * 3 * 9 * 64 + 64)


def test_work_done_once_for_the_whole_batch_is_counted_once():
    class Offsets(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.table = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            return self.fc(x) + self.table(torch.ones(7, 16)).sum(0)

    model = Offsets()
    for batch in (1, 4):
        inventory = inspect(model, torch.randn(batch, 16))
        assert inventory.macs == 256 + 7 * 256
        small = inspect(apply_plan(model, {"table": Svd(4)}), torch.randn(batch, 16))
        assert small.macs == inventory.macs_of({"table": Svd(4)})


def test_layers_that_are_also_held_in_a_plain_list():
    class Keeper(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 16)
            self.steps = [self.fc]

        def forward(self, x):
            return self.steps[0](x)

    assert only_row(Keeper(), torch.randn(1, 16)).reason == "Keeper also holds it outside of its modules"
    with pytest.raises(PlanError, match="also holds it outside of its modules"):
        apply_plan(Keeper(), {"fc": Svd(4)})


def test_totals_agree_with_torch_and_include_attention():
    model = create("resnet20")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randn(1, 3, 32, 32))
    inventory = inspect(model, torch.randn(2, 3, 32, 32))
    assert inventory.macs == counter.get_total_flops() // 2 == sum(row.macs for row in inventory) == 40_551_040
    assert inventory.params == 269_722
    assert inventory.open_share == 1.0
    x = torch.randn(1, 5, 16)
    attention = inspect(nn.MultiheadAttention(16, 4, batch_first=True), (x, x, x))
    assert attention.macs == 4 * 5 * 16 * 16 + 2 * 5 * 5 * 16


def test_transposed_convolutions_are_counted():
    model = nn.Sequential(nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2))
    inventory = inspect(model, torch.randn(1, 4, 5, 5))
    assert inventory["0"].macs == inventory.macs == 25 * 4 * 3 * 9


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)).train()
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inspect(model, torch.randn(2, 3, 8, 8))
    assert type(model[0]) is nn.Conv2d
    assert type(model[4]) is nn.Linear
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert len(model[0]._forward_hooks) == 1
    assert calls == [1]


def test_a_model_that_fails_is_put_back_and_reported_in_one_sentence():
    model = Owner().train()
    with pytest.raises(ModelError, match=r"does not run on the inputs given \(1×3 float32\): RuntimeError: .*shapes"):
        inspect(model, torch.randn(1, 3))
    assert type(model.fc) is nn.Linear
    assert model.training


def test_a_model_that_is_a_layer_has_an_empty_name():
    assert only_row(nn.Linear(16, 16), torch.randn(1, 16)).name == ""


def test_lazy_layers_are_known_after_a_run_of_the_users_own():
    model = nn.Sequential(nn.LazyLinear(16))
    assert "not initialised" in only_row(model, torch.randn(1, 16)).reason
    assert "not initialised" in only_row(model, torch.randn(1, 16)).reason
    model(torch.randn(1, 16))
    assert only_row(model, torch.randn(1, 16)).families == ("svd",)


def test_min_rank_moves_the_bar():
    model, image = nn.Sequential(nn.Conv2d(16, 4, 1)), torch.randn(1, 16, 4, 4)
    assert only_row(model, image).reason == "too small to gain"
    row = next(iter(inspect(model, image, min_rank=2)))
    assert row.families == ("svd",)
    with pytest.raises(SpecError, match="min_rank"):
        inspect(model, image, min_rank=0)
