from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from haloc.errors import ModelError, PlanError
from haloc.factor.calibrate import calibrate
from haloc.factor.inspect import inspect
from haloc.factor.modules import Factoriser
from haloc.factor.surgery import apply_plan
from haloc.forms import Dense, Svd, Tucker2
from haloc.methods.supernet import Choice, choices, draw_paths, gated_output, gates_open, supernet
from haloc.space import Grid, LayerChoices, RankSpace, rank_space
from tests.methods.tiny import IMAGE, OPEN, network, rank_space_of

FORMS = (Dense(), Tucker2(1, 1), Tucker2(6, 6))


@pytest.fixture
def net() -> nn.Module:
    model = network()
    return supernet(model, rank_space_of(model)).eval()


def take(net: nn.Module, number: int) -> None:
    for choice in choices(net).values():
        choice.active = number


def two_linears() -> Choice:
    """The first candidate is right, the second the opposite of it."""
    pair = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    pair[0].weight.data, pair[1].weight.data = torch.eye(2), -torch.eye(2)
    return Choice({Dense(): pair[0], Svd(1): pair[1]})


def test_a_choice_runs_its_active_candidate_alone(net):
    inputs = torch.randn(2, 8, 8, 8)
    layer = network().get_submodule("conv2")
    choice = choices(net)["conv2"]
    assert choice.forms == FORMS
    for number, form in enumerate(FORMS):
        choice.active = number
        assert torch.equal(choice(inputs), Factoriser(layer).build(form)(inputs))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("aware", [False, True])
def test_a_path_is_the_network_that_its_plan_makes(form, aware):
    model = network().eval()
    images = torch.randn(16, 1, 8, 8)
    moments = calibrate(model, [images], layers=OPEN) if aware else None
    net = supernet(model, rank_space_of(model), moments)
    take(net, FORMS.index(form))
    planned = apply_plan(model, dict.fromkeys(OPEN, form), moments=moments)
    assert torch.equal(net(images), planned(images))
    with gates_open(net):
        assert torch.equal(net(images), planned(images))


def test_the_model_is_left_alone_and_nothing_is_shared():
    model = network()
    before = copy.deepcopy(model.state_dict())
    net = supernet(model, rank_space_of(model))
    for parameter in net.parameters():
        parameter.data.add_(1.0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert list(choices(net)) == list(OPEN)
    assert choices(model) == {}


def test_a_choice_answers_what_the_layer_did_and_keeps_its_hooks():
    model, seen = network(), []
    space = rank_space_of(model)
    model.conv2.register_forward_hook(lambda *args: seen.append(1))
    net = supernet(model, space)
    assert net.conv2.stride == (1, 1)
    net(IMAGE.repeat(2, 1, 1, 1))
    assert seen == [1]


def test_layers_that_apply_plan_refuses_are_refused_too():
    model = network()
    space = rank_space_of(model)
    model.conv4.weight = model.conv3.weight
    with pytest.raises(PlanError, match="'conv3'.*tied"):
        supernet(model, space)
    with pytest.raises(PlanError, match="no layer 'conv2'"):
        supernet(nn.Sequential(nn.Conv2d(1, 1, 1)), space)


def test_what_cannot_be_decomposed_is_named():
    model = network()
    space = rank_space_of(model)
    with pytest.raises(ModelError, match="no calibration of layer 'conv2'"):
        supernet(model, space, {})
    model.conv3.weight.data[0] = float("nan")
    with pytest.raises(ModelError, match="'conv3'.*NaN"):
        supernet(model, space)


def test_a_model_that_is_one_layer_and_a_layer_that_must_not_stay_dense():
    layer = nn.Linear(16, 16)
    space = rank_space(inspect(layer, torch.randn(1, 16)), round_to=4)
    assert isinstance(supernet(layer, space), Choice)
    call = space.layers[""].calls
    net = supernet(layer, RankSpace({"": LayerChoices(call, (Grid.of("svd", [(4,)]),), dense=False)}))
    draw_paths(net, 0, 0)
    assert choices(net)[""].probabilities.tolist() == [1.0]
    assert choices(net)[""].active == 0


def test_the_gated_output_is_that_of_the_path_and_every_probability_gets_its_gradient():
    answers = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0])]
    probabilities = torch.tensor([0.3, 0.7], requires_grad=True)
    output = gated_output(answers[1], answers, probabilities)
    assert torch.equal(output, answers[1])
    (output * torch.tensor([10.0, 1.0])).sum().backward()
    assert probabilities.grad.tolist() == pytest.approx([12.0, 29.0])  # ⟨∂L/∂y, τ_j(x)⟩


@pytest.mark.parametrize("active", [0, 1])
def test_a_candidate_that_hurts_loses_probability_whichever_runs(active):
    choice = two_linears()
    choice.active = active
    with gates_open(choice):
        logits = choice(torch.tensor([[1.0, -1.0]]))
    nn.functional.cross_entropy(logits, torch.tensor([0])).backward()
    # Logits ±(1, −1): ∂L/∂y is q (−1, 1) with q the probability of the wrong class, and ⟨∂L/∂y, τ_j(x)⟩ is ∓2q.
    wrong = torch.tensor(-2.0 if active == 0 else 2.0).sigmoid()
    slope = -2 * float(wrong) * 0.5  # p_0 (g_0 − Σ_j p_j g_j) with p = ½ and g = (−2q, 2q)
    assert choice.alpha.grad.tolist() == pytest.approx([slope, -slope])


def test_the_better_candidate_is_told_apart_behind_a_batchnorm_too():
    choice = two_linears()
    choice.candidates[1].weight.data = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    choice.active = 1  # the one that takes the classes for each other
    inputs = torch.randn(64, 2)
    with gates_open(choice):
        logits = nn.BatchNorm1d(2)(choice(inputs))
    nn.functional.cross_entropy(logits, inputs.argmax(1)).backward()
    assert choice.alpha.grad[0] < -0.1


def test_gradients_reach_the_alphas_alone_inside_and_the_weights_alone_outside(net):
    frozen = net.fc.bias.requires_grad_(False)
    with gates_open(net):
        net(IMAGE).sum().backward()
    alphas = [choice.alpha for choice in choices(net).values()]
    assert all((parameter.grad is not None) == any(parameter is a for a in alphas) for parameter in net.parameters())
    assert all(parameter.requires_grad == (parameter is not frozen) for parameter in net.parameters())
    net.zero_grad()
    net(IMAGE).sum().backward()
    assert all(alpha.grad is None for alpha in alphas)
    assert net.conv2.candidates[0].weight.grad is not None


def test_candidates_are_drawn_as_often_as_they_are_likely():
    choice = two_linears()
    choice.alpha.data = torch.tensor([0.0, float(torch.tensor(0.2 / 0.8).log())])
    drawn = []
    for step in range(2000):
        draw_paths(choice, step, seed=5)
        drawn.append(choice.active)
    assert sum(drawn) / 2000 == pytest.approx(0.2, abs=0.03)


def test_paths_hang_on_seed_step_and_stream(net):
    def path(step: int, seed: int, stream: int = 0) -> list[int]:
        draw_paths(net, step, seed, stream)
        return [choice.active for choice in choices(net).values()]

    def paths(seed: int, stream: int = 0) -> list[list[int]]:
        return [path(step, seed, stream) for step in range(20)]

    first = paths(1)
    torch.manual_seed(99)
    assert paths(1) == first
    assert paths(2) != first
    assert paths(1, stream=1) != first
    assert len(set(map(tuple, first))) > 5
