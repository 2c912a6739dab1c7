from __future__ import annotations

import copy
import errno
import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from haloc.artifact.store import CARD, PLAN, WEIGHTS, load, read_card, save
from haloc.errors import FileFormatError, PlanError, SpecError, WeightsError
from haloc.factor.between import fold_norms, insert_norms
from haloc.factor.inspect import inspect
from haloc.factor.surgery import apply_plan, plan_of, reconstruct, skeleton
from haloc.forms import Dense, Svd, Tucker2
from haloc.methods.uniform import uniform_plan
from haloc.plan import Plan
from haloc.zoo import create
from tests.artifact.networks import BRANCHES_PLAN, ODD_PLAN, Branches, Odd, Tied, images, moved


def logits(model: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        outputs = model.eval()(*inputs)
    return outputs["logits"] if isinstance(outputs, dict) else outputs


def small_odd() -> nn.Module:
    return moved(apply_plan(Odd(), ODD_PLAN), images(4))


# What a network knows of its plan.


def test_a_factorised_network_knows_its_plan():
    model = Odd()
    small = apply_plan(model, Plan({**ODD_PLAN, "norm": Dense()}))
    assert plan_of(small) == ODD_PLAN
    assert plan_of(skeleton(model, ODD_PLAN)) == ODD_PLAN
    assert plan_of(model) == Plan({})
    assert plan_of(reconstruct(small, ODD_PLAN)) == Plan({})
    assert plan_of(nn.Sequential(small)) == Plan({f"0.{name}": form for name, form in ODD_PLAN.items()})


def test_a_full_rank_that_is_one_layer_is_known_too():
    plan = Plan({"dilated": Tucker2(24, 24)})
    small = apply_plan(Odd(), plan)
    assert isinstance(small.dilated, nn.Conv2d)
    assert plan_of(small) == plan


def test_the_plan_survives_what_is_done_to_networks():
    small = apply_plan(Odd(), ODD_PLAN)
    insert_norms(small, ODD_PLAN)
    assert plan_of(small) == ODD_PLAN
    fold_norms(small)
    for again in (small, copy.deepcopy(small), small.double().to("cpu"), pickle.loads(pickle.dumps(small))):
        assert plan_of(again) == ODD_PLAN


def test_the_form_on_a_layer_is_of_plain_values():
    """A pickle of the network needs nothing of ours."""
    kept = vars(apply_plan(Odd(), ODD_PLAN).head)["haloc_form"]
    assert kept == {"form": "svd", "rank": 4}
    assert b"haloc.forms" not in pickle.dumps(kept)


def test_a_layer_factorised_twice_has_no_one_plan():
    once = apply_plan(Odd(), {"head": Svd(8)})
    with pytest.raises(PlanError, match=r"'head\.0' was factorised inside 'head'"):
        plan_of(apply_plan(once, {"head.0": Svd(4)}))
    alone = apply_plan(nn.Linear(8, 8), {"": Svd(4)})
    assert plan_of(alone) == Plan({"": Svd(4)})
    with pytest.raises(PlanError, match=r"'0' was factorised inside ''"):
        plan_of(apply_plan(alone, {"0": Svd(2)}))


# Saving and loading.


@pytest.mark.parametrize("name", ["resnet20", "mobilenet_v2"])
def test_networks_of_the_zoo_come_back(tmp_path, name):
    torch.manual_seed(1)
    model = create(name)
    plan = uniform_plan(inspect(model, images(1, 32)), macs=0.6)
    small = moved(apply_plan(model, plan), images(4, 32))
    save(tmp_path / "out", small)
    again = load(tmp_path / "out", create(name))
    assert plan_of(again) == plan_of(small)
    assert len(plan_of(again)) == len(plan.changes()) > 5
    assert torch.equal(logits(again, images(2, 32)), logits(small, images(2, 32)))


def test_odd_convolutions_come_back(tmp_path):
    small = small_odd()
    small.scale.fill_(3.0)
    save(tmp_path, small)
    base = Odd()
    before = copy.deepcopy(base.state_dict())
    again = load(tmp_path, base)
    assert torch.equal(logits(again, images()), logits(small, images()))
    assert not again.training
    assert base.training
    assert all(torch.equal(value, before[key]) for key, value in base.state_dict().items())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([CARD, PLAN, WEIGHTS])


def test_several_inputs_and_outputs(tmp_path):
    small = moved(apply_plan(Branches(), BRANCHES_PLAN), images(4), torch.ones(4, 8))
    save(tmp_path, small)
    given = (images(), torch.ones(2, 8))
    assert torch.equal(logits(load(tmp_path, Branches()), *given), logits(small, *given))


def test_tied_weights_and_infinite_masks(tmp_path):
    tokens = torch.arange(6)[None]
    small = moved(apply_plan(Tied(), {"middle": Svd(3)}), tokens)
    save(tmp_path, small)
    again = load(tmp_path, Tied())
    assert again.head.weight is again.words.weight
    assert torch.equal(logits(again, tokens), logits(small, tokens))


def test_a_dense_network_has_an_empty_plan(tmp_path):
    model = moved(Odd(), images(4))
    save(tmp_path, model)
    assert Plan.load(tmp_path / PLAN) == Plan({})
    assert torch.equal(logits(load(tmp_path, Odd()), images()), logits(model, images()))


def test_biases_that_folded_norms_leave(tmp_path):
    small = apply_plan(Odd(), ODD_PLAN)
    insert_norms(small, ODD_PLAN)
    moved(small, images(8))
    during = logits(small, images())
    save(tmp_path / "during", small)  # with its norms still in it
    assert "norm0" in dict(small.grouped.named_children())
    fold_norms(small)
    assert small.grouped[0].bias is not None
    save(tmp_path / "after", small)
    assert torch.equal(logits(load(tmp_path / "after", Odd()), images()), logits(small, images()))
    assert torch.allclose(logits(load(tmp_path / "during", Odd()), images()), during, rtol=1e-4, atol=1e-5)


def test_a_fine_tuned_network_comes_back(tmp_path):
    from haloc.recovery import finetune
    from haloc.training.settings import TrainSettings

    small = apply_plan(Odd(), ODD_PLAN)
    batches = [(torch.randn(8, 3, 16, 16), torch.randint(10, (8,))) for _ in range(2)]
    finetune(small, batches, teacher=Odd(), settings=TrainSettings(epochs=1, lr=0.01, warmup_epochs=0))
    save(tmp_path, small)
    assert torch.equal(logits(load(tmp_path, Odd()), images()), logits(small, images()))


def test_half_precision_and_wrappers(tmp_path):
    small = small_odd().half()
    save(tmp_path, nn.DataParallel(torch.compile(small)))
    assert read_card(tmp_path)["dtypes"] == ["float16", "int64"]
    again = load(tmp_path, Odd().half())
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in small.state_dict().items())
    assert load(tmp_path, Odd()).head[0].weight.dtype == torch.float32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_networks_on_a_gpu(tmp_path):
    small = small_odd().cuda()
    save(tmp_path, small)
    assert torch.allclose(logits(load(tmp_path, Odd()), images()), logits(small, images().cuda()).cpu(), atol=1e-4)
    assert load(tmp_path, Odd().cuda()).head[0].weight.is_cuda


def test_what_is_known_of_a_network(tmp_path):
    figures = {"budget": {"latency": "60%"}, "target": "cpu:b1", "measured": {"latency_ms": 1.25}}
    small = small_odd()
    save(tmp_path, small, provenance=figures)
    card = read_card(tmp_path)
    assert card["provenance"] == figures
    assert card["params"] == sum(parameter.numel() for parameter in small.parameters())
    assert set(card["versions"]) == {"haloc", "torch", "python"}
    assert card["created"].endswith("+00:00")
    with pytest.raises(SpecError, match="values that JSON can hold"):
        save(tmp_path / "other", small, provenance={"model": small})
    assert not (tmp_path / "other").exists()


def test_a_plan_given_instead(tmp_path):
    small = small_odd()
    for module in small.modules():
        vars(module).pop("haloc_form", None)
    assert plan_of(small) == Plan({})
    save(tmp_path, small, plan=ODD_PLAN)
    assert torch.equal(logits(load(tmp_path, Odd()), images()), logits(small, images()))
    with pytest.raises(PlanError, match="no layer 'hesd'"):
        save(tmp_path, small, plan={"hesd": Svd(4)})


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    save(tmp_path, small_odd())
    monkeypatch.setattr(torch, "load", None)
    monkeypatch.setattr(pickle, "loads", None)
    load(tmp_path, Odd())


# What can be wrong.


def test_files_of_several_networks(tmp_path):
    save(tmp_path / "one", small_odd())
    save(tmp_path / "two", apply_plan(Odd(), {"head": Svd(2)}))
    for name in (WEIGHTS, PLAN):
        kept = (tmp_path / "one" / name).read_bytes()
        (tmp_path / "one" / name).write_bytes((tmp_path / "two" / name).read_bytes())
        with pytest.raises(
            FileFormatError, match=rf"{name} is not the file that was saved with .*save the model again"
        ):
            load(tmp_path / "one", Odd())
        (tmp_path / "one" / name).write_bytes(kept)
    load(tmp_path / "one", Odd())


def test_a_single_bit(tmp_path):
    save(tmp_path, small_odd())
    content = bytearray((tmp_path / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (tmp_path / WEIGHTS).write_bytes(content)
    with pytest.raises(FileFormatError, match="is not the file that was saved with"):
        load(tmp_path, Odd())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (CARD, "model.json is missing; save the model again"),
        (PLAN, "incomplete: plan.json is missing"),
        (WEIGHTS, "incomplete: weights.safetensors is missing"),
    ],
)
def test_missing_files(tmp_path, name, text):
    save(tmp_path, small_odd())
    (tmp_path / name).unlink()
    with pytest.raises(FileFormatError, match=text):
        load(tmp_path, Odd())


def test_other_folders(tmp_path):
    with pytest.raises(FileFormatError, match="it does not exist"):
        load(tmp_path / "none", Odd())
    (tmp_path / "file").write_text("")
    with pytest.raises(FileFormatError, match="it is a file, expected a folder"):
        load(tmp_path / "file", Odd())
    with pytest.raises(FileFormatError, match="cannot write"):
        save(tmp_path / "file", Odd())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": 2}, "has format 2, this version reads format 1; upgrade haloc"),
        ({"kind": "haloc-plan"}, "is not of a saved network"),
        ({"sha256": None}, "is not of a saved network"),
    ],
)
def test_other_kinds_and_formats(tmp_path, change, text):
    save(tmp_path, small_odd())
    card = json.loads((tmp_path / CARD).read_text()) | change
    (tmp_path / CARD).write_text(json.dumps(card))
    with pytest.raises(FileFormatError, match=text):
        load(tmp_path, Odd())


def test_another_base(tmp_path):
    save(tmp_path, small_odd())
    with pytest.raises(PlanError, match="the model has no layer"):
        load(tmp_path, create("resnet20"))
    wider = Odd()
    wider.head = nn.Linear(24, 12)
    with pytest.raises(WeightsError, match=r"'head\.1\.(weight|bias)' has shape"):
        load(tmp_path, wider)


def test_states_that_cannot_be_saved(tmp_path):
    model = Odd()
    model.head.weight.data[0, 0] = torch.inf
    with pytest.raises(WeightsError, match=r"'head\.weight' has values that are NaN or infinite"):
        save(tmp_path / "out", model)

    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"calls": 3}

        def set_extra_state(self, state):
            pass

    with pytest.raises(WeightsError, match="'_extra_state' in its state is a dict"):
        save(tmp_path / "out", Extra(2, 2))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [WEIGHTS, PLAN, CARD])
def test_a_full_disk_leaves_the_old_network(tmp_path, monkeypatch, name):
    old = small_odd()
    save(tmp_path, old)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if name == WEIGHTS:
        monkeypatch.setattr("haloc.artifact.store.save_file", full)
    else:
        write = Path.write_text
        monkeypatch.setattr(
            Path, "write_text", lambda path, *a, **k: full() if name in path.name else write(path, *a, **k)
        )
    with pytest.raises(FileFormatError, match=r"cannot write .*: No space left on device") as caught:
        save(tmp_path, apply_plan(Odd(), {"head": Svd(2)}))
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert torch.equal(logits(load(tmp_path, Odd()), images()), logits(old, images()))
    assert len(list(tmp_path.iterdir())) == 3


def test_a_save_that_is_killed_between_the_files(tmp_path, monkeypatch):
    """Whatever of the new network is there, it does not pass for a network with the rest of the old one."""
    save(tmp_path, small_odd())
    replace, left = Path.replace, [1]

    def killed(path: Path, target: object) -> object:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, apply_plan(Odd(), {"head": Svd(2)}))
    monkeypatch.undo()
    with pytest.raises(FileFormatError, match="save the model again"):
        load(tmp_path, Odd())
