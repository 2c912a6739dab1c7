from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from haloc.errors import MissingExtraError, SpecError
from haloc.training.baseline import train
from haloc.training.evaluate import evaluate
from haloc.training.feed import Shard
from haloc.training.session import Session, join_session, synced_norms
from tests.processes import two_of
from tests.training import together
from tests.training.tiny import SETTINGS, batches, held_out, network, newest, same, same_weights, timeless


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where two processes have done what `together` has them do."""
    folder = tmp_path_factory.mktemp("together")
    two_of(together.main, folder, folder=folder)
    return folder


def facts(folder: Path, rank: int = 0) -> dict:
    return json.loads((folder / f"facts{rank}.json").read_text())


def largest_difference(left: dict, right: dict) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name].double() - right[name].double()).abs().max()) for name in left)


@pytest.mark.parametrize("name", ["plain", "rich"])
def test_two_processes_train_as_one_does(folder, name):
    alone = network(dropout=0)
    outcome = train(alone, batches(), val=held_out(), settings=together.SETTINGS[name])
    weights = load_file(folder / f"{name}0" / "weights.safetensors")
    # Measured: 1.2e-7 (plain) and 1.8e-7 (rich). They add in another order, that is all.
    assert largest_difference(weights, alone.state_dict()) < 1e-4
    untrained = network(dropout=0).state_dict()
    assert largest_difference(weights, untrained) > 0.01
    ours = facts(folder)[name]
    assert facts(folder, 1)[name] == ours
    for row, expected in zip(ours, timeless(outcome.history), strict=True):
        assert row == pytest.approx(expected, rel=1e-4)


def test_evaluation_is_exactly_that_of_one_process(folder):
    for size, images in together.EVALUATED:
        alone = evaluate(network(), held_out(size, images))
        for rank in range(2):
            assert facts(folder, rank)["evaluated"][f"{size} {images}"] == asdict(alone)


def test_only_the_first_process_writes(folder):
    written = {path.name.split(".")[0] for path in (folder / "plain0").iterdir()}
    assert written == {"checkpoints", "log", "events", "weights"}
    assert not (folder / "plain1").exists()


def test_two_processes_go_on_bit_for_bit(folder):
    assert same(newest(folder / "stopped").tensors, newest(folder / "rich0").tensors)
    assert facts(folder)["stopped"] == facts(folder)["rich"]
    weights = [load_file(folder / name / "weights.safetensors") for name in ("stopped", "rich0")]
    assert same(*weights)


def test_processes_begin_with_the_same_weights(folder):
    assert facts(folder)["digest"] == facts(folder, 1)["digest"]


def test_processes_that_do_not_see_the_same_folder_stop(folder):
    for rank in range(2):
        assert "do not see the same checkpoints" in facts(folder, rank)["apart"]


def test_processes_part_without_leaving_threads(folder):
    # They could abort the process at its very end, and with it the others.
    assert facts(folder)["threads"] == facts(folder, 1)["threads"] == []


def test_a_batch_that_cannot_be_shared_is_refused():
    with pytest.raises(SpecError, match="a batch of 15 cannot be shared equally by 2 processes"):
        train(network(), batches(15), settings=SETTINGS, session=Session(Shard(0, 2)))


def test_without_accelerate_the_extra_is_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(MissingExtraError, match=r"'accelerate', .* pip install 'haloc\[distributed\]'"):
        join_session()


def test_a_process_alone_needs_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    session, device = join_session("cpu")
    assert (session.alone, session.is_main, device) == (True, True, torch.device("cpu"))
    assert session.agree(True)
    assert not session.agree(False)
    model = network()
    with synced_norms(model, session):
        assert "forward" not in vars(model[1])


def test_norms_are_given_back():
    model = network().eval()
    before, inputs = network(), torch.randn(2, 1, 8, 8)
    with pytest.raises(ZeroDivisionError), synced_norms(model, Session(Shard(0, 2))):
        assert "forward" in vars(model[1])
        assert torch.equal(model(inputs), before.eval()(inputs))  # nothing is exchanged in eval mode
        1 / 0  # noqa: B018
    assert "forward" not in vars(model[1])
    assert same_weights(model, before)
