"""A user's own model, data, loss and score: training, recovery and validation of what is no classifier."""

from __future__ import annotations

import copy
import logging
from collections import UserDict, UserList
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from haloc.errors import DataError, ModelError, SpecError
from haloc.factor.forward import inputs_of, mapped, tensors_in, to_device
from haloc.factor.surgery import apply_plan
from haloc.forms import Tucker2
from haloc.recovery import OwnRecovery, finetune
from haloc.training.baseline import train
from haloc.training.feed import LoaderFeed, as_feed, batch_size, parts
from haloc.training.objective import OwnLoss
from haloc.training.outputs import distance, listening
from haloc.training.settings import OWN_LOSS, RecoverySettings, TrainSettings
from tests import twofold
from tests.training.tiny import batches as digits
from tests.training.tiny import difference, network, same_weights

SETTINGS = TrainSettings(epochs=2, lr=0.005, warmup_epochs=0)
ALONE = RecoverySettings(cross_entropy=0, distillation=1)


def squeezed(model: nn.Module, rank: int = 3) -> nn.Module:
    return apply_plan(model, {name: Tucker2(rank, rank) for name in twofold.OPEN})


def recovered(model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, list[dict[str, Any]]]:
    teacher = twofold.trained()
    small = squeezed(teacher) if model is None else model
    given = {"teacher": teacher, "loss": twofold.loss, "inputs": twofold.inputs, "settings": SETTINGS} | options
    return small, finetune(small, given.pop("data", twofold.batches()), **given).history


def test_training_by_a_loss_of_ones_own_tells_its_terms_and_the_score():
    model = twofold.network()
    settings = TrainSettings(epochs=10, lr=0.005, warmup_epochs=1, evaluate_every=10)
    history = train(model, twofold.batches(), loss=twofold.loss, val=twofold.score, settings=settings).history
    first, last = history[0], history[-1]
    assert last["loss"] == pytest.approx(last["quarters"] + last["lights"], rel=1e-5)
    assert last["loss"] < first["loss"] / 3
    assert "accuracy" not in last
    assert last["val_score"] > 0.9  # of four quarters
    assert model.training


def test_recovery_by_a_loss_of_ones_own_and_the_teachers_outputs():
    teacher = twofold.trained()
    small, history = recovered(val=twofold.score)
    last = history[-1]
    assert last["loss"] == pytest.approx(last["quarters"] + last["lights"] + last["distillation"], rel=1e-5)
    assert history[-1]["distillation"] < history[0]["distillation"]
    with torch.no_grad():
        before, after = (twofold.score(each.eval()) for each in (squeezed(teacher, 1), small))
    # Measured: 1.00 for the teacher, 0.97 afterwards.
    assert after > max(before - 0.02, 0.9)
    assert not any(module._forward_hooks for each in (teacher, small) for module in each.modules())


@pytest.mark.parametrize(
    ("weights", "terms"),
    [
        ({}, {"quarters", "lights", "distillation"}),
        ({"features": 0.1}, {"quarters", "lights", "distillation", "features"}),
        ({"cross_entropy": 0}, {"distillation"}),
        ({"cross_entropy": 0, "distillation": 0, "features": 1.0}, {"features"}),
        ({"distillation": 0}, {"quarters", "lights"}),
    ],
)
def test_what_weighs_something_is_in_the_loss_and_nothing_else(weights, terms):
    _, (row, _) = recovered(recovery=RecoverySettings(**{"cross_entropy": 1, "distillation": 1} | weights))
    assert row.keys() & {"quarters", "lights", "distillation", "features"} == terms
    assert row["loss"] == pytest.approx(sum(row[term] for term in terms), rel=1e-5)


def test_the_weights_unless_told_otherwise_and_without_a_teacher():
    told, without = recovered(recovery=OWN_LOSS)[0], recovered(teacher=None)[0]
    assert same_weights(recovered()[0], told)
    alone = RecoverySettings(cross_entropy=1, distillation=0)
    assert same_weights(without, recovered(recovery=alone)[0])


def test_the_teacher_is_called_as_the_loss_calls_the_model_and_all_calls_count():
    heard: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    class Teacher(twofold.Twofold):
        def forward(self, *args: Any, **named: Any) -> twofold.Answer:
            heard.append((args, named))
            return super().forward(*args, **named)

    teacher = Teacher()
    teacher.load_state_dict(twofold.trained().state_dict())

    def twice(model: nn.Module, batch: twofold.Batch) -> Tensor:
        model(batch["picture"])
        return sum(twofold.loss(model, batch).values())

    (batch,) = twofold.batches(1)
    given = {"data": [batch], "settings": TrainSettings(epochs=1, lr=1e-9, warmup_epochs=0), "teacher": teacher}
    recovery = RecoverySettings(cross_entropy=0, distillation=2, recalibration=0, norm_between=False)
    small = squeezed(twofold.trained())
    student = copy.deepcopy(small).train()
    _, (row,) = recovered(small, loss=twice, recovery=recovery, **given)
    (first, nothing), (second, named) = heard
    assert torch.equal(first[0], batch["picture"])
    assert torch.equal(second[0], batch["picture"])
    assert nothing == {}
    assert torch.equal(named["gain"], batch["gain"])
    with torch.no_grad():
        answers = [(student(batch["picture"]), teacher.eval()(batch["picture"])) for _ in range(2)]
    expected = sum(float(distance(mine, theirs)) for mine, theirs in answers)
    assert row["distillation"] == pytest.approx(2 * expected, rel=1e-4)


def test_the_distance_has_no_unit():
    one, other = torch.randn(4, 3), torch.randn(4, 3)
    expected = (one - other).square().sum() / other.square().sum()
    torch.testing.assert_close(distance(one, other), expected)
    torch.testing.assert_close(distance(1000 * one, 1000 * other), expected)
    assert distance(other, other) == 0
    torch.testing.assert_close(distance(torch.zeros(4, 3), other), torch.tensor(1.0))
    numbers = torch.arange(3)  # which nobody compares
    nested = ({"a": one, "n": numbers}, [other]), ({"a": other, "n": numbers}, [other])
    torch.testing.assert_close(distance(*nested), expected / 2)
    answers = twofold.Answer(one, {"light": [one]}), twofold.Answer(other, {"light": [other]})
    torch.testing.assert_close(distance(*answers), expected)
    one.requires_grad_()
    other.requires_grad_()
    distance(one, other).backward()
    assert one.grad is not None
    assert other.grad is None


def test_calls_are_heard_inside_the_block_alone():
    model = nn.Linear(2, 2)
    with listening(model) as calls:
        model(torch.ones(1, 2))
        model(input=torch.zeros(1, 2))
    model(torch.ones(1, 2))
    assert [(len(call.args), list(call.named)) for call in calls] == [(1, []), (0, ["input"])]
    assert torch.equal(calls[1].again(model), model(torch.zeros(1, 2)))


class Triple(NamedTuple):
    picture: Tensor
    quarter: Tensor
    light: Tensor


@dataclass
class Sample:
    picture: Tensor
    quarter: Tensor
    light: Tensor


class Graph:
    """Something that only knows how to move itself."""

    def __init__(self, batch: twofold.Batch) -> None:
        self.batch, self.moved = batch, False

    def to(self, device: torch.device) -> Graph:
        graph = Graph(to_device(self.batch, device))
        graph.moved = True
        return graph


def _rows(batch: twofold.Batch) -> list[twofold.Batch]:
    return [{name: value[number] for name, value in batch.items()} for number in range(len(batch["light"]))]


#: How a batch may look, and how to get back to what the loss takes.
LOOKS: dict[str, tuple[Any, Any]] = {
    "triple": (lambda b: (b["picture"], b["quarter"], b["light"]), lambda t: dict(zip(Triple._fields, t, strict=True))),
    "named": (lambda b: Triple(b["picture"], b["quarter"], b["light"]), lambda t: t._asdict()),
    "dict": (dict, dict),
    "mapping": (UserDict, dict),
    "dataclass": (lambda b: Sample(b["picture"], b["quarter"], b["light"]), vars),
    "list of dicts": (_rows, lambda rows: {name: torch.stack([row[name] for row in rows]) for name in rows[0]}),
    "object": (Graph, lambda graph: graph.batch),
    "with a name": (lambda b: {**b, "name": "picture.png", "number": 7}, dict),
}


@pytest.mark.parametrize("look", LOOKS)
def test_batches_may_look_like_anything(look):
    make, back = LOOKS[look]

    def whole(batch: Any) -> twofold.Batch:
        batch = back(batch)
        return {"gain": torch.ones(len(batch["light"])), **batch}

    def loss(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        assert getattr(batch, "moved", True)
        return twofold.loss(model, whole(batch))

    data = [make(batch) for batch in twofold.batches(3)]
    one, other = twofold.network(), twofold.network()
    train(one, data, loss=loss, settings=SETTINGS)
    train(other, twofold.batches(3), loss=twofold.loss, settings=SETTINGS)
    assert same_weights(one, other)
    small, _ = recovered(data=data, loss=loss, inputs=lambda batch: twofold.inputs(whole(batch)))
    assert same_weights(small, recovered(data=twofold.batches(3))[0])


@pytest.mark.parametrize("look", ["triple", "dict", "list of dicts"])
def test_parts_of_batches_add_up_to_the_same_step(look):
    make, back = LOOKS[look]
    data, sizes = [make(batch) for batch in twofold.batches(2)], []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        batch = back(batch)
        sizes.append(len(batch["light"]))
        return F.cross_entropy(model(batch["picture"]).quarter, batch["quarter"])

    one, other = (twofold.network().requires_grad_(True) for _ in range(2))
    for model in (one, other):
        model.norm = model.norm3 = nn.Identity()  # BatchNorm sees a part
    train(one, data, loss=loss, settings=TrainSettings(epochs=1, lr=0.005, warmup_epochs=0, accumulate=2))
    assert sizes == [16] * 4
    train(other, data, loss=loss, settings=TrainSettings(epochs=1, lr=0.005, warmup_epochs=0))
    assert difference(one, other) < 1e-5


def test_examples_that_were_not_collated_are_counted_and_cut():
    pictures, boxes = [torch.zeros(3, 9, 9)] * 4, [torch.zeros(number, 4) for number in (1, 2, 0, 5)]
    assert batch_size((pictures, boxes)) == 4
    cut = parts((pictures, boxes), slice(1, 3))
    assert [len(each) for each in cut] == [2, 2]
    assert len(cut[1][0]) == 2
    rows = [{"picture": torch.zeros(3, 9, 9), "boxes": each} for each in boxes]
    assert batch_size(rows) == 4
    assert len(parts(rows, slice(3))) == 3
    two = ((torch.zeros(8, 2), torch.zeros(8, 3)), (torch.zeros(8), torch.zeros(8)))  # two inputs, two targets
    assert batch_size(two) == 8
    assert len(parts(two, slice(3))[1][1]) == 3
    assert LoaderFeed([rows, rows[:2], rows], lambda batch: (batch, None)).steps == 2


def test_batches_whose_examples_cannot_be_counted_are_taken_as_they_are():
    class Loader(UserList):
        batch_size = 4

    points = [torch.zeros(count, 3) for count in (20, 31, 17)]  # of four clouds each
    graphs = [Graph(batch) for batch in twofold.batches(3)]
    for given in (points, graphs):
        feed = as_feed(Loader(given), whole=True)
        assert feed.batch_size == 4
        assert len(list(feed.raw(0))) == feed.steps == 3
    assert len(list(as_feed(Loader([torch.zeros(4, 3), torch.zeros(4, 3)]), whole=True).raw(0))) == 2


def test_inputs_are_the_first_of_a_tuple_or_what_is_no_label():
    one, other = torch.zeros(2), torch.ones(2)
    assert inputs_of((one, other, other)) is one
    assert inputs_of(UserDict(ids=one, labels=other)) == {"ids": one}
    assert inputs_of(({"ids": one}, {"classes": other})) == {"ids": one}
    with pytest.raises(DataError, match="lists 2 examples one by one; give inputs="):
        inputs_of([{"ids": one}, {"ids": other}])


def test_nests_of_every_kind_are_gone_through():
    sample = Sample(torch.zeros(1), torch.ones(1), torch.ones(2))
    nest = {"a": [sample], "b": UserDict(c=torch.zeros(3)), "d": "text"}
    assert [len(tensor) for tensor in tensors_in(nest)] == [1, 1, 2, 3]
    doubled = mapped(nest, lambda tensor: 2 * tensor)
    assert isinstance(doubled["a"][0], Sample)
    assert isinstance(doubled["b"], UserDict)
    assert doubled["d"] == "text"
    assert doubled["a"][0].light.tolist() == [2, 2]


def test_batches_of_the_zoo_are_pairs_and_a_step_may_start_in_the_middle():
    def loss(model: nn.Module, batch: Any) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    one, other = network(), network()
    assert as_feed(digits(), whole=True).seekable
    train(one, digits(), settings=SETTINGS)
    train(other, digits(), loss=loss, settings=SETTINGS)
    assert same_weights(one, other)
    small = apply_plan(one, {"3": Tucker2(4, 4)})
    finetune(small, digits(), teacher=one, loss=loss, settings=SETTINGS)


def test_held_out_data_are_looked_at_by_a_function_or_by_the_loss():
    _, history = recovered(val=twofold.score)
    assert 0 <= history[-1]["val_score"] <= 1
    _, history = recovered(val=lambda model: {"iou": torch.tensor(0.5), "recall": 1})
    assert (history[-1]["val_iou"], history[-1]["val_recall"]) == (0.5, 1.0)
    held = twofold.batches(2, seed=3)
    small, history = recovered(val=held)
    with torch.no_grad():
        means = [float(sum(twofold.loss(small.eval(), batch).values())) for batch in held]
    assert history[-1]["val_loss"] == pytest.approx(sum(means) / 2, rel=1e-3)
    for wrong in (lambda model: "good", lambda model: torch.zeros(3), lambda model: None):
        with pytest.raises(SpecError, match="a score must be a number, or numbers by name, got"):
            recovered(val=wrong)


def _detached(model: nn.Module, batch: twofold.Batch) -> Tensor:
    return model(batch["picture"]).quarter.detach().sum()


MISTAKES = [
    (lambda model, batch: float(_detached(model, batch)), SpecError, "must return a tensor of one number.*not item"),
    (lambda model, batch: model(batch["picture"]).quarter, SpecError, "must return a tensor of one number.*32×4"),
    (_detached, SpecError, "test_tasks._detached returns does not depend on the model's weights"),
    (lambda model, batch: {}, SpecError, "must have terms"),
    (lambda model, batch: {"loss": _detached(model, batch)}, SpecError, "none called accuracy.*got loss"),
    (lambda model, batch: {"distillation": model(batch["picture"]).quarter.sum()}, SpecError, "none called"),
    (lambda model, batch: batch["nothing"], ModelError, "does not run on a batch of picture: 32×1×8×8.*KeyError"),
    (lambda model, batch: model.conv1(batch["picture"]).sum(), ModelError, "did not call the model itself"),
]


@pytest.mark.parametrize(("loss", "kind", "text"), MISTAKES)
def test_mistakes_in_a_loss_are_answered_in_a_sentence(loss, kind, text):
    with pytest.raises(kind, match=text):
        recovered(loss=loss)


class Moody(twofold.Twofold):
    """Says less when it is not trained."""

    def forward(self, picture: Tensor, *, gain: Tensor | None = None) -> Any:
        answer = super().forward(picture, gain=gain)
        return answer if self.training else answer.quarter


def test_other_outputs_in_training_are_refused_unless_nobody_compares():
    model = Moody()
    given = {"teacher": model, "recovery": RecoverySettings(cross_entropy=1, distillation=0, recalibration=0)}
    recovered(squeezed(model), **given)
    with pytest.raises(ModelError, match=r"cannot be compared .* or let what compares them weigh nothing"):
        recovered(squeezed(model), teacher=model)


def test_what_does_not_go_together_is_refused():
    with pytest.raises(SpecError, match="give both, or neither"):
        recovered(loss=None)
    with pytest.raises(SpecError, match="loss= or objective=, not both"):
        train(twofold.network(), twofold.batches(), loss=twofold.loss, objective=lambda *_: None)
    assert recovered(inputs=inputs_of, recovery=RecoverySettings(recalibration=0, norm_between=False))


def another(model: nn.Module, batch: twofold.Batch) -> dict[str, Tensor]:
    return twofold.loss(model, batch)


def test_a_run_goes_on_with_the_loss_it_began_with(tmp_path):
    whole, _ = recovered(settings=TrainSettings(epochs=3, lr=0.005, warmup_epochs=0, schedule="constant"))
    halfway = TrainSettings(epochs=3, lr=0.005, warmup_epochs=0, schedule="constant", minutes=1e-9, save_every_s=0)
    small = squeezed(twofold.trained())
    for _ in range(3):
        small, _ = recovered(squeezed(twofold.trained()), settings=halfway, folder=tmp_path)
    assert same_weights(small, whole)
    with pytest.raises(SpecError, match="loss"):
        recovered(squeezed(twofold.trained()), settings=halfway, folder=tmp_path, loss=another)


def test_a_compiled_network_recovers_the_same(caplog, monkeypatch):
    """A loss of one's own calls the compiled network, and the compiled teacher is called in the same way."""
    # What is compiled need not be quick here.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    with caplog.at_level(logging.WARNING):
        eager, compiled = (recovered(settings=TrainSettings(epochs=1, lr=0.005, warmup_epochs=0, speed=speed))
                           for speed in ("eager", "compile"))  # fmt: skip
    assert not caplog.records
    assert eager[1][0]["distillation"] == pytest.approx(compiled[1][0]["distillation"], rel=1e-3)
    assert difference(eager[0], compiled[0]) < 1e-4


def test_a_step_never_waits_for_a_value():
    """Tensors without values tell: a step that reads one back could not be captured."""
    teacher, (batch,) = twofold.trained(), twofold.batches(1)
    small = squeezed(teacher).to("meta")
    settings = RecoverySettings(cross_entropy=1, distillation=1, features=0.1)
    objective = OwnRecovery(teacher.to("meta"), settings, twofold.OPEN, loss=OwnLoss(twofold.loss))
    loss = objective(small, to_device(batch, torch.device("meta")))
    loss.total.backward()
    assert set(loss.terms) == {"quarters", "lights", "distillation", "features"}
    assert all(weight.grad is not None for weight in small.parameters())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("features", [0.0, 0.1])
def test_a_captured_step_recovers_the_same(caplog, features):
    recovery = RecoverySettings(cross_entropy=1, distillation=1, features=features)
    models, rows = [], []
    with caplog.at_level(logging.WARNING):
        for speed in ("eager", "graph"):
            teacher = twofold.trained().cuda()
            small = squeezed(teacher)
            settings = TrainSettings(epochs=3, lr=0.005, warmup_epochs=0, speed=speed)
            given = {"settings": settings, "teacher": teacher, "recovery": recovery}
            rows.append(recovered(small, **given)[1][-1])
            models.append(small.cpu())
    assert not caplog.records
    assert rows[0]["distillation"] == pytest.approx(rows[1]["distillation"], rel=1e-2)
    assert difference(*models) < 1e-3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_is_no_tensor_is_not_taken_for_the_same_every_time():
    seen: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append(batch["number"])
        return sum(twofold.loss(model, batch).values()) * batch["number"]

    models = []
    for speed in ("eager", "graph"):
        model = twofold.network().cuda()
        data = [{**batch, "number": number % 2 + 1} for number, batch in enumerate(twofold.batches(6))]
        train(model, data, loss=loss, settings=TrainSettings(epochs=2, lr=0.005, warmup_epochs=0, speed=speed))
        models.append(model.cpu())
    assert difference(*models) < 1e-3
