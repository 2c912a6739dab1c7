from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import haloc
from haloc.errors import BudgetError, SpecError
from haloc.forms import Dense, Spatial, Tucker2
from haloc.methods import finalists, haloc_settings
from haloc.methods import haloc as haloc_method
from haloc.methods.budget import limits_of
from haloc.methods.evidence import Evidence
from haloc.methods.finalists import Contest, Taught, Tried, best_of, between, nominated
from haloc.methods.haloc_settings import SearchSettings
from haloc.methods.judges import by_labels, calibrated_loss
from haloc.methods.solve import grown
from haloc.methods.supernet import choices, supernet
from haloc.methods.task import Rehearsal, Task
from haloc.methods.trials import of_classes
from haloc.space import Grid, RankSpace
from haloc.training.objective import distillation, onlooker
from haloc.training.settings import TrainSettings
from tests.methods import tiny
from tests.methods.tiny import batches, find, rank_space_of, trained
from tests.processes import two_of

CLASSES = 10
BRIEF = TrainSettings(epochs=2, lr=0.02, warmup_epochs=0)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.set_num_threads(1)
    return trained().eval()


def task_of(model: nn.Module, **changes) -> Task:
    space, (train, val) = rank_space_of(model), batches()
    return Task(model, space, limits_of(space, 0.6), **{"train": train, "val": val} | changes)


def liking(task: Task, wanted: dict[str, object]) -> dict[str, np.ndarray]:
    """Losses by which a plan is likeliest."""
    return {
        name: np.array([0.0 if form == wanted[name] else 50.0 for form in offer])
        for name, offer in task.space.open_layers.items()
    }


def offered(task: Task, *forms) -> dict[str, dict[str, np.ndarray]]:
    """Losses by which all layers take one of these forms, for each of them."""
    return {str(form): liking(task, dict.fromkeys(task.space.open_layers, form)) for form in forms}


def test_from_where_it_began_to_where_it_ended(model):
    net = supernet(model, rank_space_of(model))
    own = choices(net)
    first, last = {}, {}
    for number, (name, choice) in enumerate(own.items()):
        choice.alpha.data.copy_(torch.tensor([0.3, 0.1 * number, -1.0]))
        first[name] = -choice.log_probabilities.numpy()
        choice.start.copy_(choice.alpha.data)
    for name, choice in own.items():
        choice.alpha.data.copy_(torch.tensor([-2.0, 1.0, 0.5]))
        last[name] = -choice.log_probabilities.numpy()
    found = between(own, 3)
    assert list(found) == ["0% of the way", "50% of the way", "100% of the way"]
    begun, halfway, ended = found.values()
    for name in own:
        assert begun[name] == pytest.approx(first[name], abs=1e-6)
        assert halfway[name] == pytest.approx((first[name] + last[name]) / 2, abs=1e-6)
        assert ended[name] == pytest.approx(last[name])
    (alone,) = between(own, 1).values()
    assert all(alone[name] == pytest.approx(last[name]) for name in own)


def test_the_network_that_learns_best_is_taken(model):
    """One that has rank 1 wherever it can cannot come as near as one that spends its budget."""
    task = task_of(model)
    poor = dict.fromkeys(task.space.open_layers, Tucker2(1, 1))
    rich = poor | {"conv3": Dense(), "conv2": Tucker2(6, 6)}
    found = {"one": liking(task, poor), "two": liking(task, rich), "three": liking(task, poor)}
    assert as_it_is(task, found["one"]) != as_it_is(task, found["two"])
    original = onlooker(model, BRIEF)
    with pytest.MonkeyPatch.context() as patch:  # as they are, without what is left of the budget
        patch.setattr(finalists, "_plan", as_it_is)
        best, rows = best_of(task, original, found, BRIEF, 256)
    assert best is found["two"]
    assert [row["finalist"] for row in rows] == list(found)
    assert rows[1]["loss"] < rows[0]["loss"] == rows[2]["loss"]


def test_what_was_tried_is_not_tried_again(model, tmp_path, monkeypatch):
    task = task_of(model, folder=tmp_path)
    found = offered(task, Tucker2(1, 1), Tucker2(6, 6))
    original, tried = onlooker(model, BRIEF), []
    real = Contest._try
    monkeypatch.setattr(Contest, "_try", lambda *given: [tried.append(1), real(*given)][1])
    once = best_of(task, original, found, BRIEF, 128)
    count = len(tried)
    again = best_of(task, original, found, BRIEF, 128)
    assert again[0] is once[0]
    assert again[1] == once[1]
    assert len(tried) == count
    best_of(task, original, found, TrainSettings(epochs=1, lr=0.02, warmup_epochs=0), 128)
    assert len(tried) == 2 * count, "other epochs are another trial"


def test_other_training_is_another_trial(model, tmp_path, monkeypatch):
    task, tried = task_of(model, folder=tmp_path), []
    found = offered(task, Tucker2(1, 1))
    monkeypatch.setattr(Contest, "_try", lambda self, plan: tried.append(1) or Tried(plan, 1.0, {}))
    for training in (BRIEF, BRIEF, replace(BRIEF, weight_decay=0.3)):
        best_of(task, onlooker(model, BRIEF), found, training, 64)
    assert len(tried) == 2


def test_one_that_does_not_train_is_not_the_best(model, tmp_path):
    task = task_of(model, folder=tmp_path)
    found = offered(task, Tucker2(1, 1), Tucker2(6, 6))
    wild = replace(BRIEF, lr=1e30)
    for _ in range(2):  # the second time by what was noted
        _, rows = best_of(task, onlooker(model, BRIEF), found, wild, 64)
        assert all(row["loss"] == float("inf") for row in rows)


def test_what_is_minimised(model):
    inputs, targets = next(iter(batches()[0]))
    original, other = trained().eval(), haloc.apply_plan(model, {"conv3": Tucker2(2, 2)}).eval()
    loss = Taught(original, of_classes(4.0))(other, inputs, targets)
    expected = distillation(other(inputs), original(inputs), 4.0)
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert Taught(original, of_classes(4.0))(original, inputs, targets).total.item() == pytest.approx(0, abs=1e-6)
    whole = Taught(original, of_classes(4.0), inputs=lambda batch: batch["x"])
    assert whole(other, {"x": inputs}, targets).total.item() == pytest.approx(loss.total.item())


def test_a_search_ends_with_the_best_of_its_finalists(model, tmp_path):
    settings = {"finalists": 3, "trial_epochs": 1, "images": 128, "start": "sensitivity", "warmup_epochs": 1}
    found = find(model, 0.6, epochs=3, folder=tmp_path, **settings)
    rows = found.evidence.history[-1]["finalists"]
    assert [row["finalist"] for row in rows] == ["0% of the way", "50% of the way", "100% of the way"]
    noted = finalists_of(tmp_path)
    assert min(noted.values()) == min(row["loss"] for row in rows)
    best = min(noted, key=noted.__getitem__)
    assert str(sorted((n, str(f)) for n, f in found.plan.items())) == best
    again = find(model, 0.6, epochs=3, folder=tmp_path / "again", **settings)
    assert again.plan == found.plan
    plain = find(model, 0.6, epochs=3, folder=tmp_path, **settings | {"finalists": 0})
    assert "finalists" not in plain.evidence.history[-1], "a finished search can be ended in another way"


def test_ranks_move_until_that_does_not_pay(model, tmp_path):
    """All of the budget was given to one layer; it is shared in the end, and the network is nearer to the original."""
    grids = (Grid.of("tucker2", [(rank, rank) for rank in (1, 2, 3, 4, 5, 6, 7, 8)]),)
    space = RankSpace({name: replace(offer, grids=grids) for name, offer in rank_space_of(model).layers.items()
                       if offer.grids})  # fmt: skip
    train, val = batches()
    uneven = dict(zip(space.open_layers, (Tucker2(8, 8), Tucker2(1, 1), Tucker2(1, 1)), strict=True))
    layers = haloc.inspect(model, tiny.IMAGE)
    share = layers.macs_of(haloc.Plan(uneven)) / layers.macs + 1e-6
    task = Task(model, space, limits_of(space, share), train=train, val=val, folder=tmp_path)
    found, original = {"uneven": liking(task, uneven)}, onlooker(model, BRIEF)
    best, rows = best_of(task, original, found, BRIEF, 256, moves=3)
    assert [row.get("move") for row in rows] == [None, *range(1, len(rows))]
    assert len(rows) > 1
    assert min(row["loss"] for row in rows) < rows[0]["loss"]
    plan = Evidence("haloc", task.space, {n: tuple(r) for n, r in best.items()}, "likeliest").plan(task.limits)
    noted = finalists_of(tmp_path)
    assert noted[finalists._key(plan)] == min(noted.values()), "by what is returned the best is chosen"
    assert all(np.exp(-row).sum() == pytest.approx(1) for row in best.values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Contest, "_try", lambda *given: pytest.fail("it was noted"))
        assert best_of(task, original, found, BRIEF, 256, moves=3)[1] == rows


def test_every_kind_of_weights_can_be_asked_for():
    assert set(haloc_settings.WEIGHTS) == set(haloc_method.WEIGHTS)


def test_moves_want_finalists(model, tmp_path):
    with pytest.raises(SpecError, match="moves must be 0 where there are no finalists to begin with, got 2"):
        SearchSettings(moves=2)
    settings = {"finalists": 2, "trial_epochs": 1, "images": 128, "start": "sensitivity", "warmup_epochs": 1}
    found = find(model, 0.6, epochs=3, folder=tmp_path, moves=2, **settings)
    noted = finalists_of(tmp_path)
    assert noted[finalists._key(found.plan)] == min(noted.values())


def test_others_name_finalists_too(model, tmp_path):
    settings = {"finalists": 1, "trial_epochs": 1, "images": 128, "start": "sensitivity", "warmup_epochs": 1}
    found = find(model, 0.6, epochs=3, folder=tmp_path, nominees=("uniform", "tucker2"), **settings)
    rows = found.evidence.history[-1]["finalists"]
    assert [row["finalist"] for row in rows] == ["100% of the way", "uniform", "tucker2"]
    noted = finalists_of(tmp_path)
    assert noted[finalists._key(found.plan)] == min(noted.values())


def test_a_nominee_is_what_the_method_or_the_form_alone_would_be(model):
    space = haloc.rank_space(haloc.inspect(model, tiny.IMAGE), forms=("tucker2", "spatial"), round_to=2)
    train, val = batches()
    task = Task(model, space, limits_of(space, 0.6), train=train, val=val)
    rng = np.random.default_rng(0)
    first = {name: rng.uniform(1, 900, len(tuple(offer))) for name, offer in space.open_layers.items()}
    named = nominated(task, ("uniform", "spatial", "svd"), first, first)
    assert finalists._plan(task, named["uniform"]) == grown(
        haloc.search(model, space, budget=0.6, method="uniform").plan, task.limits
    )
    spatial = finalists._plan(task, named["spatial"])
    told = {name for name, offer in space.open_layers.items() if any(isinstance(form, Spatial) for form in offer)}
    assert told
    assert {type(spatial[name]) for name in told} <= {Dense, Spatial}
    assert any(isinstance(spatial[name], Spatial) for name in told)
    assert all(np.isfinite(row).all() and np.exp(-row).sum() == pytest.approx(1) for row in named["spatial"].values())


def test_who_has_no_plan_within_the_budget_names_none(model):
    task = task_of(model)
    first = liking(task, dict.fromkeys(task.space.open_layers, Dense()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finalists, "method_of", lambda name: unable)
        assert nominated(task, ("uniform",), first, first) == {}


def unable(task: Task) -> Evidence:
    raise BudgetError("nothing is small enough", {})


def test_plans_are_rehearsed_and_judged_by_labels(model):
    """The rehearsal decides: one that spoils a network makes it the worst, whatever it was before."""
    seen: list[tuple[int, int]] = []

    def run(network: nn.Module, epochs: int) -> None:
        parameters = sum(each.numel() for each in network.parameters())
        seen.append((parameters, epochs))
        if parameters == max(seen)[0]:
            with torch.no_grad():
                for each in network.parameters():
                    each.zero_()

    task = task_of(model, rehearsal=Rehearsal(run, {"how": "by hand"}))
    found = offered(task, Tucker2(6, 6), Tucker2(1, 1))
    with pytest.MonkeyPatch.context() as patch:  # as they are, without what is left of the budget
        patch.setattr(finalists, "_plan", as_it_is)
        best, rows = best_of(task, onlooker(model, BRIEF), found, BRIEF, 256, trial="finetuned")
    assert len(seen) == 2
    assert all(epochs == BRIEF.epochs for _, epochs in seen)
    assert rows[0]["loss"] == pytest.approx(np.log(CLASSES), rel=1e-4), "it knows nothing any more"
    assert best is found[str(Tucker2(1, 1))]


def as_it_is(task: Task, losses: dict[str, np.ndarray]) -> haloc.Plan:
    return Evidence("haloc", task.space, {name: tuple(row) for name, row in losses.items()}).plan(task.limits)


def test_a_rehearsal_has_to_be_known(model):
    task = task_of(model)
    with pytest.raises(SpecError, match=r'trial="finetuned" has to know how the network will be fine-tuned'):
        best_of(task, onlooker(model, BRIEF), offered(task, Tucker2(1, 1)), BRIEF, 64, trial="finetuned")


def test_another_rehearsal_is_another_trial(model, tmp_path):
    tried: list[str] = []
    for how in ("one", "one", "other"):
        practice = Rehearsal(lambda network, epochs, how=how: tried.append(how), {"how": how})
        task = task_of(model, folder=tmp_path, rehearsal=practice)
        best_of(task, onlooker(model, BRIEF), offered(task, Tucker2(1, 1)), BRIEF, 64, trial="finetuned")
    assert tried == ["one", "other"]


def test_a_loss_by_labels_does_not_mind_how_sure_answers_are():
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(512, 10, generator=generator), torch.randint(10, (512,), generator=generator)
    logits[torch.arange(512), targets] += 1.5
    plain = calibrated_loss(logits, targets)
    assert plain <= nn.functional.cross_entropy(logits, targets).item() + 1e-6
    assert calibrated_loss(3 * logits, targets) == pytest.approx(plain, rel=1e-5)
    assert nn.functional.cross_entropy(3 * logits, targets).item() > plain * 1.1
    logits[0, 0] = float("nan")
    assert calibrated_loss(logits, targets) == float("inf")


def test_judged_by_a_loss_of_the_users_own(model):
    def loss(network, batch):
        return nn.functional.mse_loss(network(batch[0]), nn.functional.one_hot(batch[1], CLASSES).float())

    task = task_of(model, loss=loss)
    held_out = finalists.examples(task, 64)
    with torch.no_grad():
        expected = sum(float(loss(model, whole)) * len(whole[0]) for _, whole in held_out)
    assert by_labels(task, held_out)(model) == pytest.approx(expected / sum(len(whole[0]) for _, whole in held_out))


def test_what_has_no_labels_is_not_judged_by_them(model):
    task = task_of(model)
    held_out = [(inputs, targets.float()) for inputs, targets in finalists.examples(task, 64)]
    with pytest.raises(SpecError, match="judged by labels, which are whole numbers beside logits"):
        by_labels(task, held_out)(model)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"nominees": ("uniform",)}, r"nominees must be \(\) where there are no finalists to begin with"),
        ({"finalists": 1, "nominees": ("lc",)}, "nominees must be some of sensitivity, alds, energy"),
        ({"finalists": 1, "nominees": "uniform"}, "nominees must be some of"),
        ({"trial": "by hand"}, "trial must be one of taught, finetuned"),
    ],
)
def test_who_may_nominate(settings, said):
    with pytest.raises(SpecError, match=said):
        SearchSettings(**settings)


def finalists_of(folder) -> dict[str, float]:
    from haloc.training.journal import read_journal

    rows = read_journal(folder / "finalists.jsonl")[1:]
    return {finalists._key(haloc.Plan.from_dict(row["plan"])): row["loss"] for row in rows}


def test_a_loss_of_the_users_own(model):
    def loss(network, batch):
        return nn.functional.cross_entropy(network(batch[0]), batch[1])

    found = find(model, 0.6, epochs=2, finalists=2, trial_epochs=1, images=128, warmup_epochs=1, loss=loss)
    assert len(found.evidence.history[-1]["finalists"]) == 2


@pytest.mark.parametrize(("name", "value"), [("finalists", -1), ("finalists", 1.5), ("trial_epochs", 0), ("moves", -1)])
def test_settings_that_cannot_be(name, value):
    with pytest.raises(SpecError, match=f"{name} must be a whole number"):
        SearchSettings(**{name: value})


def test_two_processes_agree_when_they_go_on(model, tmp_path):
    """The first has notes of what was tried, the second has none: it must not wait for the first at a trial."""
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    two_of(tiny.finalists_together, str(tmp_path / "weights.pt"), tmp_path, folder=tmp_path)
    first, second = (json.loads(Path(tmp_path, f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first[0] == first[1]
