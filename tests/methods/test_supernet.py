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
from haloc.forms import Dense, Svd, Tucker2, ranks
from haloc.methods.estimators import ESTIMATORS, every_answer
from haloc.methods.shared import SharedWeights
from haloc.methods.supernet import Alone, Choice, OwnWeights, choices, draw_paths, gates_open, supernet
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


def two_linears() -> OwnWeights:
    """The first candidate is right, the second the opposite of it."""
    pair = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    pair[0].weight.data, pair[1].weight.data = torch.eye(2), -torch.eye(2)
    return OwnWeights({Dense(): pair[0], Svd(1): pair[1]})


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
    with gates_open(net, every_answer):
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


class Constants(Choice):
    """Candidates that answer (1, 2) and (3, −1) whatever they are asked."""

    def __init__(self) -> None:
        super().__init__([Dense(), Svd(1)], torch.device("cpu"))
        self.answers = torch.tensor([[1.0, 2.0], [3.0, -1.0]])

    def answer(self, number: int, input: torch.Tensor) -> torch.Tensor:
        return self.answers[number] + 0 * input


def slopes(estimate: str, active: int = 1) -> tuple[torch.Tensor, list[float]]:
    """The output with p = (0.3, 0.7), and ∂L/∂α for a loss of 10 y_0 + y_1."""
    choice = Constants()
    choice.alpha.data = torch.tensor([0.3, 0.7]).log()
    choice.active, choice.other = active, 1 - active
    output = ESTIMATORS[estimate](choice, torch.zeros(2))
    (output * torch.tensor([10.0, 1.0])).sum().backward()
    return output.detach(), choice.alpha.grad.tolist()


def test_every_candidate_is_asked():
    output, grad = slopes("all")
    assert output.tolist() == [3.0, -1.0]  # of the path, to the last bit
    # ⟨∂L/∂y, τ_j(x)⟩ = (12, 29), their mean 0.3·12 + 0.7·29 = 23.9, and p_j (g_j − mean).
    assert grad == pytest.approx([0.3 * (12 - 23.9), 0.7 * (29 - 23.9)])


def test_two_candidates_are_compared_as_if_there_were_no_others():
    choice = OwnWeights({Svd(rank): nn.Linear(2, 2) for rank in (1, 2, 3)})
    choice.alpha.data = torch.tensor([0.3, 0.5, 0.2]).log()
    choice.active, choice.other = 2, 0
    inputs = torch.randn(4, 2)
    ESTIMATORS["pair"](choice, inputs).sum().backward()
    answers = [choice.answer(number, inputs).sum().item() for number in (0, 2)]
    mean = 0.6 * answers[0] + 0.4 * answers[1]
    expected = [0.6 * (answers[0] - mean), 0.0, 0.4 * (answers[1] - mean)]
    assert choice.alpha.grad.tolist() == pytest.approx(expected, abs=1e-5)
    assert slopes("pair")[1] == pytest.approx(slopes("all")[1])  # of two, a pair is all


def test_a_gate_on_the_path_alone_knows_nothing_of_the_others():
    output, grad = slopes("single")
    assert output.tolist() == [3.0, -1.0]
    assert grad == pytest.approx([29 * -0.3, 29 * (1 - 0.7)])  # ∂ log p_1 / ∂α times ⟨∂L/∂y, τ_1(x)⟩


def test_a_mixture_is_the_mean_of_all_answers():
    output, grad = slopes("mixture")
    assert output.tolist() == pytest.approx([0.3 * 1 + 0.7 * 3, 0.3 * 2 - 0.7])
    assert grad == pytest.approx([0.3 * (12 - 23.9), 0.7 * (29 - 23.9)])  # the noise is zero where nothing was drawn


def test_a_mixture_is_weighed_by_temperature_and_noise():
    choice = Constants()
    choice.alpha.data = torch.tensor([0.01, 0.0])
    draw_paths(choice, 0, seed=1, temperature=1e-4)
    output = ESTIMATORS["mixture"](choice, torch.zeros(2))
    assert output.tolist() == pytest.approx(choice.answers[0].tolist())
    draw_paths(choice, 0, seed=1)
    gates = torch.softmax(choice.alpha.detach() + torch.from_numpy(choice.noise).float(), 0)
    assert ESTIMATORS["mixture"](choice, torch.zeros(2)).tolist() == pytest.approx((gates @ choice.answers).tolist())


@pytest.mark.parametrize("active", [0, 1])
def test_a_candidate_that_hurts_loses_probability_whichever_runs(active):
    choice = two_linears()
    choice.active = active
    with gates_open(choice, every_answer):
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
    with gates_open(choice, every_answer):
        logits = nn.BatchNorm1d(2)(choice(inputs))
    nn.functional.cross_entropy(logits, inputs.argmax(1)).backward()
    assert choice.alpha.grad[0] < -0.1


def test_gradients_reach_the_alphas_alone_inside_and_the_weights_alone_outside(net):
    frozen = net.fc.bias.requires_grad_(False)
    with gates_open(net, every_answer):
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


def test_the_second_draw_is_from_what_is_left():
    choice = OwnWeights({Svd(rank): nn.Linear(2, 2) for rank in (1, 2, 3)})
    choice.alpha.data = torch.tensor([0.6, 0.3, 0.1]).log()
    pairs = []
    for step in range(3000):
        draw_paths(choice, step, seed=5)
        pairs.append((choice.active, choice.other))
    assert all(first != second for first, second in pairs)
    assert pairs.count((0, 1)) / 3000 == pytest.approx(0.6 * 0.3 / 0.4, abs=0.03)


def test_a_high_temperature_draws_all_alike():
    choice = two_linears()
    choice.alpha.data = torch.tensor([0.0, 3.0])
    drawn = []
    for step in range(2000):
        draw_paths(choice, step, seed=5, temperature=1e6)
        drawn.append(choice.active)
    assert sum(drawn) / 2000 == pytest.approx(0.5, abs=0.04)


SHAPES = [
    nn.Conv2d(12, 8, 3, padding=1, stride=2), nn.Conv2d(8, 12, 3, padding="same", groups=2, padding_mode="reflect"),
    nn.Conv2d(8, 8, 1), nn.Linear(10, 6), nn.Conv1d(6, 8, 5, dilation=2),
]  # fmt: skip


@pytest.mark.parametrize("layer", SHAPES, ids=str)
@pytest.mark.parametrize("aware", [False, True])
def test_shared_candidates_are_parts_of_the_largest(layer, aware):
    sizes = {nn.Linear: (64, 10), nn.Conv1d: (16, 6, 20)}
    inputs = torch.randn(sizes.get(type(layer), (16, getattr(layer, "in_channels", 0), 9, 9)))
    offered = rank_space(
        inspect(layer, inputs[:1]), round_to=1, forms=["tucker2", "tucker2-out", "tucker2-in", "spatial", "svd"]
    )
    moments = calibrate(layer, [inputs], [""])[""] if aware else None
    factoriser = Factoriser(layer, moments)
    forms = tuple(offered.layers[""])
    choice = SharedWeights.of(factoriser, forms)
    kinds = {}
    with torch.no_grad():
        dense = layer(inputs)
        for number, form in enumerate(forms):
            answer = choice.answer(number, inputs)
            assert answer.shape == dense.shape
            own = (factoriser.build(form)(inputs) - dense).norm() / dense.norm()
            error = (answer - dense).norm() / dense.norm()
            # Cut from a larger one it is no better than made for its rank, and not much worse.
            assert error < 1.6 * own + 0.05, form
            kinds.setdefault(choice.parts[number].chain, []).append((sum(ranks(form)), float(error)))
    assert len(choice.chains) == len(kinds) <= 5
    assert all(max(errors)[1] <= min(errors)[1] for errors in kinds.values())  # at the largest and smallest ranks


@pytest.mark.parametrize("layer", SHAPES, ids=str)
@pytest.mark.parametrize("mixed", [False, True])
def test_all_parts_asked_at_once_say_what_they_say_one_by_one(layer, mixed):
    sizes = {nn.Linear: (4, 7, 10), nn.Conv1d: (3, 6, 20)}
    inputs = torch.randn(sizes.get(type(layer), (3, getattr(layer, "in_channels", 0), 9, 9)))
    kinds = ["tucker2", "tucker2-out", "tucker2-in", "spatial", "svd"]
    forms = tuple(rank_space(inspect(layer, inputs[:1]), round_to=1, forms=kinds).layers[""])
    choice = SharedWeights.of(Factoriser(layer), reversed(forms))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        grad = torch.randn_like(layer(inputs))
        answers = [choice.answer(number, inputs) for number in range(len(forms))]
        found = choice.products(inputs, grad, range(len(forms)))
    one_by_one = torch.stack([(grad.double() * answer.double()).sum() for answer in answers]).float()
    noise = (1e-2 if mixed else 1e-6) * float(grad.double().norm() * answers[-1].double().norm())
    torch.testing.assert_close(found, one_by_one, rtol=0, atol=noise)


@pytest.mark.parametrize("active", [0, 1])
def test_two_shared_candidates_are_not_mixed_up(active):
    forms, inputs = [Dense(), Svd(2)], torch.randn(3, 8)
    factoriser = Factoriser(nn.Linear(8, 8))
    slopes = []
    for build in (OwnWeights, SharedWeights):
        choice = build.of(factoriser, forms)
        choice.active, choice.other = active, 1 - active
        (ESTIMATORS["pair"](choice, inputs) ** 2).sum().backward()
        slopes.append(choice.alpha.grad)
    torch.testing.assert_close(*slopes, rtol=1e-3, atol=1e-4)


def test_shared_weights_do_not_grow_with_the_number_of_candidates():
    layer = nn.Conv2d(32, 32, 3, padding=1)
    few, many = (
        SharedWeights.of(Factoriser(layer), [Dense(), *(Tucker2(rank, rank) for rank in ranks)])
        for ranks in ((28,), range(2, 29, 2))
    )
    sizes = [sum(parameter.numel() for parameter in choice.chains.parameters()) for choice in (few, many)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("estimate", ["all", "pair", "single", "mixture"])
def test_gradients_of_shared_weights_reach_the_part_alone(estimate):
    choice = SharedWeights.of(Factoriser(nn.Linear(8, 8)), [Dense(), Svd(1), Svd(3)])
    choice.active = 1
    choice(torch.randn(2, 8)).sum().backward()
    assert choice.chains[0][0].weight.grad is None
    first, second = choice.chains[1]
    assert first.weight.grad[0].abs().sum() > 0
    assert first.weight.grad[1:].abs().sum() == 0
    assert second.weight.grad[:, 1:].abs().sum() == 0
    choice.zero_grad()
    with gates_open(choice, ESTIMATORS[estimate]):
        choice(torch.randn(2, 8)).sum().backward()
    assert choice.alpha.grad is not None
    assert all(parameter.grad is None for parameter in choice.chains.parameters())


@pytest.mark.parametrize("build", [OwnWeights, SharedWeights])
def test_a_candidate_alone_answers_as_its_choice_does_and_leaves_its_weights_be(build):
    choice = build.of(Factoriser(nn.Conv2d(4, 4, 3)), [Dense(), Tucker2(1, 1), Tucker2(2, 2)])
    inputs = torch.randn(2, 4, 5, 5)
    alone = Alone(choice, Tucker2(1, 1)).eval().requires_grad_(False)
    assert torch.equal(alone(inputs), choice.answer(1, inputs))
    assert not list(alone.parameters())
    assert all(weight.requires_grad for weight in choice.parameters())


def test_a_candidate_alone_answers_what_the_layer_did(net):
    alone = Alone(choices(net)["conv2"], Tucker2(6, 6))
    assert (alone.out_channels, alone.stride) == (16, (1, 1))


def test_what_others_answer_takes_no_memory_on_the_way_there():
    kept = []
    for count in (2, 12):
        choice = SharedWeights.of(Factoriser(nn.Linear(16, 16)), [Svd(rank) for rank in range(1, count)])
        sizes = []
        with (
            gates_open(choice, every_answer),
            torch.autograd.graph.saved_tensors_hooks(
                lambda tensor, sizes=sizes: (sizes.append(tensor.numel()), tensor)[1], lambda tensor: tensor
            ),
        ):
            choice(torch.randn(64, 16))
        kept.append(sum(size for size in sizes if size >= 64))
    assert kept[0] == kept[1]
